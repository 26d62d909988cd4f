"""Compiles a decoding call so that CUDA runs it as a single graph.

XLA records parts of a compiled call as CUDA graphs, each started by one launch. By default it does not record loops, so
the host waits for the loop condition after every round. `GRAPH_OPTIONS` records loops too, so the host is not involved
between the first and the last token.

On several GPUs of one machine, the collectives are recorded as well. On several machines XLA's defaults stay in place,
because NCCL then adds a host node (a CPU callback) per collective, which CUDA does not allow inside a graph loop.

ROCm graphs cannot contain loops, so on ROCm the host reads one condition per round. CPUs have no graphs.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from mtpjax import compat
from mtpjax.decoding.graph_trial import try_loop, wait_for_devices
from mtpjax.distributed import gather_values
from mtpjax.errors import printable

# XLA's default list of operations that graphs may contain, plus WHILE. The compiler option replaces the whole list.
_RECORDED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
# By default, XLA does not make a graph with fewer than 5 operations, and a recorded loop counts as one operation.
GRAPH_OPTIONS = {"xla_gpu_enable_command_buffer": _RECORDED, "xla_gpu_graph_min_graph_size": "1"}
MESH_GRAPH_OPTIONS = {**GRAPH_OPTIONS, "xla_gpu_enable_command_buffer": f"{_RECORDED},COLLECTIVES"}

T = TypeVar("T")
_log = logging.getLogger(__name__)


def graph_options(mesh: Mesh) -> dict[str, str] | None:
    """Returns the compiler options for a call on a mesh; an empty mesh means one GPU.

    Returns None, which keeps XLA's defaults, on several nodes or if XLA_FLAGS set the contents of graphs.
    """
    if compat.has_graph_flags():
        return None
    if mesh.empty or mesh.size == 1:
        return GRAPH_OPTIONS
    return MESH_GRAPH_OPTIONS if compat.is_one_node(mesh.devices.flat) else None


class Graphs:
    """Finds out, for each mesh, whether calls can run as graphs. The results are kept until the process ends.

    A call donates its state, so after its graph has failed, the call cannot be repeated without a graph. Graphs are
    therefore tried on states that may be lost: in a small loop before the first call (`options`), and in the engine's
    programs while the engine warms up (`attempt`). A later graph failure raises an ordinary error, unless the caller
    can rebuild the state (`run_or_repeat`).
    """

    def __init__(self):
        self._answers: dict[Mesh, dict[str, str] | None] = {}
        self._lock = threading.Lock()  # programs are compiled in several threads

    def options(self, mesh: Mesh) -> dict[str, str] | None:
        """Returns `graph_options` for calls on a mesh, or None if graphs do not work.

        The first call runs a trial, so all processes of the mesh must make this call at the same point.
        """
        if mesh not in self._answers:
            with self._lock:
                if mesh not in self._answers:
                    options = graph_options(mesh)
                    works = options is not None and self.attempt(mesh, lambda: try_loop(mesh, options))
                    self._answers[mesh] = options if works else None
        return self._answers[mesh]

    def attempt(self, mesh: Mesh, run: Callable[[], Any]) -> bool:
        """Runs calls as graphs. If one fails, calls on this mesh no longer use graphs, and a warning is logged.

        Args:
            mesh: the mesh of the calls. All of its processes must make the attempt.
            run: makes the calls and waits for them. If it fails, the calls' states are lost.

        Returns:
            True if nothing failed in any process.
        """
        problem = ""
        try:
            run()
        except jax.errors.JaxRuntimeError as error:
            problem = printable(error, 300) or type(error).__name__
        # All processes must run the same programs.
        if not mesh.empty and mesh.is_multi_process:
            problem = next(filter(None, gather_values(problem)), "")
        if problem:
            self._reject(mesh, problem)
        return not problem

    def run_or_repeat(self, mesh: Mesh, run: Callable[[], T]) -> T:
        """Runs calls that start from a new state, and repeats them without graphs if a graph fails.

        Args:
            mesh: the mesh of the calls.
            run: makes the state and the calls, and waits for the result.

        Raises:
            JaxRuntimeError: a call fails because memory runs out, or in a run with several processes, or without a
                graph.
        """
        try:
            return run()
        except jax.errors.JaxRuntimeError as error:
            # Several processes would have to agree. Running out of memory says nothing about graphs.
            is_several = not mesh.empty and mesh.is_multi_process
            if self._answers.get(mesh) is None or is_several or "RESOURCE_EXHAUSTED" in str(error):
                raise
            self._reject(mesh, printable(error, 300))
        return run()

    def _reject(self, mesh: Mesh, problem: str) -> None:
        self._answers[mesh] = None
        _log.warning(
            "decoding does not run as one CUDA graph, because a call failed: %s. Results stay the same, but the host "
            "starts every round, which is slower",
            problem,
        )


GRAPHS = Graphs()


class OneGraph:
    """A jitted function that CUDA runs as one graph. On other platforms it acts like `jax.jit(function)`.

    Attributes:
        plain: the function jitted without compiler options, for other platforms and for calls inside another trace.
    """

    def __init__(self, function: Callable[..., Any], **jit_options: Any):
        """Wraps a function; `jit_options` are arguments of `jax.jit`."""
        functools.update_wrapper(self, function)
        self.plain: Any = jax.jit(function, **jit_options)
        self._on_one_gpu: Any = jax.jit(function, compiler_options=GRAPH_OPTIONS, **jit_options)
        self._on_mesh: Any = jax.jit(function, compiler_options=MESH_GRAPH_OPTIONS, **jit_options)
        self._called: set[Any] = set()  # signatures of calls over a mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiled for the platform and the current mesh."""
        if not compat.is_cuda():
            return self.plain(*args, **kwargs)
        # Compiler options are only allowed at the top level.
        leaves, structure = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self.plain(*args, **kwargs)
        jitted = self._jitted()
        if jitted is self._on_mesh:
            self._separate_first_call((structure, *map(_signature, leaves)))
        return jitted(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the program for a call in advance. Several threads may compile at once."""
        self._jitted().lower(*args, **kwargs).compile()

    def with_options(self, options: dict[str, str] | None) -> Any:
        """Returns the jitted function with the given result of `graph_options` as its compiler options."""
        return self.plain if options is None else self._on_one_gpu if options is GRAPH_OPTIONS else self._on_mesh

    def _jitted(self) -> Any:
        """Returns the jitted function for the platform and the current mesh."""
        return self.with_options(GRAPHS.options(jax.sharding.get_mesh()) if compat.is_cuda() else None)

    def _separate_first_call(self, signature: Any) -> None:
        """Waits for the devices before the first call of a new program, which XLA runs without a graph.

        With NCCL_GRAPH_MIXING_SUPPORT=0, NCCL must not start a collective outside graphs while a graph runs.
        """
        if signature not in self._called:
            self._called.add(signature)
            wait_for_devices(jax.sharding.get_mesh())

    @property
    def num_programs(self) -> int:
        """Number of programs that calls have compiled so far."""
        return sum(jitted._cache_size() for jitted in (self.plain, self._on_one_gpu, self._on_mesh))


def one_graph(**jit_options: Any) -> Callable[[Callable[..., Any]], OneGraph]:
    """Returns a decorator that makes a `OneGraph`; `jit_options` are arguments of `jax.jit`."""
    return functools.partial(OneGraph, **jit_options)


def _signature(leaf: Any) -> Any:
    """Returns the shape and dtype of an array, which select the program, or any other argument unchanged."""
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf
