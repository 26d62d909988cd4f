"""Describes the machine of a measurement, and measures how much other programs disturbed it. Imports no JAX."""

import contextlib
import os
import pathlib
import platform
import time


def describe_machine() -> dict[str, str | int]:
    """Returns the processor's name and the number of cores that this process may use."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "cores": len(os.sched_getaffinity(0))}


def has_waiting_times() -> bool:
    """Returns whether this system says how long threads wait for a core: Linux with schedstat."""
    return os.path.exists("/proc/self/schedstat")


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
            # A thread may end between the listing and the reading.
            with contextlib.suppress(OSError):
                waited += int(task.read_text().split()[1])
        return time.perf_counter(), time.process_time(), waited * 1e-9

    def read(self) -> dict[str, float]:
        """Returns `seconds`, `cpu_seconds` and `waited_seconds` since the start."""
        names = ("seconds", "cpu_seconds", "waited_seconds")
        return {name: now - begin for name, begin, now in zip(names, self.begin, self._now(), strict=True)}

    def waited_share(self) -> float:
        """Returns the share of the time since the start that threads waited for a core, added up over the threads."""
        elapsed = self.read()
        # Threads that have ended take their waiting time with them.
        return max(elapsed["waited_seconds"], 0.0) / max(elapsed["seconds"], 1e-9)
