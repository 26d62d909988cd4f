"""Greedy speculation gives token for token what plain decoding gives, in float32."""

import dataclasses
import functools

import numpy as np
import pytest

from experiments.correctness import check_equality
from mtpjax import DecodeConfig, SamplingParams, speculative_generate
from tests.helpers.small_models import DRAFT_QUALITIES, MIXED_BLOCK_SCALE

LENGTHS = (1, 2, 7, 17, 32)  # of the prompts, in turn: few, since plain.py compiles once for each
PROMPTS = 16


def named(cell):
    is_slow = cell.attention == "sparse" or (cell.topk > 1 and (cell.num_steps > 3 or cell.topk > 4))
    is_slow |= cell.attention == "latent" and cell.num_mtp_modules > 1
    return pytest.param(cell, id=str(cell).replace(" ", ""), marks=[pytest.mark.slow] * is_slow)


CELLS, TREES = (list(map(named, cells)) for cells in (check_equality.COVERING, check_equality.COVERING_TREES))


@pytest.fixture(scope="module")
def reference():
    """Made once each; making it raises where `generate`, `plain.py` and the full pass differ."""
    return functools.cache(
        functools.partial(check_equality.make_reference, lengths=LENGTHS, num_prompts=PROMPTS, num_plain=len(LENGTHS))
    )


QUALITIES = [pytest.param(name, marks=[pytest.mark.slow] * (name in ("random", "right"))) for name in DRAFT_QUALITIES]


@pytest.mark.parametrize("draft_quality", QUALITIES)
@pytest.mark.parametrize(
    "attention",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("grouped", "latent"))) for name in MIXED_BLOCK_SCALE],
)
def test_plain_decoding_is_the_arg_max_of_the_full_pass(attention, draft_quality, reference):
    rows = reference(attention, draft_quality).rows
    assert len(rows) == PROMPTS and {len(row) for row in rows} == {check_equality.NEW_TOKENS}


@pytest.mark.parametrize("draft_quality", QUALITIES)
@pytest.mark.parametrize("cell", CELLS)
def test_greedy_speculation_reproduces_plain_decoding(cell, draft_quality, reference):
    differences, num_calls, stats = check_equality.check_cell(
        cell, draft_quality, reference(cell.attention, draft_quality)
    )
    assert not differences
    if (
        draft_quality == "mixed"
    ):  # without this the equality would prove little: at every level some are accepted, some not
        assert (stats.conditional_rates > 0.1).all() and (stats.conditional_rates < 1).all()
    assert num_calls == (1 + 4 * (cell.num_steps + 1) if draft_quality in ("mixed", "right") else 1)


@pytest.mark.parametrize("cell", TREES)
def test_greedy_trees_reproduce_plain_decoding(cell, reference):
    differences, _, stats = check_equality.check_cell(cell, "mixed", reference(cell.attention, "mixed"))
    assert not differences
    assert stats.accept_length > 1.5


DEPLOYED = [  # num_steps, topk, num_draft_tokens and the thresholds of published deployments
    (2, 1, 3, {"threshold_single": 0.001}),
    (1, 4, 5, {}),
    *(pytest.param(*case, {}, marks=pytest.mark.slow) for case in [(1, 1, 2), (3, 1, 4), (5, 4, 8), (3, 4, None)]),
]


@pytest.mark.parametrize(("num_steps", "topk", "num_draft_tokens", "more"), DEPLOYED)
def test_settings_of_published_deployments_run(num_steps, topk, num_draft_tokens, more, reference, small):
    model, params = small("grouped", "mixed")
    wanted = reference("grouped", "mixed")
    rule = "threshold" if more else "greedy"
    config = DecodeConfig(
        max_new_tokens=12, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens, acceptance=rule, **more
    )
    assert config.num_nodes == (num_draft_tokens or 37)
    result = speculative_generate(params, wanted.prompts[:6], model=model, config=config)
    assert result.is_exact == (not more)
    if not more:
        assert result.rows() == wanted.until(12)[:6]
    warm = SamplingParams(temperature=0.8, seed=list(range(6)))
    rule = "threshold" if more else "auto"
    config = dataclasses.replace(config, acceptance=rule)
    lossy = speculative_generate(params, wanted.prompts[:6], model=model, config=config, sampling=warm)
    lossy.stats.check()
    assert (lossy.lengths == 12).all()


@pytest.mark.parametrize(
    ("attention", "num_steps"),
    [("grouped", 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("latent", 2), ("hybrid", 3)])],
)
def test_one_row_decodes_as_it_does_in_a_batch(attention, num_steps, reference, small):
    model, params = small(attention, "mixed", num_mtp_modules=3)
    wanted = reference(attention, "mixed")
    for number in range(len(LENGTHS)):  # one of each length
        row = wanted.rows[number]
        for stop in ((), *((token,) for token in row[: num_steps + 2])):
            config = DecodeConfig(max_new_tokens=len(row), num_steps=num_steps, stop_token_ids=stop)
            found = speculative_generate(params, [wanted.prompts[number]], model=model, config=config)
            assert found.rows() == [wanted.until(len(row), stop)[number]]
            assert np.all(found.tokens >= 0)
