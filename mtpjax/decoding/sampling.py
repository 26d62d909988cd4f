"""Logits -> the distribution that a request asked for. Drafting, verifying and plain decoding share it."""

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding import rng

BITS_OF_TWO = 0x40000000  # as float32: above every probability


class Sampling(flax.struct.PyTreeNode):
    """What each of B rows asks for, on the device; None where no row asks (and nothing is compiled for it)."""

    temperature: jax.Array  # [B] float32; 0: the arg-max
    seed: jax.Array  # [B, 2] uint32
    top_k: jax.Array | None = None  # [B] int32, V where off
    top_p: jax.Array | None = None  # [B] float32, 1 where off
    min_p: jax.Array | None = None  # [B] float32, 0 where off
    bias: jax.Array | None = None  # [B, V] float32; -inf: a token that does not come
    repetition: jax.Array | None = None  # [B] float32, 1 where off
    frequency: jax.Array | None = None  # [B] float32, 0 where off
    presence: jax.Array | None = None  # [B] float32, 0 where off
    min_new: jax.Array | None = None  # [B] int32

    @classmethod
    def greedy(cls, batch: int) -> "Sampling":
        """Every row at temperature 0, and nothing else asked for."""
        return cls(jnp.zeros(batch), jnp.zeros((batch, 2), jnp.uint32))

    @property
    def counts_tokens(self) -> bool:
        """Whether penalties need to know what came before."""
        return not (self.repetition is None and self.frequency is None and self.presence is None)

    @property
    def changes_logits(self) -> bool:
        """Whether `adjust` does more than to leave out ids that pad the tables."""
        return self.counts_tokens or self.bias is not None or self.min_new is not None


class History(flax.struct.PyTreeNode):
    """What penalties count. Empty (None) where no row has any."""

    prompt: jax.Array | None = None  # [B, V] bool, tokens of the prompt
    counts: jax.Array | None = None  # [B, V] int32, of the new tokens


class Path(flax.struct.PyTreeNode):
    """Drafted tokens between the committed text and each of T nodes: `is_on[b, t, x]` says that `tokens[b, x]` is."""

    tokens: jax.Array  # [B, X] int32
    is_on: jax.Array  # [B, T, X] bool


