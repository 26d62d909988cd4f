"""The MTP drafter, which proposes a chain or a tree with the model's MTP modules."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, Weights
from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import DecodeState
from mtpjax.drafters.cached import CachedDrafter, ModuleSizes
from mtpjax.drafters.scoring import DraftScores, PreparedDrafter, reduce_head
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel, TrunkOutput, bind
from mtpjax.models.params import is_of_modules
from mtpjax.models.view import Entries, View


class MTPParams(flax.struct.PyTreeNode):
    """Parameters of the MTP drafter."""

    modules: dict[str, Any]  # the model's top-level parameters whose names start with `mtp_`
    draft_ids: jax.Array | None = None  # [R] int32 reduced draft vocabulary, ascending


@dataclasses.dataclass(frozen=True)
class MTPNetwork:
    """The model's MTP modules as a `DraftNetwork`."""

    decoder: Decoder
    prepared: PreparedDrafter

    @property
    def config(self) -> ModelConfig:
        """The model's config, because a module's layer is like the trunk's layers."""
        return self.decoder.model.config

    def input_hidden(self, states: jax.Array) -> jax.Array:
        """Returns the trunk's hidden states unchanged."""
        return states

    def run(
        self, index: int, hidden: jax.Array, tokens: jax.Array, view: View, layers: tuple[Entries, ...]
    ) -> tuple[jax.Array, jax.Array, tuple[Entries, ...]]:
        """Runs module `index`; see `DraftNetwork.run`."""
        apply = bind(self.decoder.model, self.prepared.network)
        output, chained, entries = apply(hidden, tokens, view, layers[0], index=index, method="run_module")
        return output, chained, (entries,)

    def scores(
        self, state: DecodeState, output: jax.Array, index: int, path: PathTokens | None, level: int
    ) -> DraftScores:
        """Scores tokens with the module's head or a reduced head; see `DraftNetwork.scores`."""
        return DraftScores(self.decoder, self.prepared.network, state, self.prepared.head, output, index, path, level)


@dataclasses.dataclass(frozen=True)
class MTPDrafter(CachedDrafter):
    """Drafts with the model's MTP modules. Chains support any number of modules, and trees exactly one."""

    def check(self, model: MTPModel, config: DecodeConfig) -> None:
        """Raises `ValueError` if the model has no modules or cannot draft the tree."""
        if not model.config.num_mtp_modules:
            raise ValueError(
                f"num_steps {config.num_steps} with drafter 'mtp' needs at least one MTP module, but the model has "
                "none; use drafter 'lookup', or add_mtp_modules and train"
            )
        if config.topk == 1:
            return
        # The other checks are only for trees.
        num_modules, num_draftable = model.config.num_mtp_modules, model.config.num_tokens or model.config.vocab_size
        if num_modules > 1:
            raise ValueError(
                f"topk {config.topk} drafts trees, which need exactly one MTP module; the model has {num_modules}"
            )
        if config.draft_vocabulary is not None:
            num_draftable = len(draftable_ids(config.draft_vocabulary, model))
        if config.topk > num_draftable:
            raise ValueError(f"topk {config.topk} exceeds the {num_draftable} tokens that can be drafted")

    def default_params(self, params: dict, config: DecodeConfig, *, model: MTPModel) -> MTPParams:
        """Returns the `mtp_*` leaves of the model's parameters, and the reduced vocabulary if there is one."""
        modules = {name: leaf for name, leaf in params.items() if is_of_modules(name)}
        ids = config.draft_vocabulary
        return MTPParams(modules, None if ids is None else jnp.asarray(draftable_ids(ids, model)))

    def prepare(self, params: dict, draft_params: MTPParams, *, model: MTPModel) -> PreparedDrafter:
        """Merges the modules with the parameters that they share with the trunk, and gathers the reduced head."""
        # Modules share the embedding, and often the head, with the trunk.
        merged = {**params, **draft_params.modules}
        ids = draft_params.draft_ids
        return PreparedDrafter(merged, None if ids is None else reduce_head(merged, ids, model=model))

    def network(self, decoder: Decoder, weights: Weights) -> MTPNetwork:
        """Returns the modules with their parameters."""
        return MTPNetwork(decoder, weights.drafter)

    def sizes(self, model: MTPModel) -> ModuleSizes:
        """Returns the sizes of the modules, each of which has one layer like the trunk's."""
        config = model.config
        return ModuleSizes(config.num_mtp_modules, config, (config.mtp_kind,), config.hidden_size)

    def select_states(self, decoder: Decoder, output: TrunkOutput) -> jax.Array:
        """Picks the hidden states `[B, T, D]` that the modules read."""
        return decoder.model.mtp_input_hidden(output)


def draftable_ids(ids: tuple[int, ...], model: MTPModel) -> np.ndarray:
    """Sorts a reduced vocabulary and drops ids that only pad the embedding table.

    Args:
        ids: token ids.

    Returns:
        `[R]` int32, ascending.

    Raises:
        ValueError: no id remains, or an id is outside the vocabulary.
    """
    unique = np.unique(np.asarray(ids, np.int32))
    num_tokens = model.config.num_tokens or model.config.vocab_size
    if not unique.size or unique[0] < 0 or unique[-1] >= model.config.vocab_size:
        raise ValueError(f"draft_vocabulary is empty or has ids outside 0..{model.config.vocab_size - 1}")
    if num_tokens <= unique[0]:
        raise ValueError(
            f"draft_vocabulary has no usable token: ids of {num_tokens} and above only pad the embedding table"
        )
    return unique[unique < num_tokens]
