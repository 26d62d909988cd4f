"""The shapes that the kernels are for, with the least that each must move: what is lowered, compiled and timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul, rms_norm


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
    return [*_rms_norm(), *_grouped_matmul()]


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


def _grouped_matmul() -> Iterator[Case]:
    deepseek_v3 = {"name": "DeepSeek-V3", "experts": 256, "chosen": 8, "width": 7168, "expert_width": 2048}
    medium = {"name": "16B-A2.4B", "experts": 64, "chosen": 6, "width": 2048, "expert_width": 1408}
    for tokens in (1, 4, 16, 64):
        yield _experts(**deepseek_v3, tokens=tokens)
        yield _experts(**deepseek_v3, tokens=tokens, is_fp8=True)
    for tokens in (1, 4, 64, 2048):
        yield _experts(**medium, tokens=tokens)
    yield _experts(**medium, tokens=2048, is_fp8=True)
    yield _experts(**medium, tokens=2048, is_trained=True)


def _experts(*, name, tokens, experts, chosen, width, expert_width, is_fp8=False, is_trained=False) -> Case:
    """Tokens that choose uniformly among the experts, always the same."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
    shapes = (experts, width, 2, expert_width), (experts, expert_width, width)
    block = 128

    def make(key):
        keys = jax.random.split(key, 4)
        x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
        weights = jax.random.uniform(keys[1], ids.shape)
        if not is_fp8:
            stacks = [jax.random.normal(*each, jnp.bfloat16) for each in zip(keys[2:], shapes, strict=True)]
            stacks = [stack * stack.shape[1] ** -0.5 for stack in stacks]
            return x, jnp.asarray(ids), weights, *stacks
        # Any bits but those of the largest numbers and of NaN.
        bits = (jax.random.bits(k, shape, jnp.uint8) & 0xBF for k, shape in zip(keys[2:], shapes, strict=True))
        values = (jax.lax.bitcast_convert_type(each, jnp.float8_e4m3fn) for each in bits)
        scales = (jnp.full((each[0], each[1] // block, *each[2:]), each[1] ** -0.5) for each in shapes)
        return x, jnp.asarray(ids), weights, *values, *scales

    def run(x, ids, weights, gate_up, down, gate_up_scales=None, down_scales=None, *, implementation):
        scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales, "block": block}
        form = functools.partial(grouped_matmul, **scales, implementation=implementation)
        if not is_trained:
            return form(x, ids, weights, gate_up, down, inference=True)
        loss = lambda x, weights, gate_up, down: jnp.sum(form(x, ids, weights, gate_up, down).astype(jnp.float32))
        return jax.grad(loss, argnums=(0, 1, 2, 3))(x, weights, gate_up, down)

    touched = len(np.unique(ids))
    expert = 3 * width * expert_width * (1 + 4 / block if is_fp8 else 2)
    # What enters and leaves; training also writes a gradient of each weight, touched or not, and reads that of y.
    moved = touched * expert + 2 * 2 * tokens * width + 8 * ids.size
    if is_trained:
        moved += experts * expert + 2 * 2 * tokens * width + 4 * ids.size
    return Case(
        op="grouped_matmul",
        name=f"{name}, {tokens} tokens, {'fp8' if is_fp8 else 'bfloat16'}{', gradients' if is_trained else ''}",
        sizes={
            "tokens": tokens,
            "chosen": chosen,
            "experts": experts,
            "width": width,
            "expert_width": expert_width,
        },
        run=run,
        make=make,
        bytes=int(moved),
        operations=6 * ids.size * width * expert_width * (3 if is_trained else 1),
    )
