"""Measures the engine's cost and its advantage over static batches.

    python -m experiments.serving.bench_engine [--quick] [--output FILE]

Rounds (counted, not timed). The output lengths of a load have a long tail. All requests of a load are in the queue
before the first tick, so the schedule is the same in every run. The engine's rounds are its decoding calls. A static
batch of 8 takes as many rounds as its longest request, and a request takes the same number of rounds in both
(`experiments.correctness.check_engine`). The occupancy is the share of row-rounds (slots x rounds) that advanced a
request, over the rounds during which other requests waited. The ratio and the occupancy are computed over several loads
together.

Host time. The engine dispatches a call before it reads the previous call's report, so the host works while the device
runs. Hidden host time costs nothing; the device waits only if it has finished a call before the next one is dispatched.
A second thread records when each call's report is ready. From that moment until the next dispatch returns, the device
is idle. This time is the host time that no call hides, and it is divided by the time of a tick. Only ticks in which all
slots decode and no request enters are measured.

One request. The time per token of one request is measured in turns in an engine with 8 slots, in an engine with 1 slot,
and in `speculative_generate`. Ratios are computed within a turn; the interval resamples the turns.

Throughput. The tokens per second of 1, 4 and 16 simultaneous requests are measured in an engine with 16 slots, with and
without drafts in turns.
"""

import argparse
import dataclasses
import json
import pathlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.console import Console

from experiments.common.results import about, write
from mtpjax import DecodeConfig, MTPModel, speculative_generate
from mtpjax.console import narrow_table
from mtpjax.evaluation.intervals import Estimate, estimate_from, resample
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.serving.calls import InFlightCall
from mtpjax.serving.engine import Engine
from mtpjax.serving.request import Delta, Finish, Request
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.small_models import constructed_params, small_config

NUM_SLOTS = 8
MAX_LENGTH = 240
NUM_STEPS = 2
PROMPT_TOKENS = 16
NEW_TOKENS = 128  # of timed requests
# Fields of the model's config, and a factor for its blocks' outputs that makes some drafts wrong.
# A round of the larger model with 8 rows takes about 20 ms on two cores.
MODELS = {
    "tiny": ({}, 1.0),
    "larger": (
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 2048,
        },
        2.4,
    ),
}
LONG_ROUND = 10  # milliseconds; shorter rounds cannot hide the host's work
GOALS = {"rounds": 0.65, "occupancy": 0.92, "host": 0.05, "single": 1.15}


@dataclasses.dataclass
class TracedCall:
    """A call of the engine, seen from outside.

    Attributes:
        call: the call.
        num_waiting: requests in the queue when it was dispatched.
        began: time at which the host began to prepare it.
        dispatched: time at which its dispatch returned.
        completed: time at which its report was ready.
        read_seconds: time for which the host waited for the report.
    """

    call: InFlightCall
    num_waiting: int
    began: float
    dispatched: float
    completed: float = 0.0
    read_seconds: float = 0.0


class Trace:
    """Records the calls of an engine in a `with` block around a load; they are complete after the block."""

    def __init__(self, engine: Engine):
        self._engine, self._executor = engine, engine._executor
        self.calls: list[TracedCall] = []
        self._pending: queue.Queue[TracedCall | None] = queue.Queue()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> "Trace":
        self._watcher.start()
        for name in ("prefill", "advance"):
            setattr(self._executor, name, self._traced(getattr(self._executor, name)))
        return self

    def __exit__(self, *exception: object) -> None:
        for name in ("prefill", "advance"):
            delattr(self._executor, name)  # restores the class's own methods
        self._pending.put(None)
        self._watcher.join()

    def _traced(self, method: Callable[..., InFlightCall]) -> Callable[..., InFlightCall]:
        def run(*arguments: object) -> InFlightCall:
            began = time.perf_counter()
            call = method(*arguments)
            traced = TracedCall(call, self._engine._scheduler.num_waiting, began, time.perf_counter())
            read = call.read

            def timed_read():
                begin = time.perf_counter()
                report = read()
                traced.read_seconds = time.perf_counter() - begin
                return report

            call.read = timed_read  # pyright: ignore[reportAttributeAccessIssue]
            self.calls.append(traced)
            self._pending.put(traced)
            return call

        return run

    def _watch(self) -> None:
        while (traced := self._pending.get()) is not None:
            jax.block_until_ready(traced.call.report)
            traced.completed = time.perf_counter()


