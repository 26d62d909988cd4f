"""The resumable loop: rows that enter a running state at any time get the tokens that they get alone."""

import dataclasses

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, collect, init_state, insert, run, speculative_generate
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.inference import resumable
from mtpjax.inference.resumable import num_pages_for

SLOTS, ROWS = 3, 7
POOL = 40, 4  # enough for the longest rows at once; pages are used again and again
PROMPTS = [
    np.random.default_rng(row).integers(0, 61, size).tolist() for row, size in enumerate([1, 9, 4, 17, 2, 6, 12])
]
LIMITS = [14, 5, 20, 9, 16, 1, 11]  # new tokens; one row ends with its prefill
CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8, acceptance="greedy", stop_sequences=((7, 7), (33,)))
TREE = {"topk": 2, "num_draft_tokens": 5}
SHAPES = {
    "greedy chain": {},
    "greedy tree": TREE,
    "sampled chain": {"acceptance": "block"},
    "sampled tree": {"acceptance": "recursive", **TREE},
    "adaptive chain": {"depth_policy": "adaptive", "depth_costs": (1.0, 1.2, 1.4)},
}
CASES = [
    ("grouped", "greedy chain"),
    *[
        pytest.param(attention, shape, marks=pytest.mark.slow)
        for attention, shape in [
            ("hybrid", "greedy chain"),
            ("hybrid", "sampled chain"),
            ("latent", "sampled chain"),
            ("grouped", "sampled tree"),
            ("sparse", "sampled chain"),
            ("grouped", "greedy tree"),
            ("grouped", "sampled chain"),
            ("grouped", "adaptive chain"),
            ("latent", "greedy chain"),
            ("latent", "greedy tree"),
            ("latent", "sampled tree"),
            ("sparse", "greedy chain"),
            ("sparse", "greedy tree"),
            ("sparse", "sampled tree"),
            ("hybrid", "adaptive chain"),
        ]
    ],
]


def settings_of(row, shape):
    """One request's settings: its own limit, temperature, filters and seed."""
    config = dataclasses.replace(CONFIG, max_new_tokens=LIMITS[row], **SHAPES[shape])
    if "sampled" not in shape:
        return config, SamplingParams()
    asked = [{}, {"top_k": 9}, {"frequency_penalty": 0.5}, {"temperature": 0.0}, {"min_p": 0.05}, {}, {"top_p": 0.9}]
    return config, SamplingParams(**{"temperature": 0.8, "seed": 10 + row, **asked[row]})


def serve(model, params, shape, seed, pool=None):
    """Decodes all rows in `SLOTS` slots, in an order and at times that `seed` gives; returns each row's result."""
    random = np.random.default_rng(seed)
    config = settings_of(0, shape)[0]
    state = init_state(params, model=model, config=config, num_slots=SLOTS, max_length=64, pool=pool)
    free_pages, pages_of = list(range(pool[0])) if pool else [], {}
    waiting, holds, found = random.permutation(ROWS).tolist(), {}, {}
    while waiting or holds:
        # Requests come at random: none, one or two at a time, into random free slots. Those of one call share limits.
        free = [slot for slot in range(SLOTS) if slot not in holds]
        for slot in random.permutation(free)[: random.integers(0, len(free) + 1)].tolist():
            if waiting:
                row = holds[slot] = waiting.pop()
                config, sampling = settings_of(row, shape)
                if pool:
                    length = len(PROMPTS[row]) + LIMITS[row]
                    random.shuffle(free_pages)
                    needed = num_pages_for(params, state, length, model=model, config=config)
                    pages_of[slot], free_pages = free_pages[:needed], free_pages[needed:]
                state = insert(
                    params,
                    state,
                    [slot],
                    [PROMPTS[row]],
                    model=model,
                    config=config,
                    sampling=sampling,
                    pages=[pages_of[slot]] if pool else None,
                )
        # Run for a few rounds, or until a row ends.
        config = settings_of(0, shape)[0]
        until = ["all", "any"][random.integers(2)]
        state = run(params, state, int(random.integers(0, 4)), model=model, config=config, until=until)
        # Collect what has ended and free its slot.
        done = np.asarray(state.done)
        for slot in [slot for slot in holds if done[slot]]:
            found[holds.pop(slot)] = collect(state, [slot])
            free_pages += pages_of.pop(slot, [])
    return [found[row] for row in range(ROWS)]


