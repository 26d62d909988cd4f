"""Scores tokens for draft networks with the trunk's head, a reduced head (FR-Spec, 2502.14856) or their own head.

Verification always uses the full vocabulary, so a reduced vocabulary changes the acceptance rate but not the text.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding import rng
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.logits import adjust_logits
from mtpjax.decoding.sampling import PathTokens, distribution, draw
from mtpjax.decoding.state import DecodeState
from mtpjax.models.model import MTPModel, bind, multiply_head
from mtpjax.models.vocabulary import Vocabulary
from pallas_kernels.head_top_k import head_top_k


class ReducedHead(flax.struct.PyTreeNode):
    """The head columns of a draft vocabulary of R tokens, and the token of each column."""

    matrices: tuple[jax.Array, ...]  # [D, R] per module, or one shared matrix
    ids: jax.Array  # [R] int32, token of each column
    column: jax.Array  # [V] int32, column of each token, or -1 if it cannot be drafted


class PreparedDrafter(flax.struct.PyTreeNode):
    """The parameters that a round reads, for a drafter with modules or its own network."""

    network: dict[str, Any]  # for MTP modules, including what they share with the trunk
    head: ReducedHead | None  # None means the trunk's head


def reduce_head(params: dict, ids: jax.Array, *, model: MTPModel) -> ReducedHead:
    """Gathers every module's head columns for a reduced vocabulary, once per call; `ids [R]` are in ascending order."""
    # Modules with their own heads each get a matrix; otherwise all share one.
    config = model.config
    indices = range(config.num_mtp_modules) if config.mtp_own_head else [None]
    apply = bind(model, params)
    vocabulary = Vocabulary.of(config.vocab_size)

    def reduced(index):
        rows = apply(index=index, method="head_matrix").T  # [local V, D]
        return vocabulary.look_up(lambda columns: rows[columns], ids, len(rows)).T.astype(params["embedding"].dtype)

    return ReducedHead(tuple(map(reduced, indices)), ids, _columns(ids, config.vocab_size))


def own_head(params: dict, matrices: tuple[jax.Array, ...], ids: jax.Array | None, *, model: MTPModel) -> ReducedHead:
    """Makes the head of a drafter with its own output matrices, in the model's dtype.

    Args:
        matrices: `[D, R]` matrices, either one that all modules share or one per module.
        ids: `[R]` int32 token of each column; None if column j is token j.

    Raises:
        ValueError: the numbers of ids and columns differ.
    """
    num_columns = matrices[0].shape[1]
    ids = jnp.arange(num_columns, dtype=jnp.int32) if ids is None else ids
    if len(ids) != num_columns:
        raise ValueError(f"the drafter's head has {num_columns} columns, but draft_ids has {len(ids)} elements")
    matrices = tuple(matrix.astype(params["embedding"].dtype) for matrix in matrices)
    return ReducedHead(matrices, ids, _columns(ids, model.config.vocab_size))


