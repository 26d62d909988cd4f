"""The shapes that the kernels are for, with the least that each must move: what is lowered, compiled and timed."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import block_scaled_matmul, rms_norm


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
    return [*_rms_norm(), *_block_scaled_matmul()]


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


def _block_scaled_matmul() -> Iterator[Case]:
    """DeepSeek-V3's matrices in fp8, then those of an 8 B Llama in bfloat16; n is batch times verified nodes."""
    fp8 = ((7168, 2112), (1536, 24576), (16384, 7168), (7168, 2 * 18432), (18432, 7168))
    plain = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    for D, F, rows, is_fp8 in (
        *((*shape, rows, True) for shape in fp8 for rows in (1, 4, 16)),
        *((*shape, rows, False) for shape in plain for rows in (1, 4)),
    ):

        def make(key, D=D, F=F, rows=rows, is_fp8=is_fp8):
            keys = jax.random.split(key, 3)
            x = jax.random.normal(keys[0], (rows, D), jnp.bfloat16)
            weights = jax.random.normal(keys[1], (D, F), jnp.bfloat16)
            if not is_fp8:
                return x, weights
            return x, weights.astype(jnp.float8_e4m3fn), jax.random.uniform(keys[2], (D // 128, F))

        yield Case(
            op="block_scaled_matmul",
            name=f"{rows} rows, {D} x {F}, {'fp8' if is_fp8 else 'bfloat16'}",
            sizes={"rows": rows, "inputs": D, "outputs": F, "weight_bits": 8 if is_fp8 else 16},
            run=block_scaled_matmul,
            make=make,
            bytes=D * F + D // 128 * F * 4 + 2 * rows * (D + F) if is_fp8 else 2 * (D * F + rows * (D + F)),
            operations=2 * rows * D * F,
            peers={"two rows, one thrown away": _with_a_second_row} if rows == 1 else {},
        )


def _with_a_second_row(x, weights, scales=None):
    """One row through XLA, without the product of a weight's size that XLA makes of one row (jax 0.10)."""
    return block_scaled_matmul(jnp.concatenate([x, x]), weights, scales, implementation="xla")[:1]