class Load:
    """The requests of an engine and their final events."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._ends: queue.Queue[Finish] = queue.Queue()
        self._number = 0
        self.finished: dict[int, Finish] = {}

    def submit(self, request: Request) -> None:
        number, self._number = self._number, self._number + 1

        def deliver(event: Delta | Finish) -> None:
            if isinstance(event, Finish):
                self.finished[number] = event
                self._ends.put(event)

        self._engine.submit(request, deliver)

    def wait(self) -> list[Finish]:
        """Waits until all requests have ended; returns their final events in the order of submission."""
        for _ in range(self._number):
            end = self._ends.get(timeout=600)
            assert end.reason in ("stop", "length"), end
        return [self.finished[number] for number in range(self._number)]


def make_requests(
    rng: np.random.Generator, lengths: Sequence[int], vocab_size: int, *, prompt_tokens: int = PROMPT_TOKENS
) -> list[Request]:
    """Makes greedy requests with random prompts and the given numbers of new tokens."""
    prompts = rng.integers(0, vocab_size, (len(lengths), prompt_tokens)).tolist()
    return [
        Request(prompt=tuple(prompt), max_new_tokens=int(length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def run_load(engine: Engine, requests: Sequence[Request]) -> list[Finish]:
    """Submits all requests at once and waits until they have ended."""
    load = Load(engine)
    for request in requests:
        load.submit(request)
    return load.wait()


def measure_rounds(engine: Engine, loads: Sequence[Sequence[Request]]) -> dict:
    """Counts the rounds of the engine and of static batches; see the module's docstring."""
    found = [count_rounds(engine, requests) for requests in loads]
    total = {name: sum(each[name] for each in found) for name in found[0]}
    return {
        **total,
        "ratio": total["engine_rounds"] / total["static_rounds"],
        "ratio_per_load": [each["engine_rounds"] / each["static_rounds"] for each in found],
        "occupancy": total["waited_used"] / (NUM_SLOTS * total["waited_rounds"]),
    }


def count_rounds(engine: Engine, requests: Sequence[Request]) -> dict[str, int]:
    """Counts the rounds of one load."""
    is_submitted = threading.Event()

    def hold() -> None:
        is_submitted.wait()

    engine._inbox.post(hold)  # delays the next tick of the engine's thread
    with Trace(engine) as trace:
        load = Load(engine)
        for request in requests:
            load.submit(request)
        is_submitted.set()
        ends = load.wait()
    # 1. A row-round counts if it increased the passes of its request. Rounds after the request's end, which were
    #    dispatched before the report was read, do not count.
    rounds = used = waited_rounds = waited_used = 0
    passes: dict[int, int] = {}
    for traced in trace.calls:
        if traced.call.is_prefill:
            continue
        steps = traced.call.report.read().rounds
        advanced = 0
        for row, sequence in enumerate(traced.call.rows):
            if sequence is not None:
                advanced += int(steps[row]) - passes.get(sequence.id, 0)
                passes[sequence.id] = int(steps[row])
        rounds, used = rounds + 1, used + advanced
        if traced.num_waiting:
            waited_rounds, waited_used = waited_rounds + 1, waited_used + advanced
    num_steps = [end.num_steps for end in ends]
    assert used == sum(num_steps), (used, sum(num_steps))
    # 2. Form static batches in the order of arrival.
    static = sum(max(num_steps[begin : begin + NUM_SLOTS]) for begin in range(0, len(num_steps), NUM_SLOTS))
    return {
        "requests": len(requests),
        "new_tokens": sum(end.num_new_tokens for end in ends),
        "engine_rounds": rounds,
        "static_rounds": static,
        "row_rounds": used,
        "waited_rounds": waited_rounds,
        "waited_used": waited_used,
    }


def measure_host(engine: Engine, rng: np.random.Generator) -> dict:
    """Measures the host time that no call hides while all slots decode."""
    lengths = [MAX_LENGTH - PROMPT_TOKENS - 1] * NUM_SLOTS
    requests = make_requests(rng, lengths, engine.vocab_size)
    stopwatch = Stopwatch()
    with Trace(engine) as trace:
        run_load(engine, requests)
    return {**host_times(trace.calls), "waited_share": stopwatch.waited_share()}


def host_times(calls: Sequence[TracedCall]) -> dict:
    """Summarizes pairs of consecutive decoding calls of full batches by medians and the share of host time."""
    is_full = [not traced.call.is_prefill and None not in traced.call.rows for traced in calls]
    pairs = [
        (before, after)
        for before, after, *full in zip(calls, calls[1:], is_full, is_full[1:], strict=False)
        if all(full)
    ]
    ticks = np.array([after.began - before.began for before, after in pairs])
    exposed = np.array([max(after.dispatched - before.completed, 0.0) for before, after in pairs])
    device = np.array([after.completed - max(after.dispatched, before.completed) for before, after in pairs])
    blocked = np.array([before.read_seconds for before, _ in pairs])
    (drawn,) = resample(len(pairs))
    share = estimate_from(exposed.sum() / ticks.sum(), exposed[drawn].sum(axis=1) / ticks[drawn].sum(axis=1))
    milliseconds = {"tick": ticks, "device": device, "host": ticks - blocked, "exposed": exposed}
    dispatch = np.array([after.dispatched - after.began for _, after in pairs])
    return {
        "ticks": len(pairs),
        **{f"{name}_ms": 1e3 * float(np.median(values)) for name, values in milliseconds.items()},
        "dispatch_ms": 1e3 * float(np.median(dispatch)),
        "share": share.to_dict(),
    }


