"""Teacher-forced scores on a mesh are those of one device. Eight virtual devices; float32."""

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, compat, shard_for_decoding
from mtpjax.evaluation import teacher_forced, token_scores
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.evaluation.self_check import make_record
from mtpjax.evaluation.teacher_forced import PaddedTexts, compare_levels
from mtpjax.evaluation.token_scores import score_tokens

TEXTS = [[(7 * place + 3 * row) % 61 for place in range(10 + row)] for row in range(3)]
ROWS = PaddedTexts(
    np.array([text + [0] * (16 - len(text)) for text in TEXTS], np.int32),
    np.array([len(text) for text in TEXTS], np.int32),
    np.array([1.0, 0.7, 1.3], np.float32),
)
ALL = {"data": 2, "expert": 2, "tensor": 2}
slow = pytest.mark.slow


def on_mesh(small, attention, axes):
    """A small model whose sizes the meshes divide, on one device and on a mesh."""
    model, params = small(attention, "mixed", num_mtp_modules=2, vocab_size=64, num_tokens=61)
    return (model, params), shard_for_decoding(model, params, compat.make_mesh(axes), allow_copies=True)


@pytest.mark.parametrize(
    ("attention", "axes"),
    [
        ("latent", ALL),
        pytest.param("latent", {"data": 8}, marks=slow),  # more than there are rows
        pytest.param("latent", {"expert": 4}, marks=slow),
        ("clamped", {"data": 2, "tensor": 2}),  # experts with biases
        pytest.param("clamped", {"data": 2, "expert": 2}, marks=slow),
        pytest.param("clamped", {"data": 4, "expert": 2}, marks=slow),  # only `data` splits the four experts
        pytest.param("grouped", {"tensor": 4}, marks=slow),  # more than there are key/value heads
    ],
)
def test_a_mesh_gives_the_scores_of_a_single_device(attention, axes, small):
    (model, params), (meshed_model, meshed_params) = on_mesh(small, attention, axes)
    single = compare_levels(params, ROWS, model=model, num_depths=3)
    meshed = compare_levels(meshed_params, ROWS, model=meshed_model, num_depths=3)
    np.testing.assert_array_equal(meshed.agrees, single.agrees)
    np.testing.assert_array_equal(meshed.matches_text, single.matches_text)
    # Sums over shards are rounded in another order.
    np.testing.assert_allclose(meshed.overlap, single.overlap, atol=1e-5)
    np.testing.assert_allclose(meshed.log_ratio, single.log_ratio, atol=1e-4)
    texts = [text[-2:] for text in TEXTS]
    single = score_tokens(params, TEXTS, texts, model=model, num_top=3)
    meshed = score_tokens(meshed_params, TEXTS, texts, model=meshed_model, num_top=3)
    assert [score.top_ids for score in meshed] == [score.top_ids for score in single]
    for one, other in zip(meshed, single, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_scores_run_in_the_layout_of_decoding(small):
    """Each device has its shard of the experts, over `data` and `expert`; XLA partitions nothing itself."""
    _, (model, params) = on_mesh(small, "latent", ALL)
    with jax.set_mesh(compat.make_mesh(ALL)):
        rows = jax.tree.map(lambda leaf: leaf[:2], ROWS)
        compare = teacher_forced._compare_on_shards
        text = str(jax.make_jaxpr(lambda p: compare(p, {}, rows, model=model, num_depths=1, drafter=None))(params))
        assert "shard_map" in text
        score = token_scores._score
        tokens = np.zeros((2, 64), np.int32)
        assert "shard_map" in str(jax.make_jaxpr(lambda p: score(p, {}, tokens, model=model, num_top=2))(params))


@slow
def test_the_record_of_training_is_the_same_on_a_mesh(small):
    (model, params), (meshed_model, meshed_params) = on_mesh(small, "latent", {"data": 2, "expert": 2})
    single = make_record(params, ROWS.tokens, model=model, num_depths=2)
    meshed = make_record(meshed_params, ROWS.tokens, model=meshed_model, num_depths=2)
    np.testing.assert_allclose(meshed["agreement"], single["agreement"], atol=1e-6)
    np.testing.assert_allclose(meshed["overlap"], single["overlap"], atol=1e-6)


@slow
def test_predictions_are_the_same_on_a_mesh(small):
    (model, params), (meshed_model, meshed_params) = on_mesh(small, "clamped", {"data": 2, "expert": 2})
    config = DecodeConfig(max_new_tokens=6, num_steps=2)
    single = measure_acceptance(params, TEXTS, model=model, config=config, temperature=0.8)
    meshed = measure_acceptance(meshed_params, TEXTS, model=meshed_model, config=config, temperature=0.8)
    assert meshed.texts.tolist() == single.texts.tolist()
    for one, other in zip(jax.tree.leaves(meshed[:2]), jax.tree.leaves(single[:2]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
