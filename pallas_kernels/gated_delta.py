"""The gated delta rule, a linear attention with a state per head: ops, kernels and references.

`S <- exp(log_decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q` (2412.06464, equation 10), token by token.

| op | for | kernel |
|---|---|---|
| `gated_delta_verify` | few tokens that may yet be rejected: outputs and corrections u, no state | reads the state |
| `gated_delta_replay` | the state after those of them that were accepted | none: one pass over the state in XLA |
| `gated_delta_steps` | few tokens that are known to stay: outputs and the last state | reads and writes the state |
| `gated_delta` | many tokens, by chunks, for prefill and training: outputs and the last state | see there |

Verifying and replaying move three times the state whatever the number of tokens W. A state kept after each token would
move W + 4 times as much (read, W written; two read and one written when one is picked) and would fill W states of every
layer until then.

Shapes of all: q and k `[B, T, K, P]` for K key heads, v `[B, T, J, Q]` for J value heads, all three of one floating
dtype; value head j reads key head j // (J / K). log_decay (at most 0) and beta `[B, T, J]`, state `[B, J, P, Q]`
float32. Outputs and corrections `[B, T, J, Q]` and states are float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import choose

CHUNK = 64  # tokens that `gated_delta` takes in at once
BLOCK = 16  # tokens of a chunk whose triangular system is inverted at once; the least that a tensor core multiplies
FEW_TOKENS = 16  # that are unrolled in plain JAX
FEW_PROGRAMS = 128  # of the chunked kernel: below, the state is split into narrower columns; an H100 runs 132 at once


def gated_delta_verify(q, k, v, log_decay, beta, state, *, implementation="auto") -> tuple[jax.Array, jax.Array]:
    """Outputs and corrections of one token after the other; the state after any of them is `gated_delta_replay`'s.

    Shapes: see the module. All arithmetic is float32 and in the same order whatever T is: a token's outcome does not
    depend on those behind it. `implementation` is "xla" (the reference), "triton" (the kernel: CUDA and ROCm),
    "interpreted" (the kernel on any machine, slowly) or "auto", see `pallas_kernels.dispatch`. The kernel has no
    gradient. Raises ValueError for other implementations and for shapes or dtypes that do not fit.
    """
    shape = _shape(q, k, v, log_decay, beta, state)
    chosen = choose("gated_delta_verify", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        output, corrections, _ = gated_delta_steps_reference(q, k, v, log_decay, beta, state)
        return output, corrections
    return _steps_triton(q, k, v, log_decay, beta, state, is_known=False, interpret=chosen == "interpreted")


def gated_delta_steps(q, k, v, log_decay, beta, state, *, implementation="auto") -> tuple[jax.Array, jax.Array]:
    """Outputs of one token after the other, and the last state. All else is as in `gated_delta_verify`."""
    shape = _shape(q, k, v, log_decay, beta, state)
    chosen = choose("gated_delta_steps", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        output, _, state = gated_delta_steps_reference(q, k, v, log_decay, beta, state)
        return output, state
    return _steps_triton(q, k, v, log_decay, beta, state, is_known=True, interpret=chosen == "interpreted")


def gated_delta_replay(k, log_decay, corrections, state, taken) -> jax.Array:
    """The state after the first `taken [B]` tokens, from what `gated_delta_verify` took and made.

    The sums that were made there, but for the last bit: compilers round between product and sum, or do not. XLA reads
    the state once and writes it in place.
    """
    (B, J, P, Q), (T, K) = state.shape, k.shape[1:3]
    is_taken = (jnp.arange(T)[None, :] < taken[:, None])[:, :, None]
    decay = jnp.exp(jnp.where(is_taken, log_decay, 0.0)).reshape(B, T, K, J // K, 1, 1)
    corrections = jnp.where(is_taken[..., None], corrections, 0.0).reshape(B, T, K, J // K, 1, Q)
    k = k.astype(jnp.float32).reshape(B, T, K, 1, P, 1)

    def step(state, token):
        decay, k, correction = token
        return state * decay + k * correction, None

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (decay, k, corrections))
    replayed, _ = jax.lax.scan(step, state.reshape(B, K, J // K, P, Q), tokens, unroll=T <= FEW_TOKENS)
    return replayed.reshape(state.shape)


def gated_delta(
    q, k, v, log_decay, beta, state, *, segment_ids=None, implementation="auto"
) -> tuple[jax.Array, jax.Array]:
    """Many tokens by chunks: outputs, and the last state `[B, J, P, Q]`.

    Shapes: see the module. With `segment_ids [B, T]` int32 each document starts from an empty state, the first one from
    `state`. The kernel multiplies in float32 if v is float32; otherwise it rounds the factors of each product to v's
    dtype, but for the triangular systems, and adds up in float32. `implementation`: as in `gated_delta_verify`.
    Differentiable in reverse mode; the gradient is the reference's, which computes everything again. Raises ValueError
    for other implementations and for shapes or dtypes that do not fit.
    """
    shape = _shape(q, k, v, log_decay, beta, state, segment_ids)
    chosen = choose("gated_delta", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        return gated_delta_reference(q, k, v, log_decay, beta, state, segment_ids=segment_ids)
    return _chunks_triton(q, k, v, log_decay, beta, state, segment_ids, chosen == "interpreted")


def _shape(q, k, v, log_decay, beta, state, segment_ids=None) -> dict[str, int | str]:
    """What the dispatcher chooses by; raises for what does not fit together."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q {q.shape} and v {v.shape} are not [batch, tokens, heads, width]")
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    expected = {"k": (k, (B, T, K, P)), "v": (v, (B, T, J, Q)), "log_decay": (log_decay, (B, T, J))}
    expected |= {"beta": (beta, (B, T, J)), "state": (state, (B, J, P, Q))}
    if segment_ids is not None:
        expected["segment_ids"] = (segment_ids, (B, T))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} {array.shape} does not fit q {q.shape} and v {v.shape}: it should be {shape}")
    if J % K:
        raise ValueError(f"{J} value heads are no multiple of {K} key heads")
    if B * T == 0:
        raise ValueError(f"q {q.shape} holds no tokens")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, not of one floating dtype")
    for name, array in {"log_decay": log_decay, "beta": beta, "state": state}.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} is {array.dtype}, not float32")
    return {"rows": B, "tokens": T, "heads": J, "state": P * Q, "dtype": str(v.dtype)}


