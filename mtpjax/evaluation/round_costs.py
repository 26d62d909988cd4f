"""Measures the costs of a round and of its parts, and the speed-up that they allow.

The ideal speed-up is `accept length / cost`, where the cost of a round is `verify(W) + extend(K+M) + (K-1) draft(topk)`
in units of a plain decoding step.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import rng
from mtpjax.decoding.commit import cond_as_while_loop
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.drafters.mtp import MTPDrafter
from mtpjax.decoding.loop import run_round
from mtpjax.decoding.requests import make_drafter
from mtpjax.decoding.sampling import SamplingArrays, distribution, draw
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, empty_state, start_rows
from mtpjax.models.cache import commit, empty_cache
from mtpjax.models.layers.entries import read_rows
from mtpjax.models.masks import cached_view
from mtpjax.models.model import MTPModel, bind

MAX_ROUNDS_PER_TIMING = 512  # limit on the rounds of one timing
MAX_MEASURED_STEPS = 32  # deepest draft to measure; each depth compiles several programs, longer ones with each level
MAX_TIMING_TRIES = 10  # of a timing that comes out negative


class RoundShape(NamedTuple):
    """Depth, width and verified nodes of a round; `chain_shape` makes that of a chain, `PLAIN_STEP` has no drafts."""

    num_steps: int  # draft levels, K
    topk: int  # children per tree node; 1 for a chain
    num_nodes: int  # nodes verified, W, including the pending token


def chain_shape(num_steps: int) -> RoundShape:
    """Returns the shape of a chain of `num_steps` drafts; 0 is a plain step."""
    return RoundShape(num_steps, 1, num_steps + 1)


PLAIN_STEP = chain_shape(0)


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Seconds per round of a batch, by shape.

    Attributes:
        batch: rows, B.
        verify: the trunk's pass over the nodes alone.
        parts: all passes of a round: the trunk over the nodes, every module over the positions that it extends over,
            and the recycled draft levels. They are timed together, since differences of timings are mostly noise.
        round: the whole round of `speculative_generate`, including acceptance and commit; empty if not measured.
        change: how much longer a round takes after a round of another depth.
    """

    batch: int
    verify: dict[RoundShape, float]
    parts: dict[RoundShape, float]
    round: dict[RoundShape, float] = dataclasses.field(default_factory=dict)
    change: float = 0.0

    @property
    def plain(self) -> float:
        """Seconds of the parts of a plain step."""
        return self.parts[PLAIN_STEP]

    def ideal_ratio(self, accept_length: float, shape: RoundShape) -> float:
        """Computes the speed-up over plain decoding if a round cost only its parts.

        Args:
            accept_length: tokens per round, bonus token included.
            shape: the round.

        Returns:
            `accept_length / parts`, with parts in units of a plain step.
        """
        return accept_length * self.plain / self.parts[shape]

    def to_json(self) -> dict[str, Any]:
        """Returns the costs for JSON, with a row per shape, since keys in JSON are strings."""
        rows = [
            {**shape._asdict(), **{f"{kind}_seconds": of[shape] for kind, of in self._kinds() if shape in of}}
            for shape in self.parts
        ]
        return {"batch": self.batch, "change_seconds": self.change, "rounds": rows}

    def _kinds(self) -> list[tuple[str, dict[RoundShape, float]]]:
        return [("verify", self.verify), ("parts", self.parts), ("round", self.round)]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "RoundCosts":
        """Restores costs from `to_json`.

        Args:
            stored: the JSON object.

        Returns:
            The costs.

        Raises:
            KeyError, TypeError, ValueError: for any other object.
        """
        costs = cls(int(stored["batch"]), {}, {}, {}, float(stored["change_seconds"]))
        for row in stored["rounds"]:
            shape = RoundShape(row["num_steps"], row["topk"], row["num_nodes"])
            for kind, of in costs._kinds():
                if f"{kind}_seconds" in row:
                    of[shape] = float(row[f"{kind}_seconds"])
        return costs


