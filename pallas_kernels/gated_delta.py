"""The gated delta rule, a linear attention with one recurrent state per head: ops, kernels and references.

Per token `S <- exp(log_decay) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q` (2412.06464, equation 10). u is
the token's correction.

| op | use | limit on a GPU |
|---|---|---|
| `gated_delta_verify` | a few draft tokens: outputs and corrections u, no state | bytes: reads the state |
| `gated_delta_replay` | the state after the accepted ones | bytes: XLA reads and writes the state, no kernel |
| `gated_delta_steps` | a few committed tokens: outputs and the last state | bytes: reads and writes the state |
| `gated_delta` | prefill and training, by chunks: outputs and the last state | latency, see the kernels |

Verify plus replay move the state three times, whatever the number W of draft tokens. Keeping a state after each token
would move it W + 4 times (read, W written; two read and one written to select one) and would hold W states of every
layer until the tokens are accepted.

Shapes in all ops: q and k `[B, T, K, P]` for K key heads, v `[B, T, J, Q]` for J value heads, all of one floating
dtype. Value head j reads key head j // (J / K). log_decay (at most 0) and beta are `[B, T, J]` float32, the state `[B,
J, P, Q]` float32. Outputs and corrections are `[B, T, J, Q]` float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import choose

CHUNK = 64  # tokens per chunk of `gated_delta`
BLOCK = 16  # tokens per block of a chunk's triangular system; the fewest that a tensor core multiplies
FEW_TOKENS = 16  # plain JAX unrolls the loop over at most this many tokens
# The chunked kernel narrows its columns until it has this many programs; an H100 runs 132 at once.
FEW_PROGRAMS = 128


def gated_delta_verify(q, k, v, log_decay, beta, state, *, implementation="auto") -> tuple[jax.Array, jax.Array]:
    """Computes outputs and corrections of draft tokens, one after the other, without changing the state.

    `gated_delta_replay` computes the state after the accepted tokens. All arithmetic is float32 and in the same order
    for any T, so a token's result does not depend on the tokens after it. The kernel has no gradient.

    Args:
        q: `[B, T, K, P]` queries.
        k: `[B, T, K, P]` keys.
        v: `[B, T, J, Q]` values.
        log_decay: `[B, T, J]` float32, at most 0.
        beta: `[B, T, J]` float32.
        state: `[B, J, P, Q]` float32.
        implementation: "xla" (the reference), "triton" (the kernel, on CUDA and ROCm), "interpreted" (the kernel in
            Pallas's interpreter, on any machine) or "auto"; see `pallas_kernels.dispatch`.

    Returns:
        Outputs and corrections, `[B, T, J, Q]` float32 each.

    Raises:
        ValueError: The implementation is unknown, or shapes or dtypes do not fit.
    """
    shape = _shape(q, k, v, log_decay, beta, state)
    chosen = choose("gated_delta_verify", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        output, corrections, _ = gated_delta_steps_reference(q, k, v, log_decay, beta, state)
        return output, corrections
    return _steps_triton(q, k, v, log_decay, beta, state, is_known=False, interpret=chosen == "interpreted")


def gated_delta_steps(q, k, v, log_decay, beta, state, *, implementation="auto") -> tuple[jax.Array, jax.Array]:
    """Computes outputs of committed tokens, one after the other, and the state after the last one.

    Args:
        q: `[B, T, K, P]` queries.
        k: `[B, T, K, P]` keys.
        v: `[B, T, J, Q]` values.
        log_decay: `[B, T, J]` float32, at most 0.
        beta: `[B, T, J]` float32.
        state: `[B, J, P, Q]` float32; the kernel updates it in place.
        implementation: As in `gated_delta_verify`.

    Returns:
        Outputs `[B, T, J, Q]` and the last state `[B, J, P, Q]`, float32.

    Raises:
        ValueError: The implementation is unknown, or shapes or dtypes do not fit.
    """
    shape = _shape(q, k, v, log_decay, beta, state)
    chosen = choose("gated_delta_steps", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        output, _, state = gated_delta_steps_reference(q, k, v, log_decay, beta, state)
        return output, state
    return _steps_triton(q, k, v, log_decay, beta, state, is_known=True, interpret=chosen == "interpreted")


def gated_delta_replay(k, log_decay, corrections, state, taken) -> jax.Array:
    """Computes the state after the accepted tokens from the corrections of `gated_delta_verify`.

    The result equals the state that `gated_delta_steps` computes, up to the last bit: compilers may or may not round
    between product and sum. XLA reads the state once and writes it in place.

    Args:
        k: `[B, T, K, P]` keys of the draft tokens.
        log_decay: `[B, T, J]` float32.
        corrections: `[B, T, J, Q]` float32, from `gated_delta_verify`.
        state: `[B, J, P, Q]` float32, the state before the draft tokens.
        taken: `[B]` integer, number of accepted tokens per row.

    Returns:
        The state `[B, J, P, Q]` float32.
    """
    (B, J, P, Q), (T, K) = state.shape, k.shape[1:3]
    # Rejected tokens get decay 1 and correction 0, so their steps leave the state unchanged. All rows run T steps.
    is_taken = (jnp.arange(T)[None, :] < taken[:, None])[:, :, None]
    decay = jnp.exp(jnp.where(is_taken, log_decay, 0.0)).reshape(B, T, K, J // K, 1, 1)
    corrections = jnp.where(is_taken[..., None], corrections, 0.0).reshape(B, T, K, J // K, 1, Q)
    k = k.astype(jnp.float32).reshape(B, T, K, 1, P, 1)

    def step(state, token):
        decay, k, correction = token
        return state * decay + k * correction, None

    # Without q and v a step needs no product with the state: it decays and adds a rank-one update.
    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (decay, k, corrections))
    replayed, _ = jax.lax.scan(step, state.reshape(B, K, J // K, P, Q), tokens, unroll=T <= FEW_TOKENS)
    return replayed.reshape(state.shape)


def gated_delta(
    q, k, v, log_decay, beta, state, *, segment_ids=None, implementation="auto"
) -> tuple[jax.Array, jax.Array]:
    """Runs many tokens by chunks, for prefill and training.

    The kernel multiplies in float32 if v is float32. Otherwise it rounds the factors of each product to v's dtype,
    except those of the triangular systems, and accumulates in float32. Differentiable in reverse mode: the backward
    pass differentiates the reference and recomputes the forward pass.

    Args:
        q: `[B, T, K, P]` queries.
        k: `[B, T, K, P]` keys.
        v: `[B, T, J, Q]` values.
        log_decay: `[B, T, J]` float32, at most 0.
        beta: `[B, T, J]` float32.
        state: `[B, J, P, Q]` float32.
        segment_ids: `[B, T]` int32, or None. Each document starts from an empty state, the first one from `state`.
        implementation: As in `gated_delta_verify`.

    Returns:
        Outputs `[B, T, J, Q]` and the last state `[B, J, P, Q]`, float32.

    Raises:
        ValueError: The implementation is unknown, or shapes or dtypes do not fit.
    """
    shape = _shape(q, k, v, log_decay, beta, state, segment_ids)
    chosen = choose("gated_delta", implementation, ("xla", "triton"), shape)
    if chosen == "xla":
        return gated_delta_reference(q, k, v, log_decay, beta, state, segment_ids=segment_ids)
    return _chunks_triton(q, k, v, log_decay, beta, state, segment_ids, chosen == "interpreted")


def _shape(q, k, v, log_decay, beta, state, segment_ids=None) -> dict[str, int | str]:
    """Returns the sizes that the dispatcher chooses by; raises ValueError for arguments that do not fit together."""
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q {q.shape} and v {v.shape} are not [batch, tokens, heads, width]")
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    # Every other shape follows from q and v.
    expected = {"k": (k, (B, T, K, P)), "v": (v, (B, T, J, Q)), "log_decay": (log_decay, (B, T, J))}
    expected |= {"beta": (beta, (B, T, J)), "state": (state, (B, J, P, Q))}
    if segment_ids is not None:
        expected["segment_ids"] = (segment_ids, (B, T))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} {array.shape} does not fit q {q.shape} and v {v.shape}: it should be {shape}")
    if J % K:
        raise ValueError(f"{J} value heads are not a multiple of {K} key heads")
    if B * T == 0:
        raise ValueError(f"q {q.shape} holds no tokens")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(v.dtype, jnp.floating):
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, not of one floating dtype")
    for name, array in {"log_decay": log_decay, "beta": beta, "state": state}.items():
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} is {array.dtype}, not float32")
    return {"rows": B, "tokens": T, "heads": J, "state": P * Q, "dtype": str(v.dtype)}


def _to_value_heads(q, k, v):
    """Converts to float32 and repeats each key head's queries and keys for its value heads."""
    groups = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x.astype(jnp.float32), groups, axis=2) for x in (q, k))
    return q, k, v.astype(jnp.float32)


