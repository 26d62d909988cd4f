"""Cache capacity and pass width: the shapes that a decoding call is compiled for."""


def bucket(size: int) -> int:
    """Rounds a number of cache slots up, so that calls of similar lengths share one compiled program.

    Args:
        size: slots needed.

    Returns:
        256, then multiples of 128; from 1024 on steps that waste at most a quarter.
    """
    step = max(128, 2 ** (size.bit_length() - 3))
    return max(256, -(-size // step) * step)


def cache_capacity(prompt: int, length: int, *, widest: int, chunk: int) -> int:
    """Computes the cache slots per row of a call.

    Attention reads every slot, so no slot is allocated that nothing writes to.

    Args:
        prompt: tokens of the longest prompt.
        length: tokens of the longest sequence, prompt included.
        widest: most slots that a round writes behind the committed text.
        chunk: tokens per prefill pass; prefill writes whole chunks.

    Returns:
        Slots per row, rounded up by `bucket`.
    """
    return bucket(max(-(-prompt // chunk) * chunk, length) + widest + 1)


def min_rows_per_pass(batch: int, platform: str, implementation: str) -> int:
    """Computes the fewest token rows per forward pass that run fast.

    On a GPU, XLA turns a matrix product with a single row into an elementwise product of the matrix's size. Padding
    the pass to two rows avoids that. The Triton kernels accept a single row.

    Args:
        batch: rows of the call, B.
        platform: "cpu", "cuda" or "rocm".
        implementation: the model's kernel implementation.

    Returns:
        1 or 2.
    """
    return 2 if batch == 1 and platform != "cpu" and implementation != "triton" else 1
