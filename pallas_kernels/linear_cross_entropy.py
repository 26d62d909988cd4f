"""Computes cross-entropy, and distances of drafts from the trunk, from `hidden @ head` without storing the logits.

Bottleneck: multiplications. One product takes 2 N D V operations, for N rows, width D and vocabulary V. The forward
pass needs one product for cross-entropy, and a second one to compare drafts with the trunk. The backward pass needs one
to recompute the logits and two for the gradients. That makes 4 products, or 5 with the comparison; code that stores all
logits needs 3. For large N, reading the head takes a small fraction of that time on an H100, so block sizes are chosen
for multiplication.

A kernel that accumulated both gradients itself would need a further product. It would also have no room for the sums,
because `[rows, D]` float32 does not fit into registers or shared memory, and splitting D would compute the logits again
for each part. Therefore, the kernel writes the gradient of the logits for some columns at a time, in hidden's dtype,
and XLA multiplies it by head and hidden.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.dispatch import choose

HIGHEST = jax.lax.Precision.HIGHEST  # exact float32 products; no effect on bfloat16
# Blocks of rows that pass over the vocabulary together, so that their hidden states stay in the L2 cache.
L2_GROUP = 16


class LossTerms(NamedTuple):
    """The float32 losses of each row.

    p is the trunk's distribution, a target without gradient; q is a draft's distribution.
    """

    cross_entropy: jax.Array  # [R, N] log-sum-exp of the logits minus the target's logit, in nats
    kl: jax.Array  # [R - 1, N] KL(p||q) in nats
    overlap: jax.Array  # [R - 1, N] sum of min(p, q), which is 1 - TV(p, q)


def linear_cross_entropy(hidden, head, targets, *, vocab_chunk=8192, implementation="auto") -> jax.Array:
    """Computes `logsumexp(hidden @ head) - (hidden @ head)[target]` for each row.

    Products are computed in hidden's dtype and summed in float32. Differentiable in reverse mode with respect to hidden
    and head. Rows whose cotangent is 0 contribute nothing. To compute several depths, concatenate their rows.

    Args:
        hidden: [N, D] bfloat16 or float32.
        head: [D, V] floating; every column is a class, padding included.
        targets: [N] integer, 0..V-1.
        vocab_chunk: The backward pass holds gradients of about this many columns of the logits at a time.

    Returns:
        [N] float32, in nats.

    Raises:
        ValueError: `vocab_chunk` is less than 1.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {hidden.shape} and targets {targets.shape} must be [N, D] and [N]")
    _check([hidden[None]], [head], targets[None], vocab_chunk)
    chosen = choose_implementation([hidden[None]], [head], implementation, compares_with_trunk=False)
    if chosen == "xla" or hidden.size == 0:
        return linear_cross_entropy_reference(hidden, head, targets)
    terms: LossTerms = _losses_triton((hidden[None],), (head,), targets[None], vocab_chunk, chosen == "interpreted")
    return terms.cross_entropy[0]


def linear_total_variation(hidden, heads, targets, *, vocab_chunk=8192, implementation="auto") -> LossTerms:
    """Computes the cross-entropy of the trunk and R - 1 drafts, and each draft's KL and overlap with the trunk.

    Let z be a draft's logits. Because `dq_v/dz_u = q_v (1[u = v] - q_u)` and min has the gradient of the smaller side,
    the gradients are (2602.23881)::

        d overlap / dz_u = sum_v 1[q_v < p_v] q_v (1[u = v] - q_u) = q_u (1[q_u < p_u] - b),  b = sum_v q_v 1[q_v < p_v]
        d KL(p||q) / dz_u = q_u - p_u        d cross_entropy / dz_u = q_u - 1[u = target]

    A first pass computes the log-sum-exps, which p and q need; a second pass computes KL, overlap and b. The backward
    pass needs no further sum. Each pass computes the trunk's logits once, for any number of drafts.

    Args:
        hidden: One array [R_h, N, D] per head, with R entries of N rows in total; the first entry is the trunk's. Row n
            of a draft is compared with row n of the trunk.
        heads: [D, V] each.
        targets: [R, N] integer.

    Returns:
        The terms of each row.

    Raises:
        ValueError: `vocab_chunk` is less than 1.
    """
    _check(hidden, heads, targets, vocab_chunk)
    chosen = choose_implementation(hidden, heads, implementation, compares_with_trunk=True)
    if chosen == "xla" or hidden[0].size == 0:
        return linear_total_variation_reference(hidden, heads, targets)
    return _losses_triton(tuple(hidden), tuple(heads), targets, vocab_chunk, chosen == "interpreted")


