"""The compiled calls of the engine. Each takes some rows of a state, works on them, and writes them back.

`admit` puts requests into slots, `prefill_chunk` processes a part of their prompts, and `advance` runs rounds. Rows
with a grammar take a round in two calls, `draft_round` and `verify_round`: between them the host reads the drafted
tokens and computes which tokens may follow each. The host keeps the page tables and passes those of the rows at each
call. It may dispatch a call before it has read the report of the one before. Calls are compiled for a few numbers of
rows and of pages; padding rows read nothing and write nothing.

On a mesh a call has b rows of each part of `data`: the arrays of a batch are `[P, b, ...]`, and slots and pages count
from 0 in each part.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mtpjax.decoding.commit import cond_as_while_loop
from mtpjax.decoding.drafter import Draft, Drafter
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.loop import finish_round, run_rounds
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, gather_rows, scatter_rows, start_rows
from mtpjax.models.cache import Cache, reset_rows
from mtpjax.models.cache import clear_pages as clear_cache_pages
from mtpjax.models.decoding_layout import run_in_parts
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import first_row, over_rows
from mtpjax.models.vocabulary import Vocabulary

# Rows that only pad a batch start behind every text, so no chunk is theirs.
NO_START = 2**30


class Batch(flax.struct.PyTreeNode):
    """The rows of a call."""

    slots: Any  # [P, b] int32; the number of slots of a part: padding
    table: Any  # [P, b, N] int32 pages of each row; NO_PAGE where it has none
    num_shared: Any  # [P, b] int32 positions at the beginning that the row never writes


class RowReport(NamedTuple):
    """A row of a `Report`, as Python's own values."""

    tokens: list[int]
    origins: list[int]
    logprobs: np.ndarray  # [n] float32
    done: bool
    stopped: bool
    failed: bool
    counts: list[int]  # [1 + 2 K]: rounds, and proposed and accepted drafts per level
    num_final: int


class Report(NamedTuple):
    """The changes of a call, per row of its batch: R = P * b rows, n new tokens at most, K draft levels."""

    tokens: Any  # [R, n] int32, valid up to num_new
    origins: Any  # [R, n] int32
    logprobs: Any  # [R, n] float32; [R, 0] for a state without log-probabilities
    num_new: Any  # [R] int32
    done: Any  # [R] bool
    stopped: Any  # [R] bool
    failed: Any  # [R] bool
    rounds: Any  # [R] int32, as in `DecodeState`
    proposed: Any  # [R, K] int32
    accepted: Any  # [R, K] int32
    num_final: Any  # [R] int32 positions at the beginning whose entries will not change

    def rows(self) -> Iterator[RowReport]:
        """Yields the rows of a report on the host. Reading arrays element by element would take longer."""
        counts = np.concatenate([self.rounds[:, None], self.proposed, self.accepted], axis=1)
        flags = (self.done, self.stopped, self.failed)
        columns = (self.tokens, self.origins, self.num_new, *flags, counts, self.num_final)
        lists = zip(*(column.tolist() for column in columns), strict=True)
        for logprobs, (tokens, origins, num_new, *rest) in zip(self.logprobs, lists, strict=True):
            yield RowReport(tokens[:num_new], origins[:num_new], logprobs[:num_new], *rest)


