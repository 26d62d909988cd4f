"""Converts logits to a request's distribution, and samples from it.

Drafting, verification and plain decoding share these functions. Ratio rules are exact only if q is the distribution
that drafts were actually drawn from. The text equals the text of plain decoding only if both transform p in the same
way.

On a mesh, each device has only the columns of its vocabulary shard; `vocabulary` combines the shards
(`mtpjax.models.vocabulary`). V is then the size of the shard, except in `SamplingArrays` and `TokenHistory`.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.models.vocabulary import WHOLE, Vocabulary

BITS_OF_TWO = 0x40000000  # bits of 2.0 as float32, which is above every probability
DIGIT = 3  # bits of the threshold that a sharded vocabulary determines per step; must divide 30


@dataclasses.dataclass(frozen=True)
class SamplingFeatures:
    """The sampling options that are compiled in. An option that is off costs nothing, and its values are ignored."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    bias: bool = False
    repetition: bool = False
    frequency: bool = False
    presence: bool = False
    min_new: bool = False

    @classmethod
    def all_enabled(cls) -> "SamplingFeatures":
        """Returns features with every option compiled in, for states that serve requests of any kind."""
        return cls(**{field.name: True for field in dataclasses.fields(cls)})


class SamplingArrays(flax.struct.PyTreeNode):
    """Sampling parameters of B rows, as arrays. Every leaf is present, whichever options are enabled."""

    temperature: jax.Array  # [B] float32; 0: greedy
    seed: jax.Array  # [B, 2] uint32
    top_k: jax.Array  # [B] int32; V: off
    top_p: jax.Array  # [B] float32; 1: off
    min_p: jax.Array  # [B] float32; 0: off
    repetition: jax.Array  # [B] float32; 1: off
    frequency: jax.Array  # [B] float32; 0: off
    presence: jax.Array  # [B] float32; 0: off
    min_new: jax.Array  # [B] int32; 0: off
    bias: jax.Array  # [B, V] float32, -inf bans a token; [B, 0] if `features.bias` is off
    features: SamplingFeatures = flax.struct.field(pytree_node=False, default=SamplingFeatures())

    @classmethod
    def greedy(cls, batch: int, vocab_size: int = 0, features: SamplingFeatures | None = None) -> "SamplingArrays":
        """Makes parameters for greedy decoding of B rows, with every other option at its neutral value.

        `vocab_size` is needed only if `features` includes top_k or bias.
        """
        features = features or SamplingFeatures()
        # Each field has its own buffer, because a compiled call donates the state.
        return cls(
            temperature=jnp.zeros(batch),
            seed=jnp.zeros((batch, 2), jnp.uint32),
            top_k=jnp.full(batch, vocab_size, jnp.int32),
            top_p=jnp.ones(batch),
            min_p=jnp.zeros(batch),
            repetition=jnp.ones(batch),
            frequency=jnp.zeros(batch),
            presence=jnp.zeros(batch),
            min_new=jnp.zeros(batch, jnp.int32),
            bias=jnp.zeros((batch, vocab_size if features.bias else 0)),
            features=features,
        )

    @property
    def has_penalties(self) -> bool:
        """True if a penalty is compiled in, so that the logits depend on earlier tokens."""
        return self.features.repetition or self.features.frequency or self.features.presence

    @property
    def changes_logits(self) -> bool:
        """True if `apply_penalties_and_bias` does more than ban the ids that pad the embedding table."""
        return self.has_penalties or self.features.bias or self.features.min_new


class TokenHistory(flax.struct.PyTreeNode):
    """Token counts of the committed text, for the penalties; `[B, 0]` if no penalty is compiled in."""

    prompt: jax.Array  # [B, V] bool, True for tokens of the prompt
    counts: jax.Array  # [B, V] int32, occurrences among the new tokens

    @classmethod
    def empty(cls, batch: int, vocab_size: int, sampling: SamplingArrays) -> "TokenHistory":
        """Makes a history without tokens for rows with these sampling options."""
        size = vocab_size if sampling.has_penalties else 0
        return cls(jnp.zeros((batch, size), bool), jnp.zeros((batch, size), jnp.int32))


class PathTokens(flax.struct.PyTreeNode):
    """The drafted tokens on the path from the committed text to each of T nodes. Penalties count them too."""

    tokens: jax.Array  # [B, X] int32
    is_ancestor: jax.Array  # [B, T, X] bool: tokens[b, x] is node t or an ancestor of it


