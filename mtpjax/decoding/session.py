"""Continuous decoding: requests enter and leave the slots of a running state with paged caches.

Each function is a compiled call that copies some rows of a state, processes them, and writes them back. `admit` puts
requests into slots, `prefill_chunk` processes a chunk of their prompts, and `advance` runs rounds. Rows with a grammar
need two calls per round, `draft_round` and `verify_round`. Between them, the host reads the drafted tokens and computes
which tokens may follow each of them. The host keeps the page tables and passes the rows' tables to each call. It may
dispatch a call before it has read the previous report. Calls are compiled for only a few row counts and page counts;
padding rows neither read nor write.

All calls take `params` (the model's), `draft_params` (the drafter's) and `state`, which is donated. They return the new
state and their result. With a decoder for plain rows (`Decoder.for_plain_rows`) they omit the rows' sampling options
and log-probabilities.

On a mesh whose `data` axis has P devices, a call processes b rows from each of the P shards. Batch arrays then have
shape `[P, b, ...]`, and slots and pages are numbered from 0 within each shard.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from mtpjax.decoding.commit import cond_as_while_loop
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.device import device_settings
from mtpjax.decoding.gpu_graph import OneGraph, one_graph
from mtpjax.decoding.loop import finish_round, run_rounds
from mtpjax.decoding.prefill import prefill
from mtpjax.decoding.report import PackedReport, Report
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.state import DecodeState, Draft, NewRows, StateShape, gather_rows, scatter_rows, start_rows
from mtpjax.models.cache import Cache, reset_rows
from mtpjax.models.cache import clear_pages as clear_cache_pages
from mtpjax.models.decoding_layout import run_on_shards
from mtpjax.models.parallel import first_row, over_rows
from mtpjax.models.vocabulary import Vocabulary

# Padding rows start after the end of any text, so they have no chunk.
NO_START = 2**30
# Fields of a state that no call after `admit` changes.
UNCHANGED = ("settings", "storage", "drafting_disabled")


class Batch(flax.struct.PyTreeNode):
    """The rows of a call."""

    slots: Any  # [P, b] int32; for padding rows, the number of slots per shard
    table: Any  # [P, b, N] int32 pages of each row; NO_PAGE where no page is mapped
    num_shared: Any  # [P, b] int32 number of initial positions that the row never writes


class PromptChunk(flax.struct.PyTreeNode):
    """The chunk of each row's prompt that a call processes."""

    start: Any  # [P, b] int32 first position; `NO_START` for padding
    first_token: Any  # [P, b] int32 the first new token if it is known already, else -1
    end: Any = None  # [P, b] int32 position before which the chunk ends; None: its width or the prompt's end
    allowed: Any = None  # [P, b, ceil(V/32)] int32 bit mask of the allowed first new tokens; None: all


class Session:
    """A running state, and the parameters that its calls read. All calls must come from one thread.

    Args:
        params: model parameters, on their devices.
        draft_params: the drafter's parameters.
        decoder: the decoder, whose spec sets the size of the page pool.
        config: settings that all requests share.
        mesh: mesh of the parameters; None: one device.
        shape: shape of the state.

    Attributes:
        state: the newest state; each call donates it.
    """

    def __init__(
        self,
        params: dict,
        draft_params: Any,
        *,
        decoder: Decoder,
        config: DecodeConfig,
        mesh: Mesh | None,
        shape: StateShape,
    ):
        self.params, self.draft_params, self.decoder, self.shape = params, draft_params, decoder, shape
        self.config, self.mesh = config, mesh
        self.state = self._new_state()

    def _new_state(self) -> DecodeState:
        return self.decoder.make_state(self.params, self.config, self.mesh, shape=self.shape)

    def reset(self) -> None:
        """Makes a state with all slots free. Frees the old state first, because memory may be too small for both."""
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = self._new_state()

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Sets JAX's settings for calls with these parameters; see `device_settings`."""
        return device_settings(self.params, self.mesh, self.config)

    def call(self, program: OneGraph, *arrays: Any, **static: Any) -> Any:
        """Dispatches a call; returns its result. Run it within `on_device`."""
        arguments = self.params, self.draft_params, self.state, *arrays
        self.state, result = program(*arguments, **static)
        return result

    def compile(self, program: OneGraph, *arrays: Any, **static: Any) -> None:
        """Compiles the program of a call; may run in another thread. Run it within `on_device`."""
        program.compile(self.params, self.draft_params, self.state, *arrays, **static)


