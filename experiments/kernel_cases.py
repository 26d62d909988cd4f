"""The shapes that the kernels are for, with the least that each must move: what is lowered, compiled and timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import head_top_k, rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape. `run(*make(key), implementation=...)` is a call of it."""

    op: str  # its name in `pallas_kernels`
    name: str  # the shape in words
    sizes: Mapping[str, int]  # as the op gives them to `pallas_kernels.dispatch.choose`
    run: Callable[..., Any]
    make: Callable[[jax.Array], tuple]  # random arrays; `jax.eval_shape` of it gives the shapes alone
    bytes: int  # each input that is needed read once, each output written once
    operations: int  # multiplications and additions, two for a product
    peers: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)  # others' forms of `run`

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def cases() -> list[Case]:
    """All of them, op by op."""
    return [*_rms_norm(), *_head_top_k()]


def _rms_norm() -> Iterator[Case]:
    for rows, width in ((4, 7168), (4096, 7168)):

        def make(key, rows=rows, width=width):
            x, scale = jax.random.split(key)
            return jax.random.normal(x, (rows, width), jnp.bfloat16), jax.random.normal(scale, (width,), jnp.bfloat16)

        yield Case(
            op="rms_norm",
            name=f"{rows} rows of {width}, bfloat16",
            sizes={"rows": rows, "width": width},
            run=rms_norm,
            make=make,
            bytes=2 * (2 * rows * width + width),
            operations=4 * rows * width,
        )


def _head_top_k() -> Iterator[Case]:
    """DeepSeek-V3's head, whole and reduced to 32,768 tokens: drafts (few rows), verified nodes (16, 64); others'."""
    wide, reduced, glm, tied = (7168, 129280, False), (7168, 32768, False), (4096, 151552, False), (4096, 131072, True)
    shapes = [(*head, rows, k, jnp.bfloat16) for head in (wide, reduced) for rows in (1, 4, 16) for k in (1, 4)]
    shapes += [(*head, 4, k, jnp.bfloat16) for head in (glm, tied) for k in (1, 4)]
    shapes += [(*wide, 64, 1, jnp.bfloat16), (*tied, 64, 4, jnp.bfloat16), (*reduced, 4, 4, jnp.float32)]
    for width, size, is_transposed, rows, k, dtype in shapes:

        def make(key, width=width, size=size, is_transposed=is_transposed, rows=rows, dtype=dtype):
            hidden, head = jax.random.split(key)
            shape = (size, width) if is_transposed else (width, size)
            return jax.random.normal(hidden, (rows, width), dtype), jax.random.normal(head, shape, dtype)

        def peer(hidden, head, is_transposed=is_transposed, k=k):
            head = head.T if is_transposed else head
            logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32)
            return jnp.argmax(logits, axis=-1) if k == 1 else jax.lax.top_k(logits, k)

        itemsize = jnp.dtype(dtype).itemsize
        yield Case(
            op="head_top_k",
            name=f"best {k} of {rows} rows of {width} x {size}{' as it is embedded' * is_transposed}, {dtype.__name__}",
            sizes={"rows": rows, "width": width, "vocabulary": size, "k": k},
            run=functools.partial(head_top_k, k=k, is_transposed=is_transposed),
            make=make,
            bytes=itemsize * width * (size + rows) + rows * (8 * k + 4),
            operations=2 * rows * width * size,
            peers={"XLA, without the log-sum-exp": peer},
        )
