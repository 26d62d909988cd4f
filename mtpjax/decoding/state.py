"""The decoding state, which consists of all arrays that one speculative round passes to the next."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.depth_policy import DepthPolicy
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures, TokenHistory
from mtpjax.models.cache import Cache, put_rows, take_rows
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import cached_view
from mtpjax.models.view import Storage, TreeSlots, View


class RowSettings(flax.struct.PyTreeNode):
    """The requests' settings, per row. The loop reads them and never changes them."""

    prompt_length: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, maximum number of tokens, prompt included
    stops: jax.Array  # [B, N, Z] int32 stop sequences, right-aligned; -1 before shorter ones and in unused rows
    rule_params: jax.Array  # [B, 2] float32, parameters of a lossy acceptance rule
    sampling: SamplingArrays


class DecodeState(flax.struct.PyTreeNode):
    """A batch of B rows being decoded. L is the number of cache slots, and K is the number of draft levels.

    Every leaf has B as its first axis, except `drafting_disabled`, the leaves of `policy`, and page pools.
    """

    settings: RowSettings
    tokens: jax.Array  # [B, L] int32: committed tokens, then drafts and garbage
    origin: jax.Array  # [B, L] int8: draft level that proposed the token; 0: a bonus token or the prompt
    logprobs: jax.Array  # [B, L] float32 for new tokens; [B, 0] if `spec.logprobs` is off
    length: jax.Array  # [B] int32 number of committed tokens; the trunk has not processed the last one (pending) yet
    done: jax.Array  # [B] bool, the row has ended, or the slot is free
    stopped: jax.Array  # [B] bool, the row ended with a stop sequence
    failed: jax.Array  # [B] bool, the row ended because a logit was NaN (`spec.check_nan`)
    history: TokenHistory
    trunk: Cache  # the trunk's KV cache, which covers the first length - 1 tokens
    drafter: Any  # the drafter's state
    storage: Storage  # where the caches keep each row's entries
    policy: DepthPolicy | None  # chooses the depth of an adaptive call; None: fixed depth
    drafting_disabled: jax.Array  # [] bool, drafting never pays off, so rounds do not extend the drafter
    rounds: jax.Array  # [B] int32 verification passes
    proposed: jax.Array  # [B, K] int32 rounds that drafted at least this many levels
    accepted: jax.Array  # [B, K] int32 accepted drafts per level, including those cut off at a stop or limit
    discarded: jax.Array  # [B] int32 tokens cut off at a stop or limit


class NewRows(flax.struct.PyTreeNode):
    """R new requests, as arrays."""

    tokens: jax.Array  # [R, L] int32 prompts, right-padded
    length: jax.Array  # [R] int32 prompt lengths
    settings: RowSettings
    first_token: jax.Array | None = None  # [R] int32 new token after `tokens` if already known, else -1

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
            prompt_length=jnp.copy(length),  # a separate buffer, since states are donated
            limit=limit,
            stops=jnp.full((R, 8, 1), -1, jnp.int32),
            rule_params=jnp.zeros((R, 2)),
            sampling=sampling,
        )
        return cls(tokens, length, settings)


class StateShape(NamedTuple):
    """The shape of a `DecodeState`."""

    batch: int  # slots, B
    capacity: int  # cache slots per row, L
    stops: tuple[int, ...] = (8, 1)  # largest number and length of a row's stop sequences, (N, Z)
    features: SamplingFeatures = SamplingFeatures()  # sampling options that are compiled in

    @classmethod
    def of(cls, rows: NewRows) -> "StateShape":
        """Returns the shape of a state for exactly these requests."""
        settings = rows.settings
        batch, capacity = rows.tokens.shape
        return cls(batch, capacity, settings.stops.shape[1:], settings.sampling.features)


class Draft(flax.struct.PyTreeNode):
    """The W nodes per row that one round verifies. Node 0 is the pending token.

    In a chain, node n is the child of node n-1, and `parents`, `depths` and `ancestor_mask` are None. Text stays exact
    only if no row's `num_drafted` depends on the last token that it counts or on later tokens. On a mesh,
    `probabilities` may have only the columns of this device's vocabulary shard, or all columns.
    """

    tokens: jax.Array  # [B, W] int32
    probabilities: jax.Array | None = None  # [B, W, V] (chain: [B, W-1, V]), q of each node's children
    parents: jax.Array | None = None  # [B, W] int32, parents before children, -1 for the root
    depths: jax.Array | None = None  # [B, W] int32
    ancestor_mask: jax.Array | None = None  # [B, W, W] bool, (n, m): m is n or an ancestor of n
    num_drafted: jax.Array | None = None  # [B] int32 number of drafts in each chain before the padding; None: all