def apply_penalties_and_bias(
    logits: jax.Array,
    sampling: SamplingArrays,
    history: TokenHistory,
    *,
    path: PathTokens | None,
    num_new: jax.Array,
    stop_ids: jax.Array,
    num_tokens: int,
    vocabulary: Vocabulary = WHOLE,
) -> jax.Array:
    """Applies penalties, bias and bans. Greedy decoding picks the arg-max of the result.

    1. Repetition penalty r (CTRL, 1909.05858, section 4.1): `l / r` if l is positive, else `l r`, for tokens of the
       prompt, the text or the path.
    2. Frequency and presence penalties f and p (OpenAI): `l - f count - p [count > 0]`, counted over text and path.
    3. The bias is added; ids from `num_tokens` on, which only pad the embedding table, are banned.
    4. Single stop tokens are banned until a row has `min_new` tokens.

    Args:
        logits: `[B, T, V]`.
        history: the rows' token counts.
        path: drafted tokens up to and including each node; None: no drafted tokens.
        num_new: `[B, T]` int32 new tokens up to each node.
        stop_ids: `[B, N]` int32 single stop tokens of each row, padded with -1.
        num_tokens: ids below this are real tokens.

    Returns:
        `[B, T, V]` float32.
    """
    # Each option is a Python condition, so the program contains only the options that are compiled in.
    features = sampling.features
    logits = logits.astype(jnp.float32)
    B, T, V = logits.shape
    # 1. and 2. Penalties. The new text at a node consists of the committed new tokens and the node's path.
    if sampling.has_penalties:
        counts = jnp.broadcast_to(vocabulary.own(history.counts)[:, None], (B, T, V))
        if path is not None:
            counts = counts + _occurrences(path, V, vocabulary)
        if features.repetition:
            penalty = sampling.repetition[:, None, None]
            is_seen = vocabulary.own(history.prompt)[:, None] | (counts > 0)
            logits = jnp.where(is_seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        if features.frequency:
            logits = logits - sampling.frequency[:, None, None] * counts
        if features.presence:
            logits = logits - sampling.presence[:, None, None] * (counts > 0)
    # 3. Bias and banned ids. A logit of -inf makes a token's probability 0 in p and in q.
    if features.bias:
        logits = logits + vocabulary.own(sampling.bias)[:, None]
    if num_tokens < vocabulary.size(V):
        logits = jnp.where(vocabulary.ids(V)[None, None] < num_tokens, logits, -jnp.inf)
    # 4. Early stop tokens.
    if features.min_new:
        is_stop = (vocabulary.ids(V)[None, :, None] == stop_ids[:, None, :]).any(axis=2)
        is_early = num_new < sampling.min_new[:, None]
        logits = jnp.where(is_early[:, :, None] & is_stop[:, None], -jnp.inf, logits)
    return logits


def _occurrences(path: PathTokens, size: int, vocabulary: Vocabulary) -> jax.Array:
    """Counts how often each token occurs on the path to each node; returns `[B, T, V]` int32."""

    def count(tokens, is_ancestor):  # [X], [X]
        return jnp.zeros(size, jnp.int32).at[tokens].add(is_ancestor.astype(jnp.int32))

    return jax.vmap(jax.vmap(count, (None, 0)))(vocabulary.columns(path.tokens, size), path.is_ancestor)


def distribution(logits: jax.Array, sampling: SamplingArrays, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Converts adjusted logits to the probabilities that a token is sampled from.

    Three filters apply to `softmax(l / temperature)` in this order, each followed by a renormalisation. top_k keeps the
    most likely tokens. top_p keeps the most likely tokens until their sum reaches top_p (Holtzman et al., 1904.09751).
    min_p keeps tokens with at least min_p times the largest probability (2407.01082). Equally likely tokens are kept or
    dropped together.

    Args:
        logits: `[B, T, V]` float32, from `apply_penalties_and_bias`.

    Returns:
        `[B, T, V]` float32. Rows at temperature 0 are one-hot at the arg-max. A row whose logits are all -inf or
        contain NaN is one-hot at some token, so every rule stays exact even if a draft head computes NaN.
    """
    features = sampling.features
    # 1. Softmax. Greedy rows, and rows with a NaN or with every token banned, become one-hot at the end; until then
    # their logits are 0, so that no NaN appears.
    temperature = sampling.temperature[:, None, None]
    is_greedy = (temperature == 0) | ~(vocabulary.max(logits, keepdims=True) > -jnp.inf)
    temperature = jnp.where(temperature == 0, 1, temperature)
    scaled = apply_temperature(jnp.where(is_greedy, 0, logits), temperature, vocabulary)
    probabilities = vocabulary.softmax(scaled)
    # 2. top_k: find the largest threshold that at least k probabilities reach.
    if features.top_k:
        min_sum = jnp.broadcast_to(sampling.top_k[:, None], logits.shape[:2]).astype(jnp.float32)
        threshold = _threshold(probabilities, jnp.ones_like(probabilities), min_sum, vocabulary)
        probabilities = _keep_at_least(probabilities, threshold, vocabulary)
    # 3. top_p: find the largest threshold at which the probabilities at or above it sum to top_p.
    if features.top_p:
        # For top_p = 1 the required sum is infinite, so that rounding of the sum never drops a token.
        min_sum = jnp.where(sampling.top_p >= 1, jnp.inf, sampling.top_p)[:, None]
        min_sum = jnp.broadcast_to(min_sum, logits.shape[:2])
        threshold = _threshold(probabilities, probabilities, min_sum, vocabulary)
        probabilities = _keep_at_least(probabilities, threshold, vocabulary)
    # 4. min_p: the threshold is relative to the probability of the most likely token.
    if features.min_p:
        threshold = sampling.min_p[:, None] * vocabulary.max(probabilities)
        probabilities = _keep_at_least(probabilities, threshold, vocabulary)
    return jnp.where(is_greedy, vocabulary.one_hot(vocabulary.argmax(logits), logits.shape[-1]), probabilities)


def apply_temperature(logits: jax.Array, temperature: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Computes `(l - max l) / temperature` without overflow; returns zeros where every logit is -inf.

    The result has the same softmax as `l / temperature`. The temperature is above 0 and broadcasts against the logits
    `[..., V]`.
    """
    # Subtract the maximum first, because l / temperature overflows at small temperatures.
    largest = vocabulary.max(logits, keepdims=True)
    return jnp.where(largest == -jnp.inf, 0, logits - jnp.where(largest == -jnp.inf, 0, largest)) / temperature


def _keep_at_least(probabilities: jax.Array, threshold: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Zeroes probabilities below `threshold [B, T]` and renormalises the rest."""
    kept = jnp.where(probabilities >= threshold[:, :, None], probabilities, 0)
    return kept / vocabulary.sum(kept, keepdims=True)


def _threshold(values: jax.Array, weights: jax.Array, min_sum: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Finds the largest threshold for which the weights of the values at or above it sum to `min_sum [B, T]` or more.

    Returns 0 where the sum of all weights is smaller.
    """
    # Non-negative floats have the same order as their bits, so a bisection over the 31 bits finds the threshold without
    # sorting the vocabulary. Invariant: the weights at or above `low` suffice, and the weights above `high` do not.
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    if vocabulary != WHOLE:
        return _threshold_of_parts(bits, weights, min_sum, vocabulary)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        is_enough = jnp.where(bits >= middle[:, :, None], weights, 0).sum(axis=-1) >= min_sum
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle - 1)

    low = jnp.zeros(values.shape[:2], jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, BITS_OF_TWO)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _threshold_of_parts(bits: jax.Array, weights: jax.Array, min_sum: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Computes `_threshold` digit by digit, because a bisection would wait for the other devices 31 times."""
    # The search covers the bit patterns below 2.0. Each step tests all digits at once, with one sum over the devices.
    digits = jnp.arange(1, 2**DIGIT, dtype=jnp.int32)[None, None]

    def append_digit(step, low):
        # The largest digit at which the weights suffice equals the number of nonzero digits at which they suffice.
        shift = 30 - DIGIT * (step + 1)
        is_kept = bits[:, :, None] >= (low[:, :, None] + (digits << shift))[..., None]  # [B, T, digits, V]
        sums = vocabulary.sum(jnp.where(is_kept, weights[:, :, None], 0))
        return low + ((sums >= min_sum[:, :, None]).sum(axis=-1, dtype=jnp.int32) << shift)

    low = jax.lax.fori_loop(0, 30 // DIGIT, append_digit, jnp.zeros(bits.shape[:2], jnp.int32))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def draw(probabilities: jax.Array, gumbel: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Draws tokens `[B, T]` int32 from weights `[B, T, V]` with Gumbel noise `[B, T, V]`; never draws weight 0."""
    # The Gumbel-max trick: the arg-max of log p plus Gumbel noise is a draw from p.
    return vocabulary.argmax(jnp.log(probabilities) + gumbel)
