"""The decoding state: all arrays that one speculative round passes to the next."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.depth_policy import DepthPolicy
from mtpjax.decoding.sampling import SamplingArrays, TokenHistory
from mtpjax.models.cache import Cache, put_rows, take_rows
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import cached_view
from mtpjax.models.pages import NO_PAGE
from mtpjax.models.view import Pages, TreeSlots, View


class RowSettings(flax.struct.PyTreeNode):
    """The requests' settings, per row. The loop reads them and never changes them."""

    prompt_length: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, maximum number of tokens, prompt included
    stops: jax.Array  # [B, N, Z] int32 stop sequences, right-aligned; -1 before shorter ones and in unused rows
    rule_params: jax.Array  # [B, 2] float32, parameters of a lossy acceptance rule
    sampling: SamplingArrays


class DecodeState(flax.struct.PyTreeNode):
    """A batch of B rows being decoded. L is the number of cache slots, K the number of draft levels.

    Every leaf except those of `policy` and `drafting_disabled`, and pools of pages, has B as its first axis.
    """

    settings: RowSettings
    tokens: jax.Array  # [B, L] int32: committed tokens, then drafts and garbage
    origin: jax.Array  # [B, L] int8: draft level that proposed the token; 0: a bonus token or the prompt
    logprobs: jax.Array  # [B, L] float32 of new tokens; [B, 0] if `spec.logprobs` is off
    length: jax.Array  # [B] int32 committed tokens; the last one is pending: the trunk has not processed it yet
    done: jax.Array  # [B] bool, the row has ended, or the slot is free
    stopped: jax.Array  # [B] bool, the row ended with a stop sequence
    failed: jax.Array  # [B] bool, the row ended because a logit was NaN (`spec.check_nan`)
    history: TokenHistory
    trunk: Cache  # the trunk's KV cache; holds the first length - 1 tokens
    drafter: Any  # the drafter's own state
    pages: Pages | None  # where the caches keep each row's entries; None: contiguous caches
    policy: DepthPolicy | None  # chooses the depth of an adaptive call; None: fixed depth
    drafting_disabled: jax.Array  # [] bool: no depth can pay at these costs, so rounds do not extend the drafter
    rounds: jax.Array  # [B] int32 verification passes
    proposed: jax.Array  # [B, K] int32 rounds that drafted at least this many levels
    accepted: jax.Array  # [B, K] int32 accepted drafts per level, including those cut off at a stop or limit
    discarded: jax.Array  # [B] int32 tokens cut off at a stop or limit


class NewRows(flax.struct.PyTreeNode):
    """R new requests, as arrays."""

    tokens: jax.Array  # [R, L] int32 prompts, right-padded
    length: jax.Array  # [R] int32 prompt lengths
    settings: RowSettings
    first_token: jax.Array | None = None  # [R] int32 new token after `tokens` that is known already; -1: none

    @classmethod
    def without_stops(
        cls, tokens: jax.Array, length: jax.Array, limit: jax.Array, sampling: SamplingArrays
    ) -> "NewRows":
        """Makes greedy or sampled requests without stop sequences.

        Args:
            tokens: `[R, L]` int32 prompts, right-padded.
            length: `[R]` int32 prompt lengths.
            limit: `[R]` int32 maximum number of tokens, prompt included.
            sampling: the rows' sampling parameters.
        """
        R = tokens.shape[0]
        settings = RowSettings(
            prompt_length=jnp.copy(length),  # its own buffer, since states are donated
            limit=limit,
            stops=jnp.full((R, 8, 1), -1, jnp.int32),
            rule_params=jnp.zeros((R, 2)),
            sampling=sampling,
        )
        return cls(tokens, length, settings)


