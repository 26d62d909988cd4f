import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mtpjax import compat, forward, presets
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import StateShape
from mtpjax.drafters.mtp.drafting import MTPDrafter
from mtpjax.models.attention_kinds import has_recurrent_layers
from mtpjax.models.decoding_layout import (
    align_blocks,
    constrain_state,
    copy_key_value_heads,
    find_copies,
    fit_config,
    part_specs,
)
from mtpjax.models.params import param_shapes, shard_for_decoding
from mtpjax.models.quantized import BlockScaled
from mtpjax.models.sharding import MESH_AXES, PARAMETER_AXES, param_sharding, shard_params
from tests.helpers.small_models import small_config

REPLICATED = re.compile(r"(experts/router|shared_gate)$")  # small, and each token needs them whole


def parameters(name, *, scan_layers):
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(presets[name], scan_layers))
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize(
    ("name", "scan_layers"),
    [
        ("tiny", False),
        ("tiny", True),
        ("tiny-moe", False),
        ("tiny-moe", True),
        ("glm-4.5-air", True),
        ("deepseek-v3", True),
    ],
)
def test_a_pattern_knows_every_matrix_of_a_preset(name, scan_layers):
    for path, shape in parameters(name, scan_layers=scan_layers).items():
        stacked = int(bool(re.match("trunk/group_", path)))
        found = [axes for pattern, axes in PARAMETER_AXES if re.search(pattern, path)]
        if len(shape) - stacked > 1 and not REPLICATED.search(path):
            assert found, f"no pattern knows {path} {shape}"
        if found:
            assert len(found[0]) == len(shape) - stacked, f"{found[0]} does not fit {path} {shape}"


def test_every_large_parameter_of_deepseek_is_split():
    mesh = jax.sharding.AbstractMesh((1, 2, 2, 2), ("data", "fsdp", "expert", "tensor"))
    for path, shape in parameters("deepseek-v3", scan_layers=True).items():
        if len(shape) > 2 and not REPLICATED.search(path):
            assert any(param_sharding(path, shape, mesh).spec), path


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("embedding", (64, 32), PartitionSpec("tensor", None)),
        ("head", (32, 64), PartitionSpec(None, "tensor")),
        ("mtp_head_1", (32, 64), PartitionSpec(None, "tensor")),
        ("mtp_embedding_0", (64, 32), PartitionSpec("tensor", None)),
        ("embedding", (61, 32), PartitionSpec(None, None)),  # 61 is odd
        ("trunk/layer_3/attention/qkv", (32, 2, 4, 8), PartitionSpec(None, "tensor", None, None)),
        ("trunk/group_0/layer_0/attention/qkv", (5, 32, 2, 4, 8), PartitionSpec(None, None, "tensor", None, None)),
        ("mtp_0/block/experts/gate_up", (8, 32, 2, 12), PartitionSpec("expert", None, None, "tensor")),
        ("trunk/group_2/layer_0/experts/down", (3, 8, 12, 32), PartitionSpec(None, "expert", "tensor", None)),
        ("trunk/layer_0/norm_attention/scale", (32,), PartitionSpec()),
        ("trunk/layer_0/experts/router", (32, 8), PartitionSpec()),
    ],
)
def test_parameters_lie_where_the_tables_say(path, shape, expected):
    mesh = compat.make_mesh({"data": 2, "expert": 2, "tensor": 2})
    assert param_sharding(path, shape, mesh).spec == expected


def test_parameters_and_state_are_split_over_a_mesh(small):
    model, params = small("latent", num_mtp_modules=1)
    mesh = compat.make_mesh({"data": 2, "expert": 2, "tensor": 2})
    placed = shard_params(params, mesh)
    experts = placed["trunk"]["layer_1"]["experts"]["gate_up"]
    assert experts.addressable_shards[0].data.shape == (4, 32, 2, 6)
    # For decoding, `data` splits the experts too: no device holds another one's.
    _, placed = shard_for_decoding(model, params, mesh, allow_copies=True)
    experts = placed["trunk"]["layer_1"]["experts"]["gate_up"]
    assert experts.addressable_shards[0].data.shape == (2, 32, 2, 6)
    state = Decoder(model, MTPDrafter(), DecodeSpec(1, num_nodes=2)).empty_state(StateShape(2, 16), jnp.float32)
    state = jax.jit(lambda state: constrain_state(state, model.config, mesh))(state)
    assert state.trunk.layers[0]["latent"].addressable_shards[0].data.shape == (1, 16, 16)
    assert state.settings.stops.addressable_shards[0].data.shape == (1, 8, 1)


