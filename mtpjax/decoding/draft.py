"""Drafting: the modules take in what was committed, then run ahead, along a chain or level by level of a tree."""

import dataclasses
import functools
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import rng
from mtpjax.decoding.draft_tree import Candidates, ancestry
from mtpjax.decoding.intake import take_in
from mtpjax.decoding.sampling import Path, adjust, distribution, draw, scale
from mtpjax.decoding.state import DecodeState, Plan
from mtpjax.models.cache import commit, read_rows, write_rows
from mtpjax.models.layers.attend import Branches, View, cached_view
from mtpjax.models.model import MTPModel, bind
from pallas_kernels import head_top_k, top_k


class Draft(flax.struct.PyTreeNode):
    """What one round verifies: W nodes per row, the pending token first. A chain's node n descends from node n-1."""

    tokens: jax.Array  # [B, W] int32
    probabilities: jax.Array | None = None  # [B, W, V] (chain: [B, W-1, V]) that a node's children were drawn from
    parents: jax.Array | None = None  # [B, W] int32, of a tree
    depths: jax.Array | None = None  # [B, W] int32, of a tree
    is_on: jax.Array | None = None  # [B, W, W] bool, of a tree: (n, m): m is n or an ancestor


class DraftHead(flax.struct.PyTreeNode):
    """The columns of each module's head that a reduced vocabulary leaves."""

    matrices: tuple[jax.Array, ...]  # per module, or one for all: [D, R]
    ids: jax.Array  # [R] int32, token of each column, rising
    place: jax.Array  # [V] int32, column of each token, -1 where it is left out


