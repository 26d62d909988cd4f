"""Describes the machine of a measurement, and measures how much other programs disturbed it. Imports no JAX."""

import os
import pathlib
import platform
import time

# A measurement counts as undisturbed if its threads waited at most this share of the time for a core.
MAX_WAITING_SHARE = 0.03


def describe_machine() -> dict[str, str | int]:
    """Returns the processor's name and the number of cores that this process may use."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": len(os.sched_getaffinity(0))}


class Stopwatch:
    """Measures wall time, CPU time, and the time that this process's threads waited for a core.

    Threads wait while other programs run on the cores, so a long wait means a disturbed measurement.
    """

    def __init__(self):
        self.begin = self._now()

    def _now(self) -> tuple[float, float, float]:
        """Returns wall, CPU and waiting time in seconds. Where the kernel has no schedstat, waiting time is 0."""
        # The second number of Linux's schedstat counts the nanoseconds that a thread was ready but not running.
        waited = 0
        for task in pathlib.Path("/proc/self/task").glob("*/schedstat"):
            waited += int(task.read_text().split()[1])
        return time.perf_counter(), time.process_time(), waited * 1e-9

    def read(self) -> dict[str, float]:
        """Returns `seconds`, `cpu_seconds` and `waited_seconds` since the start."""
        names = ("seconds", "cpu_seconds", "waited_seconds")
        return {name: now - begin for name, begin, now in zip(names, self.begin, self._now(), strict=True)}
