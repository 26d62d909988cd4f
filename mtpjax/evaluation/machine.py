"""Describes the machine that runs a measurement, and measures how much other programs disturb the measurement.

Only `describe_device` and `product_rate` import JAX.
"""

import contextlib
import math
import os
import pathlib
import platform
import time

_TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01  # seconds per unit of /proc/stat


def describe_machine() -> dict[str, str | int]:
    """Returns the processor's name and the number of cores that this process may use."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    # Only Linux reports which cores a process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": names[0] if names else platform.processor() or platform.machine(), "cores": cores}


def describe_device(count: int = 1) -> str:
    """Describes the `count` devices that JAX uses, such as "NVIDIA H100 80GB HBM3 x 8" or "AMD EPYC 7B13, 2 cores"."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        machine = describe_machine()
        return f"{machine['cpu']}, {machine['cores']} cores"
    return device.device_kind + f" x {count}" * (count > 1)


def product_rate(dtype: str = "float32") -> float:
    """Measures how fast XLA multiplies two large matrices, in FLOP/s, as the fastest of ten products."""
    import jax.numpy as jnp

    size, times = 1024, []
    left, right = jnp.ones((2 * size, size), dtype), jnp.ones((size, size), dtype)
    jnp.matmul(left, right).block_until_ready()
    for _ in range(10):
        begin = time.perf_counter()
        jnp.matmul(left, right).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 4 * size**3 / min(times)


def has_waiting_times() -> bool:
    """Returns whether this system reports how long threads wait for a core, as Linux with schedstat does."""
    return os.path.exists("/proc/self/schedstat")


def busy_seconds() -> float:
    """Returns how long the cores available to this process have been busy since the system started, in core-seconds.

    Time that a hypervisor gives to other machines counts as busy. Returns nan if the system does not report idle time.
    """
    try:
        lines = pathlib.Path("/proc/stat").read_text().splitlines()
        own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return float("nan")
    # Columns: user, nice, system, idle, iowait, irq, softirq, steal. The kernel measures idle time exactly but samples
    # the others, so subtract the idle time from the wall-clock time.
    idle = [sum(map(int, line.split()[4:6])) for line in lines if line.split()[0] in own]
    return len(idle) * time.perf_counter() - sum(idle) * _TICK


class Stopwatch:
    """Measures wall time, CPU time, and the time that this process's threads waited for a core.

    Threads wait while other programs run on the cores, so long waits mean that the measurement was disturbed.
    """

    def __init__(self):
        self.begin = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        """Returns wall, CPU, waiting and busy time in seconds. If the kernel has no schedstat, waiting time is 0."""
        # The second number of Linux's schedstat counts the nanoseconds that a thread was ready but not running.
        waited = 0
        for task in pathlib.Path("/proc/self/task").glob("*/schedstat"):
            # A thread may end after it was listed and before its file is read.
            with contextlib.suppress(OSError):
                waited += int(task.read_text().split()[1])
        return time.perf_counter(), time.process_time(), waited * 1e-9, busy_seconds()

    def read(self) -> dict[str, float]:
        """Returns `seconds`, `cpu_seconds` and `waited_seconds` since the start.

        Threads also wait for other threads of this process, which is not a disturbance. The waiting time is therefore
        capped at the time that other programs ran on these cores.
        """
        seconds, cpu, waited, busy = (now - begin for begin, now in zip(self.begin, self._now(), strict=True))
        # The waiting time of threads that have ended is lost, so the difference may be negative.
        waited = max(waited, 0.0)
        if not math.isnan(busy):
            # Each core's idle time is only known to within one tick.
            others = busy - cpu - len(os.sched_getaffinity(0)) * _TICK
            waited = min(waited, max(others, 0.0))
        return {"seconds": seconds, "cpu_seconds": cpu, "waited_seconds": waited}

    def waited_share(self) -> float:
        """Returns how long threads waited for a core, summed over threads, as a share of the time since the start."""
        elapsed = self.read()
        return elapsed["waited_seconds"] / max(elapsed["seconds"], 1e-9)
