"""What the parts of a round cost, and the speed-up they allow."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.cache import commit, empty_cache, read_rows
from mtpjax.decode.state import hidden_rows
from mtpjax.layers.attend import cached_view
from mtpjax.model import MTPModel, bind


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, one row: a plain step, and by draft levels K the verifying pass alone and all parts of a round.

    Those parts are `verify(W) + extend(W) + (K-1) draft(1)`: the pass over W = K+1 tokens, the module's over the rows
    that it takes in, and K-1 more of its passes. They are timed together: differences of timings are mostly noise.
    """

    plain: float
    verify: dict[int, float]
    round: dict[int, float]

    def ideal_ratio(self, accept_length: float, num_steps: int) -> float:
        """What the parts allow: `accept length / round`, in units of a plain step."""
        return accept_length * self.plain / self.round[num_steps]


class CostMeter:
    """Times the parts of a round in `while_loop`s of their own; `costs` gives the medians of all `measure` calls.

    `context` tokens stand in caches of `capacity` slots; a part that comes to their end starts over behind the context.
    One module is assumed: with several, each level of `num_steps` is one intake.
    """

    def __init__(
        self,
        params: dict,
        *,
        model: MTPModel,
        num_steps: tuple[int, ...],
        context: int,
        capacity: int,
        passes: int = 32,
    ):
        self.levels = sorted(set(num_steps))
        time_part = functools.partial(_timer, params, model, context, capacity, passes)
        self._parts = {("plain", 0): time_part(1, 0, 0)}
        for level in self.levels:
            self._parts["verify", level] = time_part(level + 1, 0, 0)
            self._parts["round", level] = time_part(level + 1, hidden_rows(model, level), level - 1)
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
        verify, round_ = ({level: median[part, level] for level in self.levels} for part in ("verify", "round"))
        return Costs(plain=median["plain", 0], verify=verify, round=round_)


def _timer(params, model: MTPModel, context: int, capacity: int, passes: int, width: int, rows: int, drafts: int):
    """A function that times a pass of the trunk over `width` tokens, of the last module over `rows`, and `drafts` more.

    The trunk's head reads all tokens, the module's one row. What a call costs before its first pass is taken off.
    """
    config = model.config
    last = config.num_mtp_modules - 1

    def body(carry):
        index, limit, token, hidden, trunk, module = carry
        apply = bind(model, params)
        start = trunk.length + index % max(1, capacity - context - width - rows - drafts)
        view = cached_view(config, start, width, capacity)
        tokens = jnp.broadcast_to(token, (1, width))
        output, _, trunk = apply(tokens, view, trunk, method="run_trunk")
        trunk = commit(trunk, trunk.length)
        token = jnp.argmax(apply(output, method="logits"), axis=-1).astype(jnp.int32)[:, -1:]
        passed = hidden
        for size in [rows] * bool(rows) + [1] * drafts:
            view = cached_view(config, start, size, capacity)
            tokens = jnp.broadcast_to(token, (1, size))
            output, passed, entries = apply(
                passed[:, -size:], tokens, view, module.layers[0], index=last, method="run_module"
            )
            hidden = passed if size == rows else hidden
            module, start = module.replace(layers=(entries,)), start + size
            row = read_rows(output, index % size + jnp.zeros(1, jnp.int32), 1)
            token = jnp.argmax(apply(row, index=last, method="logits"), axis=-1).astype(jnp.int32)
        return index + 1, limit, token, hidden, trunk, module

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(limit, inputs):
        carry = (jnp.zeros((), jnp.int32), limit, *inputs)
        return jax.lax.while_loop(lambda carry: carry[0] < carry[1], body, carry)[2:]

    dtype = params["embedding"].dtype
    inputs = (
        jnp.zeros((1, 1), jnp.int32),
        jnp.ones((1, rows, config.hidden_size), dtype),
        commit(empty_cache(config, config.trunk_kinds, 1, capacity, dtype), jnp.full(1, context, jnp.int32)),
        commit(empty_cache(config, (config.mtp_kind,), 1, capacity, dtype), jnp.full(1, context, jnp.int32)),
    )
    inputs = jax.block_until_ready(loop(1, inputs))

    def run() -> float:
        nonlocal inputs
        begin = time.perf_counter()
        inputs = jax.block_until_ready(loop(1, inputs))
        middle = time.perf_counter()
        inputs = jax.block_until_ready(loop(passes + 1, inputs))
        return (time.perf_counter() - middle - (middle - begin)) / passes

    return run
