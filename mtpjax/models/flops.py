"""Counts the model FLOPs of layers: the operations that the mathematics needs, not those that a program executes.

A multiplication and its addition are two operations. Only matrix products and attention count, as in PaLM (2204.02311,
appendix B); norms, activations, softmax and routing do not. Attention counts the pairs of tokens that attend to each
other, which are causal, within a document and within the window. PaLM counts all T x T pairs of a row.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from mtpjax.models.config import LayerKind, ModelConfig
from mtpjax.models.quantized import is_scaled
from mtpjax.models.sharding import path_name

# Parameters that are looked up, added or multiplied per channel.
NO_MATRIX = re.compile(r"norm|bias|sinks|log_rate|(^|/)(embedding|markov_in)$")
ROUTED_EXPERTS = re.compile(r"experts/(gate_up|down)$")


class RowCounts(NamedTuple):
    """The packed rows of an update, as the counts need them.

    Attributes:
        num_rows: number of rows.
        row_length: tokens per row, including padding.
        lengths: `[documents]` tokens of each document in the rows.
    """

    num_rows: int
    row_length: int
    lengths: np.ndarray

    @classmethod
    def full(cls, num_rows: int, row_length: int) -> "RowCounts":
        """Returns the counts of rows that each hold one document."""
        return cls(num_rows, row_length, np.full(num_rows, row_length))

    @classmethod
    def of_segments(cls, segment_ids: np.ndarray) -> "RowCounts":
        """Counts packed rows `[R, T]`, in which 0 is padding and every document has consecutive positions."""
        begins = np.diff(segment_ids, axis=1, prepend=-1) != 0
        first = np.flatnonzero(begins)
        lengths = np.diff(first, append=segment_ids.size)
        num_rows, row_length = segment_ids.shape
        return cls(num_rows, row_length, lengths[segment_ids.ravel()[first] > 0])

    @property
    def tokens(self) -> int:
        """Number of tokens, including padding."""
        return self.num_rows * self.row_length

    def pairs(self, limit: int = 0) -> int:
        """Counts the pairs (query, key) of causal attention inside the documents.

        Args:
            limit: number of keys to which a query attends at most, such as a window; 0: no limit.
        """
        lengths = self.lengths.astype(np.int64)
        short = np.minimum(lengths, limit) if limit else lengths
        return int((short * (short + 1) // 2 + (lengths - short) * short).sum())


def matrices(params: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the paths and shapes of the arrays that tokens are multiplied with."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_scaled):
        if not NO_MATRIX.search(name := path_name(path)):
            yield name, leaf.shape


def product_flops(config: ModelConfig, named: Iterable[tuple[str, tuple[int, ...]]]) -> float:
    """Returns the operations per token in the products with these matrices; of the experts, only the chosen ones run.

    Args:
        config: the model.
        named: paths and shapes, from `matrices`.
    """
    share = config.num_experts_per_tok / config.n_routed_experts if config.is_moe else 1.0
    return sum(2 * math.prod(shape) * (share if ROUTED_EXPERTS.search(name) else 1) for name, shape in named)


def attention_flops(config: ModelConfig, kinds: Iterable[LayerKind], rows: RowCounts) -> float:
    """Returns the operations that layers of these kinds need for tokens to read each other.

    Grouped attention needs a product per element of the key and of the value for every pair and query head. Latent
    attention counts in its expanded form, whose heads have their own keys and values. The gated delta rule counts as
    its recurrence, in which a token reads the state with its key, adds to the state, and reads it with its query.
    """
    total = 0.0
    for kind in kinds:
        own = config.of_layer(kind)
        if kind.attention == "delta":
            state = own.linear_num_value_heads * own.linear_key_head_dim * own.linear_value_head_dim
            total += 2 * 3 * state * rows.tokens
            continue
        width = own.head_dim + own.value_dim
        if kind.attention == "latent":
            width = own.qk_nope_head_dim + own.qk_rope_head_dim + own.v_head_dim
        limit = own.sliding_window if kind.is_sliding else own.index_topk if kind.indexer else 0
        total += 2 * own.num_attention_heads * width * rows.pairs(limit)
    return total


def indexer_flops(config: ModelConfig, kinds: Iterable[LayerKind], rows: RowCounts) -> float:
    """Returns the operations with which the sparse indexers of these layers score all earlier tokens of a document.

    In rows of at most `index_topk` tokens, every key is selected and no indexer runs.
    """
    if rows.row_length <= config.index_topk:
        return 0.0
    each = 2 * config.index_n_heads * config.index_head_dim * rows.pairs()
    return float(each * sum(kind.indexer == "full" for kind in kinds))
