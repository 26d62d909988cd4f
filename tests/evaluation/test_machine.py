"""How long threads waited for a core, and for whom."""

import math

import pytest

from mtpjax.evaluation import machine
from mtpjax.evaluation.machine import Stopwatch, busy_seconds


@pytest.mark.parametrize(
    ("waited", "busy", "share"),
    [
        (3.0, 9.0, 0.3),  # other programs ran for five of the nine busy seconds
        (8.0, 9.0, 0.498),  # they cannot have delayed this process for longer than they ran
        (3.0, 4.0, 0.0),  # nobody else ran: the threads waited for each other
        (3.0, math.nan, 0.3),  # not known: all waiting counts
        (-1.0, 9.0, 0.0),  # threads that ended took their waiting time with them
    ],
)
def test_waiting_for_other_threads_of_this_process_disturbs_nothing(waited, busy, share, monkeypatch):
    monkeypatch.setattr(machine, "_TICK", 0.01)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    # Wall clock, CPU time of this process, waiting time, busy time of the cores.
    readings = iter([(0.0, 0.0, 0.0, 0.0), (10.0, 4.0, waited, busy)])
    monkeypatch.setattr(Stopwatch, "_now", lambda self: next(readings))
    assert Stopwatch().waited_share() == pytest.approx(share)


def test_busy_time_of_this_systems_cores_grows_at_most_with_the_clock():
    stopwatch, before = Stopwatch(), busy_seconds()
    sum(range(10**6))
    elapsed = stopwatch.read()
    assert elapsed["waited_seconds"] >= 0
    cores = machine.describe_machine()["cores"]
    assert math.isnan(before) or -0.1 <= busy_seconds() - before <= cores * (elapsed["seconds"] + 0.1)
