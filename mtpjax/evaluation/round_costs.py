"""Measures the costs of a round and of its parts, which run as in decoding."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Drafter
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.drafters.methods import uses_mtp_modules
from mtpjax.evaluation.round_loops import RoundLoop, TimingConditions, full_round_loop, passes_loop
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts, RoundShape
from mtpjax.evaluation.trust import seconds_beyond, time_calls
from mtpjax.models.model import MTPModel

MAX_ROUNDS_PER_TIMING = 512  # maximum number of rounds in one timing
MAX_MEASURED_STEPS = 32  # maximum depth to measure, because each depth compiles several programs that grow with it


class CostMeter:
    """Times rounds of several shapes, and plain rounds, each in its own compiled `while_loop`.

    The loops run on caches that already hold a context. A loop that reaches the end of its caches restarts right after
    the context.
    """

    def __init__(
        self,
        params: dict,
        *,
        model: MTPModel,
        shapes: tuple[RoundShape, ...],
        conditions: TimingConditions,
        seconds: float = 0.02,
        time_full_rounds: bool = False,
        drafter: str | Drafter = "mtp",
        draft_params: Any = None,
    ):
        """Makes the loops.

        Args:
            params: parameters of `model` with unrolled layers.
            shapes: shapes of the rounds to time; plain rounds are always timed too.
            seconds: approximate duration of one timing, which covers at least four rounds.
            time_full_rounds: also time whole rounds as the decoding loop runs them. For chains, this includes a cycle
                through all depths; for drafters other than MTP modules, it includes drafting alone.
            drafter: the draft method, as in `DecodeConfig`.
            draft_params: the drafter's parameters, if it has any.
        """
        self.batch, self._seconds_per_timing, self._arguments = conditions.batch, seconds, (params, draft_params)
        self._loops: dict[tuple[str, RoundShape], Callable[[], RoundLoop]] = {}
        self._timers: dict[tuple[str, RoundShape], Callable[[], float]] = {}
        dtype = params["embedding"].dtype

        def config_of(shape: RoundShape) -> DecodeConfig:
            nodes = shape.num_nodes if shape.num_steps else None
            return DecodeConfig(drafter=drafter, num_steps=shape.num_steps, topk=shape.topk, num_draft_tokens=nodes)

        def add_passes(kind: str, shape: RoundShape, *, drafts: bool = True, verifies: bool = True) -> None:
            self._loops[kind, shape] = functools.partial(
                passes_loop, dtype, model, config_of(shape), conditions, drafts=drafts, verifies=verifies
            )

        def add_rounds(kind: str, shapes: tuple[RoundShape, ...]) -> None:
            configs = tuple(map(config_of, shapes))
            self._loops[kind, shapes[0]] = functools.partial(full_round_loop, dtype, model, configs, conditions)

        # 1. For each shape, time all parts, verification alone (the only part of a plain round), drafting alone, and
        # the whole round.
        for shape in dict.fromkeys((PLAIN_STEP, *shapes)):
            add_passes("parts", shape)
            if shape != PLAIN_STEP:
                add_passes("verify", shape, drafts=False)
                if time_full_rounds and not uses_mtp_modules(drafter):
                    add_passes("draft", shape, verifies=False)
            if time_full_rounds:
                add_rounds("round", (shape,))
        # 2. A cycle with one round per depth shows what a change of depth costs.
        chains = tuple(dict.fromkeys((PLAIN_STEP, *(shape for shape in shapes if shape.topk == 1))))
        if time_full_rounds and len(chains) > 1:
            add_rounds("cycle", chains)
        self._seconds: dict = {timed: [] for timed in self._loops}

    def compile(self, on_compiled: Callable[[], None] = lambda: None) -> None:
        """Compiles the loops, and calls `on_compiled` after each one."""
        for timed, make_loop in self._loops.items():
            if timed not in self._timers:
                self._timers[timed] = _timer(self._arguments, make_loop(), seconds=self._seconds_per_timing)
                on_compiled()

    def measure(self, repeats: int = 3) -> None:
        """Adds `repeats` timings of every loop."""
        self.compile()
        # The loops run in rotation, so that other programs disturb them equally. The first rotation only warms up.
        for number in range(repeats + 1):
            for timed, run in self._timers.items():
                seconds = run()
                if number:
                    self._seconds[timed].append(seconds)

    def plain_steps(self, shape: RoundShape) -> np.ndarray:
        """Returns the cost of a round's parts in units of plain rounds, `[R]`, with one value per measurement."""
        return np.array(self._seconds["parts", shape]) / np.array(self._seconds["parts", PLAIN_STEP])

    def costs(self) -> RoundCosts:
        """Summarises all timings so far.

        Other programs slow down all loops of one rotation equally, so ratios within a rotation vary less than times.
        Each cost is the median time of a plain round, multiplied by the median ratio to the plain round in the same
        rotation.
        """
        plain = np.array(self._seconds.get(("round", PLAIN_STEP), self._seconds["parts", PLAIN_STEP]))
        kinds = ("verify", "draft", "parts", "round", "cycle")
        medians: dict[str, dict[RoundShape, float]] = {kind: {} for kind in kinds}
        for (kind, shape), times in self._seconds.items():
            medians[kind][shape] = float(np.median(plain) * np.median(np.array(times) / plain))
        rounds, change = medians["round"], 0.0
        # The cost of a change of depth is the cycle's time minus the time of its rounds, divided by the number of
        # rounds.
        if medians["cycle"]:
            chains = [seconds for shape, seconds in rounds.items() if shape.topk == 1]
            change = max(medians["cycle"][PLAIN_STEP] - sum(chains), 0.0) / len(chains)
        # Verification is the only part of a plain round.
        verify = {PLAIN_STEP: medians["parts"][PLAIN_STEP], **medians["verify"]}
        return RoundCosts(self.batch, verify, medians["parts"], rounds, change, medians["draft"])


