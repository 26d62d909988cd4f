"""Chooses the cache capacity and the pass width, which are the shapes that a decoding call is compiled for."""

from mtpjax.models.config import Implementation, ModelConfig

MIN_PREFILL_CHUNK, MAX_PREFILL_CHUNK = 64, 2048  # tokens
MAX_ACTIVATION_BYTES = 2**30  # limit for the widest array of a prefill pass


def round_up_capacity(size: int) -> int:
    """Rounds a number of cache slots up, so that calls of similar lengths share one compiled program.

    Args:
        size: number of slots needed.

    Returns:
        At least 256 slots, in multiples of 128. From 1024 slots on, the result is a multiple of a quarter of the
        largest power of two up to `size`, which adds at most a quarter of `size`.
    """
    step = _capacity_step(size)
    return max(256, -(-size // step) * step)


def round_down_capacity(size: int) -> int:
    """Returns the largest result of `round_up_capacity` that is at most `size` slots; 0 if there is none."""
    step = _capacity_step(size)
    return size // step * step if size >= 256 else 0


def _capacity_step(size: int) -> int:
    return max(128, 2 ** (size.bit_length() - 3))


def choose_prefill_chunk(
    config: ModelConfig,
    batch: int,
    platform: str,
    *,
    implementation: Implementation,
    longest_prompt: int,
    max_length: int,
) -> int:
    """Chooses the number of tokens per row in one prefill pass.

    Each pass reads all weights, so on a GPU longer prompts get longer chunks, if the widest array of a pass fits
    into 1 GiB. It contains either the feed-forward activations, or the float32 scores `[B, heads, chunk, slots]` of an
    indexer or of XLA attention. On a CPU, short chunks are as fast as long ones and need less padding.

    Args:
        batch: number of rows in the call, B.
        platform: "cpu", "cuda" or "rocm".
        implementation: implementation of the model's kernels.
        longest_prompt: number of tokens in the longest prompt.
        max_length: number of tokens in the longest sequence, prompt included.

    Returns:
        A power of two: 64 on a CPU, else 64..2048.
    """
    chunk = MIN_PREFILL_CHUNK
    if platform == "cpu":
        return chunk
    widest = 2 * max(config.intermediate_size, config.num_experts_per_tok * config.moe_intermediate_size)
    if implementation == "xla" or config.index_topk:
        widest = max(widest, config.num_attention_heads * max_length)
    while chunk < min(MAX_PREFILL_CHUNK, longest_prompt) and 2 * chunk * 4 * batch * widest <= MAX_ACTIVATION_BYTES:
        chunk *= 2
    return chunk


def min_rows_per_pass(config: ModelConfig, batch: int, platform: str) -> int:
    """Computes the minimum number of token rows that a forward pass needs to be fast.

    On a GPU, a pass over a single row needs more kernel launches than a pass over two rows, because XLA does not use
    the tensor cores for its matmuls and fuses fewer operations around them. A model with experts keeps a single row,
    because a second row would activate more experts.

    Args:
        batch: number of rows in the call, B.
        platform: "cpu", "cuda" or "rocm".

    Returns:
        1 or 2.
    """
    return 2 if batch == 1 and platform != "cpu" and not config.is_moe else 1