class CostMeter:
    """Times rounds of several shapes, and plain steps, each in a compiled `while_loop` of its own.

    The loops run on caches that hold a context. A loop that reaches the end of its caches starts over behind the
    context.
    """

    def __init__(
        self,
        params: dict,
        *,
        model: MTPModel,
        shapes: tuple[RoundShape, ...],
        context: int,
        capacity: int,
        batch: int = 1,
        min_rows: int = 1,
        temperature: float = 0.0,
        seconds: float = 0.02,
        time_full_rounds: bool = False,
        on_compiled: Callable[[], None] = lambda: None,
    ):
        """Compiles the loops.

        Args:
            params: parameters of `model` with unrolled layers.
            model: the model.
            shapes: the rounds to time; plain steps are always added.
            context: tokens per row in the caches.
            capacity: cache slots per row.
            batch: rows, B.
            min_rows: fewest token rows per pass; narrower passes are padded, as in decoding.
            temperature: above 0, heads compute distributions, tokens are sampled, and whole rounds use the default
                acceptance rules.
            seconds: approximate duration of one timing, which covers at least four rounds.
            time_full_rounds: also time whole rounds as the decoding loop runs them, and for chains a cycle through all
                depths.
            on_compiled: called after each loop is compiled.
        """
        self.batch = batch
        self._timers: dict[tuple[str, RoundShape], Callable[[], float]] = {}
        conditions = _TimingConditions(batch, context, capacity, min_rows, temperature)
        # 1. Per shape: all parts, verification alone (a plain step has no other part), and the whole round.
        for shape in dict.fromkeys((PLAIN_STEP, *shapes)):
            dtype = params["embedding"].dtype
            loops = {"parts": _passes_loop(dtype, model, shape, conditions, drafts=True)}
            if shape != PLAIN_STEP:
                loops["verify"] = _passes_loop(dtype, model, shape, conditions, drafts=False)
            if time_full_rounds:
                loops["round"] = _full_round_loop(dtype, model, (shape,), conditions)
            for kind, loop in loops.items():
                self._timers[kind, shape] = _timer(params, *loop, seconds=seconds)
                on_compiled()
        # 2. A cycle of one round per depth shows what a change of depth costs.
        chains = tuple(dict.fromkeys((PLAIN_STEP, *(shape for shape in shapes if shape.topk == 1))))
        if time_full_rounds and len(chains) > 1:
            loop = _full_round_loop(params["embedding"].dtype, model, chains, conditions)
            self._timers["cycle", PLAIN_STEP] = _timer(params, *loop, seconds=seconds)
            on_compiled()
        self._seconds: dict = {timed: [] for timed in self._timers}

    def measure(self, repeats: int = 3) -> None:
        """Times every loop `repeats` times.

        Args:
            repeats: timings to add per loop.
        """
        # All loops take turns, so that disturbances by other programs hit them alike. The first turn only warms up.
        for number in range(repeats + 1):
            for timed, run in self._timers.items():
                seconds = run()
                if number:
                    self._seconds[timed].append(seconds)

    def plain_steps(self, shape: RoundShape) -> np.ndarray:
        """Returns the cost of a round's parts in plain steps, `[R]`: one per measurement, from timings of its turn.

        Args:
            shape: a shape that is measured.
        """
        return np.array(self._seconds["parts", shape]) / np.array(self._seconds["parts", PLAIN_STEP])

    def costs(self) -> RoundCosts:
        """Summarises all timings so far.

        Other programs slow down all loops of a turn alike, so ratios within a turn vary less than times. Each cost is
        the median time of a plain step multiplied by the median of the ratio to the plain step of the same turn.

        Returns:
            The costs.
        """
        plain = np.array(self._seconds.get(("round", PLAIN_STEP), self._seconds["parts", PLAIN_STEP]))
        medians: dict[str, dict[RoundShape, float]] = {"verify": {}, "parts": {}, "round": {}, "cycle": {}}
        for (kind, shape), times in self._seconds.items():
            medians[kind][shape] = float(np.median(plain) * np.median(np.array(times) / plain))
        rounds, change = medians["round"], 0.0
        # The cost of a change of depth is the excess of the cycle over its rounds, per round of the cycle.
        if medians["cycle"]:
            chains = [seconds for shape, seconds in rounds.items() if shape.topk == 1]
            change = max(medians["cycle"][PLAIN_STEP] - sum(chains), 0.0) / len(chains)
        return RoundCosts(
            self.batch,
            {PLAIN_STEP: medians["parts"][PLAIN_STEP], **medians["verify"]},
            medians["parts"],
            rounds,
            change,
        )


def max_slots_written(model: MTPModel, shape: RoundShape) -> int:
    """Returns an upper bound on the cache slots that a round of this shape writes behind the committed text."""
    return max(
        shape.num_nodes, MTPDrafter().num_extend_positions(model, shape.num_steps) + shape.topk * shape.num_steps
    )


class _TimingConditions(NamedTuple):
    """The conditions that all rounds share; see `CostMeter`."""

    batch: int
    context: int
    capacity: int
    min_rows: int
    temperature: float

    @property
    def sampling(self) -> SamplingArrays:
        """Sampling parameters of all rows."""
        return SamplingArrays.greedy(self.batch).replace(temperature=jnp.full(self.batch, self.temperature))