@pytest.mark.parametrize(("attention", "shape"), CASES)
def test_rows_inserted_at_random_times_get_the_tokens_they_get_alone(attention, shape, small):
    model, params = small(attention, "mixed")
    alone = []
    for row in range(ROWS):
        config, sampling = settings_of(row, shape)
        alone.append(speculative_generate(params, [PROMPTS[row]], model=model, config=config, sampling=sampling))
    for seed, pool in ((0, None), (1, POOL)):
        for row, result in enumerate(serve(model, params, shape, seed, pool)):
            result.stats.check()
            assert result.rows() == alone[row].rows(), (pool, row)
            assert result.finish_reasons == alone[row].finish_reasons
            if "adaptive" not in shape:  # an adaptive depth depends on the other rows, the text does not
                assert (result.stats.accepted == alone[row].stats.accepted).all()
    # The drafts are good at times: otherwise equal texts would say little about the drafter's state.
    accepted, proposed = (
        sum(getattr(result.stats, name).sum() for result in alone) for name in ("accepted", "proposed")
    )
    assert 0 < accepted < proposed


@pytest.mark.slow
def test_nothing_compiles_after_the_warm_up(small):
    """Later requests with other limits, stops, sampling options and prompt lengths reuse what is compiled."""
    model, params = small("grouped", "mixed")
    serve(model, params, "sampled chain", 0)
    for function in (resumable._insert, resumable._run):
        function.plain.clear_cache()
    state = init_state(params, model=model, config=settings_of(0, "sampled chain")[0], num_slots=SLOTS, max_length=64)
    config, sampling = settings_of(0, "sampled chain")
    state = insert(params, state, [0], [PROMPTS[0]], model=model, config=config, sampling=sampling)
    for until in ("all", "any"):
        state = run(params, state, 2, model=model, config=config, until=until)
    warm = resumable._insert.plain._cache_size(), resumable._run.plain._cache_size()
    assert warm == (1, 2)
    for seed in (2, 3):
        serve(model, params, "sampled chain", seed)
    assert (resumable._insert.plain._cache_size(), resumable._run.plain._cache_size()) == warm


@pytest.mark.parametrize("pool", [None, pytest.param((40, 16), marks=pytest.mark.slow)])
def test_several_rows_enter_at_once_with_settings_of_their_own(pool, small):
    """Three requests are padded to four; the padding changes no row."""
    model, params = small("grouped", "mixed")
    config = dataclasses.replace(CONFIG, acceptance="block", max_new_tokens=10)
    sampling = SamplingParams(temperature=[0.0, 0.7, 0.9], seed=[1, 2, 3], top_k=[0, 4, 0])
    prompts = PROMPTS[1:4]
    state = init_state(params, model=model, config=config, num_slots=5, max_length=64, pool=pool)
    pages = [range(4, 8), range(20, 24), range(4)] if pool else None
    settings = {"model": model, "config": config, "sampling": sampling}
    state = insert(params, state, [4, 0, 2], prompts, pages=pages, **settings)
    state = run(params, state, 1000, model=model, config=config)
    together = speculative_generate(params, prompts, model=model, config=config, sampling=sampling)
    assert collect(state, [4, 0, 2]).rows() == together.rows()


@pytest.mark.parametrize(
    ("attention", "pool"), [("grouped", (9, 8)), ("latent", None), pytest.param("sparse", None, marks=pytest.mark.slow)]
)
def test_a_conversation_goes_on_from_the_slots_own_cache(attention, pool, small):
    """The second turn prefills only what the slot does not hold, and gets the tokens of a fresh prefill."""
    model, params = small(attention, "mixed")
    config = dataclasses.replace(CONFIG, max_new_tokens=9, stop_sequences=())
    state = init_state(params, model=model, config=config, num_slots=2, max_length=96, pool=pool)
    settings = {"model": model, "config": config, "pages": [list(range(9))] if pool else None}
    state = insert(params, state, [1], [PROMPTS[3]], **settings)
    state = run(params, state, 1000, model=model, config=config)
    text = PROMPTS[3] + collect(state, [1]).rows()[0]
    turn = [*text, 5, 6, 7]
    fresh = speculative_generate(params, [turn], model=model, config=config).rows()
    # Any count up to what the slot processed may be given: all of it, or less.
    for num_cached in (len(text) - 1, 6):
        state = insert(params, state, [1], [turn], num_cached=[num_cached], **settings)
        state = run(params, state, 1000, model=model, config=config)
        assert collect(state, [1]).rows() == fresh