class VerifyOutput(flax.struct.PyTreeNode):
    """The outputs of the trunk's pass over W nodes. Exactly one of `logits` and `target_tokens` is set."""

    logits: jax.Array | None  # [B, W, local V] float32, unmodified; None if the rule needs only the arg-max
    target_tokens: jax.Array | None  # [B, W] int32 arg-max after each node; None if the rule needs logits
    states: Any  # trunk states that the drafter selected, [B, W, ...] per leaf
    trunk: Cache  # the trunk's cache with the nodes appended; its length is unchanged
    is_nan: jax.Array | None = None  # [B, W] bool, a logit after the node is NaN; None unless `spec.check_nan`


class Acceptance(flax.struct.PyTreeNode):
    """The path that the rule accepted, and the tokens that the round appends."""

    path: jax.Array | None  # [B, K+1] int32 nodes of the accepted path; None for a chain, where it is 0, 1, ...
    num_accepted: jax.Array  # [B] int32 accepted drafts, 0..K
    tokens: jax.Array  # [B, K+1] int32: the accepted drafts, then the bonus token, then garbage


def start_rows(state: DecodeState, rows: NewRows, *, vocab_size: int) -> DecodeState:
    """Replaces every row of a state with a new request. The caches keep their entries.

    Args:
        state: a state of R rows.
        rows: R requests.
        vocab_size: V.

    Returns:
        The state before prefill, with the prompts as the committed text. All other fields are as in a new state, except
        that the caches keep old entries, which attention masks.
    """
    history = state.history
    if rows.settings.sampling.has_penalties:
        # The repetition penalty also applies to tokens in the prompt, so mark them, but not the padding after the
        # prompt.
        is_prompt = jnp.arange(rows.tokens.shape[1])[None, :] < rows.length[:, None]
        mark = jax.vmap(lambda row, is_marked: jnp.zeros(vocab_size, bool).at[row].max(is_marked))
        counts = jnp.zeros_like(history.counts)
        if rows.first_token is not None:
            # If a row was decoded before, its tokens include new tokens after the prompt.
            is_new = is_prompt & (jnp.arange(rows.tokens.shape[1])[None, :] >= rows.settings.prompt_length[:, None])
            is_prompt &= ~is_new
            counts = jax.vmap(lambda counts, row, new: counts.at[row].add(new))(counts, rows.tokens, is_new.astype(int))
        history = TokenHistory(mark(rows.tokens, is_prompt), counts)
    cleared = ("origin", "logprobs", "done", "stopped", "failed", "rounds", "proposed", "accepted", "discarded")
    zeros = {name: jnp.zeros_like(getattr(state, name)) for name in cleared}
    return state.replace(settings=rows.settings, tokens=rows.tokens, length=rows.length, history=history, **zeros)


def gather_rows(state: DecodeState, slots: jax.Array) -> DecodeState:
    """Copies the rows `slots [R]` of a fixed-depth state; an out-of-range index copies the nearest row."""

    def take(node: Any) -> Any:
        return take_rows(node, slots) if _is_cache(node) else jnp.take(node, slots, axis=0, mode="clip")

    # A leaf without a batch axis cannot be indexed by slot.
    rows = jax.tree.map(take, state.replace(drafting_disabled=None), is_leaf=_is_cache)
    return rows.replace(drafting_disabled=state.drafting_disabled)


def scatter_rows(state: DecodeState, rows: DecodeState, slots: jax.Array) -> DecodeState:
    """Writes R rows into `slots [R]` of a state, the inverse of `gather_rows`; drops rows with out-of-range indices."""
    shared = {"drafting_disabled": None}

    def put(node: Any, new: Any) -> Any:
        return put_rows(node, new, slots) if _is_cache(node) else node.at[slots].set(new, mode="drop")

    updated = jax.tree.map(put, state.replace(**shared), rows.replace(**shared), is_leaf=_is_cache)
    return updated.replace(drafting_disabled=state.drafting_disabled)


def _is_cache(node: Any) -> bool:
    return isinstance(node, Cache)


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
    """Makes the view for a pass over the rows' caches.

    Args:
        config: sizes and rotary embedding of the layers that run.
        start: `[B]` int32 first slot.
        width: number of tokens in the pass, T.
        num_used: number of leading tokens whose outputs are read, `[B]` or one number for all rows. Other tokens, and
            the tokens of rows that are done, are not routed to experts.
        num_valid: as in `cached_view`.
        tree: as in `cached_view`.
        window: as in `cached_view`.

    Returns:
        The view for the trunk's layers; MTP modules store their entries at shifted positions within a page.
    """
    storage = state.storage.running(state.done)
    is_used = ~state.done[:, None] & (jnp.arange(width)[None, :] < jnp.reshape(num_used, (-1, 1)))
    num_slots, settings = storage.num_slots(state.tokens.shape[1]), {"num_valid": num_valid, "tree": tree}
    view = cached_view(config, start, width, num_slots, **settings, window=window, is_used=is_used)
    return view.replace(storage=storage)