def choose_implementation(hidden, heads, implementation: str, *, compares_with_trunk: bool) -> str:
    """Returns the implementation of `linear_total_variation`, or of `linear_cross_entropy`, for these arrays."""
    rows, width = hidden[0].shape[1:]
    shape = {"rows": rows, "width": width, "vocabulary": heads[0].shape[1], "dtype": str(hidden[0].dtype)}
    if compares_with_trunk:
        shape["drafts"] = sum(map(len, hidden)) - 1
    op = "linear_total_variation" if compares_with_trunk else "linear_cross_entropy"
    return choose(op, implementation, ("xla", "triton"), shape)


def linear_cross_entropy_reference(hidden, head, targets):
    """Computes `linear_cross_entropy` in plain JAX, which defines its meaning."""
    return linear_total_variation_reference([hidden[None]], [head], targets[None]).cross_entropy[0]


def linear_total_variation_reference(hidden, heads, targets):
    """Computes `linear_total_variation` in plain JAX, which defines its meaning."""
    logits = [_matmul("RND,DV->RNV", states, head) for states, head in zip(hidden, heads, strict=True)]
    log_probs = jax.nn.log_softmax(jnp.concatenate(logits), axis=-1)
    target_log_prob = jnp.take_along_axis(log_probs, targets[:, :, None], axis=-1)[:, :, 0]
    # The trunk is the target, so no gradient flows into p. `where` gives min the gradient of q only where q < p.
    log_p, log_q = jax.lax.stop_gradient(log_probs[:1]), log_probs[1:]
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return LossTerms(-target_log_prob, (p * (log_p - log_q)).sum(-1), jnp.where(q < p, q, p).sum(-1))


def _check(hidden, heads, targets, vocab_chunk):
    """Raises ValueError for inconsistent shapes, dtypes or chunks."""
    states, shapes = hidden[0], [other.shape for other in hidden]
    # float16 is unsupported, because its range is too small for gradients of logits.
    if states.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"hidden must be bfloat16 or float32, not {states.dtype}")
    if any(other.ndim != 3 or other.shape[1:] != states.shape[1:] or other.dtype != states.dtype for other in hidden):
        raise ValueError(f"hidden must be arrays [R, N, D] with the same N, D and dtype, not {shapes}")
    if len(heads) != len(hidden) or any(head.shape != (states.shape[2], heads[0].shape[-1]) for head in heads):
        raise ValueError(f"heads {[head.shape for head in heads]} do not fit hidden {shapes}")
    if targets.shape != (sum(map(len, hidden)), states.shape[1]):
        raise ValueError(f"targets {targets.shape} do not fit hidden {shapes}")
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk must be at least 1, not {vocab_chunk}")


