"""What a loss needs of `hidden @ head`, without the logits: cross-entropy, and how far drafts are from the trunk.

In products of hidden and head, each 2 N D V operations: forward one for cross-entropy and one more to compare with the
trunk; backward one, to have the logits again, and two for the gradients. So 4 where 3 are the least if all logits are
kept, or 5 with the comparison. At N = 4096, D = 7168 and V = 129280 one is 7.6 TFLOP, 7.7 ms of an H100's 989 TFLOP/s,
and the head's 1.9 GB are 0.6 ms of its 3.35 TB/s: what limits is multiplication, and blocks are made for that.

Kernels that own the rows of one gradient and the columns of the other would take one product more, and have no place
for their sums: `[rows, D]` floats are 3.7 MB for 128 rows, and split along D each part computes the logits again. So
the kernel writes the gradient of some columns' logits, in hidden's dtype, and XLA takes the two products over it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import choose

HIGHEST = jax.lax.Precision.HIGHEST  # float32 is multiplied as such; of no effect on bfloat16
TOGETHER = 16  # blocks of rows that pass over the vocabulary together: their hidden states stay in the L2 cache


class LinearTerms(NamedTuple):
    """Per row, float32. p is the trunk's distribution, which as the drafts' target gets no gradient, q a draft's."""

    cross_entropy: jax.Array  # [R, N] log-sum-exp of the logits less the target's logit, in nats
    kl: jax.Array  # [R - 1, N] KL(p||q) in nats
    overlap: jax.Array  # [R - 1, N] sum of min(p, q), which is 1 - TV(p, q)


