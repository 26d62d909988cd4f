"""Frees compiled programs before the process runs out of memory mappings.

On a CPU, every compiled program uses tens of memory mappings, and Linux allows 65,530 per process (`vm.max_map_count`).
Beyond this limit, XLA fails with "LLVM compilation error: Cannot allocate memory".
"""

import gc
import logging
import pathlib

import jax

MAPS_FILE, LIMIT_FILE = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
log = logging.getLogger("mtpjax")


def free_programs_if_full(max_share: float = 0.5) -> bool:
    """Frees all compiled programs if the process uses more than a given share of the allowed memory mappings.

    Call it between requests in a long-running process, such as a server. It takes about a millisecond per thousand
    mappings. Programs that are needed again are compiled again, or read from the compilation cache.

    Args:
        max_share: the share of the mappings, 0..1, above which programs are freed.

    Returns:
        True if programs were freed. False if the share is not exceeded, or the system does not report mappings.

    Raises:
        ValueError: `max_share` is not within 0..1.

    Example:
        >>> from mtpjax.program_memory import free_programs_if_full
        >>> free_programs_if_full(max_share=1.0)
        False
    """
    if not 0 <= max_share <= 1:
        raise ValueError(f"max_share must be within 0..1, got {max_share}")
    try:
        with MAPS_FILE.open("rb") as file:
            used = sum(1 for _ in file)
        limit = int(LIMIT_FILE.read_text())
    except (OSError, ValueError):
        return False
    if used <= max_share * limit:
        return False
    log.info("%d of %d memory mappings are in use: freeing compiled programs", used, limit)
    jax.clear_caches()
    gc.collect()  # programs in reference cycles keep their mappings
    return True
