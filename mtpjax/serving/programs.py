"""The compiled calls of the engine. Each takes some rows of a state, works on them, and writes them back.

`admit` puts requests into slots, `prefill_chunk` processes a part of their prompts, and `advance` runs rounds. The
host keeps the page tables and passes those of the rows at each call. It may dispatch a call before it has read the
report of the one before. Calls are compiled for a few numbers of rows and of pages; padding rows read nothing and write
nothing.

On a mesh a call has b rows of each part of `data`: the arrays of a batch are `[P, b, ...]`, and slots and pages count
from 0 in each part.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.drafters.base import Drafter
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.loop import run_rounds
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, gather_rows, scatter_rows, start_rows
from mtpjax.models.cache import Cache, reset_rows
from mtpjax.models.cache import clear_pages as clear_cache_pages
from mtpjax.models.decoding_layout import run_in_parts
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import first_row

# Rows that only pad a batch start behind every text, so no chunk is theirs.
NO_START = 2**30


class Batch(flax.struct.PyTreeNode):
    """The rows of a call."""

    slots: Any  # [P, b] int32; the number of slots of a part: padding
    table: Any  # [P, b, N] int32 pages of each row; NO_PAGE where it has none
    num_shared: Any  # [P, b] int32 positions at the beginning that the row never writes


class Report(flax.struct.PyTreeNode):
    """What a call changed, per row of its batch: R = P * b rows, and n new tokens at most."""

    tokens: jax.Array  # [R, n] int32, valid up to num_new
    origins: jax.Array  # [R, n] int8
    logprobs: jax.Array  # [R, n] float32; [R, 0] for a state without log-probabilities
    num_new: jax.Array  # [R] int32
    done: jax.Array  # [R] bool
    stopped: jax.Array  # [R] bool
    failed: jax.Array  # [R] bool
    steps: jax.Array  # [R] int32, as in `DecodeState`
    proposed: jax.Array  # [R, K] int32
    accepted: jax.Array  # [R, K] int32
    num_final: jax.Array  # [R] int32 positions at the beginning whose entries will not change


@dataclasses.dataclass(frozen=True)
class Features:
    """What the rows of a call need; hashable, since it selects the compiled program.

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
        draft_params: the drafter's own parameters, likewise.
        state: the state; donated.
        rows: requests, `[P, r, ...]`.
        slots: `[P, r]` int32.
        model: the model.

    Returns:
        The new state. Like every call of the engine this one could have a report, but there is nothing to tell.
    """

    def admit_part(_: dict, __: Any, state: DecodeState, rows: NewRows, slots: jax.Array) -> DecodeState:
        rows, slots = _of_part(state, (rows, slots))
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
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    features: Features,
) -> tuple[DecodeState, Report]:
    """Processes one chunk of each row's prompt; a row whose prompt ends there gets its first new token.

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: the state; donated.
        batch: the rows.
        start: `[P, b]` int32 first position of each row's chunk; `NO_START` for padding.
        first_token: `[P, b]` int32 the first new token if it is known already, else -1.
        model: the model.
        drafter: the draft method.
        spec: the shape of a round.
        features: what the rows need.

    Returns:
        The new state and the report.
    """

    def prefill_part(params, draft_params, state, batch, start, first_token):
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        batch, start, first_token = _of_part(state, (batch, start, first_token))
        rows, row_spec = features.reduce(_take(state, batch), spec)
        rows = prefill(
            params, prepared, rows, start, model=model, drafter=drafter, spec=row_spec, max_chunks=1,
            first_token=first_token,
        )  # fmt: skip
        return _put(state, rows, batch, features)

    before = _lengths(state, batch)
    state = run_in_parts(prefill_part, model.config, params, draft_params, state, batch, start, first_token)
    return state, _report(state, batch, before, 1, drafter)


@one_graph(donate_argnames=("state",), static_argnames=("model", "drafter", "spec", "features", "depth", "max_rounds"))
def advance(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    features: Features,
    depth: int,
    max_rounds: int,
) -> tuple[DecodeState, Report]:
    """Runs rounds on some rows, all with the same number of draft levels.

    Args:
        params: model parameters.
        draft_params: the drafter's own parameters.
        state: the state; donated.
        batch: the rows.
        model: the model.
        drafter: the draft method.
        spec: the shape of the deepest round.
        features: what the rows need.
        depth: draft levels of each round.
        max_rounds: rounds, unless all rows end before.

    Returns:
        The new state and the report.
    """

    def advance_part(params, draft_params, state, batch):
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        batch = _of_part(state, batch)
        rows, row_spec = features.reduce(_take(state, batch), spec)
        # A tree has one depth, or none for rows that are never drafted for. Chains change theirs.
        chosen = None
        if row_spec.is_adaptive:
            chosen = depth
        elif depth != row_spec.num_steps:
            row_spec = dataclasses.replace(row_spec.at_depth(depth), topk=1)
        rows = run_rounds(
            params, prepared, rows, jnp.int32(max_rounds), model=model, drafter=drafter, spec=row_spec, depth=chosen
        )
        return _put(state, rows, batch, features)

    before = _lengths(state, batch)
    state = run_in_parts(advance_part, model.config, params, draft_params, state, batch)
    return state, _report(state, batch, before, max_rounds * (depth + 1), drafter)


@one_graph(donate_argnames=("state",), static_argnames=("model",))
def clear_pages(
    params: dict, draft_params: Any, state: DecodeState, pages: jax.Array, *, model: MTPModel
) -> tuple[DecodeState, None]:
    """Zeroes pages `[P, n]` int32 that a failed row wrote: XLA's attention multiplies what it masks by 0, also NaN."""

    def clear_part(_: dict, __: Any, state: DecodeState, pages: jax.Array) -> DecodeState:
        pages = _of_part(state, pages)
        clear = lambda node: clear_cache_pages(node, pages) if isinstance(node, Cache) else node
        return jax.tree.map(clear, state, is_leaf=lambda node: isinstance(node, Cache))

    return run_in_parts(clear_part, model.config, params, draft_params, state, pages), None