@one_graph(donate_argnames=("state",), static_argnames=("decoder",))
def admit(
    params: dict, draft_params: Any, state: DecodeState, rows: NewRows, slots: jax.Array, *, decoder: Decoder
) -> tuple[DecodeState, None]:
    """Puts requests `[P, r, ...]` into slots `[P, r]`; `prefill_chunk` processes their prompts. Returns no report."""

    def admit_shard(_: dict, __: Any, state: DecodeState, rows: NewRows, slots: jax.Array) -> DecodeState:
        rows, slots = of_shard(state, (rows, slots))
        taken = gather_rows(state, slots)
        # Old cache entries can stay, because attention masks slots after the text. A recurrent layer's state must be
        # zero at the start of a text.
        taken = taken.replace(trunk=reset_rows(taken.trunk, jnp.ones(len(slots), bool)))
        taken = start_rows(taken, rows, vocab_size=decoder.vocab_size)
        return scatter_rows(state, taken, slots)

    return run_on_shards(admit_shard, decoder.model.config, params, draft_params, state, rows, slots), None


@one_graph(donate_argnames=("state",), static_argnames=("decoder",))
def prefill_chunk(
    params: dict, draft_params: Any, state: DecodeState, batch: Batch, chunk: PromptChunk, *, decoder: Decoder
) -> tuple[DecodeState, PackedReport]:
    """Processes one chunk of each row's prompt; a row whose prompt ends in this chunk gets its first new token."""

    def prefill_shard(params, draft_params, state, batch, chunk):
        weights = decoder.prepare(params, draft_params)
        batch, chunk = of_shard(state, (batch, chunk))
        rows = prefill(
            decoder, weights, take(state, batch, decoder), chunk.start, max_chunks=1,
            end=chunk.end, first_token=chunk.first_token, allowed=chunk.allowed,
        )  # fmt: skip
        return put(state, rows, batch, decoder)

    # The report contains the new tokens, which start at the old lengths.
    before = _lengths(state, batch)
    state = run_on_shards(prefill_shard, decoder.model.config, params, draft_params, state, batch, chunk)
    return state, _report(decoder, state, batch, before, 1)


@one_graph(donate_argnames=("state",), static_argnames=("decoder", "depth", "max_rounds"))
def advance(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    rounds: jax.Array,
    *,
    decoder: Decoder,
    depth: int,
    max_rounds: int,
) -> tuple[DecodeState, PackedReport]:
    """Runs rounds on some rows, all with the same number of draft levels.

    Args:
        state: the state; donated.
        rounds: `[]` int32, number of rounds to run, at most `max_rounds`; fewer run if all rows end earlier.
        decoder: the decoder for the deepest round.
        depth: draft levels of each round.
        max_rounds: maximum number of rounds, which sets the size of the report.
    """

    def advance_shard(params, draft_params, state, batch, rounds):
        weights, batch = decoder.prepare(params, draft_params), of_shard(state, batch)
        rows = take(state, batch, decoder)
        # The depth of chains varies, so their drafter may have a backlog from rounds without drafts.
        if decoder.spec.is_adaptive:
            rows = run_rounds(decoder, weights, rows, rounds, depth=depth)
        else:
            rows = run_rounds(_at_depth(decoder, depth), weights, rows, rounds)
        return put(state, rows, batch, decoder)

    before = _lengths(state, batch)
    state = run_on_shards(advance_shard, decoder.model.config, params, draft_params, state, batch, rounds)
    return state, _report(decoder, state, batch, before, max_rounds * (depth + 1))


