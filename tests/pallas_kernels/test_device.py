import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.device import num_processors


def test_the_device_of_a_mesh_says_how_many_processors_it_has():
    device = AbstractDevice(device_kind="gfx942", num_cores=304, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        assert num_processors() == 304
    assert num_processors() == 132


def test_a_gpu_says_how_many_processors_it_has(monkeypatch):
    class Device:
        core_count = 78

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert num_processors() == 78
