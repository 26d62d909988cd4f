"""Cross-entropy and draft-to-trunk distances of `hidden @ head`, without storing the logits.

Limit: multiplications. Let one product be 2 N D V operations, for N rows, width D and vocabulary V. The forward pass
takes one product for cross-entropy, and a second one to compare drafts with the trunk. The backward pass takes one to
recompute the logits and two for the gradients. So 4 products, where storing all logits needs 3, or 5 with the
comparison. For large N the bytes of the head take a small fraction of that time on an H100, so block sizes serve the
multiplication.

A kernel that accumulated both gradients itself would need a further product, and has no room for the sums: `[rows, D]`
float32 does not fit registers or shared memory, and splitting D computes the logits again for each part. So the kernel
writes the gradient of the logits for some columns at a time, in hidden's dtype, and XLA multiplies it with head and
hidden.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import choose

HIGHEST = jax.lax.Precision.HIGHEST  # exact float32 products; no effect on bfloat16
TOGETHER = 16  # blocks of rows that pass over the vocabulary together, so that their hidden states stay in L2


class LinearTerms(NamedTuple):
    """Losses per row, float32.

    p is the trunk's distribution, a target without gradient; q is a draft's distribution.
    """

    cross_entropy: jax.Array  # [R, N] log-sum-exp of the logits less the target's logit, in nats
    kl: jax.Array  # [R - 1, N] KL(p||q) in nats
    overlap: jax.Array  # [R - 1, N] sum of min(p, q), which is 1 - TV(p, q)


def linear_cross_entropy(hidden, head, targets, *, vocab_chunk=8192, implementation="auto") -> jax.Array:
    """Computes `logsumexp(hidden @ head) - (hidden @ head)[target]` of each row.

    Products are taken in hidden's dtype and summed in float32. Differentiable in reverse mode with respect to hidden
    and head. Rows whose cotangent is 0 contribute nothing. To compute several depths, concatenate their rows.

    Args:
        hidden: [N, D] bfloat16 or float32.
        head: [D, V] floating; every column counts.
        targets: [N] integer, 0..V-1.
        vocab_chunk: The backward pass holds gradients of about this many columns of the logits at a time.
        implementation: "xla" (the reference, which stores all logits), "triton" (the kernels, on CUDA and ROCm),
            "interpreted" (the kernels in Pallas's interpreter, on any machine) or "auto"; see
            `pallas_kernels.dispatch`.

    Returns:
        [N] float32, in nats.

    Raises:
        ValueError: The implementation is unknown, or shapes, dtypes or `vocab_chunk` do not fit.
    """
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {hidden.shape} and targets {targets.shape} must be [N, D] and [N]")
    _check([hidden[None]], [head], targets[None], vocab_chunk)
    chosen = choose_for([hidden[None]], [head], implementation, compares=False)
    if chosen == "xla" or hidden.size == 0:
        return linear_cross_entropy_reference(hidden, head, targets)
    terms: LinearTerms = _terms((hidden[None],), (head,), targets[None], vocab_chunk, chosen == "interpreted")
    return terms.cross_entropy[0]


def linear_total_variation(hidden, heads, targets, *, vocab_chunk=8192, implementation="auto") -> LinearTerms:
    """Computes cross-entropy of the trunk and of R - 1 drafts, and KL and overlap of each draft with the trunk.

    With z a draft's logits, as `dq_v/dz_u = q_v (1[u = v] - q_u)` and as min has the gradient of the smaller side
    (2602.23881)::

        d overlap / dz_u = sum_v 1[q_v < p_v] q_v (1[u = v] - q_u) = q_u (1[q_u < p_u] - b),  b = sum_v q_v 1[q_v < p_v]
        d KL(p||q) / dz_u = q_u - p_u        d cross_entropy / dz_u = q_u - 1[u = target]

    A first pass computes the log-sum-exps, which p and q need; a second pass computes KL, overlap and b. The backward
    pass needs no further sum. Each pass computes the trunk's logits once, for any number of drafts.

    Args:
        hidden: For each head an array [R_h, N, D]; R arrays of N rows in total, the first the trunk's. Row n of a draft
            is compared with row n of the trunk.
        heads: [D, V] each.
        targets: [R, N] integer.
        vocab_chunk: As in `linear_cross_entropy`.
        implementation: As in `linear_cross_entropy`.

    Returns:
        The terms of each row.

    Raises:
        ValueError: The implementation is unknown, or shapes, dtypes or `vocab_chunk` do not fit.
    """
    _check(hidden, heads, targets, vocab_chunk)
    chosen = choose_for(hidden, heads, implementation, compares=True)
    if chosen == "xla" or hidden[0].size == 0:
        return linear_total_variation_reference(hidden, heads, targets)
    return _terms(tuple(hidden), tuple(heads), targets, vocab_chunk, chosen == "interpreted")


def choose_for(hidden, heads, implementation: str, *, compares: bool) -> str:
    """Returns the implementation for these arrays.

    Args:
        hidden: As in `linear_total_variation`.
        heads: As in `linear_total_variation`.
        implementation: The requested implementation.
        compares: Chooses for `linear_total_variation`, which compares drafts with the trunk, not
            `linear_cross_entropy`.

    Returns:
        "xla", "triton" or "interpreted".
    """
    rows, width = hidden[0].shape[1:]
    shape = {"rows": rows, "width": width, "vocabulary": heads[0].shape[1], "dtype": str(hidden[0].dtype)}
    if compares:
        shape["drafts"] = sum(map(len, hidden)) - 1
    op = "linear_total_variation" if compares else "linear_cross_entropy"
    return choose(op, implementation, ("xla", "triton"), shape)


def linear_cross_entropy_reference(hidden, head, targets):
    """Computes `linear_cross_entropy` in plain JAX, which defines its meaning."""
    return linear_total_variation_reference([hidden[None]], [head], targets[None]).cross_entropy[0]


def linear_total_variation_reference(hidden, heads, targets):
    """Computes `linear_total_variation` in plain JAX, which defines its meaning."""
    logits = [_product("RND,DV->RNV", states, head) for states, head in zip(hidden, heads, strict=True)]
    logs = jax.nn.log_softmax(jnp.concatenate(logits), axis=-1)
    picked = jnp.take_along_axis(logs, targets[:, :, None], axis=-1)[:, :, 0]
    # The trunk is the target: no gradient flows into p. `where` gives min the gradient of q only where q < p.
    log_p, log_q = jax.lax.stop_gradient(logs[:1]), logs[1:]
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return LinearTerms(-picked, (p * (log_p - log_q)).sum(-1), jnp.where(q < p, q, p).sum(-1))


def _check(hidden, heads, targets, vocab_chunk):
    """Raises ValueError for shapes, dtypes and chunks that do not fit."""
    states, shapes = hidden[0], [other.shape for other in hidden]
    # float16 is unsupported: its range is too small for gradients of logits.
    if states.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"hidden must be bfloat16 or float32, not {states.dtype}")
    if any(other.ndim != 3 or other.shape[1:] != states.shape[1:] or other.dtype != states.dtype for other in hidden):
        raise ValueError(f"hidden must be arrays [R, N, D] of one N, one D and one dtype, not {shapes}")
    if len(heads) != len(hidden) or any(head.shape != (states.shape[2], heads[0].shape[-1]) for head in heads):
        raise ValueError(f"heads {[head.shape for head in heads]} do not fit hidden {shapes}")
    if targets.shape != (sum(map(len, hidden)), states.shape[1]):
        raise ValueError(f"targets {targets.shape} do not fit hidden {shapes}")
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk must be at least 1, not {vocab_chunk}")


def _product(dimensions, left, right):
    """Multiplies in the dtype of `left` with float32 accumulation."""
    right = right.astype(left.dtype)
    return jnp.einsum(dimensions, left, right, precision=HIGHEST, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _terms(hidden, heads, targets, vocab_chunk, interpret) -> LinearTerms:
    return _forward(hidden, heads, targets, vocab_chunk, interpret)[0]


def _forward(hidden, heads, targets, vocab_chunk, interpret):
    del vocab_chunk
    cast = [head.astype(hidden[0].dtype) for head in heads]
    # Pass 1, per head: partial log-sum-exps over blocks of columns, joined here relative to the highest logit.
    normaliser, picked, first = [], [], 0
    for states, head in zip(hidden, cast, strict=True):
        of = targets[first : first + len(states)]
        top, total, at_target = _normalise(states.reshape(of.size, -1), head, of.reshape(-1), interpret)
        highest = top.max(0)
        total = (total * jnp.exp(top - highest[None])).sum(0)
        normaliser.append((highest + jnp.log(total)).reshape(of.shape))
        picked.append(at_target.sum(0).reshape(of.shape))
        first += len(states)
    normaliser = jnp.concatenate(normaliser)
    # Pass 2, only with drafts: KL, overlap and b. The residuals hold a few numbers per row and no logits.
    none = [jnp.zeros((0, targets.shape[1]))] * 3
    kl, overlap, below = _compare(hidden, cast, normaliser, interpret) if len(targets) > 1 else none
    terms = LinearTerms(normaliser - jnp.concatenate(picked), kl, overlap)
    return terms, (hidden, heads, targets, normaliser, below)


def _backward(vocab_chunk, interpret, residuals, cotangents):
    hidden, heads, targets, normaliser, below = residuals
    dtype, V = hidden[0].dtype, heads[0].shape[1]
    # Whole blocks of columns per chunk.
    block = _tiles(hidden, V).columns
    chunk = min(block * pl.cdiv(vocab_chunk, block), V)

    def add(start, columns, sums):
        """Adds the contribution of `columns` of the vocabulary: to hidden's gradients, and as a slice of the heads'."""
        # The kernel recomputes the chunk's logits and writes their gradients [R_h, N, columns]; XLA takes both products
        # over them. Targets are shifted into the chunk; those outside it match no column.
        parts = [jax.lax.dynamic_slice_in_dim(head, start, columns, axis=1).astype(dtype) for head in heads]
        slopes = _slopes(hidden, parts, targets - start, normaliser, below, cotangents, interpret)
        after = []
        for states, part, slope, (of_states, of_head) in zip(hidden, parts, slopes, sums, strict=True):
            of_part = _product("RND,RNV->DV", states, slope).astype(of_head.dtype)
            of_head = jax.lax.dynamic_update_slice_in_dim(of_head, of_part, start, axis=1)
            after.append((of_states + _product("RNV,DV->RND", slope, part), of_head))
        return after

    # Loop over whole chunks, then the rest of the vocabulary. Hidden's gradients are summed in float32.
    sums = [
        (jnp.zeros(states.shape), jnp.zeros(head.shape, head.dtype)) for states, head in zip(hidden, heads, strict=True)
    ]
    sums = jax.lax.fori_loop(0, V // chunk, lambda step, sums: add(step * chunk, chunk, sums), sums)
    if V % chunk:
        sums = add(V - V % chunk, V % chunk, sums)
    return tuple(of_states.astype(dtype) for of_states, _ in sums), tuple(of_head for _, of_head in sums), None


_terms.defvjp(_forward, _backward)


def _normalise(states, head, targets, interpret):
    """Computes per block of columns and row, `[blocks, N]` each: highest logit, sum relative to it, target's logit."""
    tiles = _tiles([states[None]], head.shape[1])
    partial = jax.ShapeDtypeStruct((tiles.grid[1], tiles.N), jnp.float32)
    return pl.pallas_call(
        functools.partial(_normalise_kernel, tiles=tiles),
        out_shape=[partial] * 3,
        in_specs=[tiles.spec(1, "rows", tiles.D), tiles.spec(tiles.D, "columns"), tiles.spec("rows")],
        out_specs=[tiles.spec("block", "rows")] * 3,
        cost_estimate=tiles.cost(states.dtype, products=1, numbers=4),
        name="linear_cross_entropy",
        **tiles.how(interpret),
    )(states[None], head, targets)


def _normalise_kernel(states_ref, head_ref, targets_ref, top_ref, total_ref, picked_ref, *, tiles):
    is_row, columns, is_column = tiles.masks()
    # The block's logits [rows, columns] stay in registers, float32.
    logits = tiles.logits(states_ref, 0, head_ref)
    # The target's logit: only the block that holds its column contributes.
    targets = plt.load(targets_ref, mask=is_row, other=-1)
    picked = jnp.sum(jnp.where(columns == targets[:, None], logits, 0.0), axis=1)
    # Highest logit of the block and the sum of exponentials relative to it, so that nothing overflows.
    logits = jnp.where(is_column, logits, -jnp.inf)
    top = jnp.max(logits, axis=1)
    plt.store(top_ref, top, mask=is_row)
    plt.store(total_ref, jnp.sum(jnp.exp(logits - top[:, None]), axis=1), mask=is_row)
    plt.store(picked_ref, picked, mask=is_row)


def _compare(hidden, heads, normaliser, interpret):
    """Computes KL, overlap and b of each draft, `[R - 1, N]` each: sums over a block of columns, then over blocks."""
    R, tiles = len(normaliser), _tiles(hidden, heads[0].shape[1])
    partial = jax.ShapeDtypeStruct((tiles.grid[1], R - 1, tiles.N), jnp.float32)
    sums = pl.pallas_call(
        functools.partial(_compare_kernel, tiles=tiles),
        out_shape=[partial] * 3,
        in_specs=[*tiles.specs_of(hidden), tiles.spec(R, "rows")],
        out_specs=[tiles.spec("block", R - 1, "rows")] * 3,
        cost_estimate=tiles.cost(hidden[0].dtype, products=R, numbers=R + 3 * (R - 1)),
        name="linear_total_variation",
        **tiles.how(interpret),
    )(*hidden, *heads, normaliser)
    return [array.sum(0) for array in sums]


def _compare_kernel(*refs, tiles):
    *products, normaliser_ref, kl_ref, overlap_ref, below_ref = refs
    is_row, _, is_column = tiles.masks()
    # The trunk's log-probabilities come first and stay in registers; each draft's logits follow and are compared with
    # them.
    log_p = None
    for row, logits in enumerate(tiles.each_logits(products)):
        logs = logits - plt.load(normaliser_ref.at[_traced(row)], mask=is_row, other=0.0)[:, None]
        if log_p is None:
            log_p = logs
            continue
        p, q = (jnp.where(is_column, jnp.exp(array), 0.0) for array in (log_p, logs))
        # Per column: the terms of KL(p||q), of the overlap min(p, q), and of b = sum of q where q < p.
        sums = p * (log_p - logs), jnp.minimum(p, q), jnp.where(q < p, q, 0.0)
        for ref, array in zip((kl_ref, overlap_ref, below_ref), sums, strict=True):
            plt.store(ref.at[_traced(row - 1)], jnp.sum(array, axis=1), mask=is_row)


def _slopes(hidden, heads, targets, normaliser, below, cotangents, interpret):
    """Computes the gradients of the logits of some columns: per head `[R_h, N, columns]`, in hidden's dtype."""
    R, tiles = len(normaliser), _tiles(hidden, heads[0].shape[1])
    of_cross_entropy, *of_distances = cotangents
    of_all, of_drafts = [targets, normaliser, of_cross_entropy], [below, *of_distances] if R > 1 else []
    numbers = len(of_all) * R + len(of_drafts) * (R - 1)
    return pl.pallas_call(
        functools.partial(_slopes_kernel, tiles=tiles, num_heads=len(heads)),
        out_shape=[jax.ShapeDtypeStruct((len(states), tiles.N, tiles.V), states.dtype) for states in hidden],
        in_specs=[
            *tiles.specs_of(hidden),
            *(tiles.spec(R, "rows") for _ in of_all),
            *(tiles.spec(R - 1, "rows") for _ in of_drafts),
        ],
        out_specs=[tiles.spec(len(states), "rows", "columns") for states in hidden],
        cost_estimate=tiles.cost(hidden[0].dtype, products=R, numbers=numbers, stores_products=True),
        name="linear_cross_entropy_slopes",
        **tiles.how(interpret),
    )(*hidden, *heads, *of_all, *of_drafts)


def _slopes_kernel(*refs, tiles, num_heads):
    products, numbers, outs = refs[: 2 * num_heads], refs[2 * num_heads : -num_heads], refs[-num_heads:]
    targets_ref, normaliser_ref, of_cross_entropy_ref, *of_drafts = numbers
    is_row, columns, is_column = tiles.masks()
    # Per-row numbers of one depth, [rows, 1].
    load = lambda ref, row: plt.load(ref.at[_traced(row)], mask=is_row, other=0)[:, None]
    places = [out.at[_traced(place)] for out in outs for place in range(out.shape[0])]
    log_p = None
    for row, logits in enumerate(tiles.each_logits(products)):
        logs = logits - load(normaliser_ref, row)
        # Cross-entropy: q - 1[target], times the row's cotangent.
        q, weight = jnp.exp(logs), load(of_cross_entropy_ref, row)
        slopes = weight * (q - (columns == load(targets_ref, row)))
        if log_p is None:
            log_p = logs
        else:
            # Drafts add the gradients of KL and overlap (see `linear_total_variation`).
            below, of_kl, of_overlap = (load(ref, row - 1) for ref in of_drafts)
            p = jnp.exp(log_p)
            slopes += of_kl * (q - p) + of_overlap * q * ((q < p) - below)
        # Round to hidden's dtype, as the two products over the gradients need it.
        plt.store(places[row], slopes.astype(places[row].dtype), mask=is_row[:, None] & is_column)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Divides `[N, D] @ [D, V]` among programs: each takes one block of the logits, `inner` inputs of D at a time."""

    N: int
    D: int
    V: int
    rows: int
    columns: int
    inner: int

    @property
    def grid(self) -> tuple[int, int]:
        return pl.cdiv(self.N, self.rows), pl.cdiv(self.V, self.columns)

    def how(self, interpret) -> dict:
        """Returns the arguments of `pallas_call` that all kernels here share. Grid: one program per block of logits."""
        # The default number of stages: 3 on CUDA, 1 on ROCm, whose shared memory holds only one.
        warps = 8 if self.rows >= 64 else 4
        return {
            "grid": (self.grid[0] * self.grid[1],),
            "compiler_params": plt.CompilerParams(num_warps=warps),
            "interpret": interpret,
        }

    def place(self, program):
        """Returns a program's block of rows and block of columns.

        Programs that run at the same time share both: `TOGETHER` blocks of rows pass over the vocabulary side by side,
        so their hidden states stay in the L2 cache and each block of the head is loaded once per group.
        """
        # Row blocks vary fastest within a group of `TOGETHER`, then columns. The last group may have fewer row blocks.
        down, across = self.grid
        first = TOGETHER * jax.lax.div(program, jnp.int32(TOGETHER * across))
        within = jax.lax.rem(program, jnp.int32(TOGETHER * across))
        size = jnp.minimum(down - first, TOGETHER)
        return first + jax.lax.rem(within, size), jax.lax.div(within, size)

    def spec(self, *axes) -> pl.BlockSpec:
        """Returns the spec of an array with axes "rows", "columns", "block" (one entry per block of columns), or sizes.

        A size takes the axis whole.
        """
        sizes = {"rows": self.rows, "columns": self.columns, "block": None}

        def index(program):
            row, column = self.place(program)
            return tuple({"rows": row, "columns": column, "block": column}.get(axis, 0) for axis in axes)

        return pl.BlockSpec(tuple(sizes.get(axis, axis) for axis in axes), index)

    def specs_of(self, hidden) -> list[pl.BlockSpec]:
        """Returns the specs of hidden `[R_h, N, D]` and heads `[D, V]`."""
        return [
            *(self.spec(len(states), "rows", self.D) for states in hidden),
            *[self.spec(self.D, "columns")] * len(hidden),
        ]

    def cost(self, dtype, *, products, numbers, stores_products=False) -> pl.CostEstimate:
        """Estimates the cost of some products, with `numbers` 4-byte numbers per row and block of columns."""
        (down, across), item = self.grid, dtype.itemsize
        loaded = products * self.D * (across * self.N + down * self.V) * item
        stored = products * self.N * self.V * item if stores_products else 0
        return pl.CostEstimate(
            flops=2 * products * self.N * self.D * self.V,
            transcendentals=products * self.N * self.V,
            bytes_accessed=loaded + stored + 4 * numbers * self.N * across,
        )

    def masks(self):
        """Returns which of this program's rows exist [rows], its columns [1, columns], and which of these exist."""
        row, column = self.place(pl.program_id(0))
        columns = (column * self.columns + jnp.arange(self.columns))[None, :]
        return row * self.rows + jnp.arange(self.rows) < self.N, columns, columns < self.V

    def each_logits(self, refs):
        """Yields the logits of each row of hidden with its head, for `refs` of `specs_of`; the trunk first."""
        half = len(refs) // 2
        for states_ref, head_ref in zip(refs[:half], refs[half:], strict=True):
            for place in range(states_ref.shape[0]):
                yield self.logits(states_ref, place, head_ref)

    def logits(self, states_ref, place, head_ref) -> jax.Array:
        """Computes a block of logits `states_ref[place] @ head_ref`, `[rows, columns]` float32.

        The refs are `[R, rows, D]` and `[D, columns]`.
        """
        place, (is_row, _, is_column) = _traced(place), self.masks()
        is_row = is_row[:, None] if self.N % self.rows else None
        is_column = is_column if self.V % self.columns else None

        def add(step, total):
            # Load `inner` inputs of both operands, zero beyond the arrays, and accumulate in float32.
            part = pl.ds(step * self.inner, self.inner)
            is_inner = step * self.inner + jnp.arange(self.inner) < self.D
            left, right = (is_inner[None, :], is_inner[:, None]) if self.D % self.inner else (None, None)
            states = _load(states_ref.at[place, :, part], is_row, left)
            head = _load(head_ref.at[part, :], is_column, right)
            return total + jnp.dot(states, head, precision=HIGHEST, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((self.rows, self.columns), jnp.float32)
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(self.D, self.inner)), add, zeros)


