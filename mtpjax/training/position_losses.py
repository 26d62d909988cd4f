"""Computes cross-entropy, and the distance between draft and trunk distributions, at each position.

`plain_terms` is the reference, which reads all logits. `chunked_terms` reads hidden states and heads, processes the
vocabulary in chunks in the forward and backward pass, and never stores `[B, T, V]`. It can also call a kernel.

The softmax runs over every column of the head, including padding ids from `num_tokens` on. Padding ids are never
targets, so training lowers their logits, which helps engines that do not mask them.
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.models.forward import shift_left
from pallas_kernels.linear_cross_entropy import choose_implementation, linear_cross_entropy, linear_total_variation

Comparison = Literal["none", "kl", "all"]  # terms that compare a draft with the trunk: none, only KL, KL and overlap
MAX_CHUNK, MIN_CHUNK = 8192, 1024  # columns
CHUNK_BYTES = 2**30  # float32 logits of one level and chunk
LOGITS_BYTES = 2**30  # float32 logits of all levels that a CPU stores


class PositionTerms(NamedTuple):
    """Loss terms at each position. Positions without a valid target hold arbitrary finite values.

    q is depth k's distribution at position i. p is the trunk's distribution for the same token, which the trunk
    predicts at position i+k; p gets no gradient.

    Attributes:
        cross_entropy: `[1 + depths, B, T]` in nats, against the data; the trunk comes first.
        kl: `[depths, B, T]` KL(p||q) in nats.
        overlap: `[depths, B, T]` sum over the vocabulary of min(p, q), which is 1 - TV(p, q).
    """

    cross_entropy: jax.Array
    kl: jax.Array
    overlap: jax.Array


def choose_vocab_chunk(num_positions: int, num_levels: int, vocab_size: int, *, platform: str) -> int:
    """Chooses how many columns of the vocabulary the losses of a forward pass are computed over at a time.

    A CPU stores all logits unless they exceed `LOGITS_BYTES`, because computing them once is faster. Other platforms
    never store them. Wide chunks read the hidden states and their gradients less often; `CHUNK_BYTES` limits them.

    Args:
        num_positions: positions with a loss on one device, B * T of a microbatch.
        num_levels: the trunk and the draft depths.
        vocab_size: V.
        platform: "cpu", "gpu" or "tpu".

    Returns:
        The columns per chunk; 0: store all logits.
    """
    if platform == "cpu" and 4 * num_positions * num_levels * vocab_size <= LOGITS_BYTES:
        return 0
    columns = CHUNK_BYTES // (4 * num_positions) // 128 * 128
    return min(max(MIN_CHUNK, min(columns, MAX_CHUNK)), vocab_size)


def plain_terms(logits: Sequence[jax.Array], targets: jax.Array) -> PositionTerms:
    """Computes the terms from logits, as the reference for `chunked_terms`.

    Args:
        logits: `[B, T, V]` float32, for the trunk and every depth.
        targets: `[1 + depths, B, T]` int32.

    Returns:
        The terms.
    """
    # Cross-entropy is log-sum-exp minus the target's logit.
    normalisers = [jax.nn.logsumexp(array, axis=-1) for array in logits]
    target_logits = [
        jnp.take_along_axis(row, of[:, :, None], axis=-1)[:, :, 0] for row, of in zip(logits, targets, strict=True)
    ]
    logs = [array - normaliser[:, :, None] for array, normaliser in zip(logits, normalisers, strict=True)]
    # Compare each depth k with the trunk k positions later. The empty arrays give the right shape if there are no
    # depths.
    kl, overlap = [jnp.zeros((0, *targets.shape[1:]))], [jnp.zeros((0, *targets.shape[1:]))]
    for depth, log_q in enumerate(logs[1:], start=1):
        log_p = shift_left(jax.lax.stop_gradient(logs[0]), depth)
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        kl.append((p * (log_p - log_q)).sum(-1)[None])
        overlap.append(jnp.where(q < p, q, p).sum(-1)[None])
    return PositionTerms(
        jnp.stack(normalisers) - jnp.stack(target_logits), jnp.concatenate(kl), jnp.concatenate(overlap)
    )


def chunked_terms(
    hidden: Sequence[jax.Array],
    heads: Sequence[jax.Array],
    targets: jax.Array,
    *,
    head_of: Sequence[int],
    vocab_chunk: int,
    compares: Comparison,
    implementation: str = "auto",
) -> PositionTerms:
    """Computes `plain_terms` for the logits `hidden[n] @ heads[head_of[n]]`, `vocab_chunk` columns at a time.

    The backward pass recomputes the logits. Matmuls run in the dtype of `hidden` and accumulate in float32.

    Args:
        hidden: `[B, T, D]` for the trunk and every depth, as the head reads them.
        heads: the distinct heads `[D, V]`.
        targets: `[1 + depths, B, T]` int32.
        head_of: for the trunk and every depth, the index of its head in `heads`.
        vocab_chunk: columns per chunk, at least 1.
        compares: what to compute besides cross-entropy; the rest is 0. "kl" adds to the pass over the chunks that
            cross-entropy needs; "all" (KL and overlap) needs a second pass over them.
        implementation: "xla" runs the loop in this module; other values choose a kernel
            (`pallas_kernels.linear_cross_entropy`).

    Returns:
        The terms.

    Raises:
        ValueError: `vocab_chunk` is below 1.
    """
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk must be at least 1, not {vocab_chunk}")
    # Without depths there is nothing to compare.
    compares = compares if len(hidden) > 1 else "none"
    chosen = _resolve_implementation(hidden, heads, head_of, implementation, compares != "none")
    if chosen != "xla":
        kernel_options = {"vocab_chunk": vocab_chunk, "implementation": chosen}
        return _kernel_terms(hidden, heads, targets, head_of, compares != "none", **kernel_options)
    chunk = min(vocab_chunk, heads[0].shape[1])
    return _xla_terms(tuple(hidden), tuple(heads), targets, tuple(head_of), chunk, compares)


def _resolve_implementation(hidden, heads, head_of, implementation: str, compares_with_trunk: bool) -> str:
    """Chooses an implementation from the shape that a kernel would get."""
    # A comparison with the trunk is one call over the rows `[1 + depths, B * T]` of all depths. Cross-entropy alone is
    # one call per head, and the head with the most rows decides.
    of_head = [head_of.count(which) for which in range(len(heads))]
    rows = (len(hidden), hidden[0].size // hidden[0].shape[-1])
    if not compares_with_trunk:
        rows = (1, max(of_head) * rows[1])
    states = jax.ShapeDtypeStruct((*rows, hidden[0].shape[-1]), hidden[0].dtype)
    return choose_implementation([states], heads, implementation, compares_with_trunk=compares_with_trunk)


def _kernel_terms(hidden, heads, targets, head_of, compares_with_trunk, **kernel_options) -> PositionTerms:
    """Computes the terms with a kernel, which compares row r of each depth with row r of the trunk."""
    # Group the depths by head, because the kernel reads each head once.
    depths, B, T = targets.shape
    groups = {which: [depth for depth in range(depths) if head_of[depth] == which] for which in head_of}
    order = [depth for group in groups.values() for depth in group]

    # Shift depth k right by k positions, so that its q and p are in the same row. `restore_order` undoes the shift and
    # the grouping.
    def stack(arrays, group):
        return jnp.stack([_shift_right(arrays[depth], depth).reshape(B * T, -1) for depth in group])

    states, heads = [stack(hidden, group) for group in groups.values()], [heads[which] for which in groups]
    moved = [stack(targets, group)[:, :, 0] for group in groups.values()]

    def restore_order(array, first=0):
        rows = [array[order.index(depth) - first].reshape(B, T) for depth in range(first, depths)]
        return jnp.stack([shift_left(row, depth) for depth, row in enumerate(rows, start=first)])

    if compares_with_trunk:
        terms = linear_total_variation(states, heads, jnp.concatenate(moved), **kernel_options)
        return PositionTerms(
            restore_order(terms.cross_entropy), restore_order(terms.kl, 1), restore_order(terms.overlap, 1)
        )
    # Compute only cross-entropy, with one call per head over the rows of all its depths.
    losses = [
        linear_cross_entropy(array.reshape(of.size, -1), head, of.reshape(-1), **kernel_options).reshape(of.shape)
        for array, head, of in zip(states, heads, moved, strict=True)
    ]
    zeros = jnp.zeros((depths - 1, B, T))
    return PositionTerms(restore_order(jnp.concatenate(losses)), zeros, zeros)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _xla_terms(hidden, heads, targets, head_of, chunk, compares) -> PositionTerms:
    """Computes the terms chunk by chunk. The custom gradient recomputes logits instead of storing them."""
    return _xla_terms_forward(hidden, heads, targets, head_of, chunk, compares)[0]


def _xla_terms_forward(hidden, heads, targets, head_of, chunk, compares):
    V = heads[0].shape[1]
    steps = -(-V // chunk)

    # The first pass is an online log-sum-exp. It keeps, per position, the highest logit so far, the sum of exponentials
    # relative to it, and the target's logit. For KL(p||q), depths also sum `exp(z_p) * (z_p - z_q)` relative to the
    # trunk's highest logit, where z are the logits.
    def normalise(step, carry):
        start, columns, is_new = _chunk_columns(step, chunk, V)
        chunks, after = _chunk_logits(hidden, heads, head_of, start, chunk), []
        for depth, ((top, total, target_logits, products), target, raw) in enumerate(
            zip(carry, targets, chunks, strict=True)
        ):
            logits = jnp.where(is_new, raw, -jnp.inf)
            higher = jnp.maximum(top, logits.max(-1))
            total = total * jnp.exp(top - higher) + jnp.exp(logits - higher[:, :, None]).sum(-1)
            is_target = (columns == target[:, :, None]) & is_new
            if depth and compares == "kl":
                of_trunk, before, now = (shift_left(each, depth) for each in (chunks[0], carry[0][0], after[0][0]))
                added = jnp.exp(of_trunk - now[:, :, None]) * (of_trunk - raw)
                products = products * jnp.exp(before - now) + jnp.where(is_new, added, 0).sum(-1)
            after.append((higher, total, target_logits + jnp.where(is_target, logits, 0).sum(-1), products))
        return after

    zeros = jnp.zeros(targets.shape[1:])
    carry = jax.lax.fori_loop(0, steps, normalise, [(zeros - jnp.inf, zeros, zeros, zeros)] * len(hidden))
    normaliser = jnp.stack([top + jnp.log(total) for top, total, _, _ in carry])
    cross_entropy = normaliser - jnp.stack([target_logits for _, _, target_logits, _ in carry])

    # With the known log-sum-exp, the second pass sums KL and min(p, q) over the vocabulary. `below` sums q where q < p,
    # for the backward pass.
    def compare(step, carry):
        start, _, is_new = _chunk_columns(step, chunk, V)
        logs = _chunk_log_probabilities(hidden, heads, head_of, start, chunk, normaliser)
        after = []
        for depth, (log_q, (kl, overlap, below)) in enumerate(zip(logs[1:], carry, strict=True), start=1):
            log_p = shift_left(logs[0], depth)
            p, q = _masked_exp(log_p, is_new), _masked_exp(log_q, is_new)
            is_below = q < p
            kl += (p * (log_p - log_q)).sum(-1)
            overlap += jnp.where(is_below, q, p).sum(-1)
            after.append((kl, overlap, below + jnp.where(is_below, q, 0).sum(-1)))
        return after

    distances = [(zeros, zeros, zeros)] * (len(hidden) - 1)
    if compares == "all":
        distances = jax.lax.fori_loop(0, steps, compare, distances)
    elif compares == "kl":
        for depth in range(1, len(hidden)):
            top, log_sum = (shift_left(each, depth) for each in (carry[0][0], normaliser[0]))
            kl = carry[depth][3] * jnp.exp(top - log_sum) - log_sum + normaliser[depth]
            distances[depth - 1] = (kl, zeros, zeros)
    kl, overlap, below = (
        jnp.concatenate([zeros[None][:0], *(distance[n][None] for distance in distances)]) for n in range(3)
    )
    return PositionTerms(cross_entropy, kl, overlap), (hidden, heads, targets, normaliser, below)


def _xla_terms_backward(head_of, chunk, compares, residuals, cotangents):
    """Computes the gradients of hidden states and heads.

    For the draft's logits z: `dCE/dz = q - onehot`, `dKL/dz = q - p`, and
    `d overlap/dz = q (1[q < p] - sum of q where q < p)` (2602.23881). p gets no gradient.
    """
    hidden, heads, targets, normaliser, below = residuals
    of_cross_entropy, of_kl, of_overlap = (array[:, :, :, None] for array in cotangents)
    V = heads[0].shape[1]

    # For each chunk, recompute the probabilities, form the gradient of the logits, and multiply it by the head (for the
    # hidden states) and by the hidden states (for this chunk's columns of the head).
    def accumulate(step, carry):
        hidden_gradients, head_gradients = carry
        start, columns, is_new = _chunk_columns(step, chunk, V)
        logs = _chunk_log_probabilities(hidden, heads, head_of, start, chunk, normaliser)
        slices = [_slice_columns(gradient, start, chunk) for gradient in head_gradients]
        after = []
        for depth, (log_q, state, gradient) in enumerate(zip(logs, hidden, hidden_gradients, strict=True)):
            q = _masked_exp(log_q, is_new)
            is_target = (columns == targets[depth][:, :, None]) & is_new
            logit_gradient = of_cross_entropy[depth] * (q - is_target)
            if depth and compares != "none":
                p = _masked_exp(shift_left(logs[0], depth), is_new)
                logit_gradient += of_kl[depth - 1] * (q - p)
                if compares == "all":
                    logit_gradient += of_overlap[depth - 1] * q * ((q < p) - below[depth - 1][:, :, None])
            logit_gradient = logit_gradient.astype(state.dtype)
            which = head_of[depth]
            head = _slice_columns(heads[which], start, chunk).astype(state.dtype)
            after.append(gradient + jnp.einsum("BTV,DV->BTD", logit_gradient, head, preferred_element_type=jnp.float32))
            rows = (array.reshape(-1, array.shape[-1]) for array in (state, logit_gradient))
            slices[which] += jnp.einsum("ND,NV->DV", *rows, preferred_element_type=jnp.float32)
        head_gradients = [
            jax.lax.dynamic_update_slice_in_dim(gradient, part, start, axis=1)
            for gradient, part in zip(head_gradients, slices, strict=True)
        ]
        return after, head_gradients

    # Sums are float32; the results get the dtypes of the inputs.
    zeros = [[jnp.zeros(array.shape) for array in arrays] for arrays in (hidden, heads)]
    gradients = jax.lax.fori_loop(0, -(-V // chunk), accumulate, tuple(zeros))
    hidden_gradients, head_gradients = (
        tuple(gradient.astype(array.dtype) for gradient, array in zip(sums, arrays, strict=True))
        for sums, arrays in zip(gradients, (hidden, heads), strict=True)
    )
    return hidden_gradients, head_gradients, None


_xla_terms.defvjp(_xla_terms_forward, _xla_terms_backward)


def _shift_right(rows, count):
    """Moves rows `[B, T, ...]` by `count` positions to the right, with zeros in front."""
    return jnp.pad(rows, ((0, 0), (count, 0), *((0, 0),) * (rows.ndim - 2)))[:, : rows.shape[1]]


def _chunk_columns(step, chunk, V):
    """Returns the start of a chunk, its columns `[1, 1, chunk]`, and which of them are new."""
    # All chunks have the same width, so the last one starts early and repeats columns, which must not count twice.
    start = jnp.minimum(step * chunk, V - chunk)
    columns = (start + jnp.arange(chunk))[None, None]
    return start, columns, columns >= step * chunk


def _slice_columns(head, start, chunk):
    return jax.lax.dynamic_slice_in_dim(head, start, chunk, axis=1)


def _chunk_logits(hidden, heads, head_of, start, chunk):
    """Returns a chunk of the logits for the trunk and every depth, `[B, T, chunk]` float32."""
    return [
        jnp.matmul(
            state, _slice_columns(heads[which], start, chunk).astype(state.dtype), preferred_element_type=jnp.float32
        )
        for state, which in zip(hidden, head_of, strict=True)
    ]


def _chunk_log_probabilities(hidden, heads, head_of, start, chunk, normaliser):
    logits = _chunk_logits(hidden, heads, head_of, start, chunk)
    return [array - of[:, :, None] for array, of in zip(logits, normaliser, strict=True)]


def _masked_exp(logs, is_new):
    return jnp.where(is_new, jnp.exp(logs), 0)