def in_turns(measures: dict[str, Callable[[], float]], turns: int) -> dict[str, np.ndarray]:
    """Runs measurements in turns, in alternating order. The first turn only warms up."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(turns + 1):
        for name in measures if turn % 2 else reversed(measures):
            value = measures[name]()
            if turn:
                values[name].append(value)
    return {name: np.array(each) for name, each in values.items()}


def median_ratio(above: np.ndarray, below: np.ndarray) -> Estimate:
    """Returns the median of the turns' ratios."""
    ratios = above / below
    (drawn,) = resample(len(ratios))
    return estimate_from(float(np.median(ratios)), np.median(ratios[drawn], axis=1))


def measure_single(
    engines: dict[str, Engine],
    params: dict,
    model: MTPModel,
    config: DecodeConfig,
    request: Request,
    turns: int,
) -> dict:
    """Compares the time per token of one request in each engine with that of `speculative_generate`.

    Args:
        engines: the engines, by name.
        params: parameters of the model.
        model: the model.
        config: settings of `speculative_generate` except the limit, with the same drafts as the request.
        request: a greedy request.
        turns: measurements of each time.
    """
    config = dataclasses.replace(config, max_new_tokens=request.max_new_tokens)
    texts = set()

    def engine_seconds(engine: Engine) -> float:
        tokens: list[int] = []
        ended = threading.Event()
        begin = time.perf_counter()
        engine.submit(request, lambda event: ended.set() if isinstance(event, Finish) else tokens.extend(event.tokens))
        ended.wait()
        seconds = time.perf_counter() - begin
        texts.add(tuple(tokens))
        return seconds / len(tokens)

    def alone_seconds() -> float:
        begin = time.perf_counter()
        (tokens,) = speculative_generate(params, [request.prompt], model=model, config=config).rows()
        seconds = time.perf_counter() - begin
        texts.add(tuple(tokens))
        return seconds / len(tokens)

    measures = {name: lambda engine=engine: engine_seconds(engine) for name, engine in engines.items()}
    stopwatch = Stopwatch()
    seconds = in_turns({**measures, "alone": alone_seconds}, turns)
    names = list(engines)
    return {
        "turns": turns,
        "ms_per_token": {name: 1e3 * float(np.median(values)) for name, values in seconds.items()},
        "ratio": {name: median_ratio(seconds[name], seconds["alone"]).to_dict() for name in names},
        "most_slots_to_fewest": median_ratio(seconds[names[0]], seconds[names[-1]]).to_dict(),
        "identical": len(texts) == 1,
        "waited_share": stopwatch.waited_share(),
    }


def measure_throughput(engine: Engine, requests: Sequence[Request], turns: int) -> dict:
    """Measures tokens per second of simultaneous requests, with and without drafts in turns."""
    ends: dict[str, list[Finish]] = {}

    def tokens_per_second(name: str, speculative: bool) -> float:
        changed = [dataclasses.replace(request, speculative=speculative) for request in requests]
        begin = time.perf_counter()
        ends[name] = run_load(engine, changed)
        return sum(end.num_new_tokens for end in ends[name]) / (time.perf_counter() - begin)

    stopwatch = Stopwatch()
    speeds = in_turns(
        {
            "drafts": lambda: tokens_per_second("drafts", True),
            "plain": lambda: tokens_per_second("plain", False),
        },
        turns,
    )
    drafted = ends["drafts"]
    return {
        "requests": len(requests),
        "tokens_per_second": {name: float(np.median(values)) for name, values in speeds.items()},
        "ratio": median_ratio(speeds["drafts"], speeds["plain"]).to_dict(),
        "accept_length": 1 + sum(sum(end.accepted) for end in drafted) / max(sum(end.num_steps for end in drafted), 1),
        "waited_share": stopwatch.waited_share(),
    }


def make_engine(params: dict, model: MTPModel, num_slots: int, batch_sizes: tuple[int, ...] | None = None) -> Engine:
    """Makes an engine that has not started."""
    settings = EngineSettings(
        num_slots=num_slots, max_length=MAX_LENGTH, batch_sizes=batch_sizes, prefill_tokens=32, shares_prefixes=False
    )
    return Engine(params, model=model, config=DecodeConfig(num_steps=NUM_STEPS, prefill_chunk=16), settings=settings)


