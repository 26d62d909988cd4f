import functools

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, compat, load, speculative_generate
from mtpjax.models.expert_counts import count_expert_tokens, count_on_shards
from mtpjax.models.expert_moves import move_experts
from mtpjax.models.expert_placement import (
    Placement,
    apply_placement,
    num_expert_devices,
    place_all_layers,
    place_experts,
    placement_tables,
)
from mtpjax.models.masks import full_view
from mtpjax.models.params import shard_for_decoding
from tests.golden import path

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
CONFIG = DecodeConfig(max_new_tokens=12, num_steps=2, prefill_chunk=8)


@pytest.fixture(scope="module")
def skewed(small):
    """A model whose router prefers two experts."""
    model, params = small("latent", "mixed", num_mtp_modules=1, vocab_size=64)
    bias = params["trunk"]["layer_1"]["experts"]["correction_bias"].at[:2].add(0.6)
    experts = {**params["trunk"]["layer_1"]["experts"], "correction_bias": bias}
    layer = {**params["trunk"]["layer_1"], "experts": experts}
    return model, {**params, "trunk": {**params["trunk"], "layer_1": layer}}


@pytest.mark.slow
def test_copies_even_out_a_skewed_router_and_change_no_token(skewed):
    model, params = skewed
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (8, 32), 0, 64))
    [(name, counts)] = count_expert_tokens(params, tokens, model=model).items()
    assert name == "layer_1" and counts.sum() == tokens.size * 2
    plain = counts.reshape(4, 2).sum(axis=1)  # neighbouring experts on four devices
    before = plain.max() / plain.mean()
    placement = place_experts(counts, 4, 12)
    print(f"imbalance {before:.2f} without, {placement.imbalance:.2f} with four copies")
    assert before > 1.5 and placement.imbalance < 1.15
    placed = apply_placement(params, {name: placement})
    expected = speculative_generate(params, PROMPTS, model=model, config=CONFIG).rows()
    assert speculative_generate(placed, PROMPTS, model=model, config=CONFIG).rows() == expected
    # 12 slots over four devices, where 8 experts also fit; and over six, where they do not.
    mesh = compat.make_mesh({"data": 2, "expert": 2, "tensor": 2})
    assert speculative_generate(placed, PROMPTS, model=model, config=CONFIG, mesh=mesh).rows() == expected
    six = compat.make_mesh({"data": 3, "expert": 2})
    assert speculative_generate(placed, PROMPTS, model=model, config=CONFIG, mesh=six).rows() == expected
    with pytest.raises(ValueError, match="does not divide n_routed_experts 8"):
        speculative_generate(params, PROMPTS, model=model, config=CONFIG, mesh=six)


@pytest.mark.parametrize("seed", range(3))
def test_a_placement_has_every_expert_and_equal_devices(seed):
    counts = np.random.default_rng(seed).zipf(1.3, 64).clip(max=10_000)
    without, with_copies = place_experts(counts, 8), place_experts(counts, 8, 96)
    for placement, num_slots in ((without, 64), (with_copies, 96)):
        assert len(placement.expert_of_slot) == num_slots
        assert set(placement.expert_of_slot) == set(range(64))
        np.testing.assert_allclose(placement.loads.sum(), 1)
    assert with_copies.imbalance <= max(without.imbalance, 1.1)


@pytest.mark.slow
def test_fp8_experts_are_copied_with_their_scales():
    model, params = load(path("deepseek_v3_fp8"))
    counts = np.arange(model.config.n_routed_experts) ** 2
    layers = [name for name, layer in params["trunk"].items() if "experts" in layer]
    placed = apply_placement(params, {name: place_experts(counts, 4, 16) for name in layers})
    expected = speculative_generate(params, PROMPTS, model=model, config=CONFIG).rows()
    assert speculative_generate(placed, PROMPTS, model=model, config=CONFIG).rows() == expected


def test_all_layers_get_the_same_number_of_copies(small):
    _, params = small("latent", "mixed", num_hidden_layers=3, vocab_size=64)
    counts = {"layer_2": np.array([1, 1, 1, 1, 1, 1, 1, 90])}
    placed = place_all_layers(params, num_devices=2, num_redundant=2, counts=counts)
    slots = {
        name: layer["experts"]["placement"]["expert_of_slot"]
        for name, layer in placed["trunk"].items()
        if name != "layer_0"
    }
    assert sorted(slots["layer_1"].tolist()) == [0, 0, 1, 1, *range(2, 8)]
    assert sorted(slots["layer_2"].tolist()) == [*range(8), 7, 7]
    assert placed["trunk"]["layer_2"]["experts"]["down"].shape[0] == 10
    with pytest.raises(ValueError, match="multiple of the 2 devices"):
        place_all_layers(params, num_devices=2, num_redundant=1)
    with pytest.raises(ValueError, match=r"layer_2 has 8 experts, but its counts have shape \(3,\)"):
        place_all_layers(params, num_devices=1, counts={"layer_2": np.ones(3)})
    with pytest.raises(ValueError, match="no routed experts"):
        place_all_layers(small("grouped")[1], num_devices=1, num_redundant=1)