def _timer(params, body: Callable, inputs, *, seconds: float) -> Callable[[], float]:
    """Makes a function that times one round `inputs = body(params, index, inputs)`, averaged over many.

    The fixed cost of a call is subtracted. Every timing copies the inputs to other memory, as successive decoding calls
    do, since the speed of a loop depends on the addresses of its caches.
    """

    # The parameters are arguments, as in decoding: XLA would fold constants and store them in the program.
    @functools.partial(jax.jit, donate_argnums=2)
    def loop(limit, params, inputs):
        return jax.lax.while_loop(
            lambda carry: carry[0] < limit, lambda carry: (carry[0] + 1, body(params, *carry)), (jnp.int32(0), inputs)
        )[1]

    def call(rounds: int) -> float:
        nonlocal inputs
        begin = time.perf_counter()
        inputs = jax.block_until_ready(loop(rounds, params, inputs))
        return time.perf_counter() - begin

    # Choose how many rounds fill the wanted time: the difference between calls of 9 rounds and of 1 is 8 rounds.
    call(1)  # compiles
    fixed_cost = min(call(1) for _ in range(3))
    num_rounds = round(min(max(8 * seconds / max(call(9) - fixed_cost, 1e-9), 4), MAX_ROUNDS_PER_TIMING))

    def run() -> float:
        nonlocal inputs
        inputs = jax.tree.map(jnp.copy, inputs)
        # The first call only warms up the copied inputs. The difference between calls of count + 1 rounds and of 1 is
        # free of the fixed cost. A pause of the process in the shorter call can make it negative: time it again.
        seconds = 0.0
        for _ in range(MAX_TIMING_TRIES):
            call(1)
            first = call(1)
            seconds = (call(num_rounds + 1) - first) / num_rounds
            if seconds > 0:
                break
        return seconds

    return run


def _passes_loop(
    dtype, model: MTPModel, shape: RoundShape, conditions: _TimingConditions, *, drafts: bool
) -> tuple[Callable, Any]:
    """Makes the body and inputs of a loop over the passes of a round, with `drafts` or verification alone.

    The trunk's head reads all nodes. Each module extends over the committed positions, and its head reads one of them.
    Recycled levels are passes over `topk` rows, and the head reads all of these.
    """
    config, (batch, context, capacity, min_rows, temperature) = model.config, conditions
    num_modules = min(config.num_mtp_modules, shape.num_steps) if drafts else 0
    num_extended = MTPDrafter().num_extend_positions(model, shape.num_steps)
    width, level_rows = max(shape.num_nodes, min_rows), max(shape.topk, min_rows)
    num_starts = _num_start_positions(model, shape, conditions)
    # A plain step commits its token within the pass.
    num_valid = None if shape.num_steps else jnp.ones(batch, jnp.int32)

    def varied_tokens(token, count: int):
        """Makes tokens `[B, count]` that depend on the last pass and differ, so that they choose different experts."""
        steps = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
        return (token + 31 * steps) % config.vocab_size

    def body(params, index, inputs):
        token, hidden, trunk, modules = inputs
        apply, modules = bind(model, params), list(modules)

        def choose(output, module_index=None):
            """Picks the last row's arg-max, or samples a token from a mixture of all rows' distributions."""
            # The mixture makes the token depend on every row, so that XLA cannot leave out any of them.
            if not temperature:
                return apply(output, k=1, index=module_index, method="top_tokens")[1][:, -1:, 0]
            probabilities = distribution(apply(output, index=module_index, method="logits"), conditions.sampling)
            node = jnp.zeros(1, jnp.int32)
            gumbel = rng.gumbel(conditions.sampling.seed, start[:, None], rng.DRAFT, node, config.vocab_size)
            return draw(probabilities.mean(axis=1, keepdims=True), gumbel)

        # 1. Verify: the trunk over all nodes. The position moves with the round, so nothing is constant in the loop.
        start = trunk.length + index % num_starts
        view = cached_view(config, start, width, capacity, num_valid=num_valid)
        output = apply(varied_tokens(token, width), view, trunk, method="run_trunk")
        trunk = commit(output.cache, trunk.length)
        token = choose(output.hidden)
        # 2. Draft. Levels within the number of modules extend module after module over the committed positions; later
        # levels run the last module on its own output.
        module_input = hidden
        for level in range(1, shape.num_steps + 1 if drafts else 1):
            module_index, rows = min(level, num_modules) - 1, num_extended if level <= num_modules else level_rows
            view = cached_view(config, start, rows, capacity)
            tokens, layer_cache = varied_tokens(token, rows), modules[module_index].layers[0]
            output, module_output, entries = apply(
                module_input[:, -rows:], tokens, view, layer_cache, index=module_index, method="run_module"
            )
            modules[module_index] = modules[module_index].replace(layers=(entries,))
            # The next module reads these outputs. After the last module, recycled levels continue in further slots.
            if level < num_modules:
                module_input = module_output
            elif level == num_modules:
                hidden, start = module_output, start + num_extended
                module_input = jnp.pad(module_output, ((0, 0), (level_rows, 0), (0, 0)))
            else:
                module_input, start = module_output, start + level_rows
            # Of an extended module only the newest output is scored. The row varies, so all rows must be computed.
            if level <= num_modules:
                output = read_rows(output, index % rows + jnp.zeros(batch, jnp.int32), 1)
            token = choose(output, module_index)
        return token, hidden, trunk, tuple(modules)

    # Caches with `context` committed slots. The time of a pass does not depend on the entries' values.
    def filled(kinds):
        return commit(empty_cache(config, kinds, batch, capacity, dtype), jnp.full(batch, context, jnp.int32))

    return body, (
        jnp.zeros((batch, 1), jnp.int32),
        jnp.ones((batch, num_extended, config.hidden_size), dtype),
        filled(config.trunk_kinds),
        tuple(filled((config.mtp_kind,)) for _ in range(num_modules)),
    )


