"""What a measured speed-up must satisfy to be trusted, and what is said of those that do not."""

import math
import time

import numpy as np
import pytest

from mtpjax.evaluation import trust
from mtpjax.evaluation.intervals import Estimate
from mtpjax.evaluation.trust import can_pass, is_impossible, seconds_beyond, speed_up_problem, time_calls, verdict

NARROW = Estimate(1.9, 1.8, 2.0)


@pytest.mark.parametrize(
    ("ratio", "changes", "problem"),
    [
        (NARROW, {}, None),
        (NARROW, {"accept_length": None}, None),
        (NARROW, {"accept_length": 1.8}, "impossible: above the accept length 1.80"),
        (
            NARROW,
            {"accept_length": 1.8, "waited": 0.54},
            "impossible: above the accept length 1.80; waited 54% of the time for a core",
        ),
        (NARROW, {"is_negative": True}, "impossible: a call for all tokens took no longer than a call for one"),
        (NARROW, {"ideal": 2.2}, "impossible: the ideal 2.20 is above the accept length 2.10"),
        (NARROW, {"ideal": 1.7}, None),  # up to a tenth above the ideal, whose costs are measured too
        (NARROW, {"ideal": 1.5}, "impossible: above the ideal 1.50"),
        (NARROW, {"waited": 0.12}, "disturbed: waited 12% of the time for a core"),
        (Estimate(1.9, 0.9, 2.0), {}, "uncertain: the 95 % interval is 0.90-2.00"),
        (Estimate(1.9, math.nan, math.nan), {}, "uncertain: one measurement has no interval"),
    ],
)
def test_a_speed_up_is_trusted_or_has_a_reason(ratio, changes, problem):
    arguments = {"accept_length": 2.1, "waited": 0.0} | changes
    found = speed_up_problem(ratio, arguments.pop("accept_length"), **arguments)
    assert found == problem
    kind = (problem or "").partition(":")[0]
    assert is_impossible(found) == (kind == "impossible")
    assert can_pass(found) == (kind in ("impossible", "disturbed"))


def test_the_verdict_counts_kinds_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(trust, "has_waiting_times", lambda: True)
    assert verdict([None, None], 0.004) == (
        "trust in the timings: yes; threads waited up to 0.4% of the time for a core"
    )
    assert verdict(["disturbed: x", "impossible: y", None, "disturbed: z"], 0.54) == (
        "trust in the timings: for 1 of 4 (1 impossible, 2 disturbed, marked ?); threads waited up to 54.0% of the "
        "time for a core: measure again on an idle machine"
    )
    assert verdict(["uncertain: x"], 0.0) == (
        "trust in the timings: no (1 uncertain, marked ?); threads waited up to 0.0% of the time for a core: measure "
        "more prompts or repeats"
    )
    monkeypatch.setattr(trust, "has_waiting_times", lambda: False)
    assert verdict([None], 0.0) == (
        "trust in the timings: yes; this system does not report how long threads waited for a core"
    )


def test_no_difference_of_times_is_negative():
    beyond = seconds_beyond(np.array([1.0, 2.0, 1.0]), np.array([3.0, 1.5, 1.0]))
    assert beyond.tolist() == [2.0, 1.5, 1.0]


def test_a_pause_in_the_short_call_is_timed_again():
    pauses = iter([0.05, 0.05, 0.0])
    short, long, result = time_calls(lambda: time.sleep(next(pauses)), lambda: time.sleep(0.01) or "text")
    assert short < 0.01 <= long and result == "text" and next(pauses, None) is None
    calls = []
    short, long, _ = time_calls(lambda: time.sleep(2e-3), lambda: calls.append(1))
    assert long < short and len(calls) == trust.MAX_TIMING_TRIES