def test_wrong_placements_are_refused(skewed):
    _, params = skewed
    for slots in (6, 10):
        with pytest.raises(ValueError, match="num_slots must be at least 8 and a multiple of the 4 devices"):
            place_experts(np.ones(8), 4, slots)
    with pytest.raises(ValueError, match="layer_0 is not a trunk layer with experts"):
        apply_placement(params, {"layer_0": place_experts(np.ones(8), 4)})
    with pytest.raises(ValueError, match="the same number of slots"):
        apply_placement(params, {})


def check_moves(model, params, sizes, num_slots, num_moves=4):
    """Moves a layer's experts several times, on a mesh and without, and compares with the placement applied anew."""
    layer = next(name for name, layer in params["trunk"].items() if "experts" in layer)
    num_experts, rng = model.config.n_routed_experts, np.random.default_rng(7)
    placed = apply_placement(params, {layer: place_experts(np.ones(num_experts), 1, num_slots)})
    mesh = compat.make_mesh(sizes)
    mesh_model, mesh_params = shard_for_decoding(model, placed, mesh)
    plain, experts = placed["trunk"][layer]["experts"], mesh_params["trunk"][layer]["experts"]
    shardings = jax.tree.map(lambda leaf: leaf.sharding, experts)
    move = jax.jit(functools.partial(move_experts, config=mesh_model.config))
    for _ in range(num_moves):
        # Every expert has a slot, and the others are anyone's.
        slots = rng.permutation([*range(num_experts), *rng.integers(0, num_experts, num_slots - num_experts)])
        tables = placement_tables(slots, num_experts)
        with jax.set_mesh(mesh):
            experts = {**experts, **move(experts, tables)}
        plain = {**plain, **move_experts(plain, tables, config=model.config)}
        expected = apply_placement(params, {layer: Placement(slots.astype(np.int32), np.ones(1))})
        assert_same_bits(plain, expected["trunk"][layer]["experts"])
        _, expected = shard_for_decoding(model, expected, mesh)
        assert_same_bits(experts, expected["trunk"][layer]["experts"])
        assert jax.tree.map(lambda leaf: leaf.sharding, experts) == shardings
    assert move._cache_size() == 1  # one program for all placements


def assert_same_bits(found, expected):
    for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(*(np.asarray(leaf).view(np.uint8) for leaf in pair), strict=True)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "expert": 2, "tensor": 2},
        pytest.param({"expert": 4}, marks=pytest.mark.slow),
        pytest.param({"data": 3}, marks=pytest.mark.slow),
    ],
)
def test_moved_experts_are_those_of_the_placement_applied_anew(skewed, sizes):
    model, params = skewed
    check_moves(model, params, sizes, 12)


@pytest.mark.slow
def test_moved_fp8_experts_keep_their_bits_and_scales():
    model, params = load(path("deepseek_v3_fp8"))
    check_moves(model, params, {"data": 2, "expert": 2}, 12)


def test_moved_experts_with_biases_keep_them(small):
    model, params = small("clamped")
    check_moves(model, params, {"expert": 2}, 6)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["latent", "hybrid", "clamped"])
@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2}, {"expert": 4}, {"data": 3}])
def test_counts_on_a_mesh_are_those_of_one_device(small, attention, sizes):
    """Rows of different lengths, of which one is empty, in slots with copies."""
    model, params = small(attention)
    num_slots = 12
    mesh = compat.make_mesh(sizes)
    num_devices, num_shards = mesh.size, sizes.get("data", 1)
    num_redundant = num_slots - model.config.n_routed_experts
    placed = place_all_layers(params, num_devices=num_devices, num_redundant=num_redundant)
    mesh_model, mesh_params = shard_for_decoding(model, placed, mesh)
    assert num_expert_devices(mesh_params, mesh.shape) == num_devices
    tokens = np.asarray(jax.random.randint(jax.random.key(3), (num_shards, 12 // num_shards, 16), 0, 61))
    lengths = np.random.default_rng(3).integers(1, 17, tokens.shape[:2])
    lengths[0, 0] = 0
    with jax.set_mesh(mesh):
        count = jax.jit(functools.partial(count_on_shards, model=mesh_model, capacity=256))
        found = np.asarray(count(mesh_params, tokens, lengths))
    rows = [row[:length] for row, length in zip(tokens.reshape(-1, 16), lengths.ravel(), strict=True) if length]
    each = [count_expert_tokens(params, row[None], model=model) for row in rows]
    expected = [sum(counts[layer] for counts in each) for layer in each[0]]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_counts_are_those_of_the_router(skewed):
    model, params = skewed
    tokens = np.asarray(jax.random.randint(jax.random.key(4), (2, 8), 0, 64))
    view = full_view(model.config, np.ones_like(tokens))
    _, kept = model.apply({"params": params}, tokens, view, method="run_trunk", mutable=["router"])
    [ids] = kept["router"]["trunk"]["layer_1"]["experts"]["ids"]
    counts = count_expert_tokens(params, tokens, model=model)
    np.testing.assert_array_equal(counts["layer_1"], np.bincount(np.ravel(ids), minlength=8))


def test_loads_of_a_placement_are_measured_by_other_counts():
    # Expert 0 has two copies, one on each device.
    placement = Placement.measured(np.array([0, 1, 0, 2]), np.array([40, 10, 50]), 2)
    np.testing.assert_allclose(placement.loads, [0.3, 0.7])
    assert placement.imbalance == pytest.approx(1.4)
    assert Placement.measured(np.array([0, 1]), np.zeros(2), 2).imbalance == 1
