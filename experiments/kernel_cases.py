"""The shapes that the kernels are for, with the least that each must move: what is lowered, compiled and timed."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import gated_delta, gated_delta_steps, gated_delta_verify, rms_norm


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
    return [*_rms_norm(), *_gated_delta_verify(), *_gated_delta_steps(), *_gated_delta()]


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


# Key heads, value heads: Qwen3-Next-80B-A3B, Qwen3.5-9B and -35B-A3B; Qwen3.5-27B. Both widths are 128 everywhere.
DELTA_HEADS = ((16, 32), (16, 48))
DELTA_WIDTH = 128


def _delta_case(op: Callable[..., Any], rows: int, tokens: int, heads: tuple[int, int], states: int, made: int) -> Case:
    """A call that must read or write so many states of a row and `made` values per value head, token and column."""
    key_heads, value_heads = heads
    per_token = DELTA_WIDTH * (4 * key_heads + 2 * value_heads + 4 * made * value_heads) + 8 * value_heads
    state = value_heads * DELTA_WIDTH**2

    def make(key):
        """Keys and queries of length 1, decays near 1, as trained models have them."""
        keys = jax.random.split(key, 6)
        q, k = (jax.random.normal(key, (rows, tokens, key_heads, DELTA_WIDTH)) for key in keys[:2])
        q, k = ((x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16) for x in (q, k))
        v = jax.random.normal(keys[2], (rows, tokens, value_heads, DELTA_WIDTH), jnp.bfloat16)
        log_decay = -0.1 * jax.random.uniform(keys[3], (rows, tokens, value_heads))
        beta = jax.random.uniform(keys[4], (rows, tokens, value_heads))
        first = jax.random.normal(keys[5], (rows, value_heads, DELTA_WIDTH, DELTA_WIDTH))
        return q * DELTA_WIDTH**-0.5, k, v, log_decay, beta, first

    return Case(
        op=op.__name__,
        name=f"{rows} rows of {tokens} tokens, {key_heads} key heads, {value_heads} value heads",
        sizes={"rows": rows, "tokens": tokens, "heads": value_heads, "state": DELTA_WIDTH**2},
        run=op,
        make=make,
        bytes=rows * (tokens * per_token + 4 * states * state),
        operations=7 * rows * tokens * state,  # token by token; by chunks there are others
    )


def _gated_delta_verify() -> Iterator[Case]:
    for rows, tokens in itertools.product((1, 16, 64), (4, 8)):
        yield _delta_case(gated_delta_verify, rows, tokens, DELTA_HEADS[0], states=1, made=2)
    yield _delta_case(gated_delta_verify, 16, 4, DELTA_HEADS[1], states=1, made=2)


def _gated_delta_steps() -> Iterator[Case]:
    for rows in (1, 16, 64):
        yield _delta_case(gated_delta_steps, rows, 1, DELTA_HEADS[0], states=2, made=1)


def _gated_delta() -> Iterator[Case]:
    for rows, tokens, heads in ((1, 8192, DELTA_HEADS[0]), (4, 8192, DELTA_HEADS[0]), (1, 8192, DELTA_HEADS[1])):
        yield _delta_case(gated_delta, rows, tokens, heads, states=2, made=1)
    yield _delta_case(gated_delta, 16, 64, DELTA_HEADS[0], states=2, made=1)  # a prefill pass of decoding
