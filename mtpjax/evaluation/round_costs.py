"""What the parts of a round cost, and the speed-up they allow."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import rng
from mtpjax.decoding.commit import run_as_loop
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.drafters.modules import rows_per_round
from mtpjax.decoding.loop import run_round
from mtpjax.decoding.requests import drafter_of
from mtpjax.decoding.sampling import Sampling, distribution, draw
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, begin_rows, empty_state
from mtpjax.models.cache import commit, empty_cache, read_rows
from mtpjax.models.masks import cached_view
from mtpjax.models.model import MTPModel, bind

MOST_ROUNDS = 512  # in one timing


class Shape(NamedTuple):
    """What a round drafts and verifies; `chain` makes the common one, and `PLAIN` is a plain step."""

    num_steps: int
    topk: int
    num_nodes: int  # verified, the pending token among them


def chain(num_steps: int) -> Shape:
    return Shape(num_steps, 1, num_steps + 1)


PLAIN = chain(0)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, for a batch, by shape: the verifying pass alone, all parts of a round, and the round itself.

    Those parts are `verify(nodes) + extend(W) + (K-1) draft(topk)`: the trunk's pass over the nodes, the module's over
    the W = K+1 rows that it takes in, and K-1 more of its passes. They are timed together: differences of timings are
    mostly noise. The round itself is that of `speculative_generate`, with all that it does beside; empty where it was
    not asked for. `change` is how much longer a round takes behind one of another shape.
    """

    batch: int
    verify: dict[Shape, float]
    parts: dict[Shape, float]
    round: dict[Shape, float] = dataclasses.field(default_factory=dict)
    change: float = 0.0

    @property
    def plain(self) -> float:
        """A plain step's parts."""
        return self.parts[PLAIN]

    def ideal_ratio(self, accept_length: float, shape: Shape) -> float:
        """What the parts allow: `accept length / parts`, in units of a plain step."""
        return accept_length * self.plain / self.parts[shape]

    def to_json(self) -> dict[str, Any]:
        """What JSON holds: a row per shape, since its keys are strings."""
        rows = [
            {**shape._asdict(), **{f"{kind}_seconds": of[shape] for kind, of in self._kinds() if shape in of}}
            for shape in self.parts
        ]
        return {"batch": self.batch, "change_seconds": self.change, "rounds": rows}

    def _kinds(self) -> list[tuple[str, dict[Shape, float]]]:
        return [("verify", self.verify), ("parts", self.parts), ("round", self.round)]

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Costs":
        """The inverse of `to_json`. Raises `KeyError` or `TypeError` for anything else."""
        costs = cls(int(stored["batch"]), {}, {}, {}, float(stored["change_seconds"]))
        for row in stored["rounds"]:
            shape = Shape(row["num_steps"], row["topk"], row["num_nodes"])
            for kind, of in costs._kinds():
                if f"{kind}_seconds" in row:
                    of[shape] = float(row[f"{kind}_seconds"])
        return costs