def linear_cross_entropy(hidden, head, targets, *, vocab_chunk=8192, implementation="auto") -> jax.Array:
    """`logsumexp(hidden @ head) - (hidden @ head)[target]` of each row: float32 `[N]`, in nats.

    hidden [N, D] bfloat16 or float32; head [D, V] floating, of which every column counts; targets [N], integer
    in 0..V-1. Several depths are rows behind rows. Products are taken in hidden's dtype and summed in float32.
    Differentiable in reverse mode with respect to hidden and head; the backward pass holds the gradients of about
    `vocab_chunk` columns of the logits at a time. Rows with gradient 0 contribute nothing. `implementation` is "xla"
    (the reference, which has all logits), "triton" (the kernels: CUDA and ROCm), "interpreted" (the kernels on any
    machine, slowly) or "auto", see `pallas_kernels.dispatch`. Raises ValueError for other implementations and for
    shapes, dtypes and chunks that do not fit.
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
    """Cross-entropy of the trunk and of R - 1 drafts, and KL and overlap of each draft with the trunk, row by row.

    hidden holds an array [R_h, N, D] for each of the heads [D, V], in all R times N rows, the first N the trunk's: row
    n of a draft is compared with row n of the trunk. targets [R, N]. The rest is as in `linear_cross_entropy`.

    With z a draft's logits, as `dq_v/dz_u = q_v (1[u = v] - q_u)` and as min has the gradient of the smaller side::

        d overlap / dz_u = sum_v 1[q_v < p_v] q_v (1[u = v] - q_u) = q_u (1[q_u < p_u] - b),  b = sum_v q_v 1[q_v < p_v]
        d KL(p||q) / dz_u = q_u - p_u        d cross_entropy / dz_u = q_u - 1[u = target]

    (2602.23881). p and q need the log-sum-exps: a first pass has these, a second KL, overlap and b, and the backward
    pass no other sum. Each pass computes the trunk's logits once, whatever the number of drafts.
    """
    _check(hidden, heads, targets, vocab_chunk)
    chosen = choose_for(hidden, heads, implementation, compares=True)
    if chosen == "xla" or hidden[0].size == 0:
        return linear_total_variation_reference(hidden, heads, targets)
    return _terms(tuple(hidden), tuple(heads), targets, vocab_chunk, chosen == "interpreted")


def choose_for(hidden, heads, implementation: str, *, compares: bool) -> str:
    """Which implementation the op takes that `compares` drafts with the trunk, or the one that does not."""
    rows, width = hidden[0].shape[1:]
    shape = {"rows": rows, "width": width, "vocabulary": heads[0].shape[1], "dtype": str(hidden[0].dtype)}
    if compares:
        shape["drafts"] = sum(map(len, hidden)) - 1
    op = "linear_total_variation" if compares else "linear_cross_entropy"
    return choose(op, implementation, ("xla", "triton"), shape)


def linear_cross_entropy_reference(hidden, head, targets):
    """What `linear_cross_entropy` means."""
    return linear_total_variation_reference([hidden[None]], [head], targets[None]).cross_entropy[0]


def linear_total_variation_reference(hidden, heads, targets):
    """What `linear_total_variation` means."""
    logits = [_product("RND,DV->RNV", states, head) for states, head in zip(hidden, heads, strict=True)]
    logs = jax.nn.log_softmax(jnp.concatenate(logits), axis=-1)
    picked = jnp.take_along_axis(logs, targets[:, :, None], axis=-1)[:, :, 0]
    log_p, log_q = jax.lax.stop_gradient(logs[:1]), logs[1:]
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return LinearTerms(-picked, (p * (log_p - log_q)).sum(-1), jnp.where(q < p, q, p).sum(-1))


def _check(hidden, heads, targets, vocab_chunk):
    states, shapes = hidden[0], [other.shape for other in hidden]
    if states.dtype not in (jnp.bfloat16, jnp.float32):  # float16 has no room for the gradients of logits
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
    """In the dtype of `left`, summed in float32."""
    right = right.astype(left.dtype)
    return jnp.einsum(dimensions, left, right, precision=HIGHEST, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _terms(hidden, heads, targets, vocab_chunk, interpret) -> LinearTerms:
    return _forward(hidden, heads, targets, vocab_chunk, interpret)[0]


def _forward(hidden, heads, targets, vocab_chunk, interpret):
    del vocab_chunk
    cast = [head.astype(hidden[0].dtype) for head in heads]
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
    none = [jnp.zeros((0, targets.shape[1]))] * 3
    kl, overlap, below = _compare(hidden, cast, normaliser, interpret) if len(targets) > 1 else none
    terms = LinearTerms(normaliser - jnp.concatenate(picked), kl, overlap)
    return terms, (hidden, heads, targets, normaliser, below)


def _backward(vocab_chunk, interpret, residuals, cotangents):
    hidden, heads, targets, normaliser, below = residuals
    dtype, V = hidden[0].dtype, heads[0].shape[1]
    block = _tiles(hidden, V).columns
    chunk = min(block * pl.cdiv(vocab_chunk, block), V)

    def add(start, columns, sums):
        """With what `columns` of the vocabulary contribute: a term of hidden's gradients, a part of the heads'."""
        parts = [jax.lax.dynamic_slice_in_dim(head, start, columns, axis=1).astype(dtype) for head in heads]
        slopes = _slopes(hidden, parts, targets - start, normaliser, below, cotangents, interpret)
        after = []
        for states, part, slope, (of_states, of_head) in zip(hidden, parts, slopes, sums, strict=True):
            of_part = _product("RND,RNV->DV", states, slope).astype(of_head.dtype)
            of_head = jax.lax.dynamic_update_slice_in_dim(of_head, of_part, start, axis=1)
            after.append((of_states + _product("RNV,DV->RND", slope, part), of_head))
        return after

    sums = [
        (jnp.zeros(states.shape), jnp.zeros(head.shape, head.dtype)) for states, head in zip(hidden, heads, strict=True)
    ]
    sums = jax.lax.fori_loop(0, V // chunk, lambda step, sums: add(step * chunk, chunk, sums), sums)
    if V % chunk:
        sums = add(V - V % chunk, V % chunk, sums)
    return tuple(of_states.astype(dtype) for of_states, _ in sums), tuple(of_head for _, of_head in sums), None


_terms.defvjp(_forward, _backward)


def _normalise(states, head, targets, interpret):
    """Per block of columns and row, `[blocks, N]` each: the highest logit, the sum relative to it, the target's."""
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
    logits = tiles.logits(states_ref, 0, head_ref)
    targets = plt.load(targets_ref, mask=is_row, other=-1)
    picked = jnp.sum(jnp.where(columns == targets[:, None], logits, 0.0), axis=1)
    logits = jnp.where(is_column, logits, -jnp.inf)
    top = jnp.max(logits, axis=1)
    plt.store(top_ref, top, mask=is_row)
    plt.store(total_ref, jnp.sum(jnp.exp(logits - top[:, None]), axis=1), mask=is_row)
    plt.store(picked_ref, picked, mask=is_row)


