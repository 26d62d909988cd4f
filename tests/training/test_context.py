"""A mesh that splits rows by tokens changes neither losses nor gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from mtpjax import MTPModel, Objective, TrainConfig, compat, train
from mtpjax.data.packing import Batch
from mtpjax.models import context, forward, masks
from mtpjax.models.layers import delta_rule, entries
from mtpjax.training import context_terms
from mtpjax.training.data_parallel import shard_batch, shard_train_state
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.initial_model import init_model
from mtpjax.training.objective import OBJECTIVES
from mtpjax.training.step import train_step
from mtpjax.training.train_state import init_train_state
from pallas_kernels.gated_delta import gated_delta
from tests.helpers.small_models import random_params, small_config
from tests.helpers.training_runs import SETTINGS, losses, write_corpus

T = 32
EVERY = Objective(mix=dict.fromkeys(OBJECTIVES, 1.0))
BY_CHUNKS = Objective(mix=dict.fromkeys(OBJECTIVES, 1.0), vocab_chunk=40)


@pytest.fixture(scope="module")
def batch():
    """Two packed rows. Documents cross the borders of chunks of 4 and 8 tokens, and end at them."""
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (2, T), 0, 61))
    segment_ids = np.array([[1] * 22 + [2] * 7 + [0] * 3, [1] * 6 + [2] * 10 + [3] * 2 + [4] * 14])
    return Batch(tokens, segment_ids, tokens % 7 > 0)


def gradients(batch, attention, axes=None, *, objective=EVERY, accumulation=1, has_states=False, **settings):
    """Losses and gradients of one update with recycled depths, from an optimiser that keeps the gradient."""
    trains = settings.get("trains", "all")
    # Short keys of linear attention would often be close to zero before they are normalised, which amplifies rounding.
    changes = {"linear_key_head_dim": 32} if attention == "hybrid" else {}
    model = MTPModel(small_config(attention, **changes), scan_layers=True)
    optimizer, mesh, params = optax.trace(0.0), None, random_params(model)
    state = init_train_state(params, optimizer, trains)
    states = forward.trunk_states(params, *batch[:2], model=model) if has_states else None
    if axes:
        mesh = compat.make_mesh(axes)
        state = shard_train_state(state, mesh, optimizer=optimizer, trains=trains)
        batch, states = shard_batch((batch, states), mesh)
    spec = TrainSpec(model=model, num_depths=3, objective=objective, accumulation=accumulation, mesh=mesh, **settings)
    step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer))
    state, metrics = step(state, batch, 0.0, 0.3, 0.25, states)
    return jax.device_get((metrics["loss"], metrics["losses"], state.optimizer.trace))


@pytest.fixture(scope="module")
def whole(batch):
    """Losses and gradients on one device, whose scores of all pairs are computed at once."""
    return functools.cache(functools.partial(gradients, batch))


def distance(found, expected):
    """The largest relative difference of the losses and of the whole gradient, or a tenth of a parameter's gradient's.

    On one device, other chunks of the delta rule and attention by blocks change a parameter's gradient by up to 2e-5.
    """
    losses = [np.abs(got / wanted - 1).max() for got, wanted in zip(found[:2], expected[:2], strict=True)]
    pairs = list(zip(*(jax.tree.leaves(tree[2]) for tree in (found, expected)), strict=True))
    differences = np.array([np.linalg.norm(got - wanted) for got, wanted in pairs])
    norms = np.array([np.linalg.norm(wanted) for _, wanted in pairs]) + 1e-30  # a router's correction has no gradient
    return max(*losses, np.linalg.norm(differences) / np.linalg.norm(norms), (differences / norms).max() / 10)


slow = pytest.mark.slow
CASES = [
    ("grouped", {"context": 4}, {"objective": BY_CHUNKS}),
    pytest.param("latent", {"context": 2, "fsdp": 2}, {}, marks=slow),
    pytest.param("hybrid", {"context": 2}, {}, marks=slow),
    pytest.param("hybrid", {"fsdp": 2, "context": 4}, {}, marks=slow),
    pytest.param("latent", {"expert": 2, "context": 4}, {"objective": BY_CHUNKS}, marks=slow),
    pytest.param("sliding", {"context": 4}, {}, marks=slow),
    pytest.param("clamped", {"data": 2, "context": 2}, {}, marks=slow),
    pytest.param("grouped", {"context": 2}, {"attention_layout": "stream"}, marks=slow),
    pytest.param("sliding", {"context": 2}, {"trains": "detached", "accumulation": 2}, marks=slow),
    pytest.param("grouped", {"context": 4}, {"trains": "modules", "has_states": True}, marks=slow),
    pytest.param("latent", {"fsdp": 2, "context": 2}, {"trains": "modules", "objective": BY_CHUNKS}, marks=slow),
]


def case_name(value):
    return (
        value
        if isinstance(value, str)
        else ",".join(f"{name}={size}" for name, size in value.items() if size != BY_CHUNKS)
    )


@pytest.mark.parametrize(("attention", "axes", "settings"), CASES, ids=case_name)
def test_rows_split_by_tokens_give_the_gradients_of_whole_rows(attention, axes, settings, batch, whole):
    assert distance(gradients(batch, attention, axes, **settings), whole(attention, **settings)) <= 1e-5


MUTANTS = {
    "a device attends to the keys of its own tokens": (
        entries,
        "all_tokens",
        lambda own, axis: jnp.tile(own, (1, 1, 2, 1)),
    ),
    "ranges count a device's own tokens": (masks, "own_tokens", lambda rows: rows[:, : rows.shape[1] // 2]),
    "the trunk's states of the next chunk are missing": (
        context_terms,
        "begins_after",
        lambda chunks, count: jnp.zeros_like(chunks[:, :count]),
    ),
    "the trunk's states come from the chunk before": (
        context_terms,
        "begins_after",
        lambda chunks, count: context.choose_own(context.all_chunks(chunks[:, :count]), -1),
    ),
    "tokens are shifted inside a device": (
        forward,
        "own_tokens",
        lambda rows: jnp.roll(context.own_tokens(rows), 1, axis=1),
    ),
}


@slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_notices(mutant, batch, whole, monkeypatch):
    expected = whole("grouped")
    monkeypatch.setattr(*MUTANTS[mutant])
    jax.clear_caches()
    assert distance(gradients(batch, "grouped", {"context": 2}), expected) > 1e-3


@pytest.mark.parametrize("size", [2, 4])
def test_chunks_and_their_neighbours(size):
    rows = jnp.arange(2 * 16).reshape(2, 16) + 100
    c = 16 // (2 * size)

    def check(rows):
        own = context.own_tokens(rows)
        chunks = context.split_chunks(own)
        before, after = context.ends_before(chunks, 1), context.begins_after(chunks, 2)
        whole = context.all_tokens(jnp.stack([own, own], axis=1)[..., None], -2)
        return jnp.concatenate([before, chunks, after], axis=1), whole[:, 1, :, 0]

    mesh = compat.make_mesh({"context": size})
    settings = {"mesh": mesh, "in_specs": PartitionSpec(), "check_vma": False}
    chunks, whole = jax.jit(jax.shard_map(check, **settings, out_specs=PartitionSpec("context")))(rows)
    np.testing.assert_array_equal(whole, np.tile(rows, (size, 1)))
    padded = np.pad(rows, ((0, 0), (1, 2)))
    order = context.token_order(16, size)[::c] // c
    expected = [
        padded[row, index * c : index * c + c + 3]
        for pair in order.reshape(-1, 2)
        for row in range(2)
        for index in pair
    ]
    np.testing.assert_array_equal(chunks, expected)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=slow)])
def test_linear_attention_passes_its_states_on(size, key, batch):
    """Also the gradient, which passes backwards through the chunks."""
    K, J, P, Q = 2, 4, 6, 5
    keys = jax.random.split(key, 6)
    q, k = (jax.random.normal(each, (2, T, K, P)) for each in keys[:2])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    v, weights = (jax.random.normal(each, (2, T, J, Q)) for each in keys[2:4])
    log_decay, beta = -0.1 * jax.random.uniform(keys[4], (2, T, J)), jax.random.uniform(keys[5], (2, T, J))
    segment_ids = jnp.asarray(batch.segment_ids)

    def expected(*rule):
        q, k, v, log_decay, beta = rule
        return gated_delta(q, k, v, log_decay, beta, jnp.zeros((2, J, P, Q)), segment_ids=segment_ids)[0]

    def found(*rule):
        order = context.token_order(T, size)

        def on_device(*own):
            chunks = [context.split_chunks(each) for each in own]
            state = jnp.zeros((len(chunks[0]), J, P, Q))
            output, _ = delta_rule._rule_over_chunks((*chunks, state), segment_ids, "xla")
            return output.reshape(2, -1, J, Q)

        tokens = PartitionSpec(None, "context")
        settings = {"mesh": compat.make_mesh({"context": size}), "check_vma": False}
        split = jax.shard_map(on_device, **settings, in_specs=tokens, out_specs=tokens)
        return split(*(each[:, order] for each in rule))[:, np.argsort(order)]

    rule = q, k, v, log_decay, beta
    for function in (
        lambda form: form(*rule),
        lambda form: jax.grad(lambda *rule: (form(*rule) * weights).sum(), range(5))(*rule),
    ):
        for got, wanted in zip(
            *(jax.tree.leaves(jax.jit(function, static_argnums=0)(form)) for form in (found, expected)), strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"row_length": 30}, "cuts a row into 4 chunks, which do not divide its 30 tokens"),
        ({"row_length": 32, "extra_tokens": 2}, r"its 34 tokens \(row_length 32 \+ extra_tokens 2\)"),
        ({"row_length": 8, "num_depths": 3}, "chunks of 2 tokens, fewer than num_depths 3"),
        (
            {"batch_size": 3, "mesh": {"data": 2, "context": 2}},
            "batch_size 3 is not a multiple of 2 .* without context",
        ),
        ({"drafter": "medusa", "init_from": "folder"}, "drafter 'medusa' "),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"mesh": {"context": 2}, "batch_size": 1} | settings)


def test_the_sparse_indexer_is_refused():
    config = TrainConfig(model=small_config("sparse"), mesh={"context": 2}, batch_size=1)
    with pytest.raises(ValueError, match="mesh axis context does not support the sparse indexer of index_topk 7"):
        init_model(config)


@slow
def test_a_run_has_the_losses_of_one_device(tmp_path):
    """Its panel decodes on the same devices, which split the rows."""
    corpus = write_corpus(tmp_path / "texts")
    settings: dict[str, Any] = SETTINGS | {
        "data": str(corpus),
        "steps": 3,
        "panel_prompts": 2,
        "model": small_config(vocab_size=256),
    }
    runs = {}
    for name, mesh in {"one": {}, "context": {"fsdp": 2, "context": 2}}.items():
        config = TrainConfig(**settings, mesh=mesh, output=str(tmp_path / name))
        runs[name] = train(config, evaluations=1)
    for step, bits in losses(runs["one"].history).items():
        np.testing.assert_allclose(losses(runs["context"].history)[step], bits, rtol=1e-5)
    assert runs["context"].panel.decoded.keys() == runs["one"].panel.decoded.keys() != set()
