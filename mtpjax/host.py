"""Configures the process's threads, memory and sockets. Imports no JAX, because it must run before JAX starts."""

import contextlib
import os
import socket
import sys

# At startup, XLA's CPU client reads its number of threads from the first of these variables that is a number.
_THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")
_SMALL_MODEL_BYTES = 16 << 20


def limit_threads(count: int) -> None:
    """Sets the number of XLA's CPU threads. Call it before JAX creates its devices.

    Args:
        count: number of threads; 0 leaves the environment unchanged.
    """
    if count:
        os.environ[_THREAD_VARIABLES[0]] = str(count)


def num_threads() -> int:
    """Returns the number of XLA's CPU threads: the number set in the environment, or one per usable core."""
    # A container may give the process fewer cores than the machine has; macOS does not report this.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _env_num_threads() or cores or 1


def _env_num_threads() -> int:
    """Returns the number of threads set in the environment; 0 if it is not set."""
    values = (os.environ.get(name, "") for name in _THREAD_VARIABLES)
    return next((int(value) for value in values if value.isdecimal()), 0)


def choose_num_threads(checkpoint_bytes: int) -> int:
    """Chooses the number of XLA threads for decoding with a model of this size.

    A small matrix product takes less time than starting it on a second thread.

    Args:
        checkpoint_bytes: size of the checkpoint's files (`mtpjax.io.checkpoint_format.checkpoint_bytes`).

    Returns:
        1 for less than 16 MiB; 0 (no change) for more, or if the environment sets the number.
    """
    if _env_num_threads():
        return 0
    return 1 if checkpoint_bytes < _SMALL_MODEL_BYTES else 0


def raise_descriptor_limit() -> None:
    """Raises this process's limit on open files and connections to the maximum that the system allows.

    A server needs a descriptor per connection. Many systems have a soft limit of 1024 and a much higher hard limit.
    """
    try:
        import resource  # not on Windows
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems reject the hard limit that they report.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def describe_address_limit() -> str:
    """Describes the limit on this process's address space and how to raise it; "" if it is unlimited."""
    try:
        import resource
    except ImportError:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"`ulimit -v` allows {soft >> 20} MiB of address space, which counts reserved memory too: raise it"


# glibc reads these settings when a process starts. They make blocks of up to 4 GB come from the heap, shrink the heap
# only if 8 GB are free at its end, and enable huge pages.
_GLIBC_TUNABLES = {"mmap_threshold": 4_000_000_000, "trim_threshold": 8_000_000_000, "hugetlb": 1}


def keep_freed_memory() -> None:
    """Restarts this program so that glibc keeps freed memory for later allocations. Call it first in a program.

    On a CPU, XLA frees the temporaries of a training step after the step. By default glibc returns such large blocks to
    the system, and the next step causes a page fault for every page. With these settings the process hardly ever
    shrinks, so use it only for programs that run one training loop. It does nothing after the restart, if
    GLIBC_TUNABLES is set, or on systems other than Linux.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{name}={value}" for name, value in _GLIBC_TUNABLES.items())
    # The new program replaces this one under the same process id; buffered output would be lost.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keepalive_options(**more: int) -> list[tuple[int, int, int]]:
    """Returns socket options that end a connection to a lost machine within half a minute.

    Args:
        **more: further TCP options by name.
    """
    # These are the Linux names. Other systems keep their default times.
    times = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, **more}
    known = [(getattr(socket, name), value) for name, value in times.items() if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *each) for each in known)]
