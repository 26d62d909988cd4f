"""Training in several processes, one per host.

All processes compute the same batches and keep their own rows of them. Only the first one writes the run folder, which
must be on a file system that all of them can read.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtpjax.errors import LostProcess

HEARTBEAT_TIMEOUT = 30  # seconds without a heartbeat after which a process counts as lost


def connect(num_processes: int, process_id: int | None = None, address: str | None = None) -> None:
    """Joins the other processes of a run. Must run before anything else initialises JAX's devices.

    Args:
        num_processes: number of processes.
        process_id: number of this process, from 0.
        address: "host:port" of the first process. Without `process_id` and `address`, JAX asks the launcher (Slurm,
            Open MPI, …).

    Raises:
        ValueError: only one of `process_id` and `address` is given, `process_id` is out of range, or `address` is not
            host:port with a port within 1..65535.
    """
    if (process_id is None) != (address is None):
        raise ValueError("node-rank and dist-init-addr must be set together: give both, or neither under a launcher")
    if process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"node-rank {process_id} is outside 0..{num_processes - 1}")
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
            raise ValueError(f"dist-init-addr must be HOST:PORT with a port within 1..65535, got {address!r}")
    jax.distributed.initialize(
        address,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        shutdown_timeout_seconds=HEARTBEAT_TIMEOUT,
    )


def is_multiprocess() -> bool:
    """Returns whether the run has more than one process."""
    return jax.process_count() > 1


def is_main_process() -> bool:
    """Returns whether this process writes the run folder."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes have reached the barrier `name`."""
    if is_multiprocess():
        multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process. All processes must call it."""
    return bool(multihost_utils.process_allgather(np.int32(flag)).any()) if is_multiprocess() else flag


@contextlib.contextmanager
def raise_on_lost_peer() -> Iterator[None]:
    """Turns JAX's errors about a process that has ended into `LostProcess`; other errors pass unchanged.

    JAX has no exception class of its own for a lost process, so this is the one place that reads messages.

    Raises:
        LostProcess: a collective of the block failed because another process has ended or cannot be reached.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # Collectives on CPUs run over Gloo, whose errors JAX raises as ValueError. Any other runtime error of a
        # multi-process run counts as a lost process, except running out of memory, which is this process's own failure.
        message = str(error).partition("\n")[0]
        is_lost = "Gloo" in message if isinstance(error, ValueError) else "RESOURCE_EXHAUSTED" not in message
        if not (is_lost and is_multiprocess()):
            raise
        raise LostProcess(f"another process of this run has ended or cannot be reached: {message}") from error


def exit_without_shutdown(code: int) -> NoReturn:
    """Ends this process at once, without JAX's shutdown: that would wait for the lost process and then abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
