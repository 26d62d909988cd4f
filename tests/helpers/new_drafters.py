"""Untrained drafters beside a small trunk, and updates of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax import TrainConfig
from mtpjax.data.packing import Batch
from mtpjax.models.forward import forward
from mtpjax.models.params import DRAFTER
from mtpjax.training import initial_drafter as training
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state

V, D, LEVELS = 61, 32, 3
DRAFT_IDS_OF_TESTS = jnp.arange(0, V, 2, dtype=jnp.int32)
BLOCKS = {"draft_num_layers": 2, "draft_mask_token": 1}
KIND_SETTINGS = {"eagle3": {}, "medusa": {}, "dflash": BLOCKS, "dspark": BLOCKS | {"draft_markov_rank": 8}}


def settings(kind, **changes):
    return TrainConfig(drafter=kind, init_from="unused", **{"num_depths": LEVELS} | KIND_SETTINGS[kind] | changes)


@functools.cache
def new_drafter(small, kind, is_reduced=True, attention="grouped"):
    """A trunk with a new drafter beside it, whose residual layers are not zero."""
    model, params = small(attention, num_mtp_modules=0)
    ids = DRAFT_IDS_OF_TESTS if is_reduced else None
    config = settings(kind, draft_vocab_size=0 if ids is None else len(ids))
    drafter = training.new_drafter(config, model.config)
    sizes = {"model": model, "method": config.draft_method, "drafter": drafter, "draft_ids": ids}
    params = training.add_new_drafter(params, **sizes, key=jax.random.key(1))
    noise = lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)
    return model, params | {DRAFTER: jax.tree.map(noise, params[DRAFTER])}, drafter


def packed_batch():
    """Two packed documents in the first row, padding at the end of the second."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(V, size=(2, 12)).astype(np.int32)
    segments = np.ones((2, 12), np.int32)
    segments[0, 7:], segments[1, 10:] = 2, 0
    return Batch(tokens, segments, rng.random((2, 12)) < 0.8)


def run_steps(model, params, drafter, batch, *, steps=1, states=None, warmup=1, **changes):
    """Parameters and metrics after some updates, with a learning rate that rises over `warmup` updates."""
    optimizer = make_optimizer(TrainConfig())
    state = init_train_state(params, optimizer, "modules")
    spec = TrainSpec(model=model, num_depths=LEVELS, trains="modules", drafter=drafter, **changes)
    step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer))
    for number in range(steps):
        state, metrics = step(state, batch, 1e-2 * min((number + 1) / warmup, 1), 1.0, states=states)
    return state.params, metrics


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def trunk_logs(model, params, batch):
    """The trunk's final states, and its log-probabilities of the draft ids, in float64."""
    output = forward(params, batch.tokens, model=model, segment_ids=batch.segment_ids)
    logits = np.asarray(output.logits, np.float64)[..., np.asarray(DRAFT_IDS_OF_TESTS)]
    return np.asarray(output.hidden, np.float64), log_softmax(logits)
