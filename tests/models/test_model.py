import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import MTPModel, add_mtp_modules, forward, init_params
from mtpjax.models.params import param_shapes

TOKENS = np.random.default_rng(5).integers(0, 61, (2, 9))


@pytest.mark.parametrize(
    "changes",
    [
        {"mtp_input": "hidden_embedding"},
        {"mtp_hidden_post_norm": False},
        {"mtp_chain_post_norm": False},
        {"mtp_mask_first": True},
        {"mtp_chaining": "trunk"},
    ],
    ids=str,
)
def test_each_mtp_switch_changes_the_drafts_and_not_the_trunk(changes, small):
    model, params = small("grouped", num_mtp_modules=2)
    plain = forward(params, TOKENS, model=model)
    other = forward(params, TOKENS, model=MTPModel(dataclasses.replace(model.config, **changes)))
    np.testing.assert_array_equal(plain.logits, other.logits)
    differences = [np.abs(a - b).max() for a, b in zip(plain.mtp_logits, other.mtp_logits, strict=True)]
    assert differences[1] > 0.1
    only_the_second = "mtp_chain_post_norm" in changes or "mtp_chaining" in changes
    assert (differences[0] < 1e-5) == only_the_second  # another program may round otherwise


def test_own_embedding_and_head_take_the_place_of_the_shared_ones(small):
    model, params = small("grouped", num_mtp_modules=2, mtp_own_embedding=True, mtp_own_head=True)
    shared, _ = small("grouped", num_mtp_modules=2)
    copies = {f"mtp_{name}_{index}": params[name] for name in ("embedding", "head") for index in (0, 1)}
    kept = {name: value for name, value in params.items() if name not in copies}
    same = forward({**params, **copies}, TOKENS, model=model)
    jax.tree.map(np.testing.assert_array_equal, same, forward(kept, TOKENS, model=shared))
    own = forward(params, TOKENS, model=model)
    assert all(np.abs(a - b).max() > 0.1 for a, b in zip(own.mtp_logits, same.mtp_logits, strict=True))


def test_a_tied_head_is_the_embedding(small):
    model, params = small("grouped", tie_word_embeddings=True)
    assert "head" not in params
    output = forward(params, TOKENS, model=model, num_depths=0)
    np.testing.assert_allclose(output.logits, output.hidden @ params["embedding"].T, rtol=1e-5, atol=1e-4)


def test_later_tokens_change_no_earlier_row(small):
    model, params = small("latent", num_mtp_modules=2)
    changed = TOKENS.copy()
    changed[:, 6] = (changed[:, 6] + 1) % 61
    before, after = (forward(params, tokens, model=model, num_depths=3) for tokens in (TOKENS, changed))
    for depth, (a, b) in enumerate(
        zip((before.logits, *before.mtp_logits), (after.logits, *after.mtp_logits), strict=True)
    ):
        np.testing.assert_array_equal(a[:, : 6 - depth], b[:, : 6 - depth])
        assert np.abs(a[:, 6 - depth] - b[:, 6 - depth]).max() > 1e-3


def test_init_gives_hidden_states_and_logits_of_unit_size(small):
    model, _ = small("grouped")
    params = init_params(model, jax.random.key(0))
    shapes = param_shapes(model.config, model.scan_layers)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    output = forward(params, TOKENS, model=model)
    assert np.std(output.logits) == pytest.approx(1, abs=0.3)
    assert np.std(output.mtp_logits[0]) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"tokens": TOKENS[0]}, "(9,)"),
        ({"segment_ids": np.ones((2, 8), int)}, "(2, 8) do not match tokens (2, 9)"),
        ({"lengths": np.ones(3, int)}, "(3,) do not match the batch of 2"),
        ({"num_depths": -1}, "num_depths -1"),
        ({"attention_layout": "flat"}, "'flat' is not one of ttt, stream"),
    ],
)
def test_bad_input_is_one_line_that_names_it(keywords, named, small):
    model, params = small()
    with pytest.raises(ValueError) as raised:
        forward(params, **({"tokens": TOKENS} | keywords), model=model)
    assert named in str(raised.value) and "\n" not in str(raised.value)


def test_depths_without_modules_are_refused(small):
    model, params = small(num_mtp_modules=0)
    with pytest.raises(ValueError, match="num_depths 1 is not possible with 0 MTP modules"):
        forward(params, TOKENS, model=model, num_depths=1)


def test_new_modules_begin_as_the_trunks_last_layer_and_as_each_other(small, key):
    model, params = small(num_mtp_modules=0)
    model, grown = add_mtp_modules(model, params, 2, key)
    assert model.config.num_mtp_modules == 2

    def assert_equal(found, wanted):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)

    assert_equal(grown["mtp_0"]["block"], params["trunk"][f"layer_{model.config.num_hidden_layers - 1}"])
    assert_equal(grown["mtp_1"], grown["mtp_0"])
    _, more = add_mtp_modules(model, grown, 1, key)
    assert_equal(more["mtp_2"], grown["mtp_1"])
    output = forward(grown, jnp.zeros((1, 6), int), model=model)
    assert all(jnp.isfinite(logits).all() for logits in output.mtp_logits)


def test_a_new_module_of_another_kind_than_the_last_layer_is_random(small, key):
    types = ("full_attention", "linear_attention")
    model, params = small("hybrid", num_mtp_modules=0, num_hidden_layers=2, layer_types=types)
    assert model.config.trunk_kinds[-1] != model.config.mtp_kind
    model, grown = add_mtp_modules(model, params, 1, key)
    assert jax.tree.structure(grown["mtp_0"]["block"]) != jax.tree.structure(params["trunk"]["layer_1"])
    assert jnp.isfinite(forward(grown, jnp.zeros((1, 6), int), model=model).mtp_logits[0]).all()