def _full_round_loop(
    dtype, model: MTPModel, shapes: tuple[RoundShape, ...], conditions: _TimingConditions
) -> tuple[Callable, DecodeState]:
    """Makes the body and inputs of a loop over whole decoding rounds, one of each shape, under the default rule.

    Several shapes must be chains. Lengths change from round to round: XLA would move the work that depends on constant
    lengths out of the loop.
    """
    # 1. The spec of the deepest shape; shallower chains are the same call at another depth.
    batch, context, capacity, min_rows, temperature = conditions
    shape = max(shapes)
    nodes = shape.num_nodes if shape.num_steps else None
    config = DecodeConfig(num_steps=shape.num_steps, topk=shape.topk, num_draft_tokens=nodes)
    spec = DecodeSpec.from_config(config, is_greedy=not temperature, min_rows=min_rows)
    specs = [spec.at_depth(shape.num_steps) for shape in shapes] if len(shapes) > 1 else [spec]
    # 2. A state of running rows with random text, which end only at the capacity.
    drafter = make_drafter(config)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(batch, capacity))
    rows = NewRows.without_stops(
        jnp.asarray(tokens, jnp.int32),
        jnp.full(batch, context + 1, jnp.int32),
        jnp.full(batch, capacity, jnp.int32),
        conditions.sampling,
    )
    _, max_stops, max_stop_length = rows.settings.stops.shape
    state = empty_state(
        model=model,
        drafter=drafter,
        spec=spec,
        batch=batch,
        capacity=capacity,
        stops_shape=(max_stops, max_stop_length),
        features=conditions.sampling.features,
        dtype=dtype,
    )
    state = start_rows(state, rows, vocab_size=model.config.vocab_size)
    num_starts = _num_start_positions(model, shape, conditions)

    # 3. Every round starts from a length within the room, with the caches and the drafter's buffer set to match it.
    def body(params, index, state):
        prepared = drafter.prepare(
            params, drafter.default_params(params, config, model=model), model=model, dtype=dtype
        )
        length = jnp.full_like(state.length, context + 1 + index % num_starts)
        for spec in specs:
            draft_state = state.drafter
            if shape.num_steps:
                draft_state = draft_state.replace(hidden_start=length - max(len(draft_state.caches), 1))
            state = state.replace(
                length=length,
                done=jnp.zeros_like(state.done),
                trunk=state.trunk.replace(length=length - 1),
                drafter=draft_state,
            )
            # An adaptive call runs each depth in a loop of its own, so a cycle does the same.
            run_one_round = functools.partial(
                run_round, params, model=model, drafter=drafter, spec=spec, prepared=prepared
            )
            state = cond_as_while_loop(run_one_round, index >= 0, state) if len(specs) > 1 else run_one_round(state)
        return state

    return body, state


def _num_start_positions(model: MTPModel, shape: RoundShape, conditions: _TimingConditions) -> int:
    """Returns how many slots behind the context a round may begin at, at least 1, so that its writes fit."""
    num_written = max(shape.num_nodes, conditions.min_rows, max_slots_written(model, shape) + conditions.min_rows)
    return max(1, conditions.capacity - conditions.context - num_written)
