"""What a decoding call carries from round to round, and the plan that it is compiled for."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from mtpjax.decoding.config import FIXED_TREES, DecodeConfig
from mtpjax.decoding.depth_policy import Policy, init_policy, may_pay
from mtpjax.decoding.draft_tree import Shape, fixed_shape
from mtpjax.decoding.sampling import History, Sampling
from mtpjax.models.cache import Cache, empty_cache
from mtpjax.models.model import MTPModel

RING = 32  # hidden rows that may wait for the modules while an adaptive call does not draft
WIDE = RING // 2  # of them taken in at once where so many wait


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a round does: all that is compiled in. Hashable."""

    num_steps: int
    topk: int = 1
    num_nodes: int = 1
    rule: str = "greedy"
    parameters: tuple[float, ...] = ()  # of a lossy rule
    is_adaptive: bool = False
    window: tuple[int, int] | None = None  # of the modules' attention: newest positions and sinks
    min_rows: int = 1
    chunk: int = 64

    @classmethod
    def of(cls, config: DecodeConfig, *, is_greedy: bool, min_rows: int) -> "Plan":
        """`is_greedy`: every row is at temperature 0. Raises `ValueError` for a rule that cannot be."""
        rule = config.acceptance
        is_tree = config.topk > 1 and config.num_steps > 0
        if rule == "auto":
            rule = "greedy" if is_greedy else "recursive" if is_tree else "block"
        if rule in FIXED_TREES and not is_tree:
            rule = {"recursive": "token", "traversal": "block"}[rule]  # what they are on a chain
        if rule == "greedy" and not is_greedy:
            raise ValueError("acceptance 'greedy' decodes at temperature 0; leave it out, or take an exact rule")
        if not config.num_steps:
            rule = "greedy" if is_greedy else "sample"
        parameters = {
            "threshold": (config.threshold_single, config.threshold_acc),
            "typical": (config.typical_epsilon, config.typical_delta),
            "relaxed": (config.relaxed_topk, config.relaxed_delta),
        }
        return cls(
            num_steps=config.num_steps,
            topk=config.topk if config.num_steps else 1,
            num_nodes=config.num_nodes,
            rule=rule,
            parameters=parameters.get(rule, ()),
            is_adaptive=config.depth_policy == "adaptive" and config.num_steps > 0,
            window=None if config.draft_window is None else (config.draft_window, config.draft_sinks),
            min_rows=min_rows,
            chunk=config.prefill_chunk,
        )

    def at_depth(self, num_steps: int) -> "Plan":
        """The plan of a chain's rounds with other levels."""
        rule = self.rule if num_steps or self.rule == "greedy" else "sample"
        return dataclasses.replace(self, num_steps=num_steps, num_nodes=num_steps + 1, rule=rule)

    @property
    def shape(self) -> Shape | None:
        """The fixed tree of `FIXED_TREES`; None where the tree is chosen among candidates, and for chains."""
        is_fixed = self.rule in FIXED_TREES and self.num_steps > 0
        return fixed_shape(self.topk, self.num_steps, self.num_nodes) if is_fixed else None

    @property
    def draft_slots(self) -> int:
        """Slots behind the text that drafting writes into a module's cache."""
        if self.num_steps < 2:
            return 0
        shape = self.shape
        return sum(map(len, shape.levels()[1:])) if shape else self.topk * (self.num_steps - 1)