class CostMeter:
    """Times rounds of each of `shapes`, and of plain steps, in `while_loop`s of their own.

    `context` tokens of each of `batch` rows stand in caches of `capacity` slots; a part that comes to their end starts
    over behind the context. No pass takes fewer than `min_rows` tokens per row, as in decoding. One timing lasts about
    `seconds`, or four rounds. `whole` rounds, as the loop runs them, are timed beside their parts where that is asked
    for; chains also in turn, a round of each depth behind one of another. At a `temperature` above 0 tokens are drawn:
    rounds are those of the default rules, and heads give distributions. `compiled` is called after each loop is
    compiled.
    """

    def __init__(
        self,
        params: dict,
        *,
        model: MTPModel,
        shapes: tuple[Shape, ...],
        context: int,
        capacity: int,
        batch: int = 1,
        min_rows: int = 1,
        temperature: float = 0.0,
        seconds: float = 0.02,
        whole: bool = False,
        compiled: Callable[[], None] = lambda: None,
    ):
        self.batch = batch
        self._timers: dict[tuple[str, Shape], Callable[[], float]] = {}
        place = _Place(batch, context, capacity, min_rows, temperature)
        for shape in dict.fromkeys((PLAIN, *shapes)):
            dtype = params["embedding"].dtype
            loops = {"parts": _parts(dtype, model, shape, place, drafts=True)}
            if shape != PLAIN:
                loops["verify"] = _parts(dtype, model, shape, place, drafts=False)
            if whole:
                loops["round"] = _whole_rounds(dtype, model, (shape,), place)
            for kind, loop in loops.items():
                self._timers[kind, shape] = _timer(params, *loop, seconds=seconds)
                compiled()
        chains = tuple(dict.fromkeys((PLAIN, *(shape for shape in shapes if shape.topk == 1))))
        if whole and len(chains) > 1:
            loop = _whole_rounds(params["embedding"].dtype, model, chains, place)
            self._timers["in turn", PLAIN] = _timer(params, *loop, seconds=seconds)
            compiled()
        self._seconds: dict = {timed: [] for timed in self._timers}

    def measure(self, repeats: int = 3) -> None:
        """Times every loop `repeats` times, after once that only warms up what stood idle."""
        for number in range(repeats + 1):
            for timed, run in self._timers.items():
                seconds = run()
                if number:
                    self._seconds[timed].append(seconds)

    def costs(self) -> Costs:
        """Of all `measure` calls: a plain step's median, and for everything else the median of how many it takes.

        What else the machine does slows all of a turn down, so that ratios within it stay as they are.
        """
        plain = np.array(self._seconds.get(("round", PLAIN), self._seconds["parts", PLAIN]))
        usual: dict[str, dict[Shape, float]] = {"verify": {}, "parts": {}, "round": {}, "in turn": {}}
        for (kind, shape), times in self._seconds.items():
            usual[kind][shape] = float(np.median(plain) * np.median(np.array(times) / plain))
        rounds, change = usual["round"], 0.0
        if usual["in turn"]:
            chains = [seconds for shape, seconds in rounds.items() if shape.topk == 1]
            change = max(usual["in turn"][PLAIN] - sum(chains), 0.0) / len(chains)
        return Costs(self.batch, {PLAIN: usual["parts"][PLAIN], **usual["verify"]}, usual["parts"], rounds, change)


def widest_write(model: MTPModel, shape: Shape) -> int:
    """Cache slots behind the committed tokens that a round of this shape writes, at most."""
    return max(shape.num_nodes, rows_per_round(model, shape.num_steps) + shape.topk * shape.num_steps)


class _Place(NamedTuple):
    """Where rounds take place; see `CostMeter`."""

    batch: int
    context: int
    capacity: int
    min_rows: int
    temperature: float

    @property
    def sampling(self) -> Sampling:
        return Sampling.greedy(self.batch).replace(temperature=jnp.full(self.batch, self.temperature))


def _timer(params, body: Callable, inputs, *, seconds: float) -> Callable[[], float]:
    """A function that times one of the rounds `inputs = body(params, index, inputs)`, which are run about `seconds`.

    What a call costs before its first round is taken off. Inputs move to other memory for every timing, as they do
    from one call of decoding to the next: where caches of 100 MB lie made the same loop up to twice as slow.
    """

    @functools.partial(jax.jit, donate_argnums=2)
    def loop(limit, params, inputs):  # parameters as in decoding: constants would be folded, and be in the program
        return jax.lax.while_loop(
            lambda carry: carry[0] < limit, lambda carry: (carry[0] + 1, body(params, *carry)), (jnp.int32(0), inputs)
        )[1]

    def call(rounds: int) -> float:
        nonlocal inputs
        begin = time.perf_counter()
        inputs = jax.block_until_ready(loop(rounds, params, inputs))
        return time.perf_counter() - begin

    call(1)  # compiles
    least = min(call(1) for _ in range(3))  # what a call costs, with one round
    count = round(min(max(8 * seconds / max(call(9) - least, 1e-9), 4), MOST_ROUNDS))

    def run() -> float:
        nonlocal inputs
        inputs = jax.tree.map(jnp.copy, inputs)
        call(1)  # reaches what lies cold
        first = call(1)
        return (call(count + 1) - first) / count

    return run


