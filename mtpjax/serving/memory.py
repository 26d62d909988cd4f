"""The memory of an engine: the size of its page pool, and the error if memory is full."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.state import StateShape
from mtpjax.distributed import gather_values
from mtpjax.errors import MemoryTooSmall, is_memory_error, printable
from mtpjax.host import describe_address_limit
from mtpjax.inference.requests import make_drafter
from mtpjax.models.cache import empty_cache, recurrent_entries
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import mesh_of
from mtpjax.serving import host_pages
from mtpjax.serving.sizes import EngineSettings, resolve_sizes

CPU_POOL_BYTES = 1 << 30  # size of the default pool if no accelerator reports its memory
MEMORY_FRACTION = 0.9  # of an accelerator's memory, for weights and pages


def page_bytes(decoder: Decoder, dtype: Any) -> int:
    """Computes the size of a page in bytes, over all caches and devices. The decoder's pool must have one page."""
    state = jax.eval_shape(lambda: decoder.empty_state(StateShape(1, 1), dtype))
    return host_pages.page_bytes(host_pages.page_shapes((state.trunk, state.drafter)))


def state_bytes(config: ModelConfig, dtype: Any) -> int:
    """Computes the size of a row's recurrent states in bytes, over all devices; 0 for models without such states."""
    cache = jax.eval_shape(lambda: empty_cache(config, config.trunk_kinds, 1, 1, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(recurrent_entries(cache)))


def choose_num_pages(
    params: dict, model: MTPModel, decode: DecodeConfig, settings: EngineSettings, memory_fraction: float
) -> int:
    """Returns a number of pages that is enough for the longest text in every slot, or as many as memory allows.

    Args:
        params: the parameters of `model`, on their devices.
        decode: settings that all requests share.
        settings: the engine's settings. Only slots, length and snapshots matter.
        memory_fraction: fraction of the accelerator's memory that weights and pages may use.

    Raises:
        MemoryTooSmall: the remaining memory has no room for one text of maximum length.
    """
    embedding, config = params["embedding"], model.config
    limit = config.max_position_embeddings
    sizes = resolve_sizes(settings, decode, make_drafter(decode), model, mesh_of(embedding), limit=limit)
    per_row, devices = sizes.max_pages, embedding.devices()
    own = [device for device in devices if device.process_index == jax.process_index()]
    stats = [device.memory_stats() for device in own]
    if all(stats):
        # Every device already holds its shard of the weights, and will hold its share of each page.
        room = sum(memory_fraction * each["bytes_limit"] - each["bytes_in_use"] for each in stats if each)
        # All processes must choose the same size.
        room = min(gather_values(room * len(devices) / len(own)))
    else:
        room = CPU_POOL_BYTES
    room -= sizes.num_shards * sizes.shard_snapshots * state_bytes(config, embedding.dtype)
    num_pages = int(room // page_bytes(sizes.decoder.replace(pool=(1, settings.page_size)), embedding.dtype))
    if num_pages < per_row and all(stats):
        raise MemoryTooSmall(
            f"the memory has room for {max(num_pages, 0) * settings.page_size} tokens, but a text may have "
            f"{sizes.max_length}: lower the maximum length, or raise the fraction of memory to use (in `mtpjax "
            "serve`: --context-length, --mem-fraction-static)"
        )
    return max(min(num_pages, per_row * settings.num_slots), per_row)


@contextlib.contextmanager
def explain_full_memory(advice: str) -> Iterator[None]:
    """Converts JAX's out-of-memory error to a `MemoryTooSmall` with advice, unless `ulimit -v` limits the memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # JAX's errors are RuntimeErrors
        if not is_memory_error(error):
            raise
        advice = describe_address_limit() or advice
        raise MemoryTooSmall(f"memory is too small: {advice} ({printable(error, 200)})") from error
