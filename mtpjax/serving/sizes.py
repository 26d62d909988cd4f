"""The sizes of an engine: its settings, and what follows from them for a model."""

import dataclasses
from collections.abc import Callable

from mtpjax.decoding.acceptance.rules import RULES
from mtpjax.decoding.capacity import round_up_capacity, slots_per_round
from mtpjax.decoding.drafter import Drafter
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.models.attention_kinds import has_recurrent_layers
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.pages import count_pages
from mtpjax.serving.grammar import Grammars


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes and limits of an engine.

    Attributes:
        num_slots: most requests that run at the same time.
        max_length: most tokens of a text, prompt included; None: the model's `max_position_embeddings`, which is also
            the most.
        page_size: positions per page.
        num_pages: pages of the pool; None: enough for every slot at `max_length`.
        prefill_tokens: most prompt tokens of one call; None: four chunks.
        rounds_per_call: decoding rounds per call while no request waits and no prompt is processed; 1 otherwise. More
            hide the host better.
        disable_drafts_at: number of decoding rows from which on no tokens are drafted; None: always drafted.
        adapts_depth: each call drafts as many levels, at most `num_steps`, as promise the most tokens per second.
        depth_costs: for that, per number of rows in `batch_sizes`, durations of a round at depths 0..num_steps; None:
            measured at the start.
        batch_sizes: numbers of rows that programs are compiled for, ascending; None: powers of four.
        max_waiting: most requests in the queue, besides one per slot.
        max_queue_seconds: a request that waits longer ends with "timeout"; None: no limit.
        max_run_seconds: the same for the time since its arrival.
        max_tick_seconds: a server whose tick takes longer is unhealthy; None: no limit.
        shares_prefixes: requests with the same beginning share pages.
        num_snapshots: states of recurrent layers that the prefix cache keeps; 0: requests of such models share nothing.
            None: four per slot. No effect on other models.
        host_bytes: memory of the host for pages of the prefix cache whose place is needed; 0: none. One device only.
        grammars: compiles the grammars of requests; None: requests have none.
        rebalance_experts_every: ticks after which the experts are placed anew on a mesh that splits them, by how often
            texts choose them; None: they stay. The parameters have placements (`place_all_layers`), and the engine
            then owns them: it deletes arrays of experts that it has moved.
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
    grammars: Grammars | None = None
    rebalance_experts_every: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """Sizes of the state and of the calls.

    Attributes:
        num_parts: parts of the mesh's `data`. Each has its own slots and pages.
        part_slots: slots of a part.
        part_pages: pages of a part.
        part_snapshots: states of recurrent layers that the prefix cache of a part keeps; 0 for models without them.
        page_size: positions per page.
        max_length: most tokens of a text, prompt included.
        capacity: tokens per row that the state has room for.
        num_behind: slots that a round writes behind the text.
        max_shift: positions behind its own where the drafter may store an entry.
        depths: numbers of draft levels that calls can have, the most first; a request can ask for none.
        batch_sizes: numbers of rows that programs are compiled for, ascending.
        min_rows: for each of `batch_sizes`, the fewest token rows of a forward pass.
        prefill_sizes: the same for prompts.
        table_widths: numbers of pages per row that programs are compiled for, ascending.
    """

    num_parts: int
    part_slots: int
    part_pages: int
    part_snapshots: int
    page_size: int
    max_length: int
    capacity: int
    num_behind: int
    max_shift: int
    depths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    min_rows: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    table_widths: tuple[int, ...]

    def num_pages_of(self, length: int) -> int:
        """Returns the pages of a text of `length` tokens and what a round writes behind it."""
        return count_pages(length, self.num_behind, max_shift=self.max_shift, size=self.page_size)

    @property
    def max_pages(self) -> int:
        """Pages of the longest text."""
        return self.num_pages_of(self.max_length)