def draft_head(params: dict, ids: jax.Array, *, model: MTPModel, dtype) -> DraftHead:
    """Head columns of the tokens `ids [R]`, rising; made once per call, before the loop."""
    config = model.config
    indices = range(config.num_mtp_modules) if config.mtp_own_head else [None]
    apply = bind(model, params)
    matrices = tuple(apply(index=index, method="head_matrix").astype(dtype)[:, ids] for index in indices)
    place = jnp.full(config.vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
    return DraftHead(matrices, ids, place)


def propose(
    params: dict, state: DecodeState, *, model: MTPModel, plan: Plan, head: DraftHead | None = None
) -> tuple[Draft, DecodeState]:
    """The round's drafts. Afterwards module k's cache is true up to the newest slot whose tokens are all committed."""
    drafter = functools.partial(_tree if plan.topk > 1 else _chain, params, state, model=model, plan=plan)
    scorer = functools.partial(_Scores, bind(model, params), state, head, model, plan.min_rows)
    draft, caches, tokens = drafter(scorer)
    modules = tuple(commit(cache, jnp.maximum(state.length - 1 - index, 0)) for index, cache in enumerate(caches))
    return draft, state.replace(tokens=tokens, modules=modules)


@dataclasses.dataclass(frozen=True)
class _Scores:
    """What the head says of drafts at `level`, from a module's output `[B, f, D]`: all of it, or the best alone."""

    apply: Callable
    state: DecodeState
    head: DraftHead | None
    model: MTPModel
    min_rows: int
    hidden: jax.Array
    index: int
    path: Path | None
    level: int

    def logits(self) -> jax.Array:
        """Adjusted logits `[B, f, V]`."""
        f, state, head = self.hidden.shape[1], self.state, self.head
        hidden = _pad(self.hidden, max(f, self.min_rows))
        if head is None:
            logits = self.apply(hidden, index=self.index, method="logits")[:, :f]
        else:
            few = jnp.matmul(hidden, self._matrix(head), preferred_element_type=jnp.float32)[:, :f]
            is_left = (head.place >= 0)[None, None, :]
            logits = jnp.where(is_left, jnp.take(few, jnp.maximum(head.place, 0), axis=-1), -jnp.inf)
        num_new = state.length - state.prompt_length + self.level - 1
        num_new = jnp.broadcast_to(num_new[:, None], logits.shape[:2])
        return adjust_logits(logits, state, self.path, num_new, self.model)

    def best(self, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of logits that nobody wants changed: the `k` largest, their tokens `[B, f, k]`, log-sum-exp `[B, f]`."""
        assert not self.state.sampling.changes_logits
        f = self.hidden.shape[1]
        hidden = _pad(self.hidden, max(f, self.min_rows))
        if self.head is None:
            values, tokens, logsumexp = self.apply(hidden, k=k, index=self.index, method="top_tokens")
        else:
            matrix = self._matrix(self.head)
            values, columns, logsumexp = head_top_k(hidden, matrix, k=k, implementation=self.model.implementation)
            tokens = self.head.ids[columns]
        return values[:, :f], tokens[:, :f], logsumexp[:, :f]

    def _matrix(self, head: DraftHead) -> jax.Array:
        return head.matrices[self.index if len(head.matrices) > 1 else 0]


Scorer = Callable[[jax.Array, int, Path | None, int], _Scores]


def adjust_logits(logits: jax.Array, state: DecodeState, path: Path | None, num_new: jax.Array, model: MTPModel):
    """`adjust` with what the state knows."""
    is_single = (state.stops[:, :-1] == -1).all(axis=1)
    return adjust(
        logits,
        state.sampling,
        state.history,
        path=path,
        num_new=num_new,
        stop_ids=jnp.where(is_single, state.stops[:, -1], -1),
        num_tokens=model.config.num_tokens or model.config.vocab_size,
    )


def _chain(params, state: DecodeState, scorer: Scorer, *, model: MTPModel, plan: Plan):
    """Writes `num_steps` drafted tokens behind the committed ones.

    Level k <= M is module k over all rows of true hidden at once; its row of the newest slot is draft k, which module
    k+1 reads as a token. Later levels recycle module M on its own output, one slot further each.
    """
    apply = bind(model, params)
    tokens, caches, carried = state.tokens, list(state.modules), None
    in_use, K = len(caches), plan.num_steps
    after = passed = state.hidden[:, :1]  # level 1 makes the first real ones
    draft, probabilities = tokens[:, :1], []
    is_drawn = plan.rule in ("token", "block")
    for level in range(1, max(K, in_use) + 1):
        index = min(level, in_use) - 1
        if level <= in_use:
            after, passed, carried = take_in(apply, state, model, plan, tokens, caches, carried, index, K + in_use)
            if level > K:
                continue  # a shallow round of an adaptive call: the module only takes in
        else:
            slot = state.length - 2 + level - in_use
            view = cached_view(model.config, slot, plan.min_rows, tokens.shape[1], window=plan.window)
            after, passed = _run_ahead(apply, caches, index, passed, draft, view)
        path = None
        if state.sampling.counts_tokens:
            is_before = jnp.broadcast_to(jnp.arange(K) < level - 1, (len(tokens), 1, K))
            path = Path(read_rows(tokens, state.length, K), is_before)
        scores = scorer(after, index, path, level)
        if is_drawn:
            logits = scores.logits()
            probabilities.append(distribution(logits, state.sampling))
            V = logits.shape[-1]
            began = state.length[:, None]
            draft = draw(probabilities[-1], rng.gumbel(state.sampling.seed, began, rng.DRAFT, jnp.array([level]), V))
        elif state.sampling.changes_logits:
            draft = jnp.argmax(scores.logits(), axis=-1).astype(jnp.int32)
        else:
            draft = scores.best(1)[1][:, :, 0]
        tokens = write_rows(tokens, draft, state.length + level - 1)
    nodes = read_rows(tokens, state.length - 1, K + 1)
    return Draft(nodes, jnp.concatenate(probabilities, axis=1) if is_drawn else None), caches, tokens


def _run_ahead(apply, caches, index: int, passed, tokens, view: View) -> tuple[jax.Array, jax.Array]:
    """Module `index` over drafted `tokens [B, f]` and the hidden before each, padded to the view; its cache is updated.

    Returns the outputs for the head and to pass on, `[B, f, D]`.
    """
    f, width = tokens.shape[1], view.mask.shape[1]
    memory = caches[index].layers[0]
    after, passed, entries = apply(
        _pad(passed, width), _pad(tokens, width), view, memory, index=index, method="run_module"
    )
    caches[index] = caches[index].replace(layers=(entries,))
    return after[:, :f], passed[:, :f]


def _tree(params, state: DecodeState, scorer: Scorer, *, model: MTPModel, plan: Plan):
    """Level by level, all nodes that have children in one pass: chosen as SGLang does, or a fixed shape's."""
    apply = bind(model, params)
    caches = list(state.modules)
    grow = _Fixed(state, plan) if plan.shape else _Free(state, plan)
    base = state.length - 1
    slots, offset = jnp.zeros((len(base), 0), jnp.int32), 0  # tokens in the module's slots from `base` on
    sees = path = tokens = origin = None
    after, passed, _ = take_in(apply, state, model, plan, state.tokens, caches, None, 0, plan.num_steps + 1)
    for level in range(1, grow.num_levels + 1):
        if tokens is not None and origin is not None:
            f = tokens.shape[1]
            slots = jnp.concatenate([slots, tokens], axis=1)
            itself = jnp.broadcast_to(jnp.eye(f, dtype=bool), (len(base), f, f))
            if sees is None:
                sees = itself
            else:
                sees = jnp.concatenate([jnp.take_along_axis(sees, origin[:, :, None], axis=1), itself], axis=2)
            width = max(f, plan.min_rows)
            branches = Branches(
                base, jnp.full((len(base), width), level - 2), jnp.pad(sees, ((0, 0), (0, width - f), (0, 0)))
            )
            view = cached_view(
                model.config, base + offset, width, state.tokens.shape[1], branches=branches, window=plan.window
            )
            passed = jnp.take_along_axis(passed, origin[:, :, None], axis=1)
            after, passed = _run_ahead(apply, caches, 0, passed, tokens, view)
            offset += f
            path = Path(slots, sees) if state.sampling.counts_tokens else None
        tokens, origin = grow.level(level, scorer(after, 0, path, level))
    return grow.draft(), caches, state.tokens


class _Free:
    """A tree of the best candidates. `level` takes their parents' scores, and gives the nodes to draft on."""

    def __init__(self, state: DecodeState, plan: Plan):
        self.state, self.plan, self.num_levels = state, plan, plan.num_steps
        B = len(state.length)
        self.candidates = Candidates()
        self.scores, self.places = jnp.ones((B, 1)), jnp.full((B, 1), -1, jnp.int32)

    def level(self, level: int, scores: _Scores) -> tuple[jax.Array, jax.Array]:
        """Tokens `[B, topk]` of the next level's nodes, and which of this level's each descends from."""
        if self.plan.rule == "greedy" and not self.state.sampling.changes_logits:  # every row's temperature is 0
            values, tokens, logsumexp = scores.best(self.plan.topk)
            probabilities = jnp.exp(values - logsumexp[:, :, None])
        else:
            probabilities, tokens = top_k(_spread(scores.logits(), self.state), self.plan.topk)
        self.scores, tokens, self.places, origin = self.candidates.offer(
            probabilities, tokens, self.scores, self.places
        )
        return tokens, origin

    def draft(self) -> Draft:
        tokens, parents = self.candidates.select(self.plan.num_nodes)
        pending = read_rows(self.state.tokens, self.state.length - 1, 1)
        depths, is_on = ancestry(parents, self.plan.num_steps)
        return Draft(jnp.concatenate([pending, tokens], axis=1), None, parents, depths, is_on)


class _Fixed:
    """A tree of one shape, whose nodes' children are drawn without replacement."""

    def __init__(self, state: DecodeState, plan: Plan):
        assert plan.shape is not None
        self.state, self.shape = state, plan.shape
        self.inner = self.shape.levels()
        self.num_levels = len(self.inner)
        self.tokens: dict[int, jax.Array] = {0: read_rows(state.tokens, state.length - 1, 1)[:, 0]}
        self.probabilities: list[jax.Array] = []

    def level(self, level: int, scores: _Scores) -> tuple[jax.Array | None, jax.Array]:
        nodes, state = self.inner[level - 1], self.state
        logits = scores.logits()
        B, _, V = logits.shape
        is_greedy = (state.sampling.temperature == 0)[:, None, None]
        probabilities = jnp.where(is_greedy, _spread(logits, state), distribution(logits, state.sampling))
        self.probabilities.append(probabilities)
        began = jnp.broadcast_to(state.length[:, None], (B, len(nodes)))
        gumbel = rng.gumbel(state.sampling.seed, began, rng.DRAFT, jnp.array(nodes), V)
        _, drawn = top_k(
            jnp.log(probabilities) + jnp.where(is_greedy, 0, gumbel),
            max(len(self.shape.children(node)) for node in nodes),
        )
        for place, node in enumerate(nodes):
            for rank, child in enumerate(self.shape.children(node)):
                self.tokens[child] = drawn[:, place, rank].astype(jnp.int32)
        if level == self.num_levels:
            return None, jnp.zeros((B, 0), jnp.int32)
        following = self.inner[level]
        origin = [nodes.index(self.shape.parents[node]) for node in following]
        tokens = jnp.stack([self.tokens[node] for node in following], axis=1)
        return tokens, jnp.broadcast_to(jnp.array(origin, jnp.int32), tokens.shape)

    def draft(self) -> Draft:
        W, B = len(self.shape.parents), len(self.state.length)
        inner = [node for level in self.inner for node in level]
        row = [inner.index(node) if node in inner else 0 for node in range(W)]
        parents = jnp.broadcast_to(jnp.array(self.shape.parents, jnp.int32), (B, W))
        depths, is_on = ancestry(parents, max(self.shape.depths))
        return Draft(
            jnp.stack([self.tokens[node] for node in range(W)], axis=1),
            jnp.concatenate(self.probabilities, axis=1)[:, np.array(row)],
            parents,
            depths,
            is_on,
        )


def _spread(logits: jax.Array, state: DecodeState) -> jax.Array:
    """Softmax of adjusted logits at the row's temperature, or at 1 where that is 0: what candidates are ranked by."""
    temperature = state.sampling.temperature[:, None, None]
    return jax.nn.softmax(scale(logits, jnp.where(temperature == 0, 1, temperature)), axis=-1)


def _pad(rows: jax.Array, count: int) -> jax.Array:
    """`[B, f, ...]` with zero rows behind, `count` in all."""
    return jnp.pad(rows, ((0, 0), (0, count - rows.shape[1]), *((0, 0) for _ in rows.shape[2:])))
