"""How many threads XLA has on a CPU. It takes their number when JAX makes its devices, and keeps it."""

import ctypes
import os
import sys

_VARIABLES = ("PJRT_NPROC", "NPROC")  # of XLA's client, the first that holds a number
_SMALL = 16 << 20


def limit_threads(count: int) -> None:
    """Leaves XLA so many threads (0: as it is), before JAX makes its devices."""
    if count:
        os.environ[_VARIABLES[0]] = str(count)


def num_threads() -> int:
    """What XLA takes for one device: what the environment says, or all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _asked() or cores or 1


def _asked() -> int:
    """What the environment says; 0: nothing."""
    values = (os.environ.get(name, "") for name in _VARIABLES)
    return next((int(value) for value in values if value.isdecimal()), 0)


def suitable_threads(checkpoint_bytes: int) -> int:
    """Chooses the number of XLA threads for decoding with a model of this size.

    Small matrix products take less time than handing them to a second thread does.

    Args:
      checkpoint_bytes: size of the checkpoint's files, as `mtpjax.io.checkpoint_format.checkpoint_bytes` adds it up.

    Returns:
      1 below 16 MiB, otherwise 0, which leaves XLA's default; 0 also if the environment sets the number.
    """
    if _asked():
        return 0
    return 1 if checkpoint_bytes < _SMALL else 0


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Leaves freed memory with this process, for what comes next. Tells whether the C library can do so: glibc can.

    XLA frees the temporaries of a step on a CPU after each step. glibc gives such large blocks back to the system, and
    the next step touches every page for the first time again. In return the process never shrinks. It is for processes
    that do one thing over and over; call it before JAX starts its threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    settings = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1}  # one heap, nothing outside it, never cut
    return all([mallopt(name, value) for name, value in settings.items()])