@one_graph(donate_argnames=("state",), static_argnames=("decoder", "depth"))
def draft_round(
    params: dict, draft_params: Any, state: DecodeState, batch: Batch, *, decoder: Decoder, depth: int
) -> tuple[DecodeState, Draft]:
    """Starts a round with `depth` levels for some rows, and returns the draft `[R, ...]` for `verify_round`."""

    def draft_shard(params, draft_params, state, batch):
        weights, batch = decoder.prepare(params, draft_params), of_shard(state, batch)

        def propose(carry):
            rows, _ = carry
            if decoder.spec.is_adaptive:
                rows = decoder.drafter.drain_backlog(decoder, weights, rows, jnp.int32(depth))
            draft, rows = decoder.drafter.propose(_at_depth(decoder, depth), weights, rows)
            # Between the two calls, q has the columns of the whole vocabulary.
            q, vocab_size = draft.probabilities, decoder.vocab_size
            if q is not None and q.shape[-1] != vocab_size:
                draft = draft.replace(probabilities=Vocabulary.of(vocab_size).gather(q))
            return rows, draft

        rows = take(state, batch, decoder)
        _, draft = jax.eval_shape(propose, (rows, None))
        no_draft = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), draft)
        rows, draft = _run_once(propose, (rows, no_draft))
        return put(state, rows, batch, decoder), draft

    config = decoder.model.config
    state, draft = run_on_shards(draft_shard, config, params, draft_params, state, batch, has_row_outputs=True)
    return state, in_every_process(draft)


@one_graph(donate_argnames=("state",), static_argnames=("decoder", "depth"))
def verify_round(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    batch: Batch,
    draft: Draft,
    allowed: jax.Array,
    *,
    decoder: Decoder,
    depth: int,
) -> tuple[DecodeState, PackedReport]:
    """Finishes the round that `draft_round` started: verifies, accepts and commits.

    Args:
        state: the state; donated.
        draft: from `draft_round`.
        allowed: `[R, W, ceil(V/32)]` int32 bit mask of the tokens that may follow each node.
        decoder: the decoder for the deepest round.
        depth: draft levels of the round.
    """

    def verify_shard(params, draft_params, state, batch, draft, allowed):
        batch, draft, allowed = of_shard(state, (batch, draft, allowed))
        weights = Weights(params, None)  # the drafter is no longer needed

        def finish(carry):
            return (finish_round(_at_depth(decoder, depth), weights, carry[0], draft, allowed),)

        (rows,) = _run_once(finish, (take(state, batch, decoder),))
        return put(state, rows, batch, decoder)

    before, num_shards = _lengths(state, batch), len(batch.slots)
    draft, allowed = jax.tree.map(lambda leaf: leaf.reshape(num_shards, -1, *leaf.shape[1:]), (draft, allowed))
    state = run_on_shards(verify_shard, decoder.model.config, params, draft_params, state, batch, draft, allowed)
    return state, _report(decoder, state, batch, before, depth + 1)


@one_graph(donate_argnames=("state",), static_argnames=("decoder",))
def clear_pages(
    params: dict, draft_params: Any, state: DecodeState, pages: jax.Array, *, decoder: Decoder
) -> tuple[DecodeState, None]:
    """Zeroes pages `[P, n]` int32 of a failed row, because attention in XLA reads masked values and 0 * NaN is NaN."""

    def clear_shard(_: dict, __: Any, state: DecodeState, pages: jax.Array) -> DecodeState:
        pages = of_shard(state, pages)
        clear = lambda node: clear_cache_pages(node, pages) if isinstance(node, Cache) else node
        return jax.tree.map(clear, state, is_leaf=lambda node: isinstance(node, Cache))

    return run_on_shards(clear_shard, decoder.model.config, params, draft_params, state, pages), None