def _to_value_heads(q, k, v):
    """All in float32, with the queries and keys of each value head."""
    groups = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (q, k))
    return q, k, v.astype(jnp.float32)


def gated_delta_steps_reference(q, k, v, log_decay, beta, state):
    """What all of them mean: outputs, corrections and the last state."""

    def step(state, token):
        q, k, v, log_decay, beta = token
        state = state * jnp.exp(log_decay)[:, :, None, None]
        correction = (v - jnp.einsum("BJPQ,BJP->BJQ", state, k)) * beta[:, :, None]
        state = state + k[:, :, :, None] * correction[:, :, None, :]
        return state, (jnp.einsum("BJPQ,BJP->BJQ", state, q), correction)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (*_to_value_heads(q, k, v), log_decay, beta))
    state, made = jax.lax.scan(step, state, tokens, unroll=q.shape[1] <= FEW_TOKENS)
    return *(x.swapaxes(0, 1) for x in made), state


def gated_delta_reference(q, k, v, log_decay, beta, state, *, segment_ids=None):
    """The same by chunks, whose tokens are taken in at once: outputs, and the last state only.

    Within a chunk the corrections `u_i = beta_i (v_i - S_i^T k_i)` solve a unit lower triangular system (the WY form of
    2406.06484 with the decays of 2412.06464).
    """
    q, k, v = _to_value_heads(q, k, v)
    B, T, J, _ = q.shape
    C = min(CHUNK, T)
    pad = -T % C
    if segment_ids is None:
        segment_ids = jnp.zeros((B, T), jnp.int32)

    def chunks(x, mode="constant"):
        """`[B, T, J, …]` -> `[chunks, B, J, C, …]`."""
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:])), mode=mode)
        x = x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)
        return x.swapaxes(2, 3) if x.ndim > 3 else x

    segment = chunks(segment_ids, "edge")  # [chunks, B, C]
    before = jnp.concatenate([segment[:1, :, :1], segment[:-1, :, -1:]])  # the segment of the state that comes in
    q, k, v, log_decay, beta = (chunks(x) for x in (q, k, v, log_decay, beta))
    index = jnp.arange(C)
    sees = (segment[:, :, :, None] == segment[:, :, None, :]) & (index[:, None] >= index[None, :])[None, None]
    is_before = (index[:, None] > index[None, :])[None, None, None]
    # Each sum by itself: as a difference of running sums it would drown in what was forgotten before.
    steps = jnp.where(is_before, log_decay[..., :, None], 0)
    decay = jnp.exp(jnp.where(sees[:, :, None], jnp.cumsum(steps, axis=-2), -jnp.inf))  # from token j to i: [.., i, j]
    from_state = jnp.where((segment == before)[:, :, None], jnp.exp(jnp.cumsum(log_decay, axis=-1)), 0)
    to_state = decay[..., -1, :]

    system = jnp.where(is_before, beta[..., None] * decay * jnp.einsum("nBJIP,nBJKP->nBJIK", k, k), 0)
    given = beta[..., None] * jnp.concatenate([v, from_state[..., None] * k], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, given, lower=True, unit_diagonal=True)
    update, correction = jnp.split(solved, [v.shape[-1]], axis=-1)
    within = decay * jnp.einsum("nBJIP,nBJKP->nBJIK", q, k)

    def step(state, chunk):
        update, correction, within, q, k, keeps = chunk
        update = update - correction @ state
        output = q @ state + within @ update
        return keeps[:, :, None, None] * state + jnp.einsum("BJCP,BJCQ->BJPQ", k, update), output

    chunk = (update, correction, within, q * from_state[..., None], k * to_state[..., None], from_state[..., -1])
    state, output = jax.lax.scan(step, state, chunk)
    return output.transpose(1, 0, 3, 2, 4).reshape(B, T + pad, J, -1)[:, :T], state


