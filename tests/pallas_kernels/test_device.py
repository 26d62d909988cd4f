import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.device import NUM_DIES, die_order, num_processors


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


@pytest.mark.parametrize("num_programs", [*range(1, 26), 127, 128, 999])
def test_each_die_gets_a_run_of_places_and_each_place_one_program(num_programs):
    program = np.arange(num_programs, dtype=np.int32)
    (place,) = (np.asarray(axis) for axis in die_order(jnp.asarray(program), grid=(num_programs,)))
    np.testing.assert_array_equal(np.sort(place), program)
    runs = [place[program % NUM_DIES == die] for die in range(NUM_DIES)]
    np.testing.assert_array_equal(np.concatenate(runs), program)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_the_first_axis_of_a_grid_varies_fastest():
    """So programs that differ in the first axis alone, as those that share a cache's slots, share a die."""
    grid = (3, 5, 2)
    last, middle, first = np.unravel_index(np.arange(30, dtype=np.int32), grid[::-1])
    ids = [jnp.asarray(axis, jnp.int32) for axis in (first, middle, last)]
    (flat,) = die_order(jnp.arange(30, dtype=jnp.int32), grid=(30,))
    expected = np.unravel_index(np.asarray(flat), grid[::-1])[::-1]
    np.testing.assert_array_equal(die_order(*ids, grid=grid), expected)
    np.testing.assert_array_equal(die_order(*ids, grid=grid, is_reordered=False), ids)