def start_rows(state: DecodeState, rows: NewRows, *, vocab_size: int) -> DecodeState:
    """Replaces every row of a state by a new request. The caches keep their entries.

    Args:
        state: a state of R rows.
        rows: R requests.
        vocab_size: V.

    Returns:
        The state before prefill: prompts as the committed text, and all else as in a state that was never used, except
        entries after the text, which attention masks.
    """
    history = state.history
    if rows.settings.sampling.has_penalties:
        # The repetition penalty also applies to tokens of the prompt: mark them, without the padding after the prompt.
        is_prompt = jnp.arange(rows.tokens.shape[1])[None, :] < rows.length[:, None]
        mark = jax.vmap(lambda row, is_marked: jnp.zeros(vocab_size, bool).at[row].max(is_marked))
        counts = jnp.zeros_like(history.counts)
        if rows.first_token is not None:
            # The text of a row that decoded before continues after its prompt.
            is_new = is_prompt & (jnp.arange(rows.tokens.shape[1])[None, :] >= rows.settings.prompt_length[:, None])
            is_prompt &= ~is_new
            counts = jax.vmap(lambda counts, row, new: counts.at[row].add(new))(counts, rows.tokens, is_new.astype(int))
        history = TokenHistory(mark(rows.tokens, is_prompt), counts)
    return state.replace(
        settings=rows.settings,
        tokens=rows.tokens,
        origin=jnp.zeros_like(state.origin),
        logprobs=jnp.zeros_like(state.logprobs),
        length=rows.length,
        done=jnp.zeros_like(state.done),
        stopped=jnp.zeros_like(state.stopped),
        failed=jnp.zeros_like(state.failed),
        history=history,
        rounds=jnp.zeros_like(state.rounds),
        proposed=jnp.zeros_like(state.proposed),
        accepted=jnp.zeros_like(state.accepted),
        discarded=jnp.zeros_like(state.discarded),
    )


def gather_rows(state: DecodeState, slots: jax.Array) -> DecodeState:
    """Copies the rows `slots [R]` of a state of fixed depth; an index outside the state copies the nearest row."""

    def take(node: Any) -> Any:
        return take_rows(node, slots) if _is_cache(node) else jnp.take(node, slots, axis=0, mode="clip")

    # A leaf without a batch axis cannot be indexed by slot.
    rows = jax.tree.map(take, state.replace(drafting_disabled=None), is_leaf=_is_cache)
    return rows.replace(drafting_disabled=state.drafting_disabled)


def scatter_rows(state: DecodeState, rows: DecodeState, slots: jax.Array) -> DecodeState:
    """Writes R rows into `slots [R]` of a state, the inverse of `gather_rows`; drops rows with an index outside it."""
    shared = {"drafting_disabled": None}

    def put(node: Any, new: Any) -> Any:
        return put_rows(node, new, slots) if _is_cache(node) else node.at[slots].set(new, mode="drop")

    updated = jax.tree.map(put, state.replace(**shared), rows.replace(**shared), is_leaf=_is_cache)
    return updated.replace(drafting_disabled=state.drafting_disabled)


def _is_cache(node: Any) -> bool:
    return isinstance(node, Cache)


def running_pages(state: DecodeState) -> Pages | None:
    """Returns the pages of the running rows. Those of an ended row may already belong to another request."""
    if state.pages is None:
        return None
    return state.pages.replace(table=jnp.where(state.done[:, None], NO_PAGE, state.pages.table))


def view_pass(
    state: DecodeState,
    config: ModelConfig,
    start: jax.Array,
    width: int,
    *,
    num_used: jax.Array | int,
    num_valid: jax.Array | None = None,
    tree: TreeSlots | None = None,
    window: tuple[int, int] | None = None,
) -> View:
    """Makes the view of a pass over the rows' caches.

    Args:
        config: sizes and rotary embedding of the layers that run.
        start: `[B]` int32 first slot.
        width: tokens of the pass, T.
        num_used: `[B]`, or a number for all rows: the first tokens of the pass, whose outputs are read. The others, and
            those of rows that are done, are not routed to experts.
        num_valid: as in `cached_view`.
        tree: as in `cached_view`.
        window: as in `cached_view`.

    Returns:
        The view for the trunk's layers; MTP modules store their entries at shifted places of a page.
    """
    pages, capacity = running_pages(state), state.tokens.shape[1]
    num_slots = capacity if pages is None else min(capacity, pages.num_slots)
    is_used = ~state.done[:, None] & (jnp.arange(width)[None, :] < jnp.reshape(num_used, (-1, 1)))
    settings = {"num_valid": num_valid, "tree": tree, "window": window, "is_used": is_used}
    return cached_view(config, start, width, num_slots, **settings).replace(pages=pages)
