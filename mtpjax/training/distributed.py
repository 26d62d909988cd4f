"""A run in several processes, one per host: the first writes, all compute the same batches and take their rows.

They read one run folder, which all of them must see.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtpjax.errors import LostProcess

SILENCE = 30  # seconds after which a process that is not heard of counts as lost


def connect(num_processes: int, process_id: int | None = None, address: str | None = None) -> None:
    """Joins the other processes of a run, before anything else asks JAX for devices.

    `address` is "host:port" of the first. Without it and `process_id`, the launcher is asked (Slurm, Open MPI, …).
    Raises `ValueError` for one of the two alone, or a number outside 0..num_processes-1.
    """
    if (process_id is None) != (address is None):
        raise ValueError("node-rank and dist-init-addr go together: give both, or neither under a launcher")
    if process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"node-rank {process_id} is outside 0..{num_processes - 1}")
    jax.distributed.initialize(
        address, num_processes, process_id, heartbeat_timeout_seconds=SILENCE, shutdown_timeout_seconds=SILENCE
    )


def are_several() -> bool:
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes the run folder."""
    return jax.process_index() == 0


def wait(name: str) -> None:
    """Until all processes are here."""
    if are_several():
        multihost_utils.sync_global_devices(name)


def any_of(flag: bool) -> bool:
    """Whether it is so in any process."""
    return bool(multihost_utils.process_allgather(np.int32(flag)).any()) if are_several() else flag


def fetch(tree: Any) -> Any:
    """Arrays that lie over several processes as whole ones in each; others as they are."""
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)


@contextlib.contextmanager
def told_of_losses() -> Iterator[None]:
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
        said = str(error).partition("\n")[0]
        is_lost = "Gloo" in said if isinstance(error, ValueError) else "RESOURCE_EXHAUSTED" not in said
        if not (is_lost and are_several()):
            raise
        raise LostProcess(f"another process of this run has ended or is out of reach: {said}") from error


def leave(code: int) -> NoReturn:
    """Ends this process without a word to the others: after a loss JAX would wait for the lost one, then abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
