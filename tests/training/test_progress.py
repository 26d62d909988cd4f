"""When a run ends: by updates, by seconds, and by seconds only with enough updates."""

import math

import pytest

from mtpjax import TrainConfig
from mtpjax.training import progress
from mtpjax.training.progress import ProgressClock


@pytest.mark.parametrize(
    ("settings", "seconds_per_update", "num_updates"),
    [
        ({"steps": 20}, 9.0, 20),
        ({"steps": 1000, "seconds": 90.0}, 9.0, 10),
        # A slow machine makes its updates, however long they take; a fast one trains for the whole time.
        ({"steps": 1000, "seconds": 90.0, "min_steps": 50}, 9.0, 50),
        ({"steps": 1000, "seconds": 90.0, "min_steps": 50}, 0.5, 180),
        ({"steps": 100, "seconds": 90.0, "min_steps": 50}, 0.5, 100),
        ({"steps": 100, "seconds": math.inf, "min_steps": 50}, 9.0, 100),
    ],
)
def test_a_run_ends_after_its_updates_or_seconds(settings, seconds_per_update, num_updates, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    clock = ProgressClock(TrainConfig(**settings))
    passed = []
    while clock.progress < 1:
        passed.append(clock.progress)
        now += seconds_per_update
        clock.tick()
    assert clock.step == num_updates
    assert passed == sorted(passed) and passed[0] == 0 and passed[-1] >= 1 - 2 / num_updates