def _of_part(state: DecodeState, tree: Any) -> Any:
    """Returns this device's part of arrays `[P, ...]`; `state` is the device's part of the state."""
    own = len(state.length)
    part = first_row(own) // own
    return jax.tree.map(lambda leaf: leaf[part], tree)


def _take(state: DecodeState, batch: Batch) -> DecodeState:
    """Returns the batch's rows, which read and write the pages of its table. Padding rows are done."""
    rows = gather_rows(state, batch.slots)
    assert rows.pages is not None
    return rows.replace(
        pages=rows.pages.replace(table=batch.table, num_shared=batch.num_shared),
        done=rows.done | (batch.slots >= len(state.length)),
    )


def _put(state: DecodeState, rows: DecodeState, batch: Batch, features: Features) -> DecodeState:
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


def _report(state: DecodeState, batch: Batch, before: jax.Array, max_new: int, drafter: Drafter) -> Report:
    """Reports the change of each row since it had `before [R]` tokens."""
    slots = _slots(state, batch)
    take = lambda leaf: jnp.take(leaf, slots, axis=0)
    column = jnp.minimum(before[:, None] + jnp.arange(max_new)[None, :], state.tokens.shape[1] - 1)
    new = lambda leaf: leaf[slots[:, None], column]
    # An entry of a module is stored behind the position that it belongs to, so positions before it are final.
    num_final, extended = take(state.trunk.length), drafter.num_extended(state.drafter)
    if extended is not None:
        num_final = jnp.minimum(num_final, take(extended))
    return Report(
        tokens=new(state.tokens),
        origins=new(state.origin),
        logprobs=new(state.logprobs) if state.logprobs.shape[1] else state.logprobs[slots],
        num_new=take(state.length) - before,
        **{name: take(getattr(state, name)) for name in ("done", "stopped", "failed", "steps", "proposed", "accepted")},
        num_final=num_final,
    )
