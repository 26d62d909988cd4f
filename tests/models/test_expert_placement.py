import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, compat, load, speculative_generate
from mtpjax.models.expert_placement import apply_placement, count_expert_tokens, place_all_layers, place_experts
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
    with pytest.raises(ValueError, match="multiple of 2 devices"):
        place_all_layers(params, num_devices=2, num_redundant=1)
    with pytest.raises(ValueError, match=r"layer_2 has 8 experts, but there are counts \(3,\)"):
        place_all_layers(params, num_devices=1, counts={"layer_2": np.ones(3)})
    with pytest.raises(ValueError, match="no routed experts"):
        place_all_layers(small("grouped")[1], num_devices=1, num_redundant=1)


def test_wrong_placements_are_refused(skewed):
    _, params = skewed
    for slots in (6, 10):
        with pytest.raises(ValueError, match="num_slots must be a multiple of 4 devices and at least 8"):
            place_experts(np.ones(8), 4, slots)
    with pytest.raises(ValueError, match="layer_0 is no layer of the trunk with experts"):
        apply_placement(params, {"layer_0": place_experts(np.ones(8), 4)})
    with pytest.raises(ValueError, match="one number of slots"):
        apply_placement(params, {})
