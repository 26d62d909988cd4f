import os
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from mtpjax import compat
from pallas_kernels.rms_norm import rms_norm
from tests.helpers.lowering import lower_for, triton_kernels


def test_every_axis_of_a_mesh_is_automatic():
    mesh = compat.make_mesh({"data": 2, "model": 4})
    assert mesh.shape == {"data": 2, "model": 4}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.size == 8


def test_a_mesh_takes_the_devices_it_is_given():
    devices = jax.devices()[3:5]
    assert compat.make_mesh({"data": 2}, devices).devices.tolist() == devices


def test_a_mesh_larger_than_its_devices_is_refused():
    with pytest.raises(ValueError):
        compat.make_mesh({"data": 3}, jax.devices()[:2])


def gpus(*places):
    """GPUs at places: process and slice."""
    return [types.SimpleNamespace(platform="gpu", process_index=process, slice_index=node) for process, node in places]


@pytest.mark.parametrize(
    ("num_processes", "places", "expected"),
    [
        (1, [(0, 0), (0, 0)], True),
        (1, [(0, 0), (1, 0)], False),  # described: nobody has asked their hosts
        (2, [(0, 0), (0, 0), (1, 0), (1, 0)], True),  # two processes of one host
        (2, [(0, 0), (0, 0), (1, 1), (1, 1)], False),
        (2, [(1, 1), (1, 1)], True),
    ],
)
def test_gpus_of_one_host_are_one_node(num_processes, places, expected, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: num_processes)
    assert compat.is_one_node(gpus(*places)) == expected


@pytest.mark.parametrize(
    ("before", "flags", "devices", "after"),
    [
        (None, "", gpus((0, 0), (0, 0)), "0"),
        ("1", "", gpus((0, 0), (0, 0)), "1"),
        (None, "--xla_gpu_enable_command_buffer=FUSION", gpus((0, 0), (0, 0)), None),
        (None, "", gpus((0, 0), (1, 0)), None),
        (None, "", gpus((0, 0)), None),
        (None, "", jax.devices()[:2], None),
    ],
)
def test_graphs_of_one_node_record_collectives_without_event_nodes(before, flags, devices, after, monkeypatch):
    name = "NCCL_GRAPH_MIXING_SUPPORT"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", flags)
    compat.allow_recorded_collectives(devices)
    assert os.environ.get(name) == after


@pytest.mark.h100
@pytest.mark.parametrize(("topology", "after"), [("1x1x2", "0"), ("1x2x1", None), ("2x1x1", None)])
def test_a_mesh_of_gpus_prepares_nccl(topology, after, monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "")
    monkeypatch.delenv("NCCL_GRAPH_MIXING_SUPPORT")
    compat.make_mesh({"data": 2}, compat.h100_devices(topology))
    assert os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") == after


def test_a_plain_function_and_a_jitted_one_lower_alike():
    x = jnp.ones((4, 8))
    plain, jitted = lower_for(jnp.sin, x), lower_for(jax.jit(jnp.sin), x)
    assert set(plain) == {"cuda", "rocm"}
    assert "stablehlo.sine" in plain["rocm"].as_text() and plain["rocm"].as_text() == jitted["rocm"].as_text()


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="tpu"):
        lower_for(jnp.sin, jnp.ones(4), platforms=("tpu",))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_the_triton_kernels_of_a_module_come_in_order_as_text(platform):
    def function(x, scale):
        return rms_norm(x[:3] + rms_norm(x, scale, implementation="triton")[:3], scale, implementation="triton")

    lowered = lower_for(function, jnp.ones((40, 64)), jnp.ones(64), platforms=(platform,))[platform]
    first, second = triton_kernels(lowered)
    assert (first.name, first.num_warps, first.num_stages) == ("rms_norm", 4, 1)
    assert "tt.func public @rms_norm" in first.ir and "arith.constant 40 : i32" in first.ir
    assert "arith.constant 40 : i32" not in second.ir


def test_a_module_without_kernels_has_none():
    assert triton_kernels(lower_for(jnp.sin, jnp.ones(4))["cuda"]) == []


@pytest.mark.h100
def test_a_sharded_product_compiles_for_eight_h100s():
    mesh = compat.make_mesh({"model": 8}, compat.h100_devices("1x1x8"))
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "model")))
    w = jax.ShapeDtypeStruct((128, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("model", None)))
    replicated = NamedSharding(mesh, PartitionSpec())
    with use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(jnp.dot, out_shardings=replicated).lower(x, w).compile()
    assert "all-reduce" in compiled.as_text()
