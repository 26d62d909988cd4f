"""Measures the time of a process independently of the load of the machine."""

import os
import pathlib
import time

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Stopwatch:
    """Measures the time that a process and its children need, not counting the time that they wait for a core.

    This is the smaller of two times: the wall-clock time, and the CPU time plus the time that at least one of the
    allowed cores was idle. If a process hangs while it sleeps, a core is idle and the time grows; if other programs
    keep the process from running, no core is idle. Without `/proc`, the result is the wall-clock time.

    Args:
        pid: the process.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._wall = time.perf_counter()
        self._seconds: dict[int, float] = {}  # of every process seen, so that the sum does not shrink when one ends
        self._cpu = self._cpu_seconds()
        self._idle = _idle_seconds(pid)

    def seconds(self) -> float:
        """Returns the seconds since the start."""
        wall = time.perf_counter() - self._wall
        cpu, idle = self._cpu_seconds(), _idle_seconds(self._pid)
        if cpu is None or self._cpu is None or not idle:
            return wall
        waited = min((idle[core] - self._idle.get(core, idle[core]) for core in idle), default=wall)
        return min(wall, cpu - self._cpu + waited)

    def _cpu_seconds(self) -> float | None:
        """Returns the CPU time of the process and its descendants; None if it cannot be read."""
        waiting = [self._pid]
        try:
            while waiting:
                pid = waiting.pop()
                # Fields 14 and 15 are the CPU time; the name in field 2 may contain spaces.
                fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self._seconds[pid] = (int(fields[11]) + int(fields[12])) / TICKS
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    waiting.extend(map(int, (task / "children").read_text().split()))
        except OSError:
            # A process that ended between two reads is missed once. Without /proc, nothing can be read.
            pass
        return sum(self._seconds.values()) if self._seconds else None


def _idle_seconds(pid: int) -> dict[int, float]:
    """Returns the idle time of each core that the process may use; empty if it cannot be read."""
    try:
        cores = os.sched_getaffinity(pid)
        lines = pathlib.Path("/proc/stat").read_text().splitlines()
    except (OSError, AttributeError):
        return {}
    fields = {name[3:]: rest.split() for name, _, rest in (line.partition(" ") for line in lines)}
    # Columns 4 and 5 are the idle time and the idle time during disk waits.
    return {core: (int(fields[str(core)][3]) + int(fields[str(core)][4])) / TICKS for core in cores}
