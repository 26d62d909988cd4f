"""The engine with drafters in files of their own: EAGLE-3, DFlash and DSpark, with caches in pages, and Medusa."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, MTPModel, SamplingParams, compat
from mtpjax.models.params import shard_for_decoding
from mtpjax.serving.engine import Engine
from mtpjax.serving.host_pages import page_bytes, page_shapes
from mtpjax.serving.launch import page_bytes as expected_page_bytes
from mtpjax.serving.model_digest import model_digest
from mtpjax.serving.request import Request
from tests.helpers.small_models import constructed_drafter, constructed_params, small_config
from tests.serving.test_engine import CONFIG, ONE_SIZE, PREFIXES, Client, alone, check_all, check_idle, random_requests

slow = pytest.mark.slow
TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}
BLOCK = {"num_steps": 3}  # as many levels as a block of these drafters has
KINDS = ("eagle3", "medusa", "dflash", "dspark")


@functools.cache
def trunk(attention="grouped", vocab_size=61, num_mtp_modules=0):
    model = MTPModel(small_config(attention, vocab_size=vocab_size, num_mtp_modules=num_mtp_modules))
    return model, constructed_params(model, attention, "mixed")


@functools.cache
def drafter_of(kind, seed=0, **changes):
    """A drafter and its parameters; "confident" is DSpark, whose drafts end early."""
    if kind == "confident":
        drafter, draft_params = drafter_of("dspark", seed, **changes)
        return dataclasses.replace(drafter, confidence_threshold=0.5), draft_params
    return constructed_drafter(kind, *trunk(**changes), seed=seed)


def make_engine(kind, settings=ONE_SIZE, of_trunk=(), grammars=None, **changes):
    """Makes an engine; returns it with its config and the parameters of its drafter."""
    drafter, draft_params = drafter_of(kind, **dict(of_trunk))
    config = dataclasses.replace(CONFIG, drafter=drafter, **changes)
    model, params = trunk(**dict(of_trunk))
    made = {"model": model, "config": config, "settings": settings, "draft_params": draft_params}
    return Engine(params, **made, grammars=grammars), config


@pytest.fixture(scope="module")
def engines():
    """`engines(kind, settings, **changes)` -> a running engine and its config."""
    made = {}

    def make(kind, settings=ONE_SIZE, of_trunk=(), **changes):
        key = (kind, settings, of_trunk, tuple(changes.items()))
        if key not in made:
            made[key] = make_engine(kind, settings, of_trunk, **changes)
            made[key][0].warm_up()
            made[key][0].start()
        return made[key]

    yield make
    for engine, _ in made.values():
        assert engine.close(timeout=30)


ONE_SLOT = dataclasses.replace(ONE_SIZE, num_slots=1, batch_sizes=(1,), prefill_tokens=8)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", {}),
        pytest.param("dspark", BLOCK, marks=slow),
        pytest.param("dflash", BLOCK, marks=slow),
        pytest.param("dflash", BLOCK | {"draft_window": 6}, marks=slow),
        pytest.param("confident", BLOCK, marks=slow),
    ],
)
def test_a_shared_beginning_changes_neither_text_nor_acceptance(kind, shape):
    """The drafter's entries in a shared page are those of a prefill of its own."""
    # As few programs as possible: one of each kind.
    engine, config = make_engine(kind, ONE_SLOT, **shape)
    engine.start()
    prompt = np.random.default_rng(0).integers(0, 61, 41).tolist()
    request = Request(prompt=tuple(prompt), max_new_tokens=20)
    (cold,), (warm,) = Client(engine).run([request]), Client(engine).run([request])
    assert (cold[2].num_cached_tokens, warm[2].num_cached_tokens) == (0, 40)
    expected = alone(trunk()[1], trunk()[0], request, config, draft_params=drafter_of(kind)[1])[0]
    assert cold[0] == warm[0] == expected
    counts = [(each.num_steps, each.proposed, each.accepted) for each in (cold[2], warm[2])]
    assert counts[0] == counts[1] and sum(counts[0][2]) > 0
    assert engine.close(timeout=30)


@slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *itertools.product(("eagle3", "medusa"), (BLOCK, TREE, BLOCK | {"acceptance": "token"})),
        *itertools.product(("dflash", "dspark", "confident"), (BLOCK, BLOCK | {"acceptance": "token"})),
        ("dflash", {"num_steps": 2, "draft_window": 6}),
    ],
)
def test_preemption_and_shared_beginnings_change_no_text(engines, kind, shape):
    engine, config = engines(kind, **shape)
    model, params = trunk()
    requests = random_requests(1, 32, prompt_length=(1, 20), new_tokens=(1, 60), prefixes=PREFIXES)
    requests = [request for request in requests if len(request.prompt) + 1 < engine.max_length]
    before = engine.status()
    check_all(engine, model, params, requests, config, drafter_of(kind)[1])
    status = engine.status()
    assert status.num_preempted > before.num_preempted and status.num_cached_tokens > before.num_cached_tokens
    assert status.accept_length > 1.2
    assert engine.flush_cache() > 0
    check_idle(engine)


@slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *itertools.product(KINDS, ({"disable_drafts_at": 3}, {"adapts_depth": True})),
        ("confident", {"disable_drafts_at": 3}),
    ],
)
def test_a_depth_that_changes_keeps_the_text(engines, kind, changes):
    if "adapts_depth" in changes:
        changes = {**changes, "depth_costs": ((1.0, 1.1, 1.2),)}
    engine, config = engines(kind, dataclasses.replace(ONE_SIZE, **changes), acceptance="sample")
    model, params = trunk()
    check_all(engine, model, params, list(random_requests(2, 16, new_tokens=(5, 60))), config, drafter_of(kind)[1])
    assert engine.status().proposed[0] > 0


def test_a_depth_by_acceptance_is_refused_where_drafts_end_early():
    settings = dataclasses.replace(ONE_SIZE, adapts_depth=True)
    with pytest.raises(ValueError, match="confidence_threshold and depth_policy 'adaptive' both choose the depth"):
        make_engine("confident", settings, acceptance="sample")


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_trunk_with_linear_attention_and_modules_of_its_own(engines, kind):
    """Snapshots are as many positions before a border as the drafter needs, not the modules."""
    of_trunk = (("attention", "hybrid"), ("num_mtp_modules", 1))
    engine, config = engines(kind, of_trunk=of_trunk)
    model, params = trunk(**dict(of_trunk))
    requests = random_requests(1, 24, prompt_length=(1, 20), new_tokens=(1, 50), prefixes=PREFIXES)
    check_all(engine, model, params, list(requests), config, drafter_of(kind, **dict(of_trunk))[1])
    assert engine.status().num_cached_tokens > 0


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_another_engine_are_those_of_its_own_prefill(kind):
    settings = dataclasses.replace(ONE_SIZE, host_bytes=1 << 22)
    (first, _), (second, _) = (make_engine(kind, settings) for _ in range(2))
    assert first.pages.digest() == second.pages.digest()
    for engine in (first, second):
        engine.start()
    request = Request(prompt=tuple(np.random.default_rng(0).integers(0, 61, 42).tolist()), max_new_tokens=20)
    (cold,) = Client(first).run([request])
    pages = first.pages.read(request.prompt, request.salt)
    second.pages.put(pages)
    (warm,) = Client(second).run([request])
    assert warm[2].num_cached_tokens == 40 and warm[0] == cold[0]
    assert (warm[2].num_steps, warm[2].accepted) == (cold[2].num_steps, cold[2].accepted)
    # Bytes that the pool is sized by, and that a page has.
    decoder = first._executor.session.decoder.replace(pool=(1, 8))
    size = expected_page_bytes(decoder, jnp.float32)
    assert size == page_bytes(page_shapes(first._executor.session.state)) == sum(array.nbytes for array in pages[0][1])
    for engine in (first, second):
        assert engine.close(timeout=30)


@slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("eagle3", {}), ("eagle3", TREE), ("medusa", TREE), ("dflash", BLOCK), ("confident", BLOCK)],
)
def test_texts_with_grammars_are_those_of_plain_decoding_with_masks(kind, shape):
    pytest.importorskip("llguidance")
    from tests.serving.test_grammar import GRAMMARS, check_text, plain_text
    from tests.serving.test_grammar import random_requests as constrained_requests

    settings = dataclasses.replace(ONE_SIZE, num_pages=40, max_length=96)
    of_trunk = (("vocab_size", 256),)
    engine, _ = make_engine(kind, settings, of_trunk, GRAMMARS, acceptance="sample", **shape)
    engine.start()
    pairs = list(constrained_requests(0, 8))
    model, params = trunk(**dict(of_trunk))
    for (schema, request), result in zip(pairs, Client(engine).run([each for _, each in pairs]), strict=True):
        check_text(schema, result[0], result[2])
        assert result[0] == plain_text(params, model, request), schema
    assert engine.close(timeout=30)


@slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash", "confident"])
def test_a_mesh_over_rows_changes_no_text(kind):
    model, params = trunk(vocab_size=64)
    drafter, draft_params = drafter_of(kind, vocab_size=64)
    config = dataclasses.replace(CONFIG, drafter=drafter)
    mesh_model, mesh_params = shard_for_decoding(model, params, compat.make_mesh({"data": 2}))
    settings = dataclasses.replace(ONE_SIZE, num_pages=38, batch_sizes=(2,))
    engine = Engine(mesh_params, model=mesh_model, config=config, settings=settings, draft_params=draft_params)
    engine.warm_up()
    engine.start()
    requests = list(random_requests(8, 12, prompt_length=(1, 12), new_tokens=(1, 26), prefixes=PREFIXES))
    check_all(engine, model, params, requests, config, draft_params)
    assert engine.close(timeout=30)


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_becomes_nan_leaves_nothing_in_its_slot_and_pages(kind):
    model, params = trunk()
    drafter, draft_params = drafter_of(kind)
    # Neither padding nor a prompt nor a draft has this token.
    unknown = next(token for token in range(1, 30) if token not in np.asarray(draft_params.draft_ids))
    broken = {**params, "embedding": params["embedding"].at[unknown].set(jnp.nan)}
    config = dataclasses.replace(CONFIG, drafter=drafter, **BLOCK)
    engine = Engine(broken, model=model, config=config, settings=ONE_SLOT, draft_params=draft_params)
    engine.start()
    request = Request(prompt=tuple(np.random.default_rng(1).integers(30, 60, 21).tolist()), max_new_tokens=20)
    request = dataclasses.replace(request, sampling=SamplingParams(banned_tokens=(unknown,)))
    (before,) = Client(engine).run([request])
    # Its first new token is the one that has no embedding, so the trunk's states of the first round are NaN.
    (failed,) = Client(engine).run(
        [dataclasses.replace(request, sampling=SamplingParams(allowed_tokens=(unknown,)), max_new_tokens=9)]
    )
    assert failed[2].reason == "error" and "NaN" in failed[2].message
    engine.flush_cache()
    (after,) = Client(engine).run([request])
    assert after[0] == before[0] and after[2].reason == "length"
    assert (after[2].num_steps, after[2].accepted) == (before[2].num_steps, before[2].accepted)
    assert sum(before[2].accepted) > 0
    assert engine.close(timeout=30)


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_computes_nan_changes_no_text(kind):
    model, params = trunk()
    drafter, draft_params = drafter_of(kind)
    broken = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.int32 else leaf.at[0].set(jnp.nan), draft_params)
    config = dataclasses.replace(CONFIG, drafter=drafter, **BLOCK)
    engine = Engine(params, model=model, config=config, settings=ONE_SIZE, draft_params=broken)
    engine.warm_up()
    engine.start()
    check_all(engine, model, params, list(random_requests(0, 8)), config, broken)
    state = engine._executor.session.state
    assert not any(jnp.isnan(leaf).any() for leaf in jax.tree.leaves((state.trunk, state.drafter)))
    assert engine.close(timeout=30)


def test_a_mesh_that_splits_the_trunk_is_refused_at_the_start():
    model, params = trunk(vocab_size=64)
    drafter, draft_params = drafter_of("medusa", vocab_size=64)
    model, params = shard_for_decoding(model, params, compat.make_mesh({"tensor": 2}))
    with pytest.raises(
        ValueError, match=r"do not support a mesh that splits the trunk \(mesh axis tensor has size 2\)"
    ):
        config = dataclasses.replace(CONFIG, drafter=drafter)
        Engine(params, model=model, config=config, settings=ONE_SIZE, draft_params=draft_params)


def test_an_engine_needs_the_parameters_of_its_drafter():
    model, params = trunk()
    config = DecodeConfig(num_steps=2, drafter=drafter_of("medusa")[0])
    with pytest.raises(ValueError, match="MedusaDrafter needs draft_params"):
        Engine(params, model=model, config=config, settings=ONE_SIZE)


def test_engines_with_other_drafters_do_not_understand_each_others_pages():
    model, params = trunk()
    drafters = [(None, None), *(drafter_of(kind) for kind in KINDS), drafter_of("eagle3", seed=1)]
    digests = [
        model_digest(params, model.config, DecodeConfig(drafter=drafter or "mtp"), 8, [], draft_params=draft_params)
        for drafter, draft_params in (*drafters, drafter_of("eagle3"))
    ]
    assert digests[1] == digests[-1] and all(a != b for a, b in itertools.combinations(digests[:-1], 2))