def _timer(arguments: tuple[Any, Any], timed: RoundLoop, *, seconds: float) -> Callable[[], float]:
    """Makes a function that times one round of a loop, averaged over many rounds.

    The fixed cost of a call is subtracted. Each timing first copies the inputs to new memory, as successive decoding
    calls do, because the speed of a loop depends on the addresses of its caches.
    """

    inputs = timed.inputs

    # The parameters are arguments, as in decoding, because XLA would fold constant parameters and store them in the
    # program. On CUDA, the loop is one graph, also as in decoding.
    @one_graph(donate_argnums=2)
    def loop(limit, arguments, inputs):
        prepared = timed.prepare(*arguments)
        return jax.lax.while_loop(
            lambda carry: carry[0] < limit,
            lambda carry: (carry[0] + 1, timed.body(prepared, *carry)),
            (jnp.int32(0), inputs),
        )[1]

    def call(rounds: int) -> None:
        nonlocal inputs
        inputs = jax.block_until_ready(loop(rounds, arguments, inputs))

    # Choose how many rounds take the wanted time. A call of 9 rounds and a call of 1 differ by the time of 8 rounds.
    call(1)  # compiles
    one, nine = np.min([time_calls(lambda: call(1), lambda: call(9))[:2] for _ in range(3)], axis=0)
    num_rounds = round(min(max(8 * seconds / max(nine - one, 1e-9), 4), MAX_ROUNDS_PER_TIMING))

    def run() -> float:
        nonlocal inputs
        inputs = jax.tree.map(jnp.copy, inputs)
        # This call only warms up the copied inputs. The fixed cost cancels in the difference between the call of
        # num_rounds + 1 rounds and the call of 1.
        call(1)
        short, long, _ = time_calls(lambda: call(1), lambda: call(num_rounds + 1))
        return float(seconds_beyond(np.array(short), np.array(long))) / num_rounds

    return run
