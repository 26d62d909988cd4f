"""The kernels' typical shapes, which are lowered, compiled and timed, with the minimum bytes that each must move."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels import kernel_cases_attention, kernel_cases_fused
from experiments.kernels.kernel_case import Case
from pallas_kernels.block_scaled_matmul import block_scaled_matmul
from pallas_kernels.gated_delta import gated_delta, gated_delta_steps, gated_delta_verify
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.head_top_k import head_top_k
from pallas_kernels.linear_cross_entropy import linear_cross_entropy, linear_total_variation
from pallas_kernels.rms_norm import rms_norm


def cases() -> list[Case]:
    """Returns all cases, op by op."""
    return [
        *_rms_norm(),
        *kernel_cases_attention.cases(),
        *_grouped_matmul(),
        *_head_top_k(),
        *_linear_cross_entropy(),
        *_linear_total_variation(),
        *_gated_delta_verify(),
        *_gated_delta_steps(),
        *_gated_delta(),
        *_block_scaled_matmul(),
        *kernel_cases_fused.cases(),
    ]


def _rms_norm() -> Iterator[Case]:
    for rows, width in ((4, 7168), (4096, 7168)):

        def make(key, rows=rows, width=width):
            x, scale = jax.random.split(key)
            return jax.random.normal(x, (rows, width), jnp.bfloat16), jax.random.normal(scale, (width,), jnp.bfloat16)

        yield Case(
            op="rms_norm",
            name=f"{rows} rows of {width}, bfloat16",
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
    """Returns a case with tokens that choose uniformly among the experts, in the same way in every run."""
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
        # Any bits except those of the largest numbers and of NaN.
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
    # Inputs and outputs. Training also writes a gradient for every weight, and reads the gradient of the output.
    moved = touched * expert + 2 * 2 * tokens * width + 8 * ids.size
    if is_trained:
        moved += experts * expert + 2 * 2 * tokens * width + 4 * ids.size
    return Case(
        op="grouped_matmul",
        name=f"{name}, {tokens} tokens, {'fp8' if is_fp8 else 'bfloat16'}{', gradients' if is_trained else ''}",
        run=run,
        make=make,
        bytes=int(moved),
        operations=6 * ids.size * width * expert_width * (3 if is_trained else 1),
    )


def _head_top_k() -> Iterator[Case]:
    """Yields cases for whole and reduced heads. A few rows are drafts; 16 and 64 rows are verified nodes."""
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
            run=functools.partial(head_top_k, k=k, is_transposed=is_transposed),
            make=make,
            bytes=itemsize * width * (size + rows) + rows * (8 * k + 4),
            operations=2 * rows * width * size,
            peers={"XLA, without the log-sum-exp": peer},
        )


def _linear_cross_entropy() -> Iterator[Case]:
    """Yields cases for losses with the gradients of hidden and head, which need at least three products."""
    rows = 4096
    for width, vocabulary in ((4096, 129280), (4096, 151936), (7168, 129280), (7168, 151936)):
        yield Case(
            op="linear_cross_entropy",
            name=f"{rows} rows of {width}, {vocabulary} words, bfloat16, with gradients",
            run=_of_rows,
            make=functools.partial(_rows_and_head, depths=1, rows=rows, width=width, vocabulary=vocabulary),
            bytes=2 * 2 * (rows * width + width * vocabulary) + 4 * 2 * rows,
            operations=3 * 2 * rows * width * vocabulary,
            plain=functools.partial(_by_chunks, compares_with_trunk=False),
        )


def _linear_total_variation() -> Iterator[Case]:
    """Yields cases for the terms of a trunk and its drafts, with the gradients of hidden and head."""
    rows = 4096
    for drafts, width, vocabulary in ((1, 7168, 129280), (3, 4096, 151936)):
        yield Case(
            op="linear_total_variation",
            name=f"{drafts} drafts, {rows} rows of {width}, {vocabulary} words, bfloat16, with gradients",
            run=_of_drafts,
            make=functools.partial(_rows_and_head, depths=1 + drafts, rows=rows, width=width, vocabulary=vocabulary),
            bytes=2 * 2 * ((1 + drafts) * rows * width + width * vocabulary) + 4 * (2 + 4 * drafts) * rows,
            operations=3 * 2 * (1 + drafts) * rows * width * vocabulary,
            plain=functools.partial(_by_chunks, compares_with_trunk=True),
        )


def _rows_and_head(key, *, depths, rows, width, vocabulary):
    keys = jax.random.split(key, 3)
    hidden = jax.random.normal(keys[0], (depths, rows, width), jnp.bfloat16)
    head = jax.random.normal(keys[1], (width, vocabulary), jnp.bfloat16) / jnp.bfloat16(width**0.5)
    return hidden, head, jax.random.randint(keys[2], (depths, rows), 0, vocabulary)


def _of_rows(hidden, head, targets, *, implementation):
    def total(hidden, head):
        return linear_cross_entropy(hidden[0], head, targets[0], implementation=implementation).sum()

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)


def _of_drafts(hidden, head, targets, *, implementation):
    def total(hidden, head):
        terms = linear_total_variation([hidden], [head], targets, implementation=implementation)
        return terms.cross_entropy.sum() + terms.kl.sum() - terms.overlap.sum()

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)


def _by_chunks(hidden, head, targets, *, compares_with_trunk):
    """Computes the losses as the trainer does without kernels, in a loop over columns."""
    from mtpjax.training.position_losses import chunked_terms

    def total(hidden, head):
        terms = chunked_terms(
            list(hidden[:, None]),
            [head],
            targets[:, None],
            head_of=(0,) * len(hidden),
            vocab_chunk=8192,
            compares="all" if compares_with_trunk else "none",
            implementation="xla",
        )
        return terms.cross_entropy.sum() + terms.kl.sum() - terms.overlap.sum()

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)


# Key heads and value heads of Qwen3-Next-80B-A3B, Qwen3.5-9B and -35B-A3B; of Qwen3.5-27B. Both widths are 128.
DELTA_HEADS = ((16, 32), (16, 48))
DELTA_WIDTH = 128


def _delta_case(op: Callable[..., Any], rows: int, tokens: int, heads: tuple[int, int], states: int, made: int) -> Case:
    """Returns a case that moves `states` states per row, and writes `made` values per value head, token and column."""
    key_heads, value_heads = heads
    per_token = DELTA_WIDTH * (4 * key_heads + 2 * value_heads + 4 * made * value_heads) + 8 * value_heads
    state = value_heads * DELTA_WIDTH**2

    def make(key):
        """Makes keys and queries of length 1 and decays near 1, as in trained models."""
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
        run=op,
        make=make,
        bytes=rows * (tokens * per_token + 4 * states * state),
        operations=7 * rows * tokens * state,  # when computed token by token; chunks need a different number
        carried=5 if op is gated_delta_steps else None,
    )


def _gated_delta_verify() -> Iterator[Case]:
    for rows, tokens in itertools.product((1, 16, 64), (4, 8)):
        yield _delta_case(gated_delta_verify, rows, tokens, DELTA_HEADS[0], states=1, made=2)
    yield _delta_case(gated_delta_verify, 16, 4, DELTA_HEADS[1], states=1, made=2)


def _gated_delta_steps() -> Iterator[Case]:
    for rows in (1, 16, 64):
        yield _delta_case(gated_delta_steps, rows, 1, DELTA_HEADS[0], states=2, made=1)


def _gated_delta() -> Iterator[Case]:
    yield _delta_case(gated_delta, 16, 64, DELTA_HEADS[0], states=2, made=1)  # a prefill pass of decoding
    for rows, tokens, heads in ((1, 8192, DELTA_HEADS[0]), (4, 8192, DELTA_HEADS[0]), (1, 8192, DELTA_HEADS[1])):
        yield _delta_case(gated_delta, rows, tokens, heads, states=2, made=1)


def _block_scaled_matmul() -> Iterator[Case]:
    """Yields DeepSeek-V3's matrices in fp8 and those of an 8B Llama in bfloat16. Rows are batch x verified nodes."""
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
            run=block_scaled_matmul,
            make=make,
            bytes=D * F + D // 128 * F * 4 + 2 * rows * (D + F) if is_fp8 else 2 * (D * F + rows * (D + F)),
            operations=2 * rows * D * F,
            peers={"two rows, one thrown away": _with_a_second_row} if rows == 1 else {},
        )


def _with_a_second_row(x, weights, scales=None):
    """Runs one row as two in XLA, because for one row XLA writes an array of the weight's size (jax 0.10)."""
    return block_scaled_matmul(jnp.concatenate([x, x]), weights, scales, implementation="xla")[:1]
