"""The Medusa drafter (2401.10774), which has one head per draft level. All heads read the trunk's final state."""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.draft_tree import depths_and_ancestor_mask
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import Acceptance, DecodeState, Draft
from mtpjax.drafters.levels import draft_levels
from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
from mtpjax.drafters.scoring import DraftScores
from mtpjax.drafters.trained import DraftLevels, TextRows, TrainedDrafter
from mtpjax.drafters.tree import extend_ancestor_mask, tree_builder
from mtpjax.models.flops import RowCounts
from mtpjax.models.model import MTPModel, TrunkOutput, multiply_head
from mtpjax.models.params import DRAFTER
from mtpjax.models.view import read_rows

Choices = tuple[tuple[int, ...], ...]


class MedusaState(flax.struct.PyTreeNode):
    """State of the Medusa drafter."""

    hidden: jax.Array  # [B, 1, D] trunk state after the final norm, from which the pending token was chosen


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(TrainedDrafter):
    """Drafts with Medusa heads, which `mtpjax.load_drafter` loads with their parameters.

    A head reads one hidden state and no drafted token, so all levels are drafted at once. With `topk` above 1, the tree
    consists of the most likely nodes, or is drawn in the fixed shape that exact ratio rules need. `choices` replaces
    this tree with a published static tree.

    Attributes:
        architecture: the heads.
        choices: the static tree, with a path of candidate ranks per node; (0, 1) is the second candidate of head 1
            after the first of head 0. `num_steps` must be the tree's depth, `topk` its number of ranks, and
            `num_draft_tokens` its number of nodes plus 1. () means no static tree.
    """

    architecture: MedusaConfig = dataclasses.field(kw_only=True)
    choices: Choices = dataclasses.field(default=(), kw_only=True)
    title: ClassVar[str] = "Medusa"
    limits: ClassVar[DraftLimits] = dataclasses.replace(
        TrainedDrafter.limits,
        draft_window="draft_window applies only to drafters with a cache, and Medusa heads have no cache",
        levels="Medusa heads, one per level",
    )

    def __post_init__(self):
        super().__post_init__()
        choices = tuple(sorted((tuple(map(int, path)) for path in self.choices), key=lambda path: (len(path), path)))
        known = {(), *choices}
        if len(known) != len(choices) + 1 or any(path[:-1] not in known or min(path) < 0 for path in choices):
            raise ValueError("choices must be distinct paths of ranks from 0, and contain the parent of each path")
        object.__setattr__(self, "choices", choices)

    @property
    def max_levels(self) -> int:
        """The number of heads, because each head drafts one level."""
        return self.architecture.num_heads

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node of `choices`, starting with the root, whose parent is -1."""
        place = {(): 0} | {path: node for node, path in enumerate(self.choices, start=1)}
        return (-1, *(place[path[:-1]] for path in self.choices))

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the heads are for a different trunk or do not support the settings."""
        super().check(model, config)
        if not self.choices:
            return
        # The settings must describe the static tree.
        wanted = {
            "num_steps": max(map(len, self.choices)),
            "topk": max(rank for path in self.choices for rank in path) + 1,
            "num_draft_tokens": len(self.choices) + 1,
        }
        found = {"num_steps": config.num_steps, "topk": config.topk, "num_draft_tokens": config.num_nodes}
        if found != wanted or config.topk == 1:
            text = ", ".join(f"{name} {value}" for name, value in wanted.items())
            raise ValueError(f"the static tree needs {text}; got {', '.join(map(str, found.values()))}")
        if config.rule is not None and config.rule.drafts == "fixed tree":
            raise ValueError(
                f"acceptance '{config.rule}' draws each node's children, but a static tree holds the best candidates: "
                "use 'greedy', 'sample' or a lossy rule, or leave out choices"
            )

    def network_flops(
        self, network: dict[str, Any], rows: RowCounts, num_levels: int, num_anchors: int
    ) -> tuple[float, float]:
        """Counts the residual layers of the heads that run."""
        size = self.architecture.hidden_size**2
        return 2.0 * size * self.architecture.num_layers * num_levels * rows.tokens, 0.0

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the output matrices, either one per head or one that all heads share."""
        own = self.architecture
        return tuple(f"output_{index}" for index in range(1 if own.shares_output else own.num_heads))

    def init(self, decoder: Decoder, batch: int, capacity: int, dtype: Any) -> MedusaState:
        """Makes an empty state."""
        return MedusaState(jnp.zeros((batch, 1, decoder.model.config.hidden_size), dtype))

    def select_states(self, decoder: Decoder, output: TrunkOutput) -> jax.Array:
        """Picks the hidden states after the final norm, `[B, T, D]`."""
        return output.hidden

    def extend(
        self, decoder: Decoder, weights: Weights, state: DecodeState, states: jax.Array, start: jax.Array
    ) -> MedusaState:
        """Keeps the state of each row's last prompt token, regardless of the chunk that contains it."""
        chunk = states.shape[1]
        offset = state.length - 1 - start
        hidden = read_rows(states, jnp.clip(offset, 0, chunk - 1), 1)
        is_in_chunk = (offset >= 0) & (offset < chunk)
        return MedusaState(jnp.where(is_in_chunk[:, None, None], hidden, state.drafter.hidden))

    def commit(self, decoder: Decoder, state: DecodeState, states: jax.Array, accepted: Acceptance) -> MedusaState:
        """Keeps the state of the last accepted node, whose logits determine the next pending token."""
        return MedusaState(read_rows(states, accepted.num_accepted, 1))

    def propose(self, decoder: Decoder, weights: Weights, state: DecodeState) -> tuple[Draft, DecodeState]:
        """Drafts a chain, a tree chosen or drawn by probability, or the static tree."""
        spec, prepared = decoder.spec, weights.drafter
        if not spec.num_steps:
            return super().propose(decoder, weights, state)
        # 1. Run the residual layers of every used head on the state from which the pending token was chosen.
        heads = Medusa(self.architecture, decoder.model.implementation)
        run: Any = functools.partial(heads.apply, {"params": prepared.network}, method="hidden")
        hidden = [run(state.drafter.hidden, index) for index in range(spec.num_steps)]

        # 2. Score the children of f nodes at one level, which all read the same state.
        def scores(level: int, num_nodes: int, path: PathTokens | None) -> DraftScores:
            rows = jnp.repeat(hidden[level - 1], num_nodes, axis=1)
            return DraftScores(decoder, weights.params, state, prepared.head, rows, level - 1, path, level)

        if spec.topk == 1:
            return draft_levels(decoder, lambda level, _, path, carry: (scores(level, 1, path), carry), state), state
        if self.choices:
            return self._draft_choices(scores, state, spec), state
        return _draft_tree(scores, state, spec), state

    def _draft_choices(self, scores: Any, state: DecodeState, spec: DecodeSpec) -> Draft:
        """Fills the static tree, in which a node of rank r at depth d is the r-th best candidate of head d-1."""
        # Penalties ignore drafted tokens here, because a level has the same candidates after every parent. The text
        # stays correct, because the rules for this tree follow the target's own probabilities.
        best = []
        for level in range(1, spec.num_steps + 1):
            of_level = scores(level, 1, None)
            num_ranks = max((path[-1] + 1 for path in self.choices if len(path) == level), default=1)
            best.append(of_level.vocabulary.top_k(of_level.logits(), num_ranks)[1][:, 0])
        nodes = [best[len(path) - 1][:, path[-1]] for path in self.choices]
        pending = read_rows(state.tokens, state.length - 1, 1)
        tokens = jnp.concatenate([pending, jnp.stack(nodes, axis=1).astype(jnp.int32)], axis=1)
        parents = jnp.broadcast_to(jnp.array(self.parents, jnp.int32)[None], tokens.shape)
        return Draft(tokens, None, parents, *depths_and_ancestor_mask(parents, spec.num_steps))

    def levels(
        self, params: dict, rows: TextRows, heads: tuple[jax.Array, ...], *, model: MTPModel, num_levels: int
    ) -> DraftLevels:
        """Runs the heads on the final hidden state."""
        network = Medusa(self.architecture, model.implementation)
        apply: Any = functools.partial(network.apply, {"params": params[DRAFTER]}, method="hidden")
        inputs = tuple(apply(rows.hidden, index) for index in range(num_levels))
        return DraftLevels(tuple(multiply_head(x, heads[k % len(heads)]) for k, x in enumerate(inputs)), inputs)


def _draft_tree(scores: Any, state: DecodeState, spec: DecodeSpec) -> Draft:
    """Drafts a tree level by level; all nodes of a level use the same head output."""
    builder = tree_builder(state, spec)
    drafted, mask, num_nodes, path = jnp.zeros((len(state.tokens), 0), jnp.int32), None, 1, None
    for level in range(1, builder.num_levels + 1):
        tokens, parent = builder.add_level(level, scores(level, num_nodes, path))
        if tokens is not None:
            drafted, num_nodes = jnp.concatenate([drafted, tokens], axis=1), tokens.shape[1]
            mask = extend_ancestor_mask(mask, parent)
            path = PathTokens(drafted, mask) if state.settings.sampling.has_penalties else None
    return builder.draft()
