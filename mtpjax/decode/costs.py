"""What the parts of a round cost, and the speed-up they allow."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.cache import commit, empty_cache, read_rows
from mtpjax.decode.state import hidden_rows
from mtpjax.layers.attend import cached_view
from mtpjax.model import MTPModel, bind

MOST_ROUNDS = 512  # in one timing


class Shape(NamedTuple):
    """What a round drafts and verifies; `chain` makes the common one."""

    num_steps: int
    topk: int
    num_nodes: int  # verified, the pending token among them


def chain(num_steps: int) -> Shape:
    return Shape(num_steps, 1, num_steps + 1)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, for a batch: a plain step, and by shape the verifying pass alone and all parts of a round.

    Those parts are `verify(nodes) + extend(W) + (K-1) draft(topk)`: the trunk's pass over the nodes, the module's over
    the W = K+1 rows that it takes in, and K-1 more of its passes. They are timed together: differences of timings are
    mostly noise.
    """

    batch: int
    plain: float
    verify: dict[Shape, float]
    round: dict[Shape, float]

    def ideal_ratio(self, accept_length: float, shape: Shape) -> float:
        """What the parts allow: `accept length / round`, in units of a plain step."""
        return accept_length * self.plain / self.round[shape]

    def to_json(self) -> dict[str, Any]:
        """What JSON holds: a row per shape, since its keys are strings."""
        rows = [
            {**shape._asdict(), "verify_seconds": self.verify[shape], "round_seconds": seconds}
            for shape, seconds in self.round.items()
        ]
        return {"batch": self.batch, "plain_seconds": self.plain, "rounds": rows}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Costs":
        """The inverse of `to_json`. Raises `KeyError` or `TypeError` for anything else."""
        verify, round_ = {}, {}
        for row in stored["rounds"]:
            shape = Shape(row["num_steps"], row["topk"], row["num_nodes"])
            verify[shape], round_[shape] = float(row["verify_seconds"]), float(row["round_seconds"])
        return cls(int(stored["batch"]), float(stored["plain_seconds"]), verify, round_)


class CostMeter:
    """Times the parts of a round in `while_loop`s of their own; `costs` gives the medians of all `measure` calls.

    `context` tokens of each of `batch` rows stand in caches of `capacity` slots; a part that comes to their end starts
    over behind the context. No pass takes fewer than `min_rows` tokens per row, as in decoding. One timing lasts about
    `seconds`, or four rounds. `compiled` is called after each part is compiled.
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
        seconds: float = 0.02,
        compiled: Callable[[], None] = lambda: None,
    ):
        self.batch, self.shapes = batch, tuple(dict.fromkeys(shapes))
        self._parts = {}
        for part in [("plain", chain(0))] + [(name, shape) for shape in self.shapes for name in ("verify", "round")]:
            self._parts[part] = _timer(
                params,
                model,
                part[1],
                batch=batch,
                context=context,
                capacity=capacity,
                min_rows=min_rows,
                seconds=seconds,
                drafts=part[0] == "round",
            )
            compiled()
        self._seconds: dict = {part: [] for part in self._parts}

    def measure(self, repeats: int = 3) -> None:
        """Times every part `repeats` times, after once that only warms up what stood idle."""
        for number in range(repeats + 1):
            for part, run in self._parts.items():
                seconds = run()
                if number:
                    self._seconds[part].append(seconds)

    def costs(self) -> Costs:
        median = {part: float(np.median(times)) for part, times in self._seconds.items()}
        verify, round_ = ({shape: median[part, shape] for shape in self.shapes} for part in ("verify", "round"))
        return Costs(self.batch, median["plain", chain(0)], verify, round_)


def widest_write(model: MTPModel, shape: Shape) -> int:
    """Cache slots behind the committed tokens that a round of this shape writes, at most."""
    return max(shape.num_nodes, hidden_rows(model, shape.num_steps) + shape.topk * shape.num_steps)


def _timer(
    params,
    model: MTPModel,
    shape: Shape,
    *,
    batch: int,
    context: int,
    capacity: int,
    min_rows: int,
    seconds: float,
    drafts: bool,
) -> Callable[[], float]:
    """A function that times a round of this shape, with `drafts` or without; for no steps a plain one.

    The trunk's head reads all nodes. Modules take in the committed rows, and their heads read one; recycled levels are
    passes over `topk` rows, and the head reads them all. What a call costs before its first pass is taken off.
    """
    config = model.config
    in_use = min(config.num_mtp_modules, shape.num_steps) if drafts else 0
    taken_in = hidden_rows(model, shape.num_steps)
    width, level_rows = max(shape.num_nodes, min_rows), max(shape.topk, min_rows)
    room = capacity - context - max(width, widest_write(model, shape) + min_rows)
    known = None if shape.num_steps else jnp.ones(batch, jnp.int32)  # plain decoding commits what it passes

    def spread(token, count: int):
        """Tokens `[B, count]` that differ, for they choose different experts, and follow from the last pass."""
        steps = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
        return (token + 31 * steps) % config.vocab_size

    def choose(logits):
        """The newest token. Only the arg-max is timed: what sampling does with logits would have its place here."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, -1:]

    def body(carry):
        index, limit, token, hidden, trunk, modules = carry
        apply, modules = bind(model, params), list(modules)
        start = trunk.length + index % max(1, room)
        view = cached_view(config, start, width, capacity, taken=known)
        output, _, trunk = apply(spread(token, width), view, trunk, method="run_trunk")
        trunk = commit(trunk, trunk.length)
        token = choose(apply(output, method="logits"))
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
            token = choose(apply(output, index=number, method="logits"))
        return index + 1, limit, token, hidden, trunk, tuple(modules)

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(limit, inputs):
        carry = (jnp.zeros((), jnp.int32), limit, *inputs)
        return jax.lax.while_loop(lambda carry: carry[0] < carry[1], body, carry)[2:]

    dtype = params["embedding"].dtype

    def filled(kinds):
        return commit(empty_cache(config, kinds, batch, capacity, dtype), jnp.full(batch, context, jnp.int32))

    inputs = (
        jnp.zeros((batch, 1), jnp.int32),
        jnp.ones((batch, taken_in, config.hidden_size), dtype),
        filled(config.trunk_kinds),
        tuple(filled((config.mtp_kind,)) for _ in range(in_use)),
    )

    def call(rounds: int) -> float:
        nonlocal inputs
        begin = time.perf_counter()
        inputs = jax.block_until_ready(loop(rounds, inputs))
        return time.perf_counter() - begin

    call(1)  # compiles
    least = min(call(1) for _ in range(3))  # what a call costs, with one round
    count = round(min(max(8 * seconds / max(call(9) - least, 1e-9), 4), MOST_ROUNDS))

    def run() -> float:
        nonlocal least
        least = min(least, call(1))
        return (call(count + 1) - least) / count

    return run
