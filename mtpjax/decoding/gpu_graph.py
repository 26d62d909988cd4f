"""Compiles a decoding call so that CUDA runs all of it as one graph.

XLA records a compiled call as CUDA graphs, which start all of their kernels with one launch. By default a loop is not
recorded: the host waits for the condition after every round. `GRAPH_OPTIONS` records loops too, so the host takes no
part between the first and the last token.

ROCm has no graphs with loops, so the host reads one condition per round there. A CPU has no graphs.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from mtpjax import compat

# XLA's default list of what a graph may hold, and WHILE. A compiler option replaces the whole list.
_RECORDED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"
# XLA makes no graph of fewer than 5 operations, and a recorded loop counts as one.
GRAPH_OPTIONS = {"xla_gpu_enable_command_buffer": _RECORDED, "xla_gpu_graph_min_graph_size": "1"}
MESH_GRAPH_OPTIONS = {**GRAPH_OPTIONS, "xla_gpu_enable_command_buffer": f"{_RECORDED},COLLECTIVES"}

_log = logging.getLogger(__name__)


class OneGraph:
    """A jitted function that CUDA runs as one graph. On other platforms it is `jax.jit` of the function.

    Attributes:
        plain: the function jitted without compiler options, for other platforms and for calls inside another trace.
    """

    def __init__(self, function: Callable[..., Any], **jit_options: Any):
        """Wraps a function; `jit_options` are arguments of `jax.jit`."""
        functools.update_wrapper(self, function)
        self.plain: Any = jax.jit(function, **jit_options)
        self._on_one_gpu: Any = jax.jit(function, compiler_options=GRAPH_OPTIONS, **jit_options)
        self._on_mesh: Any = jax.jit(function, compiler_options=MESH_GRAPH_OPTIONS, **jit_options)
        self._is_rejected = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiled for the platform; the mesh that is set decides about collectives."""
        # Compiler options are allowed at the top level only.
        if not compat.is_cuda() or self._is_rejected or _is_traced((args, kwargs)):
            return self.plain(*args, **kwargs)
        try:
            return self._with_options()(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            # Options may be renamed in another version of XLA. Decoding works without them, only slower.
            if "option" not in str(error):
                raise
            _log.warning("decoding does not run as one CUDA graph, because XLA rejects an option: %s", error)
            self._is_rejected = True
            return self.plain(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the program of a call, so that the call only runs it. Several threads may compile at once."""
        jitted = self._with_options() if compat.is_cuda() and not self._is_rejected else self.plain
        jitted.lower(*args, **kwargs).compile()

    def _with_options(self) -> Any:
        """Returns the function with the options for the mesh that is set."""
        mesh = jax.sharding.get_abstract_mesh()
        return self._on_one_gpu if mesh.empty or mesh.size == 1 else self._on_mesh

    @property
    def num_programs(self) -> int:
        """Programs that calls have compiled so far."""
        return sum(jitted._cache_size() for jitted in (self.plain, self._on_one_gpu, self._on_mesh))


def _is_traced(arguments: Any) -> bool:
    """Returns whether the call is part of another trace."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))


def one_graph(**jit_options: Any) -> Callable[[Callable[..., Any]], OneGraph]:
    """Returns a decorator that makes a `OneGraph`.

    Args:
        **jit_options: arguments of `jax.jit`, such as `static_argnames`.

    Returns:
        The decorator.
    """
    return functools.partial(OneGraph, **jit_options)
