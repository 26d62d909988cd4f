"""What a decoding call carries from round to round."""

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.cache import Cache, empty_cache
from mtpjax.model import MTPModel


class DecodeState(flax.struct.PyTreeNode):
    """One batch being decoded. Letters: L token slots, E hidden rows kept, K draft levels, M modules in use."""

    tokens: jax.Array  # [B, L] int32: committed tokens, behind them drafts and garbage
    origin: jax.Array  # [B, L] int8: draft level that proposed the token; 0: the trunk (or the prompt)
    length: jax.Array  # [B] int32, committed tokens; the newest is pending: the trunk has not seen it
    limit: jax.Array  # [B] int32, a row ends at this length
    stop_ids: jax.Array  # [S] int32, -1 where unused
    done: jax.Array  # [B] bool
    stopped: jax.Array  # [B] bool, done because of a stop token
    trunk: Cache
    modules: tuple[Cache, ...]  # M caches of one layer; length: slots that hold what a teacher-forced prefill gives
    hidden: jax.Array  # [B, E, D]: what enters the modules, from position hidden_start on
    hidden_start: jax.Array  # [B] int32
    steps: jax.Array  # [B] int32, verification rounds
    proposed: jax.Array  # [B, K] int32, drafts verified per level
    accepted: jax.Array  # [B, K] int32, drafts accepted per level, cut ones included
    discarded: jax.Array  # [B] int32, tokens cut off at a stop or limit


def modules_in_use(model: MTPModel, num_steps: int) -> int:
    """Deeper modules than draft levels are left out of the call."""
    return min(model.config.num_mtp_modules, num_steps)


def hidden_rows(model: MTPModel, num_steps: int) -> int:
    """Positions each module takes in per round: the verified ones, and M-1 before them that had seen drafts."""
    return max(num_steps + modules_in_use(model, num_steps), 1)


def init_state(
    tokens: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    stop_ids: jax.Array,
    *,
    model: MTPModel,
    num_steps: int,
    dtype,
) -> DecodeState:
    """The state before prefill: prompts `tokens [B, L]` of `length [B]`, empty caches of L slots."""
    config = model.config
    B, L = tokens.shape

    def zero(*shape: int) -> jax.Array:  # a buffer each: the state is donated
        return jnp.zeros((B, *shape), jnp.int32)

    return DecodeState(
        tokens=tokens,
        origin=jnp.zeros((B, L), jnp.int8),
        length=length,
        limit=limit,
        stop_ids=stop_ids,
        done=jnp.zeros(B, bool),
        stopped=jnp.zeros(B, bool),
        trunk=empty_cache(config, config.trunk_kinds, B, L, dtype),
        modules=tuple(
            empty_cache(config, (config.mtp_kind,), B, L, dtype) for _ in range(modules_in_use(model, num_steps))
        ),
        hidden=jnp.zeros((B, hidden_rows(model, num_steps), config.hidden_size), dtype),
        hidden_start=zero(),
        steps=zero(),
        proposed=zero(num_steps),
        accepted=zero(num_steps),
        discarded=zero(),
    )
