"""The generator of hostile cases finds what it looks for, and the library passes some of its cases."""

import os
import pathlib
import random
import subprocess
import sys
import time

import pytest

from experiments.correctness.hostile import __main__ as hostile
from experiments.correctness.hostile import cases as hostile_cases
from experiments.correctness.hostile import cpu_time as hostile_time
from experiments.correctness.hostile import worker as hostile_worker


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return hostile_cases.make_sandbox(tmp_path_factory.mktemp("hostile"))


def outcome(action, sandbox, monkeypatch):
    monkeypatch.setitem(hostile_worker.ACTIONS, "command", action)
    monkeypatch.chdir(sandbox)
    return hostile_worker.run_case({"action": "command", "kind": "command"}, str(sandbox))["problem"]


def fails_deep_inside(case, sandbox):
    raise KeyError("x")


def prints_an_escape_sequence(case, sandbox):
    print("\x1b[2J")


def says_nothing(case, sandbox):
    raise SystemExit(2)


def fails_in_a_library(case, sandbox):
    random.Random(0).randrange(0)


def is_fine(case, sandbox):
    return None


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (fails_deep_inside, "KeyError"),
        (prints_an_escape_sequence, "control characters"),
        (says_nothing, "without a word"),
        (fails_in_a_library, "ValueError from randrange"),
    ],
)
def test_a_wrong_answer_is_found(action, problem, sandbox, monkeypatch):
    assert problem in outcome(action, sandbox, monkeypatch)


def test_a_right_answer_passes(sandbox, monkeypatch):
    assert outcome(is_fine, sandbox, monkeypatch) is None


@pytest.mark.parametrize("kind", hostile_cases.KINDS)
def test_the_cases_of_a_seed_are_always_the_same(kind, sandbox):
    first, second = ([hostile_cases.draw(kind, rng, sandbox) for _ in range(5)] for rng in map(random.Random, (3, 3)))
    assert first == second and first != [first[0]] * 5


def test_a_changed_input_is_found(sandbox):
    before = hostile_worker.fingerprint(sandbox, without=hostile_cases.OUTPUT)
    (sandbox / "out" / "new").write_text("allowed")
    assert hostile_worker.fingerprint(sandbox, without=hostile_cases.OUTPUT) == before
    (sandbox / "text.txt").write_text("changed")
    assert hostile_worker.fingerprint(sandbox, without=hostile_cases.OUTPUT) != before


@pytest.mark.slow
def test_hostile_files_get_one_line(sandbox):
    attacker, rng = hostile.Attacker(sandbox), random.Random(1)
    for number in range(60):
        kind = ("config", "header", "tokenizer", "template", "record")[number % 5]
        case = hostile_cases.draw(kind, rng, sandbox)
        assert attacker.run(case) is None, case["what"]
    attacker.close()


# Uses a second of CPU time on the first core that it may use.
SPEND = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while time.process_time() < 1:
    pass
"""


@pytest.mark.skipif(not pathlib.Path("/proc/stat").exists(), reason="only where /proc tells the time of processes")
@pytest.mark.slow
def test_a_busy_core_does_not_lengthen_the_time():
    begin = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-S", "-c", SPEND]) for _ in range(4)]
    watch = hostile_time.Stopwatch(processes[0].pid)
    seconds = 0.0
    while processes[0].poll() is None:
        seconds = watch.seconds()
        time.sleep(0.02)
    for process in processes:
        process.wait()
    wall = time.perf_counter() - begin
    assert wall > 3.5  # four seconds of work on one core
    assert seconds < 0.75 * wall


def test_a_process_that_sleeps_while_a_core_is_idle_uses_time(monkeypatch):
    idle = iter([{0: 5.0, 1: 9.0}, {0: 35.0, 1: 99.0}])
    clock = iter([0.0, 40.0])
    monkeypatch.setattr(hostile_time, "_idle_seconds", lambda pid: next(idle))
    monkeypatch.setattr(hostile_time.time, "perf_counter", lambda: next(clock))
    assert 30 <= hostile_time.Stopwatch(os.getpid()).seconds() < 40
