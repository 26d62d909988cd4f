"""The process's threads and memory on the host CPU. Imports no JAX: both must be set before JAX starts."""

import ctypes
import os
import sys

# XLA's CPU client takes its number of threads from the first of these that holds a number, once, when it starts.
_VARIABLES = ("PJRT_NPROC", "NPROC")
_SMALL_MODEL = 16 << 20  # bytes


def limit_threads(count: int) -> None:
    """Sets the number of XLA's CPU threads. Call it before JAX makes its devices.

    Args:
        count: number of threads; 0 leaves the environment unchanged.
    """
    if count:
        os.environ[_VARIABLES[0]] = str(count)


def num_threads() -> int:
    """Returns the number of CPU threads that XLA uses: the environment's, else one per core of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _threads_of_environment() or cores or 1


def _threads_of_environment() -> int:
    """Returns 0 if the environment does not set the number."""
    values = (os.environ.get(name, "") for name in _VARIABLES)
    return next((int(value) for value in values if value.isdecimal()), 0)


def suitable_threads(checkpoint_bytes: int) -> int:
    """Chooses the number of XLA threads for decoding with a model of this size.

    A small matrix product takes less time than handing it to a second thread.

    Args:
        checkpoint_bytes: size of the checkpoint's files, as `mtpjax.io.checkpoint_format.checkpoint_bytes` adds it up.

    Returns:
        1 below 16 MiB, otherwise 0, which leaves XLA's default; 0 also if the environment sets the number.
    """
    if _threads_of_environment():
        return 0
    return 1 if checkpoint_bytes < _SMALL_MODEL else 0


# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory for later allocations. Call it before JAX starts its threads.

    On a CPU, XLA frees the temporaries of a training step after the step. By default glibc returns such large blocks to
    the system, and the next step takes a page fault for every page again. The price is that the process never shrinks,
    so this suits processes that run one training loop.

    Returns:
        True if the C library supports it; False without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # One heap for all threads; no block outside of it in a mapping of its own; the heap's end is never given back.
    settings = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
    return all([mallopt(name, value) for name, value in settings.items()])
