"""The three kernels of `gated_delta`, which score and solve all chunks at once, then carry the state through them."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.device import num_processors
from pallas_kernels.gated_delta.masked_load import bounds_mask, load_in_bounds, num_bytes
from pallas_kernels.gated_delta.reference import CHUNK, gated_delta_reference
from pallas_kernels.gradients import differentiated_by

BLOCK = 16  # tokens per block of a chunk's triangular system, the minimum for tensor cores


@differentiated_by(gated_delta_reference, 7)  # recomputes the forward pass over all chunks at once
def gated_delta_triton(q, k, v, log_decay, beta, state, segment_ids, interpret):
    """Runs the three kernels, which score and solve all chunks at once, then carry the state through them."""
    (B, T, K, P), (J, Q) = q.shape, v.shape[2:]
    # First compute in parallel everything about the chunks that does not depend on the state.
    prepared = _prepare_chunks(q, k, log_decay, beta, segment_ids, J, interpret)
    num_chunks, chunk = prepared[-1].shape[2:]
    padded = max(BLOCK, pl.next_power_of_2(P))
    # The chunks run in sequence, so parallelism comes from the state's columns, which are split until there is one
    # program per processor. Every split reads all keys and queries again, mostly from L2.
    columns = max(BLOCK, min(pl.next_power_of_2(Q), 64))
    while columns > BLOCK and B * J * pl.cdiv(Q, columns) < num_processors():
        columns //= 2
    num_splits = pl.cdiv(Q, columns)
    keys = pl.BlockSpec((None, T, None, padded), lambda part, j, b: (b, 0, j // (J // K), 0))
    values = pl.BlockSpec((None, T, None, columns), lambda part, j, b: (b, 0, j, part))
    # The grid is (column splits, value heads, rows); each program reads all tokens and prepared chunks of its head.
    chunk_matrices = pl.BlockSpec((None, None, num_chunks, chunk, chunk), lambda part, j, b: (b, j, 0, 0, 0))
    chunk_vectors = pl.BlockSpec((None, None, num_chunks, chunk), lambda part, j, b: (b, j, 0, 0))
    states = pl.BlockSpec((None, None, padded, columns), lambda part, j, b: (b, j, 0, part))
    out_shape = [jax.ShapeDtypeStruct(like.shape, jnp.float32) for like in (v, state)]
    per_split = J // K * num_bytes(q, k) + num_bytes(*prepared) + 4 * B * J * num_chunks
    return pl.pallas_call(
        functools.partial(_chunks_kernel, width=P, value_width=Q),
        out_shape=out_shape,
        grid=(num_splits, J, B),
        in_specs=[keys, keys, values, chunk_matrices, chunk_matrices, chunk_vectors, chunk_vectors, states],
        out_specs=[values, states],
        input_output_aliases={7: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        cost_estimate=pl.CostEstimate(
            flops=B * J * num_chunks * chunk * Q * (6 * P + 4 * chunk),
            transcendentals=0,
            bytes_accessed=num_splits * per_split + num_bytes(v, state, *out_shape),
        ),
        interpret=interpret,
        name="gated_delta_chunks",
    )(q, k, v, *prepared, state)


def _prepare_chunks(q, k, log_decay, beta, segment_ids, num_value_heads, interpret):
    """Computes the parts of each chunk that do not depend on the state, for all chunks in parallel.

    Returns:
        `(I + system)^-1 diag(beta)` and the attention weights within the chunk, `[B, J, chunks, C, C]` in q's dtype,
        and the decays from the incoming state and to the outgoing state, `[B, J, chunks, C]` float32.
    """
    (B, T, K, P), J, dtype = q.shape, num_value_heads, q.dtype
    chunk = min(CHUNK, max(BLOCK, pl.next_power_of_2(T)))
    num_chunks = pl.cdiv(T, chunk)
    padded = max(BLOCK, pl.next_power_of_2(P))
    # Both kernels have the grid (chunks, value heads, rows), with one program for each chunk of a head.
    keys = pl.BlockSpec((None, chunk, None, padded), lambda n, j, b: (b, n, j // (J // K), 0))
    scalars = pl.BlockSpec((None, chunk, None), lambda n, j, b: (b, n, j))
    row = pl.BlockSpec((None, T), lambda n, j, b: (b, 0))
    matrix_spec = pl.BlockSpec((None, None, None, chunk, chunk), lambda n, j, b: (b, j, n, 0, 0))
    vector_spec = pl.BlockSpec((None, None, None, chunk), lambda n, j, b: (b, j, n, 0))
    chunk_matrices = functools.partial(jax.ShapeDtypeStruct, (B, J, num_chunks, chunk, chunk))
    chunk_vectors = jax.ShapeDtypeStruct((B, J, num_chunks, chunk), jnp.float32)
    segments = () if segment_ids is None else (segment_ids,)
    out_shape = [chunk_matrices(jnp.float32), chunk_matrices(dtype), chunk_vectors, chunk_vectors]
    num_programs = B * J * num_chunks
    # The first kernel computes how the tokens of a chunk depend on each other, and the decays.
    system, attention, decay_from_state, decay_to_state = pl.pallas_call(
        functools.partial(_scores_kernel, num_tokens=T, width=P),
        out_shape=out_shape,
        grid=(num_chunks, J, B),
        in_specs=[keys, keys, scalars, scalars, *[row] * len(segments)],
        out_specs=[matrix_spec, matrix_spec, vector_spec, vector_spec],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=num_programs * 4 * chunk**2 * P,
            transcendentals=num_programs * (chunk**2 + chunk),
            bytes_accessed=J // K * num_bytes(q, k)
            + num_bytes(log_decay, beta, *out_shape)
            + len(segments) * num_programs * 4 * (chunk + 1),
        ),
        interpret=interpret,
        name="gated_delta_scores",
    )(q, k, log_decay, beta, *segments)
    # The triangular systems stay float32 between the two kernels, because inverting them loses precision.
    inverse_beta = pl.pallas_call(
        functools.partial(_solve_kernel, num_tokens=T),
        out_shape=chunk_matrices(dtype),
        grid=(num_chunks, J, B),
        in_specs=[matrix_spec, scalars],
        out_specs=matrix_spec,
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=num_programs * chunk**3,
            transcendentals=0,
            bytes_accessed=num_programs * 2 * chunk * (chunk + BLOCK) + num_bytes(attention, beta),  # lower blocks only
        ),
        interpret=interpret,
        name="gated_delta_solve",
    )(system, beta)
    return inverse_beta, attention, decay_from_state, decay_to_state


def _dot(a, b, **transposed):
    """Multiplies with float32 accumulation.

    Each float32 factor is split into three bfloat16 numbers. Six products of these numbers run on tensor cores, and
    together they are as exact as a float32 product. NVIDIA GPUs have no float32 matrix instructions, and Triton would
    hold both float32 operands in registers and spill them.
    """
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6 if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision, **transposed)


def _scores_kernel(q_ref, k_ref, log_decay_ref, beta_ref, *refs, num_tokens, width):
    """Scores one chunk of C tokens from q_ref, k_ref [C, padded], log_decay_ref, beta_ref [C], optional segments [T].

    Writes system_ref [C, C], which describes how each correction depends on earlier corrections, and attention_ref
    [C, C], which maps corrections to outputs. Also writes the decays from the incoming state and to the outgoing state,
    decay_from_state_ref and decay_to_state_ref [C].

    Calculated bottleneck on an H100: memory traffic. The kernel reads queries and keys once per value head and writes
    two [C, C] arrays.
    """
    *segment_ref, system_ref, attention_ref, decay_from_state_ref, decay_to_state_ref = refs
    chunk, padded = q_ref.shape
    # Load the chunk; positions after the last token load as 0 and have no effect.
    begin, index = pl.program_id(0) * chunk, jnp.arange(chunk)
    num_left = num_tokens - begin if num_tokens % chunk else chunk
    log_decay, beta = (load_in_bounds(ref, (chunk,), (num_left,)) for ref in (log_decay_ref, beta_ref))
    q, k = (load_in_bounds(ref, (chunk, padded), (num_left, width)) for ref in (q_ref, k_ref))
    is_earlier = index[:, None] > index[None, :]
    # decay[i, j] is the decay from token j to token i. Compute each sum separately, because a difference of running
    # sums would lose its digits to the large sums of earlier decays.
    steps = jnp.where(is_earlier, log_decay[:, None], 0.0)
    decay = jnp.where(index[:, None] >= index[None, :], jnp.exp(jnp.cumsum(steps, axis=0)), 0.0)
    decay_from_state = jnp.exp(jnp.cumsum(log_decay))
    # The decay is 0 between tokens of different segments, and from an incoming state to a different segment. Indices
    # are clamped, so positions after the last token continue its segment.
    if segment_ref:
        (ids,) = segment_ref
        segment = plt.load(ids.at[jnp.minimum(begin + index, num_tokens - 1)])
        decay = jnp.where(segment[:, None] == segment[None, :], decay, 0.0)
        decay_from_state = jnp.where(segment == plt.load(ids.at[jnp.maximum(begin - 1, 0)]), decay_from_state, 0.0)
    # Write the outputs. The last row of `decay` holds the decays from each token to the outgoing state. The attention
    # within the chunk is stored in q's dtype, in which the next matmul reads it. The strictly lower triangular system
    # stays in float32, because it will be inverted.
    plt.store(decay_from_state_ref, decay_from_state)
    plt.store(decay_to_state_ref, jnp.sum(jnp.where(index[:, None] == chunk - 1, decay, 0.0), axis=0))
    plt.store(attention_ref, (decay * _dot(q, k, trans_b=True)).astype(attention_ref.dtype))
    plt.store(system_ref, jnp.where(is_earlier, beta[:, None] * decay * _dot(k, k, trans_b=True), 0.0))


def _solve_kernel(system_ref, beta_ref, inverse_ref, *, num_tokens):
    """Computes `(I + system)^-1 diag(beta)` for one chunk, with one warp and blocks of 16 tokens.

    `system` and the result are [C, C], beta_ref is [C]. Calculated bottleneck on an H100: latency, because the small
    products depend on each other; little memory is moved. This is a separate kernel because fusing it with the score
    computation spills registers, which costs more than writing the systems to memory and reading them back.
    """
    chunk = system_ref.shape[0]
    blocks = range(chunk // BLOCK)
    tokens = [pl.ds(block * BLOCK, BLOCK) for block in blocks]
    inverse = {}
    # Block forward substitution. For each row of blocks, invert the diagonal block, then compute the inverse's blocks
    # to its left from the rows above: `inv[i, j] = -inv[i, i] sum_m system[i, m] inv[m, j]`.
    for later in blocks:
        system = [plt.load(system_ref.at[tokens[later], tokens[earlier]]) for earlier in blocks[: later + 1]]
        inverse[later, later] = _invert_unit_lower(system[later])
        for earlier in blocks[:later]:
            products = [_dot(system[between], inverse[between, earlier]) for between in range(earlier, later)]
            inverse[later, earlier] = -_dot(inverse[later, later], sum(products[1:], products[0]))
    # Multiply column j by beta_j and store. Blocks above the diagonal are zero.
    for column in blocks:
        num_left = num_tokens - pl.program_id(0) * chunk - column * BLOCK if num_tokens % chunk else BLOCK
        beta = load_in_bounds(beta_ref.at[tokens[column]], (BLOCK,), (num_left,))
        for row in blocks:
            part = inverse[row, column] * beta[None, :] if row >= column else jnp.zeros((BLOCK, BLOCK))
            plt.store(inverse_ref.at[tokens[row], tokens[column]], part.astype(inverse_ref.dtype))


def _invert_unit_lower(system):
    """Inverts `I + system` for a strictly lower triangular block [16, 16].

    Joins the inverses of diagonal blocks of 1, 2, 4 and 8 rows in pairs, as forward substitution does. A product of
    powers of `system` would need as many steps, but its terms cancel and lose digits when keys repeat.
    """
    index = jnp.arange(BLOCK)
    inverse = (index[:, None] == index[None, :]).astype(jnp.float32)
    size = 1
    while size < BLOCK:
        # `coupling` holds the part of the system below the diagonal that couples the two halves of each pair of blocks.
        block, block_pair = index // size, index // (2 * size)
        is_coupling = (block_pair[:, None] == block_pair[None, :]) & (block[:, None] != block[None, :])
        coupling = jnp.where(is_coupling, system, 0.0)
        inverse = inverse - (coupling if size == 1 else _dot(inverse, _dot(coupling, inverse)))
        size *= 2
    return inverse


def _chunks_kernel(
    q_ref,
    k_ref,
    v_ref,
    inverse_ref,
    attention_ref,
    decay_from_state_ref,
    decay_to_state_ref,
    state_ref,
    out_ref,
    last_state_ref,
    *,
    width,
    value_width,
):
    """Carries some columns of one head's state, in registers, through all chunks of C tokens.

    q_ref and k_ref are [T, padded], v_ref and out_ref [T, columns], state_ref and last_state_ref [padded, columns]. The
    other refs are the outputs of `_scores_kernel` and `_solve_kernel` with a leading chunk axis.

    Calculated bottleneck on an H100: latency. A chunk needs five small products, three of which depend on each other,
    and each chunk depends on the previous one. At batch 1 there is about one program per SM, and two pipeline stages
    load the next chunk in the meantime. float32 is only for tests, because it spills registers and exceeds the shared
    memory of an MI300X.
    """
    (num_tokens, padded), (num_chunks, chunk), columns = q_ref.shape, decay_from_state_ref.shape, v_ref.shape[1]
    num_columns = value_width - pl.program_id(0) * columns if value_width % columns else columns

    def step(n, state):
        # Load the chunk's tokens in their own dtype and its decays in float32.
        tokens = pl.ds(n * chunk, chunk)
        num_left = num_tokens - n * chunk if num_tokens % chunk else chunk
        q, k = (load_in_bounds(ref.at[tokens], (chunk, padded), (num_left, width)) for ref in (q_ref, k_ref))
        v = load_in_bounds(v_ref.at[tokens], (chunk, columns), (num_left, num_columns))
        decay_from_state, decay_to_state = (
            plt.load(ref.at[n])[:, None] for ref in (decay_from_state_ref, decay_to_state_ref)
        )
        # `chunk_decay` is the decay of the state over the whole chunk. Products use the state rounded to v's dtype; the
        # carried state stays float32.
        chunk_decay = plt.load(decay_from_state_ref.at[n, jnp.int32(chunk - 1)])
        rounded_state = state.astype(v.dtype)
        # For the chunk's corrections, subtract the incoming state's prediction for each key from v. The inverse then
        # resolves how the corrections depend on each other.
        residual = v.astype(jnp.float32) - decay_from_state * _dot(k, rounded_state)
        corrections = _dot(plt.load(inverse_ref.at[n]), residual.astype(v.dtype))
        # The outputs read the incoming state with q, and add the chunk's own corrections.
        output = decay_from_state * _dot(q, rounded_state)
        output += _dot(plt.load(attention_ref.at[n]), corrections.astype(v.dtype))
        plt.store(out_ref.at[tokens], output, mask=bounds_mask((chunk, columns), (num_left, num_columns)))
        # The outgoing state is the decayed state plus the sum of k u^T with each token's remaining decay.
        return chunk_decay * state + _dot(k, (decay_to_state * corrections).astype(v.dtype), trans_a=True)

    limits = (width, num_columns)
    state = load_in_bounds(state_ref, (padded, columns), limits)
    state = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_chunks), step, state)
    plt.store(last_state_ref, state, mask=bounds_mask((padded, columns), limits))
