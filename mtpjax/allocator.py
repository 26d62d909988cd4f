"""What the C library does with freed memory."""

import ctypes
import sys

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
