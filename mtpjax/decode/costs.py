"""What the parts of a round cost, and the speed-up they allow."""

import dataclasses
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
    """Seconds of each part, one row: a plain step, and by draft levels K the verifying pass and the modules' intake."""

    plain: float
    verify: dict[int, float]
    extend: dict[int, float]
    draft: float

    def ideal_ratio(self, accept_length: float, num_steps: int) -> float:
        """`accept length / (verify(W) + extend(W) + (K-1) draft(1))`, in units of a plain step."""
        round_ = self.verify[num_steps] + self.extend[num_steps] + (num_steps - 1) * self.draft
        return accept_length * self.plain / round_


class CostMeter:
    """Times every part in a `while_loop` of its own. Each `measure` adds one timing of each; `costs` gives the medians.

    `context` tokens stand in caches of `capacity` slots; a part that comes to their end starts over behind the context.
    One module is assumed for `extend`: with several, each level of `num_steps` is one of them.
    """

    def __init__(
        self,
        params: dict,
        *,
        model: MTPModel,
        num_steps: tuple[int, ...],
        context: int,
        capacity: int,
        passes: int = 128,
    ):
        self.num_steps = sorted(set(num_steps))
        self.extended = {level: hidden_rows(model, level) for level in self.num_steps}
        sizes = params, model
        self._trunk = {
            width: _time_trunk(*sizes, width, context, capacity, passes)
            for width in (1, *(level + 1 for level in self.num_steps))
        }
        self._module = {
            rows: _time_module(*sizes, rows, context, capacity, passes) for rows in {1, *self.extended.values()}
        }
        self._seconds: dict = {}

    def measure(self) -> None:
        for name, parts in (("trunk", self._trunk), ("module", self._module)):
            for width, run in parts.items():
                self._seconds.setdefault((name, width), []).append(run())

    def costs(self) -> Costs:
        median = {part: float(np.median(times)) for part, times in self._seconds.items()}
        return Costs(
            plain=median["trunk", 1],
            verify={level: median["trunk", level + 1] for level in self.num_steps},
            extend={level: median["module", rows] for level, rows in self.extended.items()},
            draft=median["module", 1],
        )


def _time_trunk(params, model, width, context, capacity, passes):
    """A function that times `passes` trunk passes over `width` tokens with the head over all of them."""
    config, apply = model.config, bind(model, params)

    def body(carry):
        index, tokens, cache = carry
        start = cache.length + index % max(1, capacity - context - width)
        view = cached_view(config, start, width, capacity)
        hidden, _, cache = apply(tokens, view, cache, method="run_trunk")
        logits = apply(hidden, method="logits")
        return index + 1, jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    dtype = params["embedding"].dtype
    cache = empty_cache(config, config.num_hidden_layers, 1, capacity, dtype)
    return _timer(body, jnp.zeros((1, width), jnp.int32), commit(cache, jnp.full(1, context, jnp.int32)), passes)


def _time_module(params, model, width, context, capacity, passes):
    """A function that times `passes` passes of the last module over `width` rows with the head over one of them."""
    config, apply = model.config, bind(model, params)
    index_of_last = config.num_mtp_modules - 1

    def body(carry):
        index, (tokens, hidden), cache = carry
        start = cache.length + index % max(1, capacity - context - width)
        view = cached_view(config, start, width, capacity)
        after, passed, entries = apply(hidden, tokens, view, cache.layers[0], index=index_of_last, method="run_module")
        newest = read_rows(after, index % width + jnp.zeros(1, jnp.int32), 1)
        logits = apply(newest, index=index_of_last, method="logits")
        draft = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return index + 1, (jnp.broadcast_to(draft, tokens.shape), passed), cache.replace(layers=(entries,))

    dtype = params["embedding"].dtype
    cache = commit(empty_cache(config, 1, 1, capacity, dtype), jnp.full(1, context, jnp.int32))
    inputs = jnp.zeros((1, width), jnp.int32), jnp.ones((1, width, config.hidden_size), dtype)
    return _timer(body, inputs, cache, passes)


def _timer(body, inputs, cache, passes):
    loop = jax.jit(lambda state: jax.lax.while_loop(lambda carry: carry[0] < passes, body, state), donate_argnums=0)
    _, inputs, cache = jax.block_until_ready(loop((jnp.zeros((), jnp.int32), inputs, cache)))

    def run() -> float:
        nonlocal inputs, cache
        begin = time.perf_counter()
        _, inputs, cache = jax.block_until_ready(loop((jnp.zeros((), jnp.int32), inputs, cache)))
        return (time.perf_counter() - begin) / passes

    return run
