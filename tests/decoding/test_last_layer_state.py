"""Drafters that read the output of the last trunk layer, before or after the final norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig
from mtpjax.drafters.trained import DraftParams, inner_layers, join_states
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.models.forward import trunk_states
from mtpjax.models.masks import full_view
from mtpjax.models.model import bind
from mtpjax.models.params import DRAFTER
from mtpjax.training.initial_drafter import add_new_drafter, new_drafter
from tests.helpers.new_drafters import settings

L = 2  # layers of the trunk
LAYERS = (1, L, L + 1)


def test_decoding_and_training_read_the_same_states(small):
    model, params = small(num_mtp_modules=0)
    tokens, segments = jnp.array([[3, 1, 4, 1, 5]]), jnp.ones((1, 5), jnp.int32)
    whole = trunk_states(params, tokens, segments, model=model, layer_ids=LAYERS)
    view = full_view(model.config, segments)
    output = bind(model, params)(tokens, view, method="run_trunk", layer_ids=inner_layers(LAYERS, L))
    joined = join_states(output, LAYERS, L)
    np.testing.assert_allclose(joined, whole[..., : joined.shape[-1]], rtol=1e-5, atol=1e-6)
    # The last state is the final norm of the one before it.
    _, before, after = np.split(np.float64(joined), 3, axis=-1)
    scale = np.sqrt((before**2).mean(-1, keepdims=True) + model.config.rms_norm_eps)
    np.testing.assert_allclose(after, before / scale * np.float64(params["norm_final"]["scale"]), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_drafts_from_the_normed_state_are_those_of_the_teacher_forced_pass(kind, small):
    model, params = small(num_mtp_modules=0, vocab_size=11)  # random drafts are right now and then
    noise = lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)
    for layers in ((0, 1, L), (0, 1, L + 1)):
        config = settings(kind, draft_layers=layers, num_depths=2)
        drafter, method = new_drafter(config, model.config), config.draft_method
        shape = {"model": model, "method": method, "drafter": drafter, "draft_ids": None}
        made = add_new_drafter(params, **shape, key=jax.random.key(1))
        made |= {DRAFTER: jax.tree.map(noise, made[DRAFTER])}
        draft_params = DraftParams.of(made)
        assert drafter.architecture.layer_ids == layers
        config = DecodeConfig(max_new_tokens=40, num_steps=2, drafter=drafter, acceptance="block")
        arguments = {"model": model, "config": config, "draft_params": draft_params}
        found = measure_acceptance(params, [[first, second] for first in range(11) for second in (1, 7)], **arguments)
        np.testing.assert_allclose(found.predicted.accepted, found.accepted)
        assert found.accepted.sum() > 0
