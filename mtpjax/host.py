"""The process's threads, memory and sockets on the host. Imports no JAX: the first two are set before JAX starts."""

import contextlib
import os
import socket
import sys

# XLA's CPU client takes its number of threads from the first of these that holds a number, once, when it starts.
_THREAD_VARIABLES = ("PJRT_NPROC", "NPROC")
_SMALL_MODEL_BYTES = 16 << 20  # bytes


def limit_threads(count: int) -> None:
    """Sets the number of XLA's CPU threads. Call it before JAX makes its devices.

    Args:
        count: number of threads; 0 leaves the environment unchanged.
    """
    if count:
        os.environ[_THREAD_VARIABLES[0]] = str(count)


def num_threads() -> int:
    """Returns the number of CPU threads that XLA uses: the environment's, else one per core of this process."""
    # A container may give the process fewer cores than the machine has; macOS does not report it.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _env_num_threads() or cores or 1


def _env_num_threads() -> int:
    """Returns 0 if the environment does not set the number."""
    values = (os.environ.get(name, "") for name in _THREAD_VARIABLES)
    return next((int(value) for value in values if value.isdecimal()), 0)


def choose_num_threads(checkpoint_bytes: int) -> int:
    """Chooses the number of XLA threads for decoding with a model of this size.

    A small matrix product takes less time than handing it to a second thread.

    Args:
        checkpoint_bytes: size of the checkpoint's files, as `mtpjax.io.checkpoint_format.checkpoint_bytes` adds it up.

    Returns:
        1 below 16 MiB, otherwise 0, which leaves XLA's default; 0 also if the environment sets the number.
    """
    if _env_num_threads():
        return 0
    return 1 if checkpoint_bytes < _SMALL_MODEL_BYTES else 0


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open files and connections as far as the system allows.

    A server needs one per connection. Many systems start programs with a soft limit of 1024, for those that cannot
    handle more, and a hard limit of many thousands.
    """
    try:
        import resource  # not on Windows
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems do not allow what they report.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def describe_address_limit() -> str:
    """Returns how much address space this process may have and what to do about it; "" without a limit."""
    try:
        import resource
    except ImportError:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"`ulimit -v` allows {soft >> 20} MiB of address space, which counts reserved memory too: raise it"


# glibc reads these when a process starts: blocks of up to 4 GB come from the heap, the heap shrinks only where 8 GB are
# free at its end, and its pages are huge ones.
_GLIBC_TUNABLES = {"mmap_threshold": 4_000_000_000, "trim_threshold": 8_000_000_000, "hugetlb": 1}


def keep_freed_memory() -> None:
    """Restarts this program with a glibc that keeps freed memory for later allocations. Call it first in a program.

    On a CPU, XLA frees the temporaries of a training step after the step. By default glibc returns such large blocks to
    the system, and the next step causes a page fault for every page. The price is that the process hardly shrinks, so
    this suits programs that run one training loop.

    Returns:
        None, without a restart, in the restarted program, where the user has set GLIBC_TUNABLES, and outside Linux.
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
        **more: further options of TCP.
    """
    # Names of Linux; other systems keep their own times.
    times = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, **more}
    known = [(getattr(socket, name), value) for name, value in times.items() if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *each) for each in known)]