def _mask(shape, limits):
    """True where each index is below its limit; None where that is everywhere, so that nothing is compared."""
    mask = None
    for axis, (size, limit) in enumerate(zip(shape, limits, strict=True)):
        if isinstance(limit, int) and size <= limit:
            continue
        inside = jnp.expand_dims(jnp.arange(size) < limit, tuple(other for other in range(len(shape)) if other != axis))
        mask = inside if mask is None else mask & inside
    return mask if mask is None else jnp.broadcast_to(mask, shape)


def _load(ref, shape, limits):
    """What `ref` of this shape holds, in its dtype; 0 from the limits on, which is never read."""
    mask = _mask(shape, limits)
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0.0)


def _bytes(*arrays) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _steps_triton(q, k, v, log_decay, beta, state, *, is_known, interpret):
    """Outputs, and the last state where the tokens are known to stay, else the corrections.

    A program takes some columns of one head's state through all tokens, in registers.
    """
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    padded = pl.next_power_of_2(P)
    columns = min(pl.next_power_of_2(Q), 32)  # a row of 128 bytes; 16 KB in flight a program, 5 programs fit an SM
    num_splits = pl.cdiv(Q, columns)
    per_split = J // K * _bytes(q, k) + _bytes(log_decay, beta)
    keys = pl.BlockSpec((None, T, None, padded), lambda part, j, b: (b, 0, j // (J // K), 0))
    values = pl.BlockSpec((None, T, None, columns), lambda part, j, b: (b, 0, j, part))
    scalars = pl.BlockSpec((None, T, None), lambda part, j, b: (b, 0, j))
    states = pl.BlockSpec((None, None, padded, columns), lambda part, j, b: (b, j, 0, part))
    out_shape = [jax.ShapeDtypeStruct(like.shape, jnp.float32) for like in (v, state if is_known else v)]
    return pl.pallas_call(
        functools.partial(_steps_kernel, width=P, value_width=Q, is_known=is_known),
        out_shape=out_shape,
        grid=(num_splits, J, B),
        in_specs=[keys, keys, values, scalars, scalars, states],
        out_specs=[values, states if is_known else values],
        input_output_aliases={5: 1} if is_known else {},  # in place: a loop that carries the state copies nothing
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=7 * B * T * J * P * Q,
            transcendentals=num_splits * B * T * J,
            bytes_accessed=num_splits * per_split + _bytes(v, state, *out_shape),
        ),
        interpret=interpret,
        name="gated_delta_steps" if is_known else "gated_delta_verify",
    )(q, k, v, log_decay, beta, state)


def _steps_kernel(
    q_ref, k_ref, v_ref, log_decay_ref, beta_ref, state_ref, out_ref, made_ref, *, width, value_width, is_known
):
    """q_ref, k_ref [T, padded], v_ref, out_ref [T, columns], state_ref [padded, columns], made_ref as one of these.

    Limits on an H100 (reckoned, not measured), for heads of 128 x 128: the state's bytes for one token. Each further
    token costs a program 128 cycles of arithmetic at the least (4 operations an element), against 1,130 cycles in which
    an SM is sent its 16 KB: with two sums over four warps a token, arithmetic may lead from 5 tokens on, and does from
    9. One row of 32 heads is 128 programs of 16 KB, less than an SM must have in flight to be fed at full speed: there
    the time is the latency of one load and of T steps. From 16 rows on 6 programs share an SM (80 registers a thread).
    """
    (num_tokens, padded), columns = q_ref.shape, v_ref.shape[1]
    num_columns = value_width - pl.program_id(0) * columns if value_width % columns else columns
    limits, value_mask = (width, num_columns), _mask((columns,), (num_columns,))

    def load(t):
        """One token. The loads of the next are under way while this one is worked in."""
        q, k = (_load(ref.at[t], (padded,), (width,)).astype(jnp.float32)[:, None] for ref in (q_ref, k_ref))
        v = _load(v_ref.at[t], (columns,), (num_columns,)).astype(jnp.float32)
        return q, k, v, plt.load(log_decay_ref.at[t]), plt.load(beta_ref.at[t])

    def step(t, state, token):
        q, k, v, log_decay, beta = token
        state = state * jnp.exp(log_decay)
        correction = (v - jnp.sum(state * k, axis=0)) * beta
        state = state + k * correction[None, :]
        plt.store(out_ref.at[t], jnp.sum(state * q, axis=0), mask=value_mask)
        if not is_known:
            plt.store(made_ref.at[t], correction, mask=value_mask)
        return state

    def step_and_load(t, carry):
        following = load(t + 1)
        return step(t, *carry), following

    last = jnp.int32(num_tokens - 1)
    carry = (_load(state_ref, (padded, columns), limits), load(jnp.int32(0)))
    carry = jax.lax.fori_loop(jnp.int32(0), last, step_and_load, carry)
    state = step(last, *carry)
    if is_known:
        plt.store(made_ref, state, mask=_mask((padded, columns), limits))


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _chunks_triton(q, k, v, log_decay, beta, state, segment_ids, interpret):
    """After `_prepare_chunks`, a program takes some columns of one head's state through all chunks, in registers."""
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    prepared = _prepare_chunks(q, k, log_decay, beta, segment_ids, J, interpret)
    num_chunks, chunk = prepared[-1].shape[2:]
    padded = max(BLOCK, pl.next_power_of_2(P))
    columns = max(BLOCK, min(pl.next_power_of_2(Q), 64))
    while columns > BLOCK and B * J * pl.cdiv(Q, columns) < FEW_PROGRAMS:
        columns //= 2
    num_splits = pl.cdiv(Q, columns)
    keys = pl.BlockSpec((None, T, None, padded), lambda part, j, b: (b, 0, j // (J // K), 0))
    values = pl.BlockSpec((None, T, None, columns), lambda part, j, b: (b, 0, j, part))
    squares = pl.BlockSpec((None, None, num_chunks, chunk, chunk), lambda part, j, b: (b, j, 0, 0, 0))
    lines = pl.BlockSpec((None, None, num_chunks, chunk), lambda part, j, b: (b, j, 0, 0))
    states = pl.BlockSpec((None, None, padded, columns), lambda part, j, b: (b, j, 0, part))
    out_shape = [jax.ShapeDtypeStruct(like.shape, jnp.float32) for like in (v, state)]
    per_split = J // K * _bytes(q, k) + _bytes(*prepared) + 4 * B * J * num_chunks
    return pl.pallas_call(
        functools.partial(_chunks_kernel, width=P, value_width=Q),
        out_shape=out_shape,
        grid=(num_splits, J, B),
        in_specs=[keys, keys, values, squares, squares, lines, lines, states],
        out_specs=[values, states],
        input_output_aliases={7: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=B * J * num_chunks * chunk * Q * (6 * P + 4 * chunk),
            transcendentals=0,
            bytes_accessed=num_splits * per_split + _bytes(v, state, *out_shape),
        ),
        interpret=interpret,
        name="gated_delta_chunks",
    )(q, k, v, *prepared, state)


def _prepare_chunks(q, k, log_decay, beta, segment_ids, num_value_heads, interpret):
    """What of each chunk does not depend on the state, all chunks at once: see the two kernels."""
    (B, T, K, P), J, dtype = q.shape, num_value_heads, q.dtype
    chunk = min(CHUNK, max(BLOCK, pl.next_power_of_2(T)))
    num_chunks = pl.cdiv(T, chunk)
    padded = max(BLOCK, pl.next_power_of_2(P))
    keys = pl.BlockSpec((None, chunk, None, padded), lambda n, j, b: (b, n, j // (J // K), 0))
    scalars = pl.BlockSpec((None, chunk, None), lambda n, j, b: (b, n, j))
    row = pl.BlockSpec((None, T), lambda n, j, b: (b, 0))
    square = pl.BlockSpec((None, None, None, chunk, chunk), lambda n, j, b: (b, j, n, 0, 0))
    line = pl.BlockSpec((None, None, None, chunk), lambda n, j, b: (b, j, n, 0))
    squares = functools.partial(jax.ShapeDtypeStruct, (B, J, num_chunks, chunk, chunk))
    lines = jax.ShapeDtypeStruct((B, J, num_chunks, chunk), jnp.float32)
    segments = () if segment_ids is None else (segment_ids,)
    out_shape = [squares(jnp.float32), squares(dtype), lines, lines]
    programs = B * J * num_chunks
    system, within, from_state, to_state = pl.pallas_call(
        functools.partial(_scores_kernel, num_tokens=T, width=P),
        out_shape=out_shape,
        grid=(num_chunks, J, B),
        in_specs=[keys, keys, scalars, scalars, *[row] * len(segments)],
        out_specs=[square, square, line, line],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=programs * 4 * chunk**2 * P,
            transcendentals=programs * (chunk**2 + chunk),
            bytes_accessed=J // K * _bytes(q, k)
            + _bytes(log_decay, beta, *out_shape)
            + len(segments) * programs * 4 * (chunk + 1),
        ),
        interpret=interpret,
        name="gated_delta_scores",
    )(q, k, log_decay, beta, *segments)
    solve = pl.pallas_call(
        functools.partial(_solve_kernel, num_tokens=T),
        out_shape=squares(dtype),
        grid=(num_chunks, J, B),
        in_specs=[square, scalars],
        out_specs=square,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=programs * chunk**3,
            transcendentals=0,
            bytes_accessed=programs * 2 * chunk * (chunk + BLOCK) + _bytes(within, beta),  # blocks that are not empty
        ),
        interpret=interpret,
        name="gated_delta_solve",
    )(system, beta)
    return solve, within, from_state, to_state


def _dot(a, b, **transposed):
    """The product, added up in float32.

    Float32 factors are each the sum of three bfloat16 numbers, and six of their products make one as exact as float32
    has it, on the tensor cores. For float32 itself NVIDIA has no matrix instructions, and Triton holds both operands in
    registers: compiled for an H100 that spilled 50 to 120 KB a thread.
    """
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision, **transposed)


def _scores_kernel(q_ref, k_ref, log_decay_ref, beta_ref, *refs, num_tokens, width):
    """One chunk of C tokens: q_ref, k_ref [C, padded], log_decay_ref, beta_ref [C], perhaps a row's segments [T].

    Writes system_ref [C, C], how each correction depends on those before it; within_ref [C, C], from the corrections to
    the outputs; and what each token sees of the state that comes in and leaves to the state that goes out, [C] each.

    Limits on an H100 (reckoned): bytes. 8192 tokens of 32 heads read 134 MB of keys and queries, those of a key head
    once for each of its value heads (the second time from L2), and write 103 MB.
    """
    *segment_ref, system_ref, within_ref, from_state_ref, to_state_ref = refs
    chunk, padded = q_ref.shape
    begin, index = pl.program_id(0) * chunk, jnp.arange(chunk)
    left = num_tokens - begin if num_tokens % chunk else chunk
    log_decay, beta = (_load(ref, (chunk,), (left,)) for ref in (log_decay_ref, beta_ref))
    q, k = (_load(ref, (chunk, padded), (left, width)) for ref in (q_ref, k_ref))
    is_before = index[:, None] > index[None, :]
    # Each sum by itself: as a difference of running sums it would drown in what was forgotten before.
    steps = jnp.where(is_before, log_decay[:, None], 0.0)
    decay = jnp.where(index[:, None] >= index[None, :], jnp.exp(jnp.cumsum(steps, axis=0)), 0.0)
    from_state = jnp.exp(jnp.cumsum(log_decay))
    if segment_ref:  # behind the last token its segment goes on
        (ids,) = segment_ref
        segment = plt.load(ids.at[jnp.minimum(begin + index, num_tokens - 1)])
        decay = jnp.where(segment[:, None] == segment[None, :], decay, 0.0)
        from_state = jnp.where(segment == plt.load(ids.at[jnp.maximum(begin - 1, 0)]), from_state, 0.0)
    plt.store(from_state_ref, from_state)
    plt.store(to_state_ref, jnp.sum(jnp.where(index[:, None] == chunk - 1, decay, 0.0), axis=0))
    plt.store(within_ref, (decay * _dot(q, k, trans_b=True)).astype(within_ref.dtype))
    plt.store(system_ref, jnp.where(is_before, beta[:, None] * decay * _dot(k, k, trans_b=True), 0.0))


def _solve_kernel(system_ref, beta_ref, solve_ref, *, num_tokens):
    """`(I + system)^-1 diag(beta)` of one chunk, all [C, C]; beta_ref [C]. One warp works on blocks of 16 tokens.

    Limits on an H100 (reckoned): latency. Some 40 small products follow each other, and 8 warps fit an SM (250
    registers); the bytes are few (76 MB for 8192 tokens of 32 heads). It is a kernel of its own because together with
    the scores it spilled 1.4 to 2.4 KB a thread, which the 109 MB of the systems' way through memory are cheaper than.
    """
    chunk = system_ref.shape[0]
    blocks = range(chunk // BLOCK)
    at = [pl.ds(block * BLOCK, BLOCK) for block in blocks]
    inverse = {}
    for later in blocks:
        system = [plt.load(system_ref.at[at[later], at[earlier]]) for earlier in blocks[: later + 1]]
        inverse[later, later] = _inverse(system[later])
        for earlier in blocks[:later]:
            through = [_dot(system[middle], inverse[middle, earlier]) for middle in range(earlier, later)]
            inverse[later, earlier] = -_dot(inverse[later, later], sum(through[1:], through[0]))
    for column in blocks:
        left = num_tokens - pl.program_id(0) * chunk - column * BLOCK if num_tokens % chunk else BLOCK
        beta = _load(beta_ref.at[at[column]], (BLOCK,), (left,))
        for row in blocks:
            part = inverse[row, column] * beta[None, :] if row >= column else jnp.zeros((BLOCK, BLOCK))
            plt.store(solve_ref.at[at[row], at[column]], part.astype(solve_ref.dtype))


def _inverse(system):
    """`(I + system)^-1` for a strictly lower triangular block.

    The inverses of diagonal blocks of 1, 2, 4 and 8 rows are joined in pairs, as forward substitution would. A product
    of powers of `system` takes as many steps, but its terms cancel: 3e3 times the result where all keys are the same.
    """
    index = jnp.arange(BLOCK)
    inverse = (index[:, None] == index[None, :]).astype(jnp.float32)
    size = 1
    while size < BLOCK:
        own, pair = index // size, index // (2 * size)
        is_joint = (pair[:, None] == pair[None, :]) & (own[:, None] != own[None, :])
        joint = jnp.where(is_joint, system, 0.0)
        inverse = inverse - (joint if size == 1 else _dot(inverse, _dot(joint, inverse)))
        size *= 2
    return inverse


def _chunks_kernel(
    q_ref,
    k_ref,
    v_ref,
    solve_ref,
    within_ref,
    from_state_ref,
    to_state_ref,
    state_ref,
    out_ref,
    last_ref,
    *,
    width,
    value_width,
):
    """Some columns of one head's state, in registers, through all chunks of C tokens.

    q_ref, k_ref [T, padded], v_ref, out_ref [T, columns], state_ref, last_ref [padded, columns]; the others, a leading
    axis for the chunk, as the kernels above write them.

    Limits on an H100 (reckoned): latency. A chunk is five small products, of which three wait for each other, and the
    next chunk for the last of them; one row of 32 heads is 128 programs, one to an SM. The next chunk's loads are under
    way meanwhile (two stages of 56 KB). Narrower columns make more programs, each of which reads all keys and queries
    again, mostly from L2: 812 MB for 8192 tokens in four splits, where 203 MB would do. Arithmetic is the least of it,
    34 GFLOP. Float32 spills here and in the scores (0.7 and 2.1 KB a thread at 128 x 128) and
    asks for more shared memory than an MI300X has: it is there for tests, not for speed.
    """
    (num_tokens, padded), (num_chunks, chunk), columns = q_ref.shape, from_state_ref.shape, v_ref.shape[1]
    num_columns = value_width - pl.program_id(0) * columns if value_width % columns else columns

    def step(n, state):
        at = pl.ds(n * chunk, chunk)
        left = num_tokens - n * chunk if num_tokens % chunk else chunk
        q, k = (_load(ref.at[at], (chunk, padded), (left, width)) for ref in (q_ref, k_ref))
        v = _load(v_ref.at[at], (chunk, columns), (left, num_columns))
        from_state, to_state = (plt.load(ref.at[n])[:, None] for ref in (from_state_ref, to_state_ref))
        kept = plt.load(from_state_ref.at[n, jnp.int32(chunk - 1)])
        factor = state.astype(v.dtype)
        wanted = v.astype(jnp.float32) - from_state * _dot(k, factor)
        update = _dot(plt.load(solve_ref.at[n]), wanted.astype(v.dtype))
        output = from_state * _dot(q, factor) + _dot(plt.load(within_ref.at[n]), update.astype(v.dtype))
        plt.store(out_ref.at[at], output, mask=_mask((chunk, columns), (left, num_columns)))
        return kept * state + _dot(k, (to_state * update).astype(v.dtype), trans_a=True)

    limits = (width, num_columns)
    state = _load(state_ref, (padded, columns), limits)
    state = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_chunks), step, state)
    plt.store(last_ref, state, mask=_mask((padded, columns), limits))


def _forward(q, k, v, log_decay, beta, state, segment_ids, interpret):
    residuals = (q, k, v, log_decay, beta, state, segment_ids)
    return _chunks_triton(*residuals, interpret), residuals


def _backward(interpret, residuals, gradient):
    del interpret  # the reference's own gradient: XLA's products over all chunks at once, computed again
    *inputs, segment_ids = residuals
    _, pull = jax.vjp(functools.partial(gated_delta_reference, segment_ids=segment_ids), *inputs)
    return *pull(gradient), None


_chunks_triton.defvjp(_forward, _backward)
