"""A session: rows that enter a running state at any time get the tokens that they get alone."""

import dataclasses

import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, speculative_generate
from mtpjax.decoding.state import StateShape
from mtpjax.inference.requests import make_new_rows
from tests.helpers.running import Running

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
            ("latent", "greedy chain"),
            ("latent", "greedy tree"),
            ("latent", "sampled tree"),
            ("sparse", "greedy chain"),
            ("sparse", "greedy tree"),
            ("sparse", "sampled tree"),
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


def serve(model, params, shape, seed):
    """Decodes all rows in `SLOTS` slots, in an order and at times that `seed` gives; returns each row's result."""
    random = np.random.default_rng(seed)
    running = Running(params, model=model, config=settings_of(0, shape)[0], num_slots=SLOTS, pool=POOL)
    free_pages, pages_of = list(range(POOL[0])), {}
    waiting, holds, found = random.permutation(ROWS).tolist(), {}, {}
    while waiting or holds:
        # Requests come at random: none, one or two at a time, into random free slots.
        free = [slot for slot in range(SLOTS) if slot not in holds]
        for slot in random.permutation(free)[: random.integers(0, len(free) + 1)].tolist():
            if waiting:
                row = holds[slot] = waiting.pop()
                config, sampling = settings_of(row, shape)
                random.shuffle(free_pages)
                needed = running.decoder.num_pages_of(len(PROMPTS[row]) + LIMITS[row])
                pages_of[slot], free_pages = free_pages[:needed], free_pages[needed:]
                running.enter(slot, PROMPTS[row], pages_of[slot], sampling=sampling, config=config)
        # A chain may change its depth from call to call, under rules whose text does not depend on it.
        changes_depth = running.decoder.spec.is_adaptive and "sampled" not in shape
        running.go_on(int(random.integers(0, 4)), int(random.integers(0, running.depth + 1)) if changes_depth else None)
        # Collect what has ended and free its slot.
        done = np.asarray(running.state.done)
        for slot in [slot for slot in holds if done[slot]]:
            found[holds.pop(slot)] = running.collect([slot])
            free_pages += pages_of.pop(slot)
    return [found[row] for row in range(ROWS)]


@pytest.mark.parametrize(("attention", "shape"), CASES)
def test_rows_that_enter_at_random_times_get_the_tokens_they_get_alone(attention, shape, small):
    model, params = small(attention, "mixed")
    alone = []
    for row in range(ROWS):
        config, sampling = settings_of(row, shape)
        alone.append(speculative_generate(params, [PROMPTS[row]], model=model, config=config, sampling=sampling))
    for row, result in enumerate(serve(model, params, shape, 1)):
        result.stats.check()
        assert result.rows() == alone[row].rows(), row
        assert result.finish_reasons == alone[row].finish_reasons
        if shape != "greedy chain":  # the depth of rounds depends on other rows, the text does not
            assert (result.stats.accepted == alone[row].stats.accepted).all()
    # The drafts are good at times: otherwise equal texts would say little about the drafter's state.
    accepted, proposed = (
        sum(getattr(result.stats, name).sum() for result in alone) for name in ("accepted", "proposed")
    )
    assert 0 < accepted < proposed


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["grouped", "latent"])
def test_interpreted_kernels_read_and_write_pages(attention, small):
    model, params = small(attention, "mixed", num_mtp_modules=2)
    config = dataclasses.replace(CONFIG, max_new_tokens=9, prefill_chunk=32, stop_sequences=())
    prompts = [PROMPTS[3] * 2, PROMPTS[1]]  # a prefill by flash attention, and rounds of few tokens
    wanted = speculative_generate(params, prompts, model=model, config=config).rows()
    config = dataclasses.replace(config, implementation="interpreted")
    running = Running(params, model=model, config=config, pool=(12, 16))
    running.enter(1, prompts[0], [7, 1, 9, 4, 6])
    running.enter(0, prompts[1], [3, 0, 11, 2])
    running.go_on()
    assert running.collect([1, 0]).rows() == wanted


def test_options_that_the_state_lacks_are_refused(small):
    model, _ = small("grouped", "mixed")
    settings = {"model": model, "limit": 32, "capacity": 64, "shape": StateShape(1, 64, (1, 1))}
    plain, sampling = dataclasses.replace(CONFIG, stop_sequences=()), SamplingParams(temperature=1.0, top_k=3, seed=1)
    with pytest.raises(ValueError, match="made without these sampling options: top_k"):
        make_new_rows([np.ones(1, np.int32)], config=plain, sampling=sampling, **settings)
    with pytest.raises(ValueError, match="2 stop sequences of up to 2 tokens do not fit: the limits are 1 and 1"):
        make_new_rows([np.ones(1, np.int32)], config=CONFIG, sampling=SamplingParams(), **settings)
