"""The check of the engine finds no difference, and finds one where there is one."""

import dataclasses
import json

import pytest

from experiments.correctness import check_engine
from mtpjax.serving.request import Finish, FinishReason, Request

REQUEST = Request(prompt=(1,), max_new_tokens=3, logprobs=True)
EXPECTED = check_engine.Expected([4, 5, 6], [-1.0, -2.0, -3.0], "length", 1, (1, 0))
FAMILIES = [family.name for family in check_engine.FAMILIES if family.is_quick]


def received(
    tokens=(4, 5, 6), logprobs=(-1.0, -2.0, -3.0), reason: FinishReason = "length", num_steps=1, accepted=(1, 0)
):
    receiver = check_engine.Receiver()
    receiver.tokens, receiver.logprobs = list(tokens), list(logprobs)
    receiver.finish = Finish(reason, 1, num_new_tokens=len(tokens), num_steps=num_steps, accepted=accepted)
    return receiver


def difference(**changes):
    return check_engine.find_difference(REQUEST, received(**changes), EXPECTED, compare_rounds=True)


def test_equal_requests_and_aborted_prefixes_pass():
    assert difference() is None
    assert difference(logprobs=(-1.0, -2.0, -3.00001)) is None
    assert difference(tokens=(4,), logprobs=(-1.0,), reason="abort", num_steps=0) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (4, 5, 7)}, "tokens"),
        ({"tokens": (5,), "logprobs": (-1.0,), "reason": "abort"}, "tokens"),
        ({"tokens": (4, 5), "logprobs": (-1.0, -2.0)}, "2 tokens and 'length', not 3"),
        ({"reason": "stop"}, "'stop', not 3 and 'length'"),
        ({"logprobs": (-1.0, -2.0, -3.001)}, "log-probabilities differ by 0.001"),
        ({"logprobs": (-1.0, -2.0, float("nan"))}, "log-probabilities differ"),
        ({"logprobs": (-1.0,)}, "1 log-probabilities for 3"),
        ({"accepted": (0, 0)}, "passes and accepted drafts"),
    ],
)
def test_each_kind_of_difference_is_found(changes, message):
    assert message in difference(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_request_differs(family, tmp_path):
    output = tmp_path / "check.json"
    assert check_engine.main(["--quick", "--requests", "24", "--family", family, "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())["families"]
    assert row["requests"] == 24 and row["tokens"] > 0 and row["accept_length"] > 1


@pytest.mark.slow
def test_a_wrong_text_ends_with_code_4(monkeypatch):
    run_alone = check_engine.run_alone

    def run_wrongly(*arguments, **options):
        first, *others = run_alone(*arguments, **options)
        return [dataclasses.replace(first, tokens=[60 - token for token in first.tokens]), *others]

    monkeypatch.setattr(check_engine, "run_alone", run_wrongly)
    assert check_engine.main(["--quick", "--requests", "4", "--family", "grouped chain"]) == 4