def _columns(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Inverts `ids [R]` to the column of each token `[V]`, which scatters reduced logits over the vocabulary."""
    return jnp.full(vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class DraftScores:
    """Scores of the children of f draft nodes at one level. Computes all logits or only the best tokens, on demand.

    Attributes:
        decoder: the decoder; `spec.min_rows` is the minimum number of rows in a pass through the head.
        params: model parameters, with the full head.
        state: the decoding state of the rows.
        head: the reduced head; None means the full head.
        hidden: `[B, f, D]` a module's output, after its norm.
        index: the module.
        path: drafted tokens before each node's children, for penalties.
        level: draft level of the children, from 1.
    """

    decoder: Decoder
    params: dict[str, Any]
    state: DecodeState
    head: ReducedHead | None
    hidden: jax.Array
    index: int
    path: PathTokens | None
    level: int

    def head_logits(self) -> jax.Array:
        """Runs the head; returns float32 logits `[B, f, R]`, or `[B, f, V]` without a reduced head."""
        f = self.hidden.shape[1]
        hidden = pad_rows(self.hidden, max(f, self.decoder.spec.min_rows))
        if self.head is None:
            return self._apply(hidden, index=self.index, method="own_logits")[:, :f]
        return multiply_head(hidden, self._matrix(self.head))[:, :f]

    def logits(self) -> jax.Array:
        """Computes adjusted logits `[B, f, V]` float32; tokens outside a reduced vocabulary have -inf."""
        # 1. Run the head. With a reduced head, tokens outside the draft vocabulary get -inf, so their q is 0.
        state, head, logits = self.state, self.head, self.head_logits()
        if head is not None:
            reduced_logits, column = logits, self.vocabulary.own(head.column)
            is_draftable = (column >= 0)[None, None, :]
            logits = jnp.where(is_draftable, jnp.take(reduced_logits, jnp.maximum(column, 0), axis=-1), -jnp.inf)
        # 2. Apply the request's penalties and bans exactly as verification does. `num_new` is the number of new tokens
        # before the children.
        num_new = state.length - state.settings.prompt_length + self.level - 1
        num_new = jnp.broadcast_to(num_new[:, None], logits.shape[:2])
        return adjust_logits(logits, state, self.path, num_new, self.decoder.model)

    def top_tokens(self, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Finds the k best tokens without storing all logits. Valid only if penalties, bias and bans are off.

        Returns:
            Their logits and ids, `[B, f, k]`, and the log-sum-exp over the vocabulary, `[B, f]`.
        """
        assert not self.state.settings.sampling.changes_logits
        f = self.hidden.shape[1]
        hidden = pad_rows(self.hidden, max(f, self.decoder.spec.min_rows))
        if self.head is None:
            values, tokens, logsumexp = self._apply(hidden, k=k, index=self.index, method="top_tokens")
        else:
            # The kernel returns columns of the reduced head; translate them to token ids.
            matrix = self._matrix(self.head)
            values, columns, logsumexp = head_top_k(
                hidden, matrix, k=k, implementation=self.decoder.model.implementation
            )
            tokens = self.head.ids[columns]
        return values[:, :f], tokens[:, :f], logsumexp[:, :f]

    def draft_token(self) -> tuple[jax.Array, jax.Array | None]:
        """Drafts a token after each node by sampling from q if the acceptance rule compares p with q, else by arg-max.

        Returns:
            The tokens `[B, f]`, and q `[B, f, V]` if they are sampled.
        """
        state, sampling = self.state, self.state.settings.sampling
        if self.decoder.spec.is_ratio_rule:
            logits, vocabulary = self.logits(), self.vocabulary
            q = distribution(logits, sampling, vocabulary)
            # Drafts use separate noise, because the draws for acceptance and the bonus token must not depend on it.
            V, node = logits.shape[-1], jnp.array([self.level])
            noise = rng.gumbel(sampling.seed, state.length[:, None], rng.DRAFT, node, V, vocabulary.first_id(V))
            return draw(q, noise, vocabulary), q
        if sampling.changes_logits:
            return self.vocabulary.argmax(self.logits()), None
        return self.top_tokens(1)[1][:, :, 0], None

    @property
    def vocabulary(self) -> Vocabulary:
        """How the columns of `logits` are split over devices."""
        return Vocabulary.of(self.decoder.vocab_size)

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        return bind(self.decoder.model, self.params)(*arguments, **options)

    def _matrix(self, head: ReducedHead) -> jax.Array:
        return head.matrices[self.index if len(head.matrices) > 1 else 0]


def pad_rows(rows: jax.Array, count: int) -> jax.Array:
    """Pads `[B, f, ...]` with zero rows to `[B, count, ...]`."""
    return jnp.pad(rows, ((0, 0), (0, count - rows.shape[1]), *((0, 0) for _ in rows.shape[2:])))
