"""The settings for an engine's sizes, and the sizes that follow from them for a model."""

import dataclasses

from jax.sharding import Mesh

from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Drafter
from mtpjax.messages import require
from mtpjax.models.attention_kinds import has_recurrent_layers
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import data_size, platform_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes and limits of an engine.

    Attributes:
        num_slots: maximum number of running requests.
        max_length: maximum number of tokens in a text, including the prompt; None means the model's
            `max_position_embeddings`, which is also the upper limit.
        page_size: positions per page.
        num_pages: pages in the pool; None means enough for a text of `max_length` in every slot.
        prefill_tokens: maximum prompt tokens per call; None means four chunks.
        rounds_per_call: decoding rounds per call; only 1 while a request waits or a prompt is processed. More rounds
            hide more of the host's work.
        disable_drafts_at: number of decoding rows at which drafting stops; None means never.
        adapts_depth: whether each call uses the number of draft levels, up to `num_steps`, that is expected to give the
            most tokens per second.
        depth_costs: durations of a round at depths 0..num_steps, for each of `batch_sizes`, used by `adapts_depth`; if
            None, they are measured at the start.
        batch_sizes: numbers of rows that programs are compiled for, ascending; None means powers of four.
        max_waiting: maximum number of requests in the queue, in addition to one per slot.
        max_queue_seconds: a request that waits longer ends with "timeout"; None means no limit.
        max_run_seconds: a request still unfinished this long after arrival ends with "timeout"; None means no limit.
        max_tick_seconds: a server whose tick takes longer is unhealthy; None means no limit.
        shares_prefixes: whether requests with a common prefix share pages.
        num_snapshots: recurrent states that the prefix cache keeps. With 0, requests to models with recurrent layers
            share no prefixes; None means four per slot. No effect on other models.
        host_bytes: host memory for evicted pages of the prefix cache; 0 disables it. Requires a single device.
        rebalance_experts_every: ticks between two placements of the experts on a mesh that shards them. A placement
            follows the number of tokens routed to each expert. None disables this. The parameters must have placements
            (`place_all_layers`), and the engine takes ownership of them, because it deletes the arrays of experts that
            it has moved.

    Example:
        >>> from mtpjax import EngineSettings
        >>> EngineSettings(num_slots=16, max_length=4096).page_size
        16
    """

    num_slots: int = 8
    max_length: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    prefill_tokens: int | None = None
    rounds_per_call: int = 2
    disable_drafts_at: int | None = None
    adapts_depth: bool = False
    depth_costs: tuple[tuple[float, ...], ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    max_waiting: int = 1024
    max_queue_seconds: float | None = None
    max_run_seconds: float | None = None
    max_tick_seconds: float | None = None
    shares_prefixes: bool = True
    num_snapshots: int | None = None
    host_bytes: int = 0
    rebalance_experts_every: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """Sizes of the state and of the calls.

    Attributes:
        decoder: the decoder of the deepest round, with the size of the pool.
        num_shards: shards of the mesh's `data` axis. Each has its own slots and pages.
        shard_slots: slots of a shard.
        shard_pages: pages of a shard.
        shard_snapshots: states of recurrent layers that the prefix cache of a shard keeps; 0 for models without such
            layers.
        max_length: maximum number of tokens in a text, including the prompt.
        capacity: tokens per row that the state has room for.
        depths: numbers of draft levels that calls use, the deepest first; 0 is one of them, because a request may
            decode without drafts.
        batch_sizes: numbers of rows that programs are compiled for, ascending.
        min_rows: for each of `batch_sizes`, the minimum number of token rows in a forward pass.
        prefill_sizes: the same as `batch_sizes`, for prefill calls.
        table_widths: numbers of pages per row that programs are compiled for, ascending.
    """

    decoder: Decoder
    num_shards: int
    shard_slots: int
    shard_pages: int
    shard_snapshots: int
    max_length: int
    capacity: int
    depths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    min_rows: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    table_widths: tuple[int, ...]

    @property
    def max_pages(self) -> int:
        """Pages that the longest text needs."""
        return self.decoder.num_pages_of(self.max_length)


def resolve_sizes(
    settings: EngineSettings, config: DecodeConfig, drafter: Drafter, model: MTPModel, mesh: Mesh | None, *, limit: int
) -> EngineSizes:
    """Computes an engine's sizes, including its decoder.

    Args:
        settings: the requested sizes.
        config: settings that all requests share.
        drafter: the draft method of `config`.
        model: the model, fitted to the mesh.
        mesh: mesh of the parameters; None for a single device.
        limit: maximum number of tokens in a text that the model allows.

    Raises:
        ValueError: sizes are below their minimum, contradict each other, or cannot be divided over the mesh.
    """
    sizes_from_1 = ("num_slots", "page_size", "num_pages", "prefill_tokens", "rounds_per_call", "max_waiting")
    for name in (*sizes_from_1, "rebalance_experts_every"):
        value = getattr(settings, name)
        require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
    # 1. The rows of a call.
    num_shards = data_size(mesh)
    if settings.num_slots % num_shards:
        raise ValueError(f"num_slots must be a multiple of {num_shards} (data axis), got {settings.num_slots}")
    shard_slots = settings.num_slots // num_shards
    batch_sizes = settings.batch_sizes or powers_of(4, shard_slots)
    if batch_sizes[-1] < shard_slots or list(batch_sizes) != sorted(set(batch_sizes)):
        raise ValueError(f"batch_sizes must be ascending and reach {shard_slots}, got {batch_sizes}")
    platform = platform_of(mesh)
    min_rows = tuple(config.min_rows or min_rows_per_pass(model.config, size, platform) for size in batch_sizes)
    decoder = _make_decoder(settings, config, drafter, model, mesh, min_rows=max(min_rows))
    _check_changing_depth(settings, config, decoder)
    # 2. The pool.
    max_length = limit if settings.max_length is None else min(settings.max_length, limit)
    require(max_length >= 2, f"max_length must be at least 2, got {max_length}")
    max_pages = decoder.num_pages_of(max_length)
    num_pages = settings.num_pages or max_pages * settings.num_slots
    require(num_pages % num_shards == 0, f"num_pages must be a multiple of {num_shards} (data axis), got {num_pages}")
    num_snapshots = 4 * settings.num_slots if settings.num_snapshots is None else settings.num_snapshots
    if not settings.shares_prefixes or not has_recurrent_layers(model.config):
        num_snapshots = 0
    if num_snapshots < 0 or num_snapshots % num_shards:
        raise ValueError(f"num_snapshots must be 0 or a multiple of {num_shards} (data axis), got {num_snapshots}")
    # 3. The depths.
    num_steps = decoder.spec.num_steps
    depths = (num_steps, 0) if num_steps else (0,)
    if settings.adapts_depth:
        depths = tuple(range(num_steps, -1, -1))
    costs = settings.depth_costs
    if costs is not None and [len(each) for each in costs] != [num_steps + 1] * len(batch_sizes):
        raise ValueError(f"depth_costs must have {num_steps + 1} durations for each of batch_sizes {batch_sizes}")
    # 4. A prefill call processes one chunk of each of several prompts.
    chunk = decoder.spec.prefill_chunk
    prefill_rows = min((settings.prefill_tokens or 4 * chunk) // chunk, shard_slots)
    return EngineSizes(
        decoder=decoder.replace(pool=(num_pages, settings.page_size)),
        num_shards=num_shards,
        shard_slots=shard_slots,
        shard_pages=num_pages // num_shards,
        shard_snapshots=num_snapshots // num_shards,
        max_length=max_length,
        capacity=decoder.capacity(max_length),
        depths=depths,
        batch_sizes=batch_sizes,
        min_rows=min_rows,
        prefill_sizes=powers_of(4, prefill_rows),
        table_widths=fractions_of(8, max_pages, 16),
    )


def _make_decoder(
    settings: EngineSettings, config: DecodeConfig, drafter: Drafter, model: MTPModel, mesh: Mesh | None, min_rows: int
) -> Decoder:
    """Makes the decoder of an engine, with a pool of a single page."""
    # Requests may use any sampling option, so only the explicit rule "greedy" makes all rows greedy.
    is_greedy, max_length = config.acceptance == "greedy", config.max_length or model.config.max_position_embeddings
    decoder = Decoder.make(
        config, drafter, model, mesh, batch=settings.num_slots, max_length=max_length, is_greedy=is_greedy
    )
    chunk = decoder.spec.prefill_chunk
    return decoder.replace(
        # A chain may change its depth from call to call, so the drafter keeps the states of rounds without drafts.
        is_adaptive=config.num_steps > 0 and config.topk == 1,
        check_nan=True,
        logprobs=True,
        prefill_chunk=min(chunk, settings.prefill_tokens or chunk),
        min_rows=min_rows,
        pool=(1, settings.page_size),
    )


def _check_changing_depth(settings: EngineSettings, config: DecodeConfig, decoder: Decoder) -> None:
    """Raises `ValueError` if the depth depends on load or acceptance, but the other settings do not allow that."""
    if settings.disable_drafts_at is None and not settings.adapts_depth:
        return
    require(config.topk <= 1, "draft levels can adapt to load or acceptance only for chains: set topk to 1")
    if decoder.spec.is_ratio_rule:
        raise ValueError(
            f"under acceptance '{decoder.spec.rule}' the text for a seed depends on the number of drafts, which would "
            "depend on other requests: set acceptance to 'sample' or 'greedy'"
        )
    if settings.adapts_depth and config.num_steps:
        # A drafter without support for the policy "adaptive" does not support the engine's adaptive depth either.
        costs = (1.0,) * (config.num_steps + 1)
        adaptive = dataclasses.replace(config, depth_policy="adaptive", depth_costs=costs)
        decoder.drafter.check(decoder.model, adaptive)


def bucket(count: int, sizes: tuple[int, ...]) -> int:
    """Returns the smallest of ascending sizes that `count` fits into."""
    return next(size for size in sizes if size >= count)


def powers_of(base: int, largest: int) -> tuple[int, ...]:
    """Returns 1, `base`, `base`^2, ... below `largest`, and `largest`."""
    sizes = [1]
    while sizes[-1] * base < largest:
        sizes.append(sizes[-1] * base)
    return tuple(sorted({*sizes, largest}))


def fractions_of(base: int, largest: int, smallest: int) -> tuple[int, ...]:
    """Returns `largest`, `largest / base`, ... (rounded up) down to `smallest`, in ascending order."""
    sizes = [largest]
    while -(-sizes[-1] // base) >= smallest:
        sizes.append(-(-sizes[-1] // base))
    return tuple(reversed(sizes))