def test_scaled_weights_are_split_as_the_others():
    mesh = compat.make_mesh({"tensor": 2})
    scaled = BlockScaled(jnp.zeros((8, 4, 3, 8), jnp.float8_e4m3fn), jnp.ones((1, 4, 3, 8)), axis=-4, block=8)
    placed = shard_params({"trunk": {"layer_0": {"attention": {"qkv": scaled}}}}, mesh)
    assert jax.tree.leaves(placed)[0].addressable_shards[0].data.shape == (8, 2, 3, 8)


def test_a_border_that_cuts_fp8_blocks_makes_them_smaller():
    config = small_config("latent", moe_intermediate_size=96, n_routed_experts=4)
    sizes = {"tensor": 2}
    down = BlockScaled(jnp.ones((4, 96, 32), jnp.float8_e4m3fn), jnp.full((4, 3, 32), 2.0), axis=-2, block=32)
    up = BlockScaled(jnp.ones((4, 32, 2, 96), jnp.float8_e4m3fn), jnp.full((4, 1, 2, 96), 2.0), axis=-3, block=32)
    params = {"trunk": {"layer_1": {"experts": {"down": down, "gate_up": up}}}}
    aligned = align_blocks(params, config, sizes)["trunk"]["layer_1"]["experts"]
    # Each device has 48 of 96 inputs, so blocks have 16; those of gate and up follow, as the kernels want.
    assert aligned["down"].block == aligned["gate_up"].block == 16
    np.testing.assert_array_equal(aligned["down"].astype(jnp.float32), down.astype(jnp.float32))
    specs = part_specs(aligned, config, sizes)
    assert part_specs(params, config, {"tensor": 1}) != specs
    # Too small a block: the weight is dequantised.
    config = small_config("latent", moe_intermediate_size=24, n_routed_experts=4)
    narrow = BlockScaled(jnp.ones((4, 24, 32), jnp.float8_e4m3fn), jnp.ones((4, 1, 32)), axis=-2, block=32)
    [found] = jax.tree.leaves(align_blocks({"experts": {"down": narrow}}, config, sizes))
    assert found.dtype == jnp.bfloat16


def test_every_axis_name_has_a_mesh_axis():
    names = {axis for _, axes in PARAMETER_AXES for axis in axes if axis}
    assert names <= set(MESH_AXES)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "attn_output_gate": True}])
def test_copied_heads_compute_the_same(changes, small):
    model, params = small("grouped", num_attention_heads=8, **changes)
    config = fit_config(model.config, {"tensor": 4})
    assert config.num_key_value_heads == 4
    tokens = jnp.arange(1, 9)[None]
    expected = forward(params, tokens, model=model)
    copied = copy_key_value_heads(params, model.config, 4)
    found = forward(copied, tokens, model=model.clone(config=config))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    # Heads that neither divide nor are divided stay as they are.
    assert fit_config(model.config, {"tensor": 3}) == model.config


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("deepseek-v3", {"data": 32, "tensor": 8}, []),
        ("glm-4.5", {"expert": 64}, ["expert=64 of the mesh does not divide n_routed_experts 160"]),
        ("glm-4.5", {"tensor": 16}, []),  # 8 key/value heads are copied
        ("tiny", {"tensor": 3}, ["vocab_size 256", "num_attention_heads 4", "num_key_value_heads 2"]),
    ],
)
def test_sizes_that_a_mesh_does_not_divide_are_named(name, sizes, expected):
    found = find_copies(presets[name], sizes)
    assert len(found) >= len(expected) and (expected or not found)
    assert all(any(each in sentence for sentence in found) for each in expected)


def test_a_teacher_forced_pass_over_split_experts_is_that_of_one_device(small):
    """XLA partitions it, whether or not the mesh is set."""
    model, params = small("latent")
    tokens = jnp.arange(16).reshape(2, 8)
    expected = forward(params, tokens, model=model).logits
    mesh = compat.make_mesh({"data": 2, "expert": 2})
    model, params = shard_for_decoding(model, params, mesh)
    found = [forward(params, tokens, model=model).logits]
    with jax.set_mesh(mesh):
        found.append(forward(params, tokens, model=model).logits)
    for logits in found:
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention, expected", [("grouped", False), ("latent", False), ("hybrid", True)])
def test_models_with_linear_attention_have_recurrent_layers(attention, expected):
    assert has_recurrent_layers(small_config(attention)) is expected