def _parts(dtype, model: MTPModel, shape: Shape, place: _Place, *, drafts: bool) -> tuple[Callable, Any]:
    """The passes of a round of this shape, with `drafts` or without, as `_timer` takes them.

    The trunk's head reads all nodes. Modules take in the committed rows, and their heads read one; recycled levels are
    passes over `topk` rows, and the head reads them all.
    """
    config, (batch, context, capacity, min_rows, temperature) = model.config, place
    in_use = min(config.num_mtp_modules, shape.num_steps) if drafts else 0
    taken_in = rows_per_round(model, shape.num_steps)
    width, level_rows = max(shape.num_nodes, min_rows), max(shape.topk, min_rows)
    room = _room(model, shape, place)
    known = None if shape.num_steps else jnp.ones(batch, jnp.int32)  # plain decoding commits what it passes

    def spread(token, count: int):
        """Tokens `[B, count]` that differ, for they choose different experts, and follow from the last pass."""
        steps = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
        return (token + 31 * steps) % config.vocab_size

    def body(params, index, inputs):
        token, hidden, trunk, modules = inputs
        apply, modules = bind(model, params), list(modules)

        def choose(output, number=None):
            """The newest token, or one drawn from what is said of all rows together."""
            if not temperature:
                return apply(output, k=1, index=number, method="top_tokens")[1][:, -1:, 0]
            probabilities = distribution(apply(output, index=number, method="logits"), place.sampling)
            node = jnp.zeros(1, jnp.int32)
            numbers = rng.gumbel(place.sampling.seed, start[:, None], rng.DRAFT, node, config.vocab_size)
            return draw(probabilities.mean(axis=1, keepdims=True), numbers)

        start = trunk.length + index % room
        view = cached_view(config, start, width, capacity, num_valid=known)
        output = apply(spread(token, width), view, trunk, method="run_trunk")
        trunk = commit(output.cache, trunk.length)
        token = choose(output.hidden)
        entering = hidden
        for level in range(1, shape.num_steps + 1 if drafts else 1):
            number, rows = min(level, in_use) - 1, taken_in if level <= in_use else level_rows
            view = cached_view(config, start, rows, capacity)
            output, passed, entries = apply(
                entering[:, -rows:], spread(token, rows), view, modules[number].layers[0], index=number,
                method="run_module",
            )  # fmt: skip
            modules[number] = modules[number].replace(layers=(entries,))
            if level < in_use:
                entering = passed
            elif level == in_use:
                hidden, start = passed, start + taken_in
                entering = jnp.pad(passed, ((0, 0), (level_rows, 0), (0, 0)))
            else:
                entering, start = passed, start + level_rows
            if level <= in_use:
                output = read_rows(output, index % rows + jnp.zeros(batch, jnp.int32), 1)
            token = choose(output, number)
        return token, hidden, trunk, tuple(modules)

    def filled(kinds):
        return commit(empty_cache(config, kinds, batch, capacity, dtype), jnp.full(batch, context, jnp.int32))

    return body, (
        jnp.zeros((batch, 1), jnp.int32),
        jnp.ones((batch, taken_in, config.hidden_size), dtype),
        filled(config.trunk_kinds),
        tuple(filled((config.mtp_kind,)) for _ in range(in_use)),
    )


def _whole_rounds(dtype, model: MTPModel, shapes: tuple[Shape, ...], place: _Place) -> tuple[Callable, DecodeState]:
    """A round of decoding of each of these shapes (several: chains), by the default rule, as `_timer` takes them.

    Lengths move with the rounds: were they constant, XLA would take what depends on them out of the loop.
    """
    batch, context, capacity, min_rows, temperature = place
    shape = max(shapes)
    nodes = shape.num_nodes if shape.num_steps else None
    config = DecodeConfig(num_steps=shape.num_steps, topk=shape.topk, num_draft_tokens=nodes)
    spec = DecodeSpec.of(config, is_greedy=not temperature, min_rows=min_rows)
    specs = [spec.at_depth(shape.num_steps) for shape in shapes] if len(shapes) > 1 else [spec]
    drafter = drafter_of(config)
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=(batch, capacity))
    rows = NewRows.without_stops(
        jnp.asarray(tokens, jnp.int32),
        jnp.full(batch, context + 1, jnp.int32),
        jnp.full(batch, capacity, jnp.int32),
        place.sampling,
    )
    state = empty_state(
        model=model,
        drafter=drafter,
        spec=spec,
        batch=batch,
        capacity=capacity,
        stops_shape=rows.settings.stops.shape[1:],
        features=place.sampling.features,
        dtype=dtype,
    )
    state = begin_rows(state, rows, vocab_size=model.config.vocab_size)
    room = _room(model, shape, place)

    def body(params, index, state):
        prepared = drafter.prepare(params, drafter.own_params(params, config, model=model), model=model, dtype=dtype)
        length = jnp.full_like(state.length, context + 1 + index % room)
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
            round_ = functools.partial(run_round, params, model=model, drafter=drafter, spec=spec, prepared=prepared)
            state = run_as_loop(round_, index >= 0, state) if len(specs) > 1 else round_(state)  # loops as in `decode`
        return state

    return body, state


def _room(model: MTPModel, shape: Shape, place: _Place) -> int:
    """Slots behind the context that a round may begin at, at least 1."""
    widest = max(shape.num_nodes, place.min_rows, widest_write(model, shape) + place.min_rows)
    return max(1, place.capacity - place.context - widest)