def _matmul(dimensions, left, right):
    """Multiplies in the dtype of `left` with float32 accumulation."""
    right = right.astype(left.dtype)
    return jnp.einsum(dimensions, left, right, precision=HIGHEST, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _losses_triton(hidden, heads, targets, vocab_chunk, interpret) -> LossTerms:
    return _forward(hidden, heads, targets, vocab_chunk, interpret)[0]


def _forward(hidden, heads, targets, vocab_chunk, interpret):
    del vocab_chunk
    cast = [head.astype(hidden[0].dtype) for head in heads]
    # Pass 1 computes each head's partial log-sum-exps over blocks of columns. Join them relative to the highest logit.
    logsumexps, target_logits, first = [], [], 0
    for states, head in zip(hidden, cast, strict=True):
        own_targets = targets[first : first + len(states)]
        rows = states.reshape(own_targets.size, -1)
        block_highest, total, target_logit = _partial_logsumexp(rows, head, own_targets.reshape(-1), interpret)
        highest = block_highest.max(0)
        total = (total * jnp.exp(block_highest - highest[None])).sum(0)
        logsumexps.append((highest + jnp.log(total)).reshape(own_targets.shape))
        target_logits.append(target_logit.sum(0).reshape(own_targets.shape))
        first += len(states)
    logsumexp = jnp.concatenate(logsumexps)
    # Pass 2 computes KL, overlap and b if there are drafts. The residuals hold a few numbers per row and no logits.
    no_drafts = [jnp.zeros((0, targets.shape[1]))] * 3
    kl, overlap, overlap_bias = _compare(hidden, cast, logsumexp, interpret) if len(targets) > 1 else no_drafts
    terms = LossTerms(logsumexp - jnp.concatenate(target_logits), kl, overlap)
    return terms, (hidden, heads, targets, logsumexp, overlap_bias)


def _backward(vocab_chunk, interpret, residuals, cotangents):
    hidden, heads, targets, logsumexp, overlap_bias = residuals
    dtype, V = hidden[0].dtype, heads[0].shape[1]
    # A chunk holds whole blocks of columns.
    block = _choose_tiles(hidden, V).columns
    chunk = min(block * pl.cdiv(vocab_chunk, block), V)

    def add_columns(start, columns, sums):
        """Adds the contribution of `columns` columns to hidden's gradients, and fills their slice of d_head."""
        # The kernel recomputes the chunk's logits and writes their gradients [R_h, N, columns], from which XLA computes
        # both products. Targets are shifted into the chunk; targets outside it match no column.
        parts = [jax.lax.dynamic_slice_in_dim(head, start, columns, axis=1).astype(dtype) for head in heads]
        gradients = _logit_gradients(hidden, parts, targets - start, logsumexp, overlap_bias, cotangents, interpret)
        new_sums = []
        for states, part, gradient, (d_states, d_head) in zip(hidden, parts, gradients, sums, strict=True):
            d_part = _matmul("RND,RNV->DV", states, gradient).astype(d_head.dtype)
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, d_part, start, axis=1)
            new_sums.append((d_states + _matmul("RNV,DV->RND", gradient, part), d_head))
        return new_sums

    # Loop over whole chunks, then process the rest of the vocabulary. Hidden's gradients are summed in float32.
    sums = [
        (jnp.zeros(states.shape), jnp.zeros(head.shape, head.dtype)) for states, head in zip(hidden, heads, strict=True)
    ]
    sums = jax.lax.fori_loop(0, V // chunk, lambda step, sums: add_columns(step * chunk, chunk, sums), sums)
    if V % chunk:
        sums = add_columns(V - V % chunk, V % chunk, sums)
    return tuple(d_states.astype(dtype) for d_states, _ in sums), tuple(d_head for _, d_head in sums), None


_losses_triton.defvjp(_forward, _backward)


def _partial_logsumexp(states, head, targets, interpret):
    """Computes each block's highest logit, sum of exponentials relative to it, and target logit, `[blocks, N]` each."""
    tiles = _choose_tiles([states[None]], head.shape[1])
    partial = jax.ShapeDtypeStruct((tiles.grid[1], tiles.N), jnp.float32)
    return pl.pallas_call(
        functools.partial(_partial_logsumexp_kernel, tiles=tiles),
        out_shape=[partial] * 3,
        in_specs=[tiles.block_spec(1, "rows", tiles.D), tiles.block_spec(tiles.D, "columns"), tiles.block_spec("rows")],
        out_specs=[tiles.block_spec("block", "rows")] * 3,
        cost_estimate=tiles.cost(states.dtype, num_products=1, num_scalars=4),
        name="linear_cross_entropy",
        **tiles.pallas_call_kwargs(interpret),
    )(states[None], head, targets)


def _partial_logsumexp_kernel(states_ref, head_ref, targets_ref, highest_ref, total_ref, target_logit_ref, *, tiles):
    is_row, columns, is_column = tiles.masks()
    # The block's float32 logits [rows, columns] stay in registers.
    logits = tiles.logits(states_ref, 0, head_ref)
    # Only the block that holds the target's column contributes to the target's logit.
    targets = plt.load(targets_ref, mask=is_row, other=-1)
    target_logit = jnp.sum(jnp.where(columns == targets[:, None], logits, 0.0), axis=1)
    # Sum the exponentials relative to the block's highest logit, so that nothing overflows.
    logits = jnp.where(is_column, logits, -jnp.inf)
    block_highest = jnp.max(logits, axis=1)
    plt.store(highest_ref, block_highest, mask=is_row)
    plt.store(total_ref, jnp.sum(jnp.exp(logits - block_highest[:, None]), axis=1), mask=is_row)
    plt.store(target_logit_ref, target_logit, mask=is_row)


def _compare(hidden, heads, logsumexp, interpret):
    """Computes each draft's KL, overlap and b, `[R - 1, N]` each, by summing within and then over blocks of columns."""
    R, tiles = len(logsumexp), _choose_tiles(hidden, heads[0].shape[1])
    partial = jax.ShapeDtypeStruct((tiles.grid[1], R - 1, tiles.N), jnp.float32)
    sums = pl.pallas_call(
        functools.partial(_compare_kernel, tiles=tiles),
        out_shape=[partial] * 3,
        in_specs=[*tiles.hidden_and_head_specs(hidden), tiles.block_spec(R, "rows")],
        out_specs=[tiles.block_spec("block", R - 1, "rows")] * 3,
        cost_estimate=tiles.cost(hidden[0].dtype, num_products=R, num_scalars=R + 3 * (R - 1)),
        name="linear_total_variation",
        **tiles.pallas_call_kwargs(interpret),
    )(*hidden, *heads, logsumexp)
    return [array.sum(0) for array in sums]


def _compare_kernel(*refs, tiles):
    *operand_refs, logsumexp_ref, kl_ref, overlap_ref, overlap_bias_ref = refs
    is_row, _, is_column = tiles.masks()
    # The trunk's log-probabilities come first and stay in registers; each draft's logits follow and are compared with
    # them.
    log_p = None
    for row, logits in enumerate(tiles.iterate_logits(operand_refs)):
        log_probs = logits - plt.load(logsumexp_ref.at[_traced_index(row)], mask=is_row, other=0.0)[:, None]
        if log_p is None:
            log_p = log_probs
            continue
        p, q = (jnp.where(is_column, jnp.exp(array), 0.0) for array in (log_p, log_probs))
        # Compute each column's terms of KL(p||q), of the overlap min(p, q), and of b, the sum of q where q < p.
        sums = p * (log_p - log_probs), jnp.minimum(p, q), jnp.where(q < p, q, 0.0)
        for ref, array in zip((kl_ref, overlap_ref, overlap_bias_ref), sums, strict=True):
            plt.store(ref.at[_traced_index(row - 1)], jnp.sum(array, axis=1), mask=is_row)


def _logit_gradients(hidden, heads, targets, logsumexp, overlap_bias, cotangents, interpret):
    """Computes the logits' gradients for some columns; returns `[R_h, N, columns]` per head, in hidden's dtype."""
    R, tiles = len(logsumexp), _choose_tiles(hidden, heads[0].shape[1])
    d_cross_entropy, *d_distances = cotangents
    row_arrays, draft_arrays = [targets, logsumexp, d_cross_entropy], [overlap_bias, *d_distances] if R > 1 else []
    num_scalars = len(row_arrays) * R + len(draft_arrays) * (R - 1)
    return pl.pallas_call(
        functools.partial(_logit_gradients_kernel, tiles=tiles, num_heads=len(heads)),
        out_shape=[jax.ShapeDtypeStruct((len(states), tiles.N, tiles.V), states.dtype) for states in hidden],
        in_specs=[
            *tiles.hidden_and_head_specs(hidden),
            *(tiles.block_spec(R, "rows") for _ in row_arrays),
            *(tiles.block_spec(R - 1, "rows") for _ in draft_arrays),
        ],
        out_specs=[tiles.block_spec(len(states), "rows", "columns") for states in hidden],
        cost_estimate=tiles.cost(hidden[0].dtype, num_products=R, num_scalars=num_scalars, stores_products=True),
        name="linear_cross_entropy_gradients",
        **tiles.pallas_call_kwargs(interpret),
    )(*hidden, *heads, *row_arrays, *draft_arrays)


def _logit_gradients_kernel(*refs, tiles, num_heads):
    operand_refs, row_refs, out_refs = refs[: 2 * num_heads], refs[2 * num_heads : -num_heads], refs[-num_heads:]
    targets_ref, logsumexp_ref, d_cross_entropy_ref, *draft_refs = row_refs
    is_row, columns, is_column = tiles.masks()
    # Loads one depth's number for each row, [rows, 1].
    load = lambda ref, row: plt.load(ref.at[_traced_index(row)], mask=is_row, other=0)[:, None]
    outputs = [out.at[_traced_index(index)] for out in out_refs for index in range(out.shape[0])]
    log_p = None
    for row, logits in enumerate(tiles.iterate_logits(operand_refs)):
        log_probs = logits - load(logsumexp_ref, row)
        # The gradient of cross-entropy is q - 1[target], times the row's cotangent.
        q, weight = jnp.exp(log_probs), load(d_cross_entropy_ref, row)
        gradients = weight * (q - (columns == load(targets_ref, row)))
        if log_p is None:
            log_p = log_probs
        else:
            # Drafts add the gradients of KL and overlap (see `linear_total_variation`).
            overlap_bias, d_kl, d_overlap = (load(ref, row - 1) for ref in draft_refs)
            p = jnp.exp(log_p)
            gradients += d_kl * (q - p) + d_overlap * q * ((q < p) - overlap_bias)
        # Round to hidden's dtype, because the two products with the gradients need it.
        plt.store(outputs[row], gradients.astype(outputs[row].dtype), mask=is_row[:, None] & is_column)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Divides `[N, D] @ [D, V]` among programs; each computes a block of logits from `inner` inputs of D at a time."""

    N: int
    D: int
    V: int
    rows: int
    columns: int
    inner: int

    @property
    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.N, self.rows), pl.cdiv(self.V, self.columns)

    def pallas_call_kwargs(self, interpret) -> dict:
        """Returns the `pallas_call` arguments that all kernels here share, with one program per block of logits."""
        # Use the default number of stages, which is 3 on CUDA and 1 on ROCm, whose shared memory holds only one stage.
        num_warps = 8 if self.rows >= 64 else 4
        return {
            "grid": (self.grid[0] * self.grid[1],),
            "compiler_params": plt.CompilerParams(num_warps=num_warps),
            "interpret": interpret,
        }

    def block_of(self, program):
        """Returns a program's block of rows and block of columns.

        Programs that run at the same time share rows and columns, because `L2_GROUP` blocks of rows pass over the
        vocabulary side by side. Hidden states stay in the L2 cache, and a block of the head is loaded once per group.
        """
        # Row blocks vary fastest within a group of `L2_GROUP`, then columns. The last group may have fewer row blocks.
        num_row_blocks, num_column_blocks = self.grid
        first = L2_GROUP * jax.lax.div(program, jnp.int32(L2_GROUP * num_column_blocks))
        within = jax.lax.rem(program, jnp.int32(L2_GROUP * num_column_blocks))
        size = jnp.minimum(num_row_blocks - first, L2_GROUP)
        return first + jax.lax.rem(within, size), jax.lax.div(within, size)

    def block_spec(self, *axes) -> pl.BlockSpec:
        """Returns the spec of an array with axes "rows", "columns", "block" (one entry per block of columns) or sizes.

        A size means the whole axis.
        """
        sizes = {"rows": self.rows, "columns": self.columns, "block": None}

        def index(program):
            row, column = self.block_of(program)
            return tuple({"rows": row, "columns": column, "block": column}.get(axis, 0) for axis in axes)

        return pl.BlockSpec(tuple(sizes.get(axis, axis) for axis in axes), index)

    def hidden_and_head_specs(self, hidden) -> list[pl.BlockSpec]:
        """Returns the specs of hidden `[R_h, N, D]` and heads `[D, V]`."""
        return [
            *(self.block_spec(len(states), "rows", self.D) for states in hidden),
            *[self.block_spec(self.D, "columns")] * len(hidden),
        ]

    def cost(self, dtype, *, num_products, num_scalars, stores_products=False) -> pl.CostEstimate:
        """Estimates the cost of some products, with `num_scalars` 4-byte numbers per row and block of columns."""
        (num_row_blocks, num_column_blocks), itemsize = self.grid, dtype.itemsize
        loaded = num_products * self.D * (num_column_blocks * self.N + num_row_blocks * self.V) * itemsize
        stored = num_products * self.N * self.V * itemsize if stores_products else 0
        return pl.CostEstimate(
            flops=2 * num_products * self.N * self.D * self.V,
            transcendentals=num_products * self.N * self.V,
            bytes_accessed=loaded + stored + 4 * num_scalars * self.N * num_column_blocks,
        )

    def masks(self):
        """Returns a mask of this program's valid rows [rows], its columns [1, columns], and a mask of valid columns."""
        row, column = self.block_of(pl.program_id(0))
        columns = (column * self.columns + jnp.arange(self.columns))[None, :]
        return row * self.rows + jnp.arange(self.rows) < self.N, columns, columns < self.V

    def iterate_logits(self, refs):
        """Yields the logits of each entry of hidden with its head, trunk first; refs as in `hidden_and_head_specs`."""
        half = len(refs) // 2
        for states_ref, head_ref in zip(refs[:half], refs[half:], strict=True):
            for index in range(states_ref.shape[0]):
                yield self.logits(states_ref, index, head_ref)

    def logits(self, states_ref, index, head_ref) -> jax.Array:
        """Computes a block of logits `states_ref[index] @ head_ref`, `[rows, columns]` float32.

        The refs are `[R, rows, D]` and `[D, columns]`.
        """
        index, (is_row, _, is_column) = _traced_index(index), self.masks()
        is_row = is_row[:, None] if self.N % self.rows else None
        is_column = is_column if self.V % self.columns else None

        def add(step, total):
            # Load `inner` inputs of both operands, with zeros beyond the arrays, and accumulate in float32.
            part = pl.ds(step * self.inner, self.inner)
            is_inner = step * self.inner + jnp.arange(self.inner) < self.D
            left, right = (is_inner[None, :], is_inner[:, None]) if self.D % self.inner else (None, None)
            states = _load(states_ref.at[index, :, part], is_row, left)
            head = _load(head_ref.at[part, :], is_column, right)
            return total + jnp.dot(states, head, precision=HIGHEST, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((self.rows, self.columns), jnp.float32)
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(self.D, self.inner)), add, zeros)


def _traced_index(index: int) -> jax.Array:
    """Makes a traced index, because the interpreter rejects constants next to slices; it compiles to a constant."""
    return pl.program_id(0) * 0 + index


def _load(ref, *masks):
    """Loads a ref, with 0 where a mask is false. Pass None if no mask is needed: a mask can prevent wide loads."""
    masks = [mask for mask in masks if mask is not None]
    if not masks:
        return plt.load(ref)
    return plt.load(ref, mask=jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), ref.shape), other=0)


def _choose_tiles(hidden, V) -> _Tiles:
    """Chooses blocks of logits as large as registers can hold.

    A single product has 128 x 256 float32 sums, and draft and trunk together have 128 x 128 each, which is about half
    of the registers of two warp groups. Larger blocks do more operations per byte from the L2 cache. An `inner` of 64
    in 3 stages fits into an SM's shared memory. float32, without tensor cores, is for comparisons with the reference.
    """
    _, N, D = hidden[0].shape
    max_sizes = (128, 256 if sum(map(len, hidden)) == 1 else 128, 64)
    if hidden[0].dtype == jnp.float32:
        max_sizes = (64, 64, 32)
    blocks = (min(limit, max(16, pl.next_power_of_2(size))) for limit, size in zip(max_sizes, (N, V, D), strict=True))
    return _Tiles(N, D, V, *blocks)