def resolve_sizes(
    settings: EngineSettings,
    spec: DecodeSpec,
    *,
    model: MTPModel,
    drafter: Drafter,
    limit: int,
    num_parts: int,
    min_rows_of: Callable[[int], int],
) -> tuple[EngineSizes, DecodeSpec]:
    """Computes an engine's sizes.

    Args:
        settings: what the user asks for.
        spec: the shape of the deepest round.
        model: the model.
        drafter: the draft method.
        limit: most tokens of a text that the model allows.
        num_parts: parts of the mesh's `data`.
        min_rows_of: chooses the fewest token rows of a forward pass for a number of rows on a device.

    Returns:
        The sizes, and the spec with the chunk of a prompt and the pool.

    Raises:
        ValueError: for sizes below their minimum, or that the mesh does not divide.
    """
    sizes_from_1 = ("num_slots", "page_size", "num_pages", "prefill_tokens", "rounds_per_call", "max_waiting")
    for name in (*sizes_from_1, "rebalance_experts_every"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if settings.num_slots % num_parts:
        raise ValueError(f"num_slots must be a multiple of data = {num_parts}, got {settings.num_slots}")
    part_slots = settings.num_slots // num_parts
    max_length = longest_text(settings, limit)
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}")
    # 1. A call processes a chunk of each of some prompts.
    prefill_tokens = settings.prefill_tokens or 4 * spec.prefill_chunk
    spec = dataclasses.replace(spec, prefill_chunk=min(spec.prefill_chunk, prefill_tokens))
    prefill_rows = min(prefill_tokens // spec.prefill_chunk, part_slots)
    # 2. The numbers of rows that programs are compiled for.
    batch_sizes = settings.batch_sizes or powers_of(4, part_slots)
    if batch_sizes[-1] < part_slots or list(batch_sizes) != sorted(set(batch_sizes)):
        raise ValueError(f"batch_sizes must rise up to {part_slots}, got {batch_sizes}")
    min_rows = tuple(min_rows_of(size) for size in batch_sizes)
    spec = dataclasses.replace(spec, min_rows=max(min_rows))
    # 3. Rows that are all greedy have dynamic trees, which may need more slots than those of a sampling rule.
    rules = (spec, dataclasses.replace(spec, rule=RULES["greedy"]))
    num_behind, max_shift = max(slots_per_round(model, drafter, each) for each in rules), drafter.max_shift(model)
    # 4. The pool.
    max_pages = count_pages(max_length, num_behind, max_shift=max_shift, size=settings.page_size)
    num_pages = settings.num_pages or max_pages * settings.num_slots
    if num_pages % num_parts:
        raise ValueError(f"num_pages must be a multiple of data = {num_parts}, got {num_pages}")
    num_snapshots = count_snapshots(settings, model.config)
    if num_snapshots < 0 or num_snapshots % num_parts:
        raise ValueError(f"num_snapshots must be a multiple of data = {num_parts}, at least 0, got {num_snapshots}")
    # 5. The depths.
    depths = (spec.num_steps, 0) if spec.num_steps else (0,)
    if settings.adapts_depth:
        depths = tuple(range(spec.num_steps, -1, -1))
    costs = settings.depth_costs
    if costs is not None and [len(each) for each in costs] != [spec.num_steps + 1] * len(batch_sizes):
        raise ValueError(f"depth_costs must have {spec.num_steps + 1} durations for each of batch_sizes {batch_sizes}")
    sizes = EngineSizes(
        num_parts=num_parts,
        part_slots=part_slots,
        part_pages=num_pages // num_parts,
        part_snapshots=num_snapshots // num_parts,
        page_size=settings.page_size,
        max_length=max_length,
        capacity=round_up_capacity(max_length + max(num_behind, spec.prefill_chunk) + 1),
        num_behind=num_behind,
        max_shift=max_shift,
        depths=depths,
        batch_sizes=batch_sizes,
        min_rows=min_rows,
        prefill_sizes=powers_of(4, prefill_rows),
        table_widths=fractions_of(8, max_pages, 16),
    )
    return sizes, dataclasses.replace(spec, pool=(num_pages, settings.page_size))


def longest_text(settings: EngineSettings, limit: int) -> int:
    """Returns the most tokens of a text: what the settings say, but not more than `limit`, which the model allows."""
    return limit if settings.max_length is None else min(settings.max_length, limit)


def count_snapshots(settings: EngineSettings, config: ModelConfig) -> int:
    """Returns the states of recurrent layers that the prefix cache keeps; 0 for models without such layers."""
    if not settings.shares_prefixes or not has_recurrent_layers(config):
        return 0
    return 4 * settings.num_slots if settings.num_snapshots is None else settings.num_snapshots


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
    """Returns `largest`, `largest / base`, ... (rounded up) down to `smallest`, in rising order."""
    sizes = [largest]
    while -(-sizes[-1] // base) >= smallest:
        sizes.append(-(-sizes[-1] // base))
    return tuple(reversed(sizes))
