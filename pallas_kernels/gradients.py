"""Computes gradients of kernels by differentiating plain JAX, and marks results to keep for the backward pass."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT_RESULT = "kept_result"  # the name that `keep_result` gives, for policies of `jax.checkpoint`


def keep_result(result: Any) -> Any:
    """Marks arrays that cost much more time to compute again than memory to keep, such as the output of attention.

    A policy of `jax.checkpoint` can keep them for the backward pass by the name `KEPT_RESULT`. Elsewhere this changes
    nothing.
    """
    return jax.tree.map(lambda array: checkpoint_name(array, KEPT_RESULT), result)


def differentiated_by(plain: Callable[..., Any], num_arrays: int) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function that runs a kernel, so that it has the reverse-mode gradients of `plain`.

    The decorated function takes `num_arrays` arrays, settings, and `interpret`; `plain` takes the same arrays, and the
    settings as keywords.
    """

    def decorate(run):
        names = list(inspect.signature(run).parameters)[num_arrays:]
        differentiable = jax.custom_vjp(run, nondiff_argnums=tuple(range(num_arrays, num_arrays + len(names))))

        def forward(*arguments):
            return differentiable(*arguments), arguments[:num_arrays]

        # XLA fuses the plain form, and only the input arrays are kept from the forward pass.
        def backward(*arguments):
            *settings, _interpret, arrays, gradients = arguments
            settings = dict(zip(names, settings, strict=False))
            _, pull = jax.vjp(functools.partial(plain, **settings), *arrays)
            return pull(gradients)

        differentiable.defvjp(forward, backward)
        return differentiable

    return decorate