def _traced(index: int) -> jax.Array:
    """Makes an index traced: the interpreter rejects constants beside slices. The compiler folds it to a constant."""
    return pl.program_id(0) * 0 + index


def _load(ref, *masks):
    """Loads a ref, zero where a mask is false; without masks the compiler need not prove that loads are wide."""
    masks = [mask for mask in masks if mask is not None]
    if not masks:
        return plt.load(ref)
    return plt.load(ref, mask=jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), ref.shape), other=0)


def _tiles(hidden, V) -> _Tiles:
    """Chooses blocks of logits as large as registers hold.

    That is 128 x 256 float32 sums for one product, and 128 x 128 each for draft and trunk: about half of the registers
    of two warp groups. Larger blocks do more operations per byte from the L2 cache. `inner` of 64 in 3 stages fits the
    shared memory of an SM. float32 runs without tensor cores; it is for comparisons with the reference.
    """
    _, N, D = hidden[0].shape
    most = (128, 256 if sum(map(len, hidden)) == 1 else 128, 64)
    if hidden[0].dtype == jnp.float32:
        most = (64, 64, 32)
    blocks = (min(limit, max(16, pl.next_power_of_2(size))) for limit, size in zip(most, (N, V, D), strict=True))
    return _Tiles(N, D, V, *blocks)
