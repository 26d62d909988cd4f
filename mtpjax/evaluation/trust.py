"""Decides whether a measured speed-up can be trusted, for all tables, plots and recommendations.

A measurement that cannot be trusted has a *problem*, a text that starts with its kind:

- "impossible": no machine can reach the number, so one of the times was disturbed;
- "disturbed": other programs used the cores during the measurement;
- "uncertain": the 95 % interval is too wide.

This module does not import JAX.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from mtpjax.evaluation.intervals import Estimate
from mtpjax.evaluation.machine import has_waiting_times

T = TypeVar("T")
KINDS = ("impossible", "disturbed", "uncertain")
# In an undisturbed measurement, threads wait for a core at most this share of the time. On idle machines the share was
# up to 0.035, because the time in which a core sleeps and wakes up between two threads does not count as idle.
MAX_WAITING_SHARE = 0.05
# Maximum ratio of an interval's upper end to its lower end. Above it, the speed is not known within a factor of two.
MAX_INTERVAL_FACTOR = 2.0
# A round costs at least its passes, whose costs are themselves measured to within a few percent.
MAX_SHARE_OF_IDEAL = 1.1
MAX_TIMING_TRIES = 10  # maximum number of tries to get two times with a positive difference


def speed_up_problem(
    ratio: Estimate,
    accept_length: float | None,
    *,
    waited: float,
    ideal: float | None = None,
    is_negative: bool = False,
) -> str | None:
    """Returns why a measured speed-up over plain decoding cannot be trusted.

    Args:
        ratio: the measured speed-up with its interval, whose ends are nan if there is no interval.
        accept_length: tokens per round, including the bonus token. A round costs at least one plain round, so no
            speed-up exceeds it. None: unknown.
        waited: share of the measurement's time that threads waited for a core.
        ideal: the speed-up if a round cost only its passes, whose costs were measured in the same process; None: not
            measured.
        is_negative: a difference of two times was not positive (`seconds_beyond`).

    Returns:
        The reason, which starts with one of `KINDS`; None if the speed-up can be trusted.
    """
    # 1. If no machine can reach the times, one of them was disturbed.
    busy = f"waited {waited:.0%} of the time for a core" if waited > MAX_WAITING_SHARE else ""
    impossible = None
    if is_negative:  # the time of a one-token call is subtracted from every call
        impossible = "a call for all tokens took no longer than a call for one"
    elif accept_length is not None and ratio.value > accept_length:
        impossible = f"above the accept length {accept_length:.2f}"
    elif ideal is not None and accept_length is not None and ideal > accept_length:
        impossible = f"the ideal {ideal:.2f} is above the accept length {accept_length:.2f}"
    elif ideal is not None and ratio.low > MAX_SHARE_OF_IDEAL * ideal:
        impossible = f"above the ideal {ideal:.2f}"
    if impossible is not None:
        return f"impossible: {impossible}" + (f"; {busy}" if busy else "")
    # 2. Other times may be right, but are not trusted if they were disturbed or vary too much.
    if busy:
        return f"disturbed: {busy}"
    if math.isnan(ratio.low):
        return "uncertain: one measurement has no interval"
    if ratio.high > MAX_INTERVAL_FACTOR * ratio.low:
        return f"uncertain: the 95 % interval is {ratio.low:.2f}-{ratio.high:.2f}"
    return None


def waiting_problem(waited: float) -> str | None:
    """Returns why a timing cannot be trusted ("disturbed: …"), or None. `waited` is as in `speed_up_problem`."""
    return speed_up_problem(Estimate(1.0, 1.0, 1.0), None, waited=waited)


def mark(problem: str | None) -> str:
    """Returns the suffix for a number in tables and plots: " ?" if it cannot be trusted, otherwise an empty string."""
    return " ?" if problem else ""


def is_impossible(problem: str | None) -> bool:
    """Returns whether no machine can reach the number, so that plots leave it out."""
    return bool(problem) and str(problem).startswith("impossible")


def can_pass(problem: str | None) -> bool:
    """Returns whether a repeat on an idle machine may fix the problem, which must be "disturbed" or "impossible"."""
    return bool(problem) and not str(problem).startswith("uncertain")


def verdict(problems: Sequence[str | None], waited: float) -> str:
    """Returns the line before a table that says whether its measurements can be trusted, and if not, why.

    For example, "trust in the timings: yes; threads waited up to 0.4% of the time for a core".
    """
    kinds = Counter(problem.partition(":")[0] for problem in problems if problem)
    num_trusted = len(problems) - sum(kinds.values())
    waiting = f"threads waited up to {waited:.1%} of the time for a core" + " (summed over threads)" * (waited > 1)
    if not has_waiting_times():
        waiting = "this system does not report how long threads waited for a core"
    if not kinds:
        return f"trust in the timings: yes; {waiting}"
    reasons = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    answer = f"for {num_trusted} of {len(problems)}" if num_trusted else "no"
    # An idle machine does not narrow an interval that is due to few prompts.
    advice = "measure more prompts or repeats" if set(kinds) == {"uncertain"} else "measure again on an idle machine"
    return f"trust in the timings: {answer} ({reasons}, marked ?); {waiting}: {advice}"


def time_calls(short: Callable[[], Any], long: Callable[[], T]) -> tuple[float, float, T]:
    """Times a short call and a long one, for a caller that subtracts the short time from the long time.

    If the process pauses during the short call, the difference can be negative. Both calls are then timed again, with
    at most `MAX_TIMING_TRIES` tries in total.

    Returns the seconds of the short call and of the long call, and the long call's result.
    """

    # Time both calls in one go, so that a slow phase of the machine affects both.
    def once() -> tuple[float, float, T]:
        begin = time.perf_counter()
        short()
        middle = time.perf_counter()
        result = long()
        return middle - begin, time.perf_counter() - middle, result

    timed = once()
    for _ in range(MAX_TIMING_TRIES - 1):
        if timed[1] > timed[0]:
            break
        timed = once()
    return timed


def seconds_beyond(short: np.ndarray, long: np.ndarray) -> np.ndarray:
    """Subtracts the seconds of a short call from the seconds of a long call that includes the short call's work.

    If a difference is not positive, other programs disturbed the times. The result is then `long`, an upper bound, so
    that no speed is negative. Report such cases to `speed_up_problem` (`is_negative`).
    """
    return np.where(long > short, long - short, long)
