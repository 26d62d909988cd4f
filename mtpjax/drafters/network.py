"""The network of a drafter with its own KV caches: the interface for the drafting passes.

MTP modules and EAGLE-3 heads draft by the same passes: extend over committed positions, then a chain or a tree on the
network's own output. `DraftNetwork` hides the differences.
"""

from typing import Protocol

import jax

from mtpjax.decoding.sampling import PathTokens
from mtpjax.decoding.state import DecodeState
from mtpjax.drafters.scoring import DraftScores
from mtpjax.models.config import ModelConfig
from mtpjax.models.view import Entries, View


class DraftNetwork(Protocol):
    """One or several modules that read hidden states and tokens; module k's output can feed module k+1 or itself."""

    @property
    def config(self) -> ModelConfig:
        """Sizes and rotary embedding of the layers that draft."""
        ...

    def input_hidden(self, states: jax.Array) -> jax.Array:
        """Converts the trunk states that the drafter keeps to a module's input hidden states, `[B, T, D]`."""
        ...

    def run(
        self, index: int, hidden: jax.Array, tokens: jax.Array, view: View, layers: tuple[Entries, ...]
    ) -> tuple[jax.Array, jax.Array, tuple[Entries, ...]]:
        """Runs one module.

        Args:
            hidden: `[B, T, D]` from `input_hidden`, or a module's output.
            tokens: `[B, T]` int32, the token that follows each hidden state's position (one later per module).
            view: cache slots, positions and masks.
            layers: the module's cache, one entry per layer.

        Returns:
            The output for the head and the output to draft on, both `[B, T, D]`, and the cache with the new entries.
        """
        ...

    def scores(
        self, state: DecodeState, output: jax.Array, index: int, path: PathTokens | None, level: int
    ) -> DraftScores:
        """Returns the scores of the tokens after each row of `output [B, f, D]`; arguments as in `DraftScores`."""
        ...