def gated_delta_steps_reference(q, k, v, log_decay, beta, state):
    """Computes outputs, corrections and the last state token by token; this defines the meaning of every op here."""

    def step(state, token):
        q, k, v, log_decay, beta = token
        # Decay the state, correct it where it predicts v wrongly for this key, then read it with the query.
        state = state * jnp.exp(log_decay)[:, :, None, None]
        correction = (v - jnp.einsum("BJPQ,BJP->BJQ", state, k)) * beta[:, :, None]
        state = state + k[:, :, :, None] * correction[:, :, None, :]
        return state, (jnp.einsum("BJPQ,BJP->BJQ", state, q), correction)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (*_to_value_heads(q, k, v), log_decay, beta))
    state, made = jax.lax.scan(step, state, tokens, unroll=q.shape[1] <= FEW_TOKENS)
    return *(x.swapaxes(0, 1) for x in made), state


def gated_delta_reference(q, k, v, log_decay, beta, state, *, segment_ids=None):
    """Computes `gated_delta` by chunks in plain JAX: outputs and the last state.

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
        """`[B, T, J, ...]` -> `[chunks, B, J, C, ...]`, the last chunk padded."""
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:])), mode=mode)
        x = x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)
        return x.swapaxes(2, 3) if x.ndim > 3 else x

    # Split into chunks. Padding has k, v, beta and log_decay 0, so it changes neither outputs nor state.
    segment = chunks(segment_ids, "edge")  # [chunks, B, C]
    before = jnp.concatenate([segment[:1, :, :1], segment[:-1, :, -1:]])  # the incoming state's segment
    q, k, v, log_decay, beta = (chunks(x) for x in (q, k, v, log_decay, beta))
    index = jnp.arange(C)
    sees = (segment[:, :, :, None] == segment[:, :, None, :]) & (index[:, None] >= index[None, :])[None, None]
    is_before = (index[:, None] > index[None, :])[None, None, None]
    # Decay from token j to token i, [.., i, j]; 0 across documents. Each sum runs separately: a difference of running
    # sums would lose its digits to the large sums of earlier decays.
    steps = jnp.where(is_before, log_decay[..., :, None], 0)
    decay = jnp.exp(jnp.where(sees[:, :, None], jnp.cumsum(steps, axis=-2), -jnp.inf))
    # Decay from the incoming state to each token, and from each token to the outgoing state.
    from_state = jnp.where((segment == before)[:, :, None], jnp.exp(jnp.cumsum(log_decay, axis=-1)), 0)
    to_state = decay[..., -1, :]

    # Solve the triangular system for all chunks at once. The incoming state is not known yet, so solve for both parts
    # of `u = update - correction @ state` separately.
    system = jnp.where(is_before, beta[..., None] * decay * jnp.einsum("nBJIP,nBJKP->nBJIK", k, k), 0)
    given = beta[..., None] * jnp.concatenate([v, from_state[..., None] * k], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, given, lower=True, unit_diagonal=True)
    update, correction = jnp.split(solved, [v.shape[-1]], axis=-1)
    # Attention within the chunk: how much each correction contributes to each output.
    within = decay * jnp.einsum("nBJIP,nBJKP->nBJIK", q, k)

    def step(state, chunk):
        # Only this part is sequential: the state passes from chunk to chunk through four products.
        update, correction, within, q, k, keeps = chunk
        update = update - correction @ state
        output = q @ state + within @ update
        return keeps[:, :, None, None] * state + jnp.einsum("BJCP,BJCQ->BJPQ", k, update), output

    chunk = (update, correction, within, q * from_state[..., None], k * to_state[..., None], from_state[..., -1])
    state, output = jax.lax.scan(step, state, chunk)
    return output.transpose(1, 0, 3, 2, 4).reshape(B, T + pad, J, -1)[:, :T], state


def _mask(shape, limits):
    """Returns a mask that is true where each index is below its limit, or None if that is everywhere.

    A mask that is always true would still cost comparisons and registers.
    """
    mask = None
    for axis, (size, limit) in enumerate(zip(shape, limits, strict=True)):
        if isinstance(limit, int) and size <= limit:
            continue
        inside = jnp.expand_dims(jnp.arange(size) < limit, tuple(other for other in range(len(shape)) if other != axis))
        mask = inside if mask is None else mask & inside
    return mask if mask is None else jnp.broadcast_to(mask, shape)


def _load(ref, shape, limits):
    """Loads a ref of this shape in its dtype, with 0 from the limits on; memory beyond the limits is not read."""
    mask = _mask(shape, limits)
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=0.0)


def _bytes(*arrays) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _steps_triton(q, k, v, log_decay, beta, state, *, is_known, interpret):
    """Runs the token-by-token kernel: outputs, and the last state if the tokens are known to stay, else corrections.

    Each program keeps some columns of one head's state in registers through all tokens.
    """
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    padded = pl.next_power_of_2(P)
    # The columns of a state are independent, so they are split over programs: 32 float32 columns are loads of 128
    # bytes, and several programs fit an SM. Every split reads all queries and keys again.
    columns = min(pl.next_power_of_2(Q), 32)
    num_splits = pl.cdiv(Q, columns)
    per_split = J // K * _bytes(q, k) + _bytes(log_decay, beta)
    # Grid: (column splits, value heads, rows). A value head reads the queries and keys of its key head.
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
        # Update the state in place, so that a loop which carries it makes no copy.
        input_output_aliases={5: 1} if is_known else {},
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
    """q_ref, k_ref [T, padded], v_ref, out_ref [T, columns], state_ref [padded, columns]; made_ref like state or v.

    Limit, by calculation for an H100 and heads of 128 x 128: for one token, the bytes of the state. Each further token
    adds 4 operations per element of the state, so arithmetic may dominate from about 5 tokens on. At batch 1 the
    programs are too few to fill the memory pipeline, and the time is the latency of one load plus T steps.
    """
    (num_tokens, padded), columns = q_ref.shape, v_ref.shape[1]
    num_columns = value_width - pl.program_id(0) * columns if value_width % columns else columns
    limits, value_mask = (width, num_columns), _mask((columns,), (num_columns,))

    def load(t):
        """Loads one token: q, k [padded, 1], v [columns], log_decay and beta, in float32."""
        q, k = (_load(ref.at[t], (padded,), (width,)).astype(jnp.float32)[:, None] for ref in (q_ref, k_ref))
        v = _load(v_ref.at[t], (columns,), (num_columns,)).astype(jnp.float32)
        return q, k, v, plt.load(log_decay_ref.at[t]), plt.load(beta_ref.at[t])

    def step(t, state, token):
        q, k, v, log_decay, beta = token
        # The rule of the module docstring on [padded, columns], in float32: decay, correct, add k u^T, read with q.
        state = state * jnp.exp(log_decay)
        correction = (v - jnp.sum(state * k, axis=0)) * beta
        state = state + k * correction[None, :]
        plt.store(out_ref.at[t], jnp.sum(state * q, axis=0), mask=value_mask)
        if not is_known:
            plt.store(made_ref.at[t], correction, mask=value_mask)
        return state

    def step_and_load(t, carry):
        # Start the loads of the next token before computing this one, so that their latency overlaps.
        following = load(t + 1)
        return step(t, *carry), following

    # Load the state once, run all tokens on it in registers, and write it only if the tokens are known to stay. The
    # last token runs outside the loop because no token follows to be loaded.
    last = jnp.int32(num_tokens - 1)
    carry = (_load(state_ref, (padded, columns), limits), load(jnp.int32(0)))
    carry = jax.lax.fori_loop(jnp.int32(0), last, step_and_load, carry)
    state = step(last, *carry)
    if is_known:
        plt.store(made_ref, state, mask=_mask((padded, columns), limits))


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _chunks_triton(q, k, v, log_decay, beta, state, segment_ids, interpret):
    """Runs the three chunk kernels: scores and solve for all chunks at once, then the state through all chunks."""
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    # Everything about a chunk that does not depend on the state is computed in parallel beforehand.
    prepared = _prepare_chunks(q, k, log_decay, beta, segment_ids, J, interpret)
    num_chunks, chunk = prepared[-1].shape[2:]
    padded = max(BLOCK, pl.next_power_of_2(P))
    # The chunks are sequential, so parallelism comes from columns of the state: narrow them until the programs fill an
    # H100. Every split reads all keys and queries again, mostly from L2.
    columns = max(BLOCK, min(pl.next_power_of_2(Q), 64))
    while columns > BLOCK and B * J * pl.cdiv(Q, columns) < FEW_PROGRAMS:
        columns //= 2
    num_splits = pl.cdiv(Q, columns)
    keys = pl.BlockSpec((None, T, None, padded), lambda part, j, b: (b, 0, j // (J // K), 0))
    values = pl.BlockSpec((None, T, None, columns), lambda part, j, b: (b, 0, j, part))
    # Grid: (column splits, value heads, rows); each program sees all tokens and all prepared chunks of its head.
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
    """Computes the parts of each chunk that do not depend on the state, for all chunks in parallel.

    Returns:
        `(I + system)^-1 diag(beta)` and the weights within the chunk, `[B, J, chunks, C, C]` in q's dtype, and the
        decays from the incoming and to the outgoing state, `[B, J, chunks, C]` float32.
    """
    (B, T, K, P), J, dtype = q.shape, num_value_heads, q.dtype
    chunk = min(CHUNK, max(BLOCK, pl.next_power_of_2(T)))
    num_chunks = pl.cdiv(T, chunk)
    padded = max(BLOCK, pl.next_power_of_2(P))
    # Grid of both kernels: (chunks, value heads, rows), one program per chunk of a head.
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
    # The triangular systems stay float32 between the two kernels, because inverting them loses digits.
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
            bytes_accessed=programs * 2 * chunk * (chunk + BLOCK) + _bytes(within, beta),  # lower blocks only
        ),
        interpret=interpret,
        name="gated_delta_solve",
    )(system, beta)
    return solve, within, from_state, to_state


def _dot(a, b, **transposed):
    """Multiplies with float32 accumulation.

    float32 factors are split into three bfloat16 numbers each, and six of their products together are as exact as a
    float32 product. They run on tensor cores. NVIDIA has no float32 matrix instructions, and Triton would hold both
    operands in registers and spill them.
    """
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision, **transposed)


def _scores_kernel(q_ref, k_ref, log_decay_ref, beta_ref, *refs, num_tokens, width):
    """One chunk of C tokens: q_ref, k_ref [C, padded], log_decay_ref, beta_ref [C], optionally a row's segments [T].

    Writes system_ref [C, C], how each correction depends on earlier ones; within_ref [C, C], from corrections to
    outputs; from_state_ref and to_state_ref [C], the decays from the incoming and to the outgoing state.

    Limit, by calculation for an H100: bytes. It reads queries and keys once per value head and writes two [C, C]
    arrays.
    """
    *segment_ref, system_ref, within_ref, from_state_ref, to_state_ref = refs
    chunk, padded = q_ref.shape
    # Load the chunk; tokens after the last one load as 0 and change nothing.
    begin, index = pl.program_id(0) * chunk, jnp.arange(chunk)
    left = num_tokens - begin if num_tokens % chunk else chunk
    log_decay, beta = (_load(ref, (chunk,), (left,)) for ref in (log_decay_ref, beta_ref))
    q, k = (_load(ref, (chunk, padded), (left, width)) for ref in (q_ref, k_ref))
    is_before = index[:, None] > index[None, :]
    # decay[i, j], from token j to token i. Each sum runs separately: a difference of running sums would lose its digits
    # to the large sums of earlier decays.
    steps = jnp.where(is_before, log_decay[:, None], 0.0)
    decay = jnp.where(index[:, None] >= index[None, :], jnp.exp(jnp.cumsum(steps, axis=0)), 0.0)
    from_state = jnp.exp(jnp.cumsum(log_decay))
    # Documents: no decay passes between tokens of different segments, nor from a state of another segment. Indices are
    # clamped, so tokens after the last one continue its segment.
    if segment_ref:
        (ids,) = segment_ref
        segment = plt.load(ids.at[jnp.minimum(begin + index, num_tokens - 1)])
        decay = jnp.where(segment[:, None] == segment[None, :], decay, 0.0)
        from_state = jnp.where(segment == plt.load(ids.at[jnp.maximum(begin - 1, 0)]), from_state, 0.0)
    # Write the decays (the last row of `decay` leads to the outgoing state), the attention within the chunk in q's
    # dtype for the next product, and the strictly lower triangular system in float32 for its inversion.
    plt.store(from_state_ref, from_state)
    plt.store(to_state_ref, jnp.sum(jnp.where(index[:, None] == chunk - 1, decay, 0.0), axis=0))
    plt.store(within_ref, (decay * _dot(q, k, trans_b=True)).astype(within_ref.dtype))
    plt.store(system_ref, jnp.where(is_before, beta[:, None] * decay * _dot(k, k, trans_b=True), 0.0))


def _solve_kernel(system_ref, beta_ref, solve_ref, *, num_tokens):
    """Computes `(I + system)^-1 diag(beta)` of one chunk, all [C, C]; beta_ref [C]. One warp, blocks of 16 tokens.

    Limit, by calculation for an H100: latency, since the small products depend on each other; the bytes are few. It is
    a kernel of its own because together with the scores it spills registers, which costs more than writing and reading
    the systems.
    """
    chunk = system_ref.shape[0]
    blocks = range(chunk // BLOCK)
    at = [pl.ds(block * BLOCK, BLOCK) for block in blocks]
    inverse = {}
    # Block forward substitution: invert the diagonal block, then each block to its left from the blocks already
    # inverted: `inv[i, j] = -inv[i, i] sum_m system[i, m] inv[m, j]`.
    for later in blocks:
        system = [plt.load(system_ref.at[at[later], at[earlier]]) for earlier in blocks[: later + 1]]
        inverse[later, later] = _inverse(system[later])
        for earlier in blocks[:later]:
            through = [_dot(system[middle], inverse[middle, earlier]) for middle in range(earlier, later)]
            inverse[later, earlier] = -_dot(inverse[later, later], sum(through[1:], through[0]))
    # Multiply column j by beta_j and store. Blocks above the diagonal are zero.
    for column in blocks:
        left = num_tokens - pl.program_id(0) * chunk - column * BLOCK if num_tokens % chunk else BLOCK
        beta = _load(beta_ref.at[at[column]], (BLOCK,), (left,))
        for row in blocks:
            part = inverse[row, column] * beta[None, :] if row >= column else jnp.zeros((BLOCK, BLOCK))
            plt.store(solve_ref.at[at[row], at[column]], part.astype(solve_ref.dtype))


def _inverse(system):
    """Inverts `I + system` for a strictly lower triangular block [16, 16].

    The inverses of diagonal blocks of 1, 2, 4 and 8 rows are joined in pairs, as forward substitution does. A product
    of powers of `system` takes as many steps, but its terms cancel and lose digits when keys repeat.
    """
    index = jnp.arange(BLOCK)
    inverse = (index[:, None] == index[None, :]).astype(jnp.float32)
    size = 1
    while size < BLOCK:
        # `joint` holds the part of the system below the diagonal that couples the two halves of each pair of blocks.
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
    """Runs some columns of one head's state, in registers, through all chunks of C tokens.

    q_ref, k_ref [T, padded], v_ref, out_ref [T, columns], state_ref, last_ref [padded, columns]; the other refs have a
    leading chunk axis, as `_scores_kernel` and `_solve_kernel` write them.

    Limit, by calculation for an H100: latency. A chunk is five small products, three of which wait for each other, and
    the next chunk waits for the last one. At batch 1 there is about one program per SM, and two pipeline stages load
    the next chunk meanwhile. float32 spills registers and exceeds the shared memory of an MI300X: it is for tests.
    """
    (num_tokens, padded), (num_chunks, chunk), columns = q_ref.shape, from_state_ref.shape, v_ref.shape[1]
    num_columns = value_width - pl.program_id(0) * columns if value_width % columns else columns

    def step(n, state):
        # Load the chunk: tokens in their own dtype, decays in float32.
        at = pl.ds(n * chunk, chunk)
        left = num_tokens - n * chunk if num_tokens % chunk else chunk
        q, k = (_load(ref.at[at], (chunk, padded), (left, width)) for ref in (q_ref, k_ref))
        v = _load(v_ref.at[at], (chunk, columns), (left, num_columns))
        from_state, to_state = (plt.load(ref.at[n])[:, None] for ref in (from_state_ref, to_state_ref))
        # `kept`: the decay of the state over the whole chunk. Products take the state rounded to v's dtype; the carried
        # state stays float32.
        kept = plt.load(from_state_ref.at[n, jnp.int32(chunk - 1)])
        factor = state.astype(v.dtype)
        # Corrections of the chunk: what the incoming state predicts for each key is subtracted from v, then the inverse
        # resolves how the corrections depend on each other.
        wanted = v.astype(jnp.float32) - from_state * _dot(k, factor)
        update = _dot(plt.load(solve_ref.at[n]), wanted.astype(v.dtype))
        # Outputs: the incoming state read with q, plus the chunk's own corrections.
        output = from_state * _dot(q, factor) + _dot(plt.load(within_ref.at[n]), update.astype(v.dtype))
        plt.store(out_ref.at[at], output, mask=_mask((chunk, columns), (left, num_columns)))
        # Outgoing state: decay, plus the sum of k u^T with each token's remaining decay.
        return kept * state + _dot(k, (to_state * update).astype(v.dtype), trans_a=True)

    limits = (width, num_columns)
    state = _load(state_ref, (padded, columns), limits)
    state = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_chunks), step, state)
    plt.store(last_ref, state, mask=_mask((padded, columns), limits))


def _forward(q, k, v, log_decay, beta, state, segment_ids, interpret):
    residuals = (q, k, v, log_decay, beta, state, segment_ids)
    return _chunks_triton(*residuals, interpret), residuals


def _backward(interpret, residuals, gradient):
    # Differentiate the reference, which recomputes the forward pass with XLA's matmuls over all chunks at once.
    del interpret
    *inputs, segment_ids = residuals
    _, pull = jax.vjp(functools.partial(gated_delta_reference, segment_ids=segment_ids), *inputs)
    return *pull(gradient), None


_chunks_triton.defvjp(_forward, _backward)
