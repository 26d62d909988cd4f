"""Describes the machine of a measurement, and measures how much other programs disturbed it.

Only `describe_device` imports JAX.
"""

import contextlib
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
    # Only Linux tells which cores a process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": names[0] if names else platform.processor() or platform.machine(), "cores": cores}


def describe_device(count: int = 1) -> str:
    """Names what JAX computes on, such as "NVIDIA H100 80GB HBM3 x 8" or "AMD EPYC 7B13, 2 cores".

    Args:
        count: devices that are used.

    Returns:
        The name, for titles.
    """
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        machine = describe_machine()
        return f"{machine['cpu']}, {machine['cores']} cores"
    return device.device_kind + f" x {count}" * (count > 1)


def timing_problem(speed_up: float, accept_length: float, waited: float) -> str | None:
    """Says why a measured speed-up cannot be trusted.

    A round costs at least one plain step, so the speed-up over plain decoding cannot exceed the accept length.

    Args:
        speed_up: the measured speed-up.
        accept_length: tokens per round, bonus token included.
        waited: share of the measurement's time that threads waited for a core.

    Returns:
        The reason, which begins with "impossible" or "disturbed"; None if the speed-up can be trusted.
    """
    if speed_up <= 0:  # the time of a one-token call is subtracted from every call
        return "impossible: a call for all tokens took no longer than a call for one"
    if speed_up > accept_length:
        return f"impossible: above the accept length {accept_length:.2f}"
    if waited > MAX_WAITING_SHARE:
        return f"disturbed: waited {waited:.0%} of the time for a core"
    return None


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