def make_model(name: str, **changes: int) -> tuple[MTPModel, dict]:
    """Makes one of `MODELS`; `changes` are fields of its config to change."""
    fields, factor = MODELS[name]
    model = MTPModel(small_config("grouped", **{**fields, **changes}))

    def scale(path, leaf):
        return factor * leaf if path[-1].key in ("output", "down") else leaf

    return model, jax.tree_util.tree_map_with_path(scale, constructed_params(model, "grouped", "mixed"))


def measure_model(
    name: str, *, num_loads: int, requests: int, turns: int, counts: Sequence[int], show: Callable
) -> dict:
    """Runs all parts on one model."""
    rng = np.random.default_rng(0)
    model, params = make_model(name)
    sizes = (1, NUM_SLOTS)  # batch sizes for which programs are compiled
    many, one = make_engine(params, model, NUM_SLOTS, sizes), make_engine(params, model, 1)
    for engine in (many, one):
        engine.warm_up()
        engine.start()
    # Output lengths with a long tail: most are short, and a few fill the context.
    lengths = np.clip(rng.lognormal(np.log(40), 0.9, (num_loads, requests)), 4, MAX_LENGTH - PROMPT_TOKENS - 1)
    loads = [make_requests(rng, row, model.config.vocab_size) for row in lengths]
    found: dict = {"model": name, "rounds": measure_rounds(many, loads)}
    show(name, "rounds", found["rounds"])
    found["host"] = measure_host(many, rng)
    show(name, "host", found["host"])
    engines = {f"{NUM_SLOTS} slots": many, "1 slot": one}
    config = DecodeConfig(num_steps=NUM_STEPS, max_length=MAX_LENGTH)
    (request,) = make_requests(rng, [NEW_TOKENS], model.config.vocab_size)
    found["single"] = measure_single(engines, params, model, config, request, turns)
    show(name, "single", found["single"])
    largest = many
    if max(counts) > NUM_SLOTS:
        largest = make_engine(params, model, max(counts), tuple(sorted(counts)))
        largest.start()
    found["throughput"] = [
        measure_throughput(largest, make_requests(rng, [NEW_TOKENS] * count, largest.vocab_size), turns)
        for count in counts
    ]
    show(name, "throughput", found["throughput"])
    for engine in {many, one, largest}:
        assert engine.close(timeout=60)
    return found


def print_table(console: Console, models: Sequence[dict]) -> None:
    """Prints the goals and the measurements."""
    table = narrow_table()
    for number, heading in enumerate(("model", "figure", "measured", "95 %", "goal")):
        table.add_column(heading, justify="right" if number > 1 else "left")

    def add(model: str, figure: str, value: float, goal: str = "", interval: dict | None = None) -> None:
        spread = f"{interval['low']:.3f}-{interval['high']:.3f}" if interval else ""
        table.add_row(model, figure, f"{value:.3f}", spread, goal)

    for found in models:
        name, rounds, host, single = found["model"], found["rounds"], found["host"], found["single"]
        add(name, "rounds / static", rounds["ratio"], f"<= {GOALS['rounds']}")
        add(name, "occupancy", rounds["occupancy"], f">= {GOALS['occupancy']}")
        goal = f"< {GOALS['host']}" if host["device_ms"] >= LONG_ROUND else ""
        add(name, "host share", host["share"]["value"], goal, host["share"])
        for engine, ratio in single["ratio"].items():
            goal = f"<= {GOALS['single']}" if engine == f"{NUM_SLOTS} slots" else ""
            add(name, f"time, {engine} / alone", ratio["value"], goal, ratio)
        for row in found["throughput"]:
            add(name, f"speed, drafts / plain, {row['requests']} requests", row["ratio"]["value"], "", row["ratio"])
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=5, help="number of loads with a long tail (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=48, help="requests per load (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=20, help="measurements of each time (default: %(default)s)")
    parser.add_argument(
        "--model", choices=list(MODELS), nargs="+", default=list(MODELS), help="measure only these models"
    )
    parser.add_argument("--quick", action="store_true", help="the tiny model and few turns, to check that it runs")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    names, num_loads, turns, counts = options.model, options.loads, options.turns, (1, 4, 16)
    if options.quick:
        names, num_loads, turns, counts = ["tiny"], 1, 2, (1, NUM_SLOTS)
    console = Console(highlight=False)
    description = about(argv)
    models: list[dict] = []

    def show(name: str, part: str, figures: object) -> None:
        console.print(f"{name}, {part}: {json.dumps(figures)}", soft_wrap=True)

    for name in names:
        found = measure_model(
            name, num_loads=num_loads, requests=options.requests, turns=turns, counts=counts, show=show
        )
        models.append(found)
        write(options.output, {**description, "models": models})
        jax.clear_caches()
    print_table(console, models)
    identical = all(found["single"]["identical"] for found in models)
    console.print(f"identical: {'yes' if identical else 'NO'}")
    return 0 if identical else 4


if __name__ == "__main__":
    sys.exit(main())