def _compare(hidden, heads, normaliser, interpret):
    """KL, overlap and b of each draft, `[R - 1, N]` each: sums over a block of columns, then over the blocks."""
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
    log_p = None
    for row, logits in enumerate(tiles.each_logits(products)):
        logs = logits - plt.load(normaliser_ref.at[_traced(row)], mask=is_row, other=0.0)[:, None]
        if log_p is None:
            log_p = logs
            continue
        p, q = (jnp.where(is_column, jnp.exp(array), 0.0) for array in (log_p, logs))
        sums = p * (log_p - logs), jnp.minimum(p, q), jnp.where(q < p, q, 0.0)
        for ref, array in zip((kl_ref, overlap_ref, below_ref), sums, strict=True):
            plt.store(ref.at[_traced(row - 1)], jnp.sum(array, axis=1), mask=is_row)


def _slopes(hidden, heads, targets, normaliser, below, cotangents, interpret):
    """Gradients of the logits with respect to some columns: per head `[R_h, N, columns]`, in hidden's dtype."""
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
    load = lambda ref, row: plt.load(ref.at[_traced(row)], mask=is_row, other=0)[:, None]
    places = [out.at[_traced(place)] for out in outs for place in range(out.shape[0])]
    log_p = None
    for row, logits in enumerate(tiles.each_logits(products)):
        logs = logits - load(normaliser_ref, row)
        q, weight = jnp.exp(logs), load(of_cross_entropy_ref, row)
        slopes = weight * (q - (columns == load(targets_ref, row)))
        if log_p is None:
            log_p = logs
        else:
            below, of_kl, of_overlap = (load(ref, row - 1) for ref in of_drafts)
            p = jnp.exp(log_p)
            slopes += of_kl * (q - p) + of_overlap * q * ((q < p) - below)
        plt.store(places[row], slopes.astype(places[row].dtype), mask=is_row[:, None] & is_column)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How programs divide `[N, D] @ [D, V]`: each takes one block of the logits, `inner` of D at a time."""

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
        # Stages by default: 3 on CUDA, 1 on ROCm, whose local memory has no place for more.
        warps = 8 if self.rows >= 64 else 4
        return {
            "grid": (self.grid[0] * self.grid[1],),
            "compiler_params": plt.CompilerParams(num_warps=warps),
            "interpret": interpret,
        }

    def place(self, program):
        """Its block of rows and of columns: programs that run at once share both, see `TOGETHER`."""
        down, across = self.grid
        first = TOGETHER * jax.lax.div(program, jnp.int32(TOGETHER * across))
        within = jax.lax.rem(program, jnp.int32(TOGETHER * across))
        size = jnp.minimum(down - first, TOGETHER)
        return first + jax.lax.rem(within, size), jax.lax.div(within, size)

    def spec(self, *axes) -> pl.BlockSpec:
        """Of an array with axes of "rows", "columns", one entry per "block" of columns, or taken whole (its size)."""
        sizes = {"rows": self.rows, "columns": self.columns, "block": None}

        def index(program):
            row, column = self.place(program)
            return tuple({"rows": row, "columns": column, "block": column}.get(axis, 0) for axis in axes)

        return pl.BlockSpec(tuple(sizes.get(axis, axis) for axis in axes), index)

    def specs_of(self, hidden) -> list[pl.BlockSpec]:
        """Of hidden `[R_h, N, D]` and heads `[D, V]`."""
        return [
            *(self.spec(len(states), "rows", self.D) for states in hidden),
            *[self.spec(self.D, "columns")] * len(hidden),
        ]

    def cost(self, dtype, *, products, numbers, stores_products=False) -> pl.CostEstimate:
        """Of so many products, and so many 4-byte numbers per row and block of columns."""
        (down, across), item = self.grid, dtype.itemsize
        loaded = products * self.D * (across * self.N + down * self.V) * item
        stored = products * self.N * self.V * item if stores_products else 0
        return pl.CostEstimate(
            flops=2 * products * self.N * self.D * self.V,
            transcendentals=products * self.N * self.V,
            bytes_accessed=loaded + stored + 4 * numbers * self.N * across,
        )

    def masks(self):
        """Of this program: which of its rows `[rows]` exist, its columns `[1, columns]`, and which of these exist."""
        row, column = self.place(pl.program_id(0))
        columns = (column * self.columns + jnp.arange(self.columns))[None, :]
        return row * self.rows + jnp.arange(self.rows) < self.N, columns, columns < self.V

    def each_logits(self, refs):
        """Of each row of hidden with its head, `refs` of `specs_of`; the trunk first."""
        half = len(refs) // 2
        for states_ref, head_ref in zip(refs[:half], refs[half:], strict=True):
            for place in range(states_ref.shape[0]):
                yield self.logits(states_ref, place, head_ref)

    def logits(self, states_ref, place, head_ref) -> jax.Array:
        """`states_ref[place] @ head_ref`, `[rows, columns]` float32, of refs `[R, rows, D]` and `[D, columns]`."""
        place, (is_row, _, is_column) = _traced(place), self.masks()
        is_row = is_row[:, None] if self.N % self.rows else None
        is_column = is_column if self.V % self.columns else None

        def add(step, total):
            part = pl.ds(step * self.inner, self.inner)
            is_inner = step * self.inner + jnp.arange(self.inner) < self.D
            left, right = (is_inner[None, :], is_inner[:, None]) if self.D % self.inner else (None, None)
            states = _load(states_ref.at[place, :, part], is_row, left)
            head = _load(head_ref.at[part, :], is_column, right)
            return total + jnp.dot(states, head, precision=HIGHEST, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((self.rows, self.columns), jnp.float32)
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(self.D, self.inner)), add, zeros)


def _traced(index: int) -> jax.Array:
    """The interpreter takes no constant for an index beside slices; the compiler folds this into one."""
    return pl.program_id(0) * 0 + index


def _load(ref, *masks):
    """Zeros where a mask says so; without one, where all exists, the compiler need not prove that loads are wide."""
    masks = [mask for mask in masks if mask is not None]
    if not masks:
        return plt.load(ref)
    return plt.load(ref, mask=jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), ref.shape), other=0)


def _tiles(hidden, V) -> _Tiles:
    """Blocks of logits as large as registers hold: 128 x 256 floats of one product, 128 x 128 of draft and trunk each.

    Two warp groups then have 128 of their 255 registers a thread for sums, and a byte from the L2 cache serves 85 or 64
    operations. 3 stages of 64 of D are 144 or 96 KB of an SM's 227. Float32, without tensor cores, is for agreement.
    """
    _, N, D = hidden[0].shape
    most = (128, 256 if sum(map(len, hidden)) == 1 else 128, 64)
    if hidden[0].dtype == jnp.float32:
        most = (64, 64, 32)
    blocks = (min(limit, max(16, pl.next_power_of_2(size))) for limit, size in zip(most, (N, V, D), strict=True))
    return _Tiles(N, D, V, *blocks)