def adjust(
    logits: jax.Array,
    sampling: Sampling,
    history: History,
    *,
    path: Path | None,
    num_new: jax.Array,
    stop_ids: jax.Array,
    num_tokens: int,
) -> jax.Array:
    """Logits `[B, T, V]` with penalties, bias and bans, float32; their arg-max is greedy decoding's choice.

    Of a logit l: `l / r` if positive, else `l r`, for tokens in prompt, text or path (repetition penalty r, CTRL,
    1909.05858, section 4.1); then `l - f count - p [count > 0]`, count in text and path (frequency f and presence p,
    OpenAI's); then the bias. Ids from `num_tokens` on, which pad the tables, do not come; nor do single `stop_ids
    [S]` where `num_new [B, T]`, the new tokens so far, are fewer than asked for.
    """
    logits = logits.astype(jnp.float32)
    B, T, V = logits.shape
    if sampling.counts_tokens:
        assert history.prompt is not None and history.counts is not None
        counts = jnp.broadcast_to(history.counts[:, None], (B, T, V))
        if path is not None:
            counts = counts + _occurrences(path, V)
        if sampling.repetition is not None:
            penalty = sampling.repetition[:, None, None]
            is_seen = history.prompt[:, None] | (counts > 0)
            logits = jnp.where(is_seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        if sampling.frequency is not None:
            logits = logits - sampling.frequency[:, None, None] * counts
        if sampling.presence is not None:
            logits = logits - sampling.presence[:, None, None] * (counts > 0)
    if sampling.bias is not None:
        logits = logits + sampling.bias[:, None]
    if num_tokens < V:
        logits = jnp.where(jnp.arange(V)[None, None] < num_tokens, logits, -jnp.inf)
    if sampling.min_new is not None:
        is_stop = (jnp.arange(V)[:, None] == stop_ids[None]).any(axis=1)
        is_early = num_new < sampling.min_new[:, None]
        logits = jnp.where(is_early[:, :, None] & is_stop[None, None], -jnp.inf, logits)
    return logits


def _occurrences(path: Path, size: int) -> jax.Array:
    """How often each token stands on the way to each node: `[B, T, V]` int32."""

    def count(tokens, is_on):  # [X], [X]
        return jnp.zeros(size, jnp.int32).at[tokens].add(is_on.astype(jnp.int32))

    return jax.vmap(jax.vmap(count, (None, 0)))(path.tokens, path.is_on)


def distribution(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Adjusted logits `[B, T, V]` -> probabilities; rows at temperature 0 are one at the arg-max.

    Softmax of `l / temperature`; of it the top_k likeliest, renormalised; of those the likeliest whose sum reaches
    top_p (Holtzman et al. 1904.09751); of those the ones with at least min_p of the largest (2407.01082). Equally
    likely tokens stay or go together. A row whose every logit is -inf is one at token 0.
    """
    temperature = sampling.temperature[:, None, None]
    is_greedy = (temperature == 0) | (logits.max(axis=-1, keepdims=True) == -jnp.inf)
    scaled = scale(jnp.where(is_greedy, 0, logits), jnp.where(temperature == 0, 1, temperature))
    probabilities = jax.nn.softmax(scaled, axis=-1)
    if sampling.top_k is not None:
        wanted = jnp.broadcast_to(sampling.top_k[:, None], logits.shape[:2]).astype(jnp.float32)
        probabilities = _keep(probabilities, _cut(probabilities, jnp.ones_like(probabilities), wanted))
    if sampling.top_p is not None:
        wanted = jnp.where(sampling.top_p >= 1, jnp.inf, sampling.top_p)[:, None]
        wanted = jnp.broadcast_to(wanted, logits.shape[:2])
        probabilities = _keep(probabilities, _cut(probabilities, probabilities, wanted))
    if sampling.min_p is not None:
        least = sampling.min_p[:, None] * probabilities.max(axis=-1)
        probabilities = _keep(probabilities, least)
    return jnp.where(is_greedy, one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]), probabilities)


def scale(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """`(l - max l) / temperature`, which no temperature above 0 takes out of range; zeros where every l is -inf."""
    most = logits.max(axis=-1, keepdims=True)
    return jnp.where(most == -jnp.inf, 0, logits - jnp.where(most == -jnp.inf, 0, most)) / temperature


def one_hot(tokens: jax.Array, size: int) -> jax.Array:
    """`[B, T]` -> `[B, T, size]` float32."""
    return jax.nn.one_hot(tokens, size, dtype=jnp.float32)


def _keep(probabilities: jax.Array, least: jax.Array) -> jax.Array:
    """Those of at least `least [B, T]`, renormalised."""
    kept = jnp.where(probabilities >= least[:, :, None], probabilities, 0)
    return kept / kept.sum(axis=-1, keepdims=True)


def _cut(values: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest value such that the weights of all values not below it come to `wanted [B, T]`; 0 if all do not.

    By bisection over the bits of `values [B, T, V]`, which are not negative: 31 sums in place of a sort.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        is_enough = jnp.where(bits >= middle[:, :, None], weights, 0).sum(axis=-1) >= wanted
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle - 1)

    low = jnp.zeros(values.shape[:2], jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, BITS_OF_TWO)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def draw(probabilities: jax.Array, gumbel: jax.Array) -> jax.Array:
    """Draws `[B, T]` from weights `[B, T, V]`, with Gumbel noise of that shape."""
    return jnp.argmax(jnp.log(probabilities) + gumbel, axis=-1).astype(jnp.int32)


def draw_target(probabilities: jax.Array, sampling: Sampling, position: jax.Array) -> jax.Array:
    """The tokens that plain decoding draws for `position [B, T]` from `[B, T, V]`: `[B, T]`."""
    _, T, V = probabilities.shape
    return draw(probabilities, rng.gumbel(sampling.seed, position, rng.TARGET, jnp.zeros(T, jnp.int32), V))
