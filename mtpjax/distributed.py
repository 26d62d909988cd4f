"""Helpers for multi-process runs, in which one process per host runs the same program on a mesh of all devices.

All processes read the same input, and each keeps its shard. The main process writes files; every process writes its
shards of arrays. Files must be on a file system that all processes share.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtpjax.errors import LostProcess

HEARTBEAT_TIMEOUT = 30  # seconds without a heartbeat after which a process counts as lost


def connect(num_processes: int, process_id: int | None = None, address: str | None = None) -> None:
    """Joins the other processes of a run. Call it before anything else initializes JAX's devices.

    Args:
        address: "host:port" of the first process. Without `process_id` and `address`, JAX gets them from the
            launcher (Slurm, Open MPI, …).

    Raises:
        ValueError: only one of `process_id` and `address` is given, `process_id` is out of range, or `address` is not
            host:port with a port within 1..65535.
    """
    if (process_id is None) != (address is None):
        raise ValueError("node-rank and dist-init-addr must be set together: give both, or neither with a launcher")
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
    # Under Slurm, JAX gives each task the GPU with the task's index on the node. With one task per node, that would be
    # only the first GPU, so let the task use all of them.
    num_tasks, num_nodes = (os.environ.get(name) for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"))
    if num_tasks and num_tasks == num_nodes and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(name, "all")


def mesh_devices(sizes: Mapping[str, int]) -> list[Any]:
    """Returns the devices of a mesh, in an order that keeps each process's devices adjacent.

    Raises:
        ValueError: there are too few devices, or the processes of a multi-process run have more devices than the mesh.
    """
    size, devices = math.prod(sizes.values()), jax.devices()
    # A multi-process run must use all devices, because every process contributes its local ones.
    if size > len(devices) or (is_multiprocess() and size != len(devices)):
        raise ValueError(f"the mesh {dict(sizes)} covers {size} devices, but JAX has {len(devices)}")
    return devices[:size]


def is_multiprocess() -> bool:
    """Returns whether the run has more than one process."""
    return jax.process_count() > 1


def is_main_process() -> bool:
    """Returns whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until all processes have reached the barrier `name`."""
    if is_multiprocess():
        multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
    """Returns whether the flag is set in any process. All processes must call it."""
    return bool(multihost_utils.process_allgather(np.int32(flag)).any()) if is_multiprocess() else flag


def gather_processes(arrays: Any) -> Any:
    """Gathers arrays that are spread over several processes. All of them must call it.

    Returns:
        The tree with whole arrays in every process; unchanged if this process already has all of it.
    """
    # On one process, arrays that are sharded over its devices stay as they are.
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(arrays)):
        return arrays
    # The arrays may come from a CUDA graph; no other collective may start while it runs
    # (`compat.allow_recorded_collectives`).
    return multihost_utils.process_allgather(jax.block_until_ready(arrays), tiled=True)


def gather_values(value: Any) -> list[Any]:
    """Returns every process's value, ordered by process, in all processes. All processes must call it."""
    if not is_multiprocess():
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(content.size)))
    padded = np.pad(content, (0, int(sizes.max()) - content.size))
    rows = np.asarray(multihost_utils.process_allgather(padded)).astype(np.uint8)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def check_same(values: Mapping[str, Any]) -> None:
    """Checks that all processes pass the same values. All processes must call it.

    Raises:
        ValueError: the values differ. Every process raises the error, whose message lists them.
    """
    first, *others = gather_values(dict(values))
    for number, other in enumerate(others, 1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            found = ", ".join(f"{name} ({other.get(name)}; process 0 has {first.get(name)})" for name in names)
            raise ValueError(f"process {number} was started with a different {found}")


def from_main_process(value: Any) -> Any:
    """Returns the main process's value in every process. All processes must call it.

    Args:
        value: a value that JSON supports; only the main process's value is used.
    """
    return gather_values(value if is_main_process() else None)[0]


@contextlib.contextmanager
def raise_together(error: Exception) -> Iterator[None]:
    """Raises an exception in all processes if the block fails in one of them, so that none waits for another.

    All processes must enter the block, and run the same collectives in it.

    Args:
        error: raised in the processes where nothing failed.

    Raises:
        Exception: the exception that the block raised in this process, or else `error`.
    """
    problem = None
    try:
        yield
    except Exception as raised:
        problem = raised
    if any_process(problem is not None):
        raise problem or error


@contextlib.contextmanager
def in_main_process(make: Callable[..., contextlib.AbstractContextManager], *arguments: Any) -> Iterator[Any]:
    """Enters a context only in the main process. All processes must call it.

    Raises:
        Exception: the exception that entering the context raised; the other processes raise a `ValueError`.
    """
    with contextlib.ExitStack() as stack:
        value = None
        with raise_together(ValueError("process 0 failed; see its error message")):
            if is_main_process():
                value = stack.enter_context(make(*arguments))
        yield from_main_process(value)


@contextlib.contextmanager
def raise_on_lost_peer() -> Iterator[None]:
    """Converts JAX's errors about a lost process to `LostProcess`; other errors pass unchanged.

    JAX has no exception class for a lost process, so this function inspects error messages.

    Raises:
        LostProcess: a collective in the block failed because another process has ended or cannot be reached.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # In a multi-process run, any runtime error counts as a lost process, except running out of memory, which is a
        # failure of this process.
        message = str(error).partition("\n")[0]
        if not (is_multiprocess() and is_runtime_error(error)) or "RESOURCE_EXHAUSTED" in message:
            raise
        raise LostProcess(f"another process of this run has ended or cannot be reached: {message}") from error


def is_runtime_error(error: BaseException) -> bool:
    """Returns whether a call on the device failed. Collectives on CPUs run over Gloo, whose errors are ValueErrors."""
    is_gloo = isinstance(error, ValueError) and "Gloo" in str(error).partition("\n")[0]
    return is_gloo or isinstance(error, jax.errors.JaxRuntimeError)


def exit_without_shutdown(code: int) -> NoReturn:
    """Ends this process without JAX's shutdown, which would wait for the lost process and then abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