def test_bad_requests_are_refused_and_leave_the_state_usable(small):
    model, params = small("grouped", "mixed")
    config = dataclasses.replace(CONFIG, max_new_tokens=6)
    state = init_state(params, model=model, config=config, num_slots=2, max_length=32)
    state = insert(params, state, [0], [[1, 2]], model=model, config=config)
    bad = [
        ([0], [[1]], {}, "still hold running rows"),
        ([1, 1], [[1], [2]], {}, "must be distinct"),
        ([2], [[1]], {}, "within 0..1"),
        ([1], [[1], [2]], {}, "1 slots for 2 prompts"),
        ([1], [[1] * 250], {}, "room for"),
        ([1], [[]], {}, "empty"),
        ([1], [[1, 2]], {"num_cached": [3]}, "num_cached must be within"),
        ([1], [[1, 2]], {"sampling": SamplingParams(temperature=[0.5, 0.5])}, "temperature"),
        ([1], [[1, 2]], {"pages": [[0, 1]]}, "state with a pool"),
    ]
    for slots, prompts, changes, message in bad:
        with pytest.raises(ValueError, match=message):
            insert(params, state, slots, prompts, model=model, config=config, **changes)
    with pytest.raises(ValueError, match="max_rounds"):
        run(params, state, -1, model=model, config=config)
    with pytest.raises(ValueError, match="unknown until"):
        run(params, state, 1, model=model, config=config, until="some")
    # The refused calls consumed nothing.
    state = run(params, state, 100, model=model, config=config)
    assert collect(state, [0]).rows() == speculative_generate(params, [[1, 2]], model=model, config=config).rows()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["grouped", "latent"])
def test_interpreted_kernels_read_and_write_pages(attention, small):
    model, params = small(attention, "mixed", num_mtp_modules=2)
    config = dataclasses.replace(CONFIG, max_new_tokens=9, prefill_chunk=32, stop_sequences=())
    prompts = [PROMPTS[3] * 2, PROMPTS[1]]  # a prefill by flash attention, and rounds of few tokens
    wanted = speculative_generate(params, prompts, model=model, config=config).rows()
    settings = {"model": model, "config": dataclasses.replace(config, implementation="interpreted")}
    state = init_state(params, num_slots=2, max_length=64, pool=(12, 16), **settings)
    state = insert(params, state, [1, 0], prompts, pages=[[7, 1, 9, 4], [3, 0, 11]], **settings)
    state = run(params, state, 100, **settings)
    assert collect(state, [1, 0]).rows() == wanted


def test_pages_that_do_not_fit_are_refused(small):
    model, params = small("grouped", "mixed")
    config = dataclasses.replace(CONFIG, max_new_tokens=6)
    state = init_state(params, model=model, config=config, num_slots=2, max_length=32, pool=(8, 4))
    wrong = [
        (None, "needs them for every request"),
        ([[0, 1, 2, 3], [4]], "pages for 2 requests"),
        ([[0, 1, 2, 8]], "within 0..7"),
        ([[0, 1]], "need 4 pages, got 2"),
    ]
    for pages, message in wrong:
        with pytest.raises(ValueError, match=message):
            insert(params, state, [0], [[1, 2]], model=model, config=config, pages=pages)
    with pytest.raises(ValueError, match="at least 1"):
        init_state(params, model=model, config=config, num_slots=2, max_length=32, pool=(8, 0))
    with pytest.raises(ValueError, match="no pages"):
        contiguous = init_state(params, model=model, config=config, num_slots=2, max_length=32)
        num_pages_for(params, contiguous, 8, model=model, config=config)


def test_a_linear_state_is_not_continued(small):
    model, params = small("hybrid", "mixed")
    state = init_state(params, model=model, config=CONFIG, num_slots=1, max_length=32)
    with pytest.raises(ValueError, match="linear attention"):
        insert(params, state, [0], [[1, 2, 3]], model=model, config=CONFIG, num_cached=[2])


def test_options_that_the_state_lacks_are_refused(small):
    model, params = small("grouped", "mixed")
    state = init_state(
        params, model=model, config=CONFIG, num_slots=1, max_length=32, stops_shape=(1, 1), features=SamplingFeatures()
    )
    plain = dataclasses.replace(CONFIG, stop_sequences=())
    with pytest.raises(ValueError, match="made without these sampling options: top_k"):
        sampling = SamplingParams(temperature=1.0, top_k=3, seed=1)
        insert(params, state, [0], [[1]], model=model, config=plain, sampling=sampling)
    with pytest.raises(ValueError, match="stops_shape"):
        insert(params, state, [0], [[1]], model=model, config=CONFIG)


@pytest.mark.slow
def test_a_running_row_reports_its_text_so_far(small):
    model, params = small("grouped", "mixed")
    config = dataclasses.replace(CONFIG, max_new_tokens=20, stop_sequences=())
    state = init_state(params, model=model, config=config, num_slots=1, max_length=64)
    state = insert(params, state, [0], [PROMPTS[1]], model=model, config=config)
    state = run(params, state, 2, model=model, config=config)
    part = collect(state)
    whole = speculative_generate(params, [PROMPTS[1]], model=model, config=config).rows()[0]
    assert part.finish_reasons == ("running",) and part.rows()[0] == whole[: part.lengths[0]]
    assert jax.device_get(state.done).tolist() == [False]
