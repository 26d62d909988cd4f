"""Describes kernel costs for which `pl.CostEstimate` has no field."""

# Largest array, in bytes, that is assumed to stay in the L2 cache. An H100 has 50 MB, an MI300X 4 MB on each die.
MAX_L2_OPERAND_BYTES = 4 * 2**20


def loads_from_l2(*arrays: tuple[int, int]) -> dict[str, str]:
    """Returns a kernel's `metadata`, the number of its declared bytes that are repeated loads from the L2 cache.

    Several programs load the same small operand, such as x. Only the first load reaches memory, so a count of memory
    traffic subtracts the others. Weights and caches are never listed, because all of their bytes come from memory.

    Args:
        arrays: (bytes, number of loads by all programs together) of each operand. Operands larger than
            `MAX_L2_OPERAND_BYTES` count as read from memory every time.

    Returns:
        `{"from_l2": bytes}`, as text because XLA's metadata holds only text.
    """
    return {"from_l2": str(sum(nbytes * (times - 1) for nbytes, times in arrays if nbytes <= MAX_L2_OPERAND_BYTES))}