def _at_depth(decoder: Decoder, depth: int) -> Decoder:
    """Returns the decoder for rounds with `depth` levels. Trees have one fixed depth, or 0 for rows without drafts."""
    if depth == decoder.spec.num_steps and not decoder.spec.is_adaptive:
        return decoder
    return decoder.at_depth(depth).replace(topk=1)


def _run_once(function: Callable[[Any], Any], carry: Any) -> Any:
    """Computes `function(carry)`, unless all rows of `carry[0]` have ended.

    Outside a loop, jit rejects donated caches whose layout is pinned (`mtpjax.models.view.Storage`).
    """
    return cond_as_while_loop(function, over_rows(jnp.any, ~carry[0].done), carry)


def of_shard(state: DecodeState, tree: Any) -> Any:
    """Returns this device's shard of arrays `[P, ...]`; `state` is already the device's shard."""
    own = len(state.length)
    part = first_row(own) // own
    return jax.tree.map(lambda leaf: leaf[part], tree)


def take(state: DecodeState, batch: Batch, decoder: Decoder) -> DecodeState:
    """Returns the batch's rows, which use the pages in the batch's table. Padding rows are marked as done."""
    rows = gather_rows(state, batch.slots)
    rows = rows.replace(
        storage=rows.storage.replace(table=batch.table, num_shared=batch.num_shared),
        done=rows.done | (batch.slots >= len(state.length)),
    )
    if decoder.spec.logprobs:
        return rows
    # For plain rows, omit the sampling options, which none of them uses.
    sampling, history = rows.settings.sampling, rows.history
    sampling = sampling.replace(features=SamplingFeatures(), bias=sampling.bias[:, :0])
    return rows.replace(
        settings=rows.settings.replace(sampling=sampling),
        history=history.replace(prompt=history.prompt[:, :0], counts=history.counts[:, :0]),
        logprobs=rows.logprobs[:, :0],
    )


def put(state: DecodeState, rows: DecodeState, batch: Batch, decoder: Decoder) -> DecodeState:
    """Writes the batch's rows back, except fields that calls do not change or plain rows lack."""
    unchanged = UNCHANGED if decoder.spec.logprobs else (*UNCHANGED, "history", "logprobs")
    without = dict.fromkeys(unchanged)
    written = scatter_rows(state.replace(**without), rows.replace(**without), batch.slots)
    return written.replace(**{name: getattr(state, name) for name in unchanged})


def _slots(state: DecodeState, batch: Batch) -> jax.Array:
    """Returns the indices `[R]` of the batch's rows in the whole state."""
    num_shards = len(batch.slots)
    own = len(state.length) // num_shards
    # A padding row reports the values of the last row in its shard, which are ignored.
    return (jnp.arange(num_shards)[:, None] * own + jnp.minimum(batch.slots, own - 1)).reshape(-1)


def _lengths(state: DecodeState, batch: Batch) -> jax.Array:
    return jnp.take(state.length, _slots(state, batch))


def _report(decoder: Decoder, state: DecodeState, batch: Batch, before: jax.Array, max_new: int) -> PackedReport:
    """Reports how each row changed since it had `before [R]` tokens."""
    slots = _slots(state, batch)
    take = lambda leaf: jnp.take(leaf, slots, axis=0)
    column = jnp.minimum(before[:, None] + jnp.arange(max_new)[None, :], state.tokens.shape[1] - 1)
    new = lambda leaf: leaf[slots[:, None], column]
    # A module stores an entry after the position that it belongs to, so all positions before the entry are final.
    num_final, extended = take(state.trunk.length), decoder.drafter.num_extended(state.drafter)
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
    """Replicates arrays to every process in a multi-process run, because process 0 reads all shards."""
    return tree if jax.process_count() == 1 else jax.lax.with_sharding_constraint(tree, PartitionSpec())