class PackedReport(flax.struct.PyTreeNode):
    """A `Report` as one array, because every array that the host reads costs a separate copy.

    Attributes:
        values: `[R, C]` int32: the fields side by side, log-probabilities bit by bit.
        widths: columns of each field.
    """

    values: jax.Array
    widths: tuple[int, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def pack(cls, report: Report) -> "PackedReport":
        """Packs arrays on the device."""
        bits = report._replace(logprobs=jax.lax.bitcast_convert_type(report.logprobs, jnp.int32))
        columns = [field.astype(jnp.int32).reshape(len(field), -1) for field in bits]
        return cls(jnp.concatenate(columns, axis=1), tuple(column.shape[1] for column in columns))

    def read(self) -> Report:
        """Waits for the call; returns arrays of the host."""
        # One copy from the device; the rest are views.
        fields = Report(*np.split(jax.device_get(self.values), np.cumsum(self.widths)[:-1], axis=1))
        flat = {name: getattr(fields, name)[:, 0] for name in ("num_new", "rounds", "num_final")}
        flags = {name: getattr(fields, name)[:, 0].astype(bool) for name in ("done", "stopped", "failed")}
        return fields._replace(logprobs=fields.logprobs.view(np.float32), **flat, **flags)


@dataclasses.dataclass(frozen=True)
class Features:
    """The features that the rows of a call need; hashable, since they select the compiled program.

    Attributes:
        plain: every row is greedy, without sampling options or log-probabilities, so logits need not be stored.
    """

    plain: bool

    def reduce(self, state: DecodeState, spec: DecodeSpec) -> tuple[DecodeState, DecodeSpec]:
        """Returns rows and spec without the options that no row uses."""
        if not self.plain:
            return state, spec
        sampling, history = state.settings.sampling, state.history
        sampling = sampling.replace(features=SamplingFeatures(), bias=sampling.bias[:, :0])
        reduced = state.replace(
            settings=state.settings.replace(sampling=sampling),
            history=history.replace(prompt=history.prompt[:, :0], counts=history.counts[:, :0]),
            logprobs=state.logprobs[:, :0],
        )
        return reduced, dataclasses.replace(spec, rule="greedy", logprobs=False)

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Fields that a call does not write back: those that it does not change, or does not have."""
        fixed = ("settings", "pages", "policy", "drafting_disabled")
        return (*fixed, "history", "logprobs") if self.plain else fixed


@one_graph(donate_argnames=("state",), static_argnames=("model",))
def admit(
    params: dict, draft_params: Any, state: DecodeState, rows: NewRows, slots: jax.Array, *, model: MTPModel
) -> tuple[DecodeState, None]:
    """Puts requests into slots; `prefill_chunk` processes their prompts.

    Args:
        params: model parameters, for the layout of a mesh.
        draft_params: the drafter's own parameters, for the same layout.
        state: the state; donated.
        rows: requests, `[P, r, ...]`.
        slots: `[P, r]` int32.
        model: the model.

    Returns:
        The new state. Unlike the other calls of the engine, this one has nothing to report.
    """

    def admit_part(_: dict, __: Any, state: DecodeState, rows: NewRows, slots: jax.Array) -> DecodeState:
        rows, slots = of_part(state, (rows, slots))
        taken = gather_rows(state, slots)
        # Attention masks slots behind the text. A recurrent layer's state must be zero at the start of a text.
        taken = taken.replace(trunk=reset_rows(taken.trunk, jnp.ones(len(slots), bool)))
        taken = start_rows(taken, rows, vocab_size=model.config.vocab_size)
        return scatter_rows(state, taken, slots)

    return run_in_parts(admit_part, model.config, params, draft_params, state, rows, slots), None


@one_graph(donate_argnames=("state",), static_argnames=("model", "drafter", "spec", "features"))
def prefill_chunk(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    start: jax.Array,
    first_token: jax.Array,
    allowed: jax.Array | None = None,
    end: jax.Array | None = None,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    features: Features,
) -> tuple[DecodeState, PackedReport]:
    """Processes one chunk of each row's prompt; a row whose prompt ends there gets its first new token.

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: the state; donated.
        batch: the rows.
        start: `[P, b]` int32 first position of each row's chunk; `NO_START` for padding.
        first_token: `[P, b]` int32 the first new token if it is known already, else -1.
        allowed: `[P, b, ceil(V/32)]` int32 tokens that the first new token may be, a bit per token; None: all.
        end: `[P, b]` int32 position before which each row's chunk ends, at most a chunk behind `start`; None: a whole
            chunk, or the end of the prompt.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.
        features: what the rows need.

    Returns:
        The new state and the report.
    """

    def prefill_part(params, draft_params, state, batch, start, first_token, allowed, end):
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        batch, start, first_token, allowed, end = of_part(state, (batch, start, first_token, allowed, end))
        # Take the rows without the options that none of them uses, process a chunk, and write the rows back.
        rows, row_spec = features.reduce(take(state, batch), spec)
        rows = prefill(
            params, prepared, rows, start, model=model, drafter=drafter, spec=row_spec, max_chunks=1,
            first_token=first_token, allowed=allowed, end=end,
        )  # fmt: skip
        return put(state, rows, batch, features)

    # The report holds what the rows gained, so remember their lengths.
    before = _lengths(state, batch)
    rest = batch, start, first_token, allowed, end
    state = run_in_parts(prefill_part, model.config, params, draft_params, state, *rest)
    return state, _report(state, batch, before, 1, drafter)


@one_graph(
    donate_argnames=("state",),
    static_argnames=("model", "drafter", "spec", "features", "depth", "min_rows", "max_rounds"),
)
def advance(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    rounds: jax.Array,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    features: Features,
    depth: int,
    min_rows: int,
    max_rounds: int,
) -> tuple[DecodeState, PackedReport]:
    """Runs rounds on some rows, all with the same number of draft levels.

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: the state; donated.
        batch: the rows.
        rounds: `[]` int32, rounds to run, unless all rows end before; at most `max_rounds`.
        model: the model.
        drafter: the draft method.
        spec: the shape of the deepest round.
        features: what the rows need.
        depth: draft levels of each round.
        min_rows: fewest token rows of a forward pass; narrower passes are padded.
        max_rounds: what the report has room for.

    Returns:
        The new state and the report.
    """
    spec = dataclasses.replace(spec, min_rows=min_rows)

    def advance_part(params, draft_params, state, batch, rounds):
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        batch = of_part(state, batch)
        rows, row_spec = features.reduce(take(state, batch), spec)
        # Chains change their depth, so their drafter may have a backlog of rounds without drafts.
        is_adaptive = row_spec.is_adaptive
        rows = run_rounds(
            params,
            prepared,
            rows,
            rounds,
            model=model,
            drafter=drafter,
            spec=row_spec if is_adaptive else _round_spec(row_spec, depth),
            depth=depth if is_adaptive else None,
        )
        return put(state, rows, batch, features)

    before = _lengths(state, batch)
    state = run_in_parts(advance_part, model.config, params, draft_params, state, batch, rounds)
    return state, _report(state, batch, before, max_rounds * (depth + 1), drafter)


@one_graph(donate_argnames=("state",), static_argnames=("model", "drafter", "spec", "depth", "min_rows"))
def draft_round(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    depth: int,
    min_rows: int,
) -> tuple[DecodeState, Draft]:
    """Begins a round of some rows: drafts, and leaves verification to `verify_round`.

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: the state; donated.
        batch: the rows.
        model: the model.
        drafter: the draft method.
        spec: the shape of the deepest round.
        depth: draft levels of the round.
        min_rows: as in `advance`.

    Returns:
        The new state, and the draft, `[R, ...]`.
    """
    spec = dataclasses.replace(spec, min_rows=min_rows)

    def draft_part(params, draft_params, state, batch):
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        batch = of_part(state, batch)

        def propose(carry):
            rows, _ = carry
            if spec.is_adaptive:
                rows = drafter.drain_backlog(prepared, rows, jnp.int32(depth), model=model, spec=spec)
            draft, rows = drafter.propose(prepared, rows, model=model, spec=_round_spec(spec, depth))
            # Between two calls q has all columns.
            q, vocab_size = draft.probabilities, model.config.vocab_size
            if q is not None and q.shape[-1] != vocab_size:
                draft = draft.replace(probabilities=Vocabulary.of(vocab_size).gather(q))
            return rows, draft

        rows = take(state, batch)
        _, draft = jax.eval_shape(propose, (rows, None))
        no_draft = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), draft)
        rows, draft = _run_once(propose, (rows, no_draft))
        return put(state, rows, batch, Features(plain=False)), draft

    state, draft = run_in_parts(draft_part, model.config, params, draft_params, state, batch, has_row_outputs=True)
    return state, in_every_process(draft)


@one_graph(donate_argnames=("state",), static_argnames=("model", "drafter", "spec", "depth", "min_rows"))
def verify_round(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    draft: Draft,
    allowed: jax.Array,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    depth: int,
    min_rows: int,
) -> tuple[DecodeState, PackedReport]:
    """Ends the round that `draft_round` began: verifies, accepts and commits.

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: the state; donated.
        batch: the rows.
        draft: from `draft_round`.
        allowed: `[R, W, ceil(V/32)]` int32 tokens that may follow each node, a bit per token.
        model: the model.
        drafter: the draft method.
        spec: the shape of the deepest round.
        depth: draft levels of the round.
        min_rows: as in `advance`.

    Returns:
        The new state and the report.
    """
    spec = dataclasses.replace(spec, min_rows=min_rows)

    def verify_part(params, _, state, batch, draft, allowed):
        batch, draft, allowed = of_part(state, (batch, draft, allowed))

        def finish(carry):
            settings = {"model": model, "drafter": drafter, "spec": _round_spec(spec, depth), "allowed": allowed}
            return (finish_round(params, carry[0], draft, **settings),)

        (rows,) = _run_once(finish, (take(state, batch),))
        return put(state, rows, batch, Features(plain=False))

    before, num_parts = _lengths(state, batch), len(batch.slots)
    draft, allowed = jax.tree.map(lambda leaf: leaf.reshape(num_parts, -1, *leaf.shape[1:]), (draft, allowed))
    state = run_in_parts(verify_part, model.config, params, draft_params, state, batch, draft, allowed)
    return state, _report(state, batch, before, depth + 1, drafter)


@one_graph(donate_argnames=("state",), static_argnames=("model",))
def clear_pages(
    params: dict, draft_params: Any, state: DecodeState, pages: jax.Array, *, model: MTPModel
) -> tuple[DecodeState, None]:
    """Zeroes pages `[P, n]` int32 that a failed row wrote: XLA's attention multiplies what it masks by 0, also NaN."""

    def clear_part(_: dict, __: Any, state: DecodeState, pages: jax.Array) -> DecodeState:
        pages = of_part(state, pages)
        clear = lambda node: clear_cache_pages(node, pages) if isinstance(node, Cache) else node
        return jax.tree.map(clear, state, is_leaf=lambda node: isinstance(node, Cache))

    return run_in_parts(clear_part, model.config, params, draft_params, state, pages), None


def _round_spec(spec: DecodeSpec, depth: int) -> DecodeSpec:
    """Returns the spec of a round with `depth` draft levels. A tree has one depth, or none for rows without drafts."""
    if depth == spec.num_steps and not spec.is_adaptive:
        return spec
    return dataclasses.replace(spec.at_depth(depth), topk=1)


def _run_once(function: Callable[[Any], Any], carry: Any) -> Any:
    """Computes `function(carry)`, unless all rows of `carry[0]` have ended.

    Outside of a loop, jit rejects donated caches whose layout is pinned (`mtpjax.models.layers.entries.pin_layout`).
    """
    return cond_as_while_loop(function, over_rows(jnp.any, ~carry[0].done), carry)


def of_part(state: DecodeState, tree: Any) -> Any:
    """Returns this device's part of arrays `[P, ...]`; `state` is the device's part of the state."""
    own = len(state.length)
    part = first_row(own) // own
    return jax.tree.map(lambda leaf: leaf[part], tree)


def take(state: DecodeState, batch: Batch) -> DecodeState:
    """Returns the batch's rows, which read and write the pages of its table. Padding rows are done."""
    rows = gather_rows(state, batch.slots)
    assert rows.pages is not None
    return rows.replace(
        pages=rows.pages.replace(table=batch.table, num_shared=batch.num_shared),
        done=rows.done | (batch.slots >= len(state.length)),
    )


def put(state: DecodeState, rows: DecodeState, batch: Batch, features: Features) -> DecodeState:
    """Writes the batch's rows back."""
    without = dict.fromkeys(features.unchanged)
    written = scatter_rows(state.replace(**without), rows.replace(**without), batch.slots)
    return written.replace(**{name: getattr(state, name) for name in features.unchanged})


def _slots(state: DecodeState, batch: Batch) -> jax.Array:
    """Returns the batch's rows `[R]` in the whole state."""
    num_parts = len(batch.slots)
    own = len(state.length) // num_parts
    # A padding row reports what the last row of its part has; nobody reads it.
    return (jnp.arange(num_parts)[:, None] * own + jnp.minimum(batch.slots, own - 1)).reshape(-1)


def _lengths(state: DecodeState, batch: Batch) -> jax.Array:
    return jnp.take(state.length, _slots(state, batch))


def _report(state: DecodeState, batch: Batch, before: jax.Array, max_new: int, drafter: Drafter) -> PackedReport:
    """Reports the change of each row since it had `before [R]` tokens."""
    slots = _slots(state, batch)
    take = lambda leaf: jnp.take(leaf, slots, axis=0)
    column = jnp.minimum(before[:, None] + jnp.arange(max_new)[None, :], state.tokens.shape[1] - 1)
    new = lambda leaf: leaf[slots[:, None], column]
    # An entry of a module is stored behind the position that it belongs to, so positions before it are final.
    num_final, extended = take(state.trunk.length), drafter.num_extended(state.drafter)
    if extended is not None:
        num_final = jnp.minimum(num_final, take(extended))
    report = Report(
        tokens=new(state.tokens),
        origins=new(state.origin),
        logprobs=new(state.logprobs) if state.logprobs.shape[1] else state.logprobs[slots],
        num_new=take(state.length) - before,
        **{name: take(getattr(state, name)) for name in ("done", "stopped", "failed")},
        **{name: take(getattr(state, name)) for name in ("rounds", "proposed", "accepted")},
        num_final=num_final,
    )
    return in_every_process(PackedReport.pack(report))


def in_every_process(tree: Any) -> Any:
    """Gives every process whole arrays, since process 0 reads them. One process can read all parts anyway."""
    return tree if jax.process_count() == 1 else jax.lax.with_sharding_constraint(tree, PartitionSpec())