class DecodeState(flax.struct.PyTreeNode):
    """One batch being decoded. Letters: L token slots, E hidden rows kept, K draft levels, M modules in use."""

    tokens: jax.Array  # [B, L] int32: committed tokens, behind them drafts and garbage
    origin: jax.Array  # [B, L] int8: draft level that proposed the token; 0: the trunk (or the prompt)
    logprobs: jax.Array | None  # [B, L] float32 of new tokens, where they are asked for
    length: jax.Array  # [B] int32, committed tokens; the newest is pending: the trunk has not seen it
    prompt_length: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, a row ends at this length
    stops: jax.Array  # [N, Z] int32: sequences that end a row, -1 before shorter ones
    sampling: Sampling
    history: History
    done: jax.Array  # [B] bool
    stopped: jax.Array  # [B] bool, done because of a stop sequence
    trunk: Cache
    modules: tuple[Cache, ...]  # M caches of one layer; length: slots that hold what a teacher-forced prefill gives
    hidden: jax.Array  # [B, E, D]: what enters the modules, from position hidden_start on
    hidden_start: jax.Array  # [B] int32
    policy: Policy | None  # of an adaptive depth
    is_closed: jax.Array  # [] bool: an adaptive call drafts no more, its modules have fallen behind
    steps: jax.Array  # [B] int32, verification rounds
    proposed: jax.Array  # [B, K] int32, rounds that were so many levels deep
    accepted: jax.Array  # [B, K] int32, drafts accepted per level, cut ones included
    discarded: jax.Array  # [B] int32, tokens cut off at a stop or limit


def modules_in_use(model: MTPModel, num_steps: int) -> int:
    """Deeper modules than draft levels are left out of the call."""
    return min(model.config.num_mtp_modules, num_steps)


def hidden_rows(model: MTPModel, num_steps: int) -> int:
    """Positions each module takes in per round: the verified ones, and M-1 before them that had seen drafts."""
    return max(num_steps + modules_in_use(model, num_steps), 1)


@functools.partial(jax.jit, static_argnames=("model", "plan", "dtype", "logprobs"))  # in one call to the device
def init_state(
    tokens: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    stops: jax.Array,
    *,
    model: MTPModel,
    plan: Plan,
    dtype,
    sampling: Sampling | None = None,
    depth_costs: jax.Array | None = None,
    depth_change: jax.Array | float = 0.0,
    depth_rates: jax.Array | None = None,
    depth_lengths: jax.Array | None = None,
    logprobs: bool = False,
) -> DecodeState:
    """The state before prefill: prompts `tokens [B, L]` of `length [B]`, empty caches of L slots.

    `depth_costs`, `depth_change`, `depth_rates` and `depth_lengths` are those of an adaptive depth, see `init_policy`.
    A buffer for each leaf, since the state is donated.
    """
    config = model.config
    B, L = tokens.shape
    policy = None
    if depth_costs is not None:
        policy = init_policy(depth_costs, B, change=depth_change, prior=depth_rates, lengths=depth_lengths)

    def zero(*shape: int) -> jax.Array:
        return jnp.zeros((B, *shape), jnp.int32)

    if sampling is None:
        sampling = Sampling.greedy(B)
    history = History()
    if sampling.counts_tokens:
        is_prompt = jnp.arange(L)[None, :] < length[:, None]
        rows = jax.vmap(lambda row, is_set: jnp.zeros(config.vocab_size, bool).at[row].max(is_set))
        history = History(rows(tokens, is_prompt), zero(config.vocab_size))
    rows = hidden_rows(model, plan.num_steps) if not plan.is_adaptive else RING + plan.num_steps
    return DecodeState(
        tokens=tokens,
        origin=jnp.zeros((B, L), jnp.int8),
        logprobs=jnp.zeros((B, L), jnp.float32) if logprobs else None,
        length=length,
        prompt_length=jnp.copy(length),
        limit=limit,
        stops=stops,
        sampling=sampling,
        history=history,
        done=jnp.zeros(B, bool),
        stopped=jnp.zeros(B, bool),
        trunk=empty_cache(config, config.trunk_kinds, B, L, dtype),
        modules=tuple(
            empty_cache(config, (config.mtp_kind,), B, L, dtype) for _ in range(modules_in_use(model, plan.num_steps))
        ),
        hidden=jnp.zeros((B, rows, config.hidden_size), dtype),
        hidden_start=zero(),
        policy=jax.tree.map(jnp.copy, policy),
        is_closed=jnp.zeros((), bool) if policy is None else ~may_pay(policy.costs),
        steps=zero(),
        proposed=zero(plan.num_steps),
        accepted=zero(plan.num_steps),
        discarded=zero(),
    )
