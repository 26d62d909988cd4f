"""Runs the quickstart, which trains a small model, decodes plainly and with drafts, and compares texts and speed."""

import contextlib
import dataclasses
import pathlib
import shlex
from typing import Any

import numpy as np
import rich.console

from mtpjax.console import narrow_table, print_parts
from mtpjax.data.packing import held_out_prompts
from mtpjax.evaluation.intervals import estimate_from, resample
from mtpjax.evaluation.machine import describe_device
from mtpjax.evaluation.plot_style import picture_paths
from mtpjax.evaluation.plots import plot_quickstart
from mtpjax.evaluation.round_shapes import RoundCosts, chain_shape
from mtpjax.evaluation.timing_worker import TimingWorker
from mtpjax.evaluation.trust import mark, speed_up_problem, verdict
from mtpjax.host import num_threads
from mtpjax.messages import count_of
from mtpjax.training.config import TrainConfig
from mtpjax.training.decoding_eval import is_looping, repeated_share
from mtpjax.training.panel import print_panel
from mtpjax.training.trainer import TrainResult, train

# Prompt and continuation together are as long as a training row; CAPACITY is the cache capacity that fits them.
PROMPT_TOKENS, NEW_TOKENS, CAPACITY = 64, 128, 256
# Beginnings of statements, one of which is the prompt in the command that the quickstart prints at the end.
STATEMENTS = ("def ", "class ", "import ", "from ", "for ", "if ")
EXAMPLE_TEMPERATURES = (0.0, 0.8)
MAX_REPEATED_SHARE = 0.2  # maximum `repeated_share` of an example's continuation


@dataclasses.dataclass(frozen=True)
class DecoderSetting:
    """A decoder configuration to time.

    Attributes:
        num_steps: draft levels; 0 is plain decoding.
        threads: CPU threads of the process; 0: all.
        min_rows: minimum number of token rows per forward pass, as in `DecodeConfig`.
    """

    num_steps: int
    threads: int
    min_rows: int


@dataclasses.dataclass(frozen=True)
class DepthResult:
    """Results of one draft depth.

    Attributes:
        num_steps: draft levels.
        setting: the fastest setting at this depth.
        accept_length: tokens per round, including the bonus token.
        survival: per level, fraction of rounds that accepted it.
        tokens_per_second: decoding speed, not counting the first token, which prefill produces.
        ratio: median speed-up over the fastest plain setting, over all prompts and rounds.
        interval: 95 % interval of `ratio`, from resampled prompts.
        ideal: maximum speed-up for this accept length and the measured costs of a round's passes.
        waited: largest fraction of the time that threads waited for a CPU core, among this setting, the plain setting
            and the cost measurement.
        problem: why the speed-up cannot be trusted (`mtpjax.evaluation.trust`); None: it can be trusted.
    """

    num_steps: int
    setting: DecoderSetting
    accept_length: float
    survival: list[float]
    tokens_per_second: float
    ratio: float
    interval: tuple[float, float]
    ideal: float
    waited: float = 0.0
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements from the worker processes.

    Attributes:
        seconds: `[rounds, prompts]` decoding times for each setting, excluding prefill.
        answers: the texts and counts for each setting.
        waited: mean over rounds of the fraction of each setting's time that threads waited for a CPU core.
        negative: settings with a call that took no longer than its prefill.
        costs: costs of a round's passes, measured in the process of the fastest plain setting.
        waited_for_costs: the fraction of time that threads waited for a CPU core while the costs were measured.
    """

    seconds: dict[DecoderSetting, np.ndarray]
    answers: dict[DecoderSetting, Any]
    waited: dict[DecoderSetting, float]
    negative: set[DecoderSetting]
    costs: RoundCosts
    waited_for_costs: float


def run(config: TrainConfig, *, depths: tuple[int, ...] = (1, 2, 3), rounds: int = 5, num_prompts: int = 16) -> int:
    """Trains a model, measures plain and speculative decoding, prints the result and writes a plot.

    Returns exit code 4 if any speculative text differs from the plain text, and 0 otherwise.
    """
    # The first round finds the fastest plain setting; the later rounds measure the costs in that setting's process.
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, not {rounds}")
    # 1. Train, and evaluate as many draft levels as decoding will use.
    console = rich.console.Console()
    console.print(
        f"[bold]1[/] training '{config.preset}' on the standard library of this Python, {_training_length(config)}"
    )
    trained = train(config, panel_depths=max(depths), overwrite=True)
    print_panel(console, trained.panel)

    # 2. Decode. A process cannot change its number of threads, so each thread count has a worker process. A small model
    # may be fastest on one thread, or with passes padded to two rows. Plain decoding tries each of these, so that the
    # speed-up is over the best baseline. Only one of the depths also runs on all threads.
    console.print("\n[bold]2[/] decoding held-out prompts, plain and speculative, with 1 thread and with all threads")
    threads = (1, 0) if num_threads() > 1 else (1,)
    settings = [DecoderSetting(0, thread, 1) for thread in threads] + [DecoderSetting(0, 1, 2)]
    settings += [DecoderSetting(depth, 1, 1) for depth in depths]
    settings += [DecoderSetting(min(2, max(depths)), thread, 1) for thread in threads[1:]]
    with contextlib.ExitStack() as stack:
        workers = {thread: stack.enter_context(TimingWorker(trained.path, threads=thread)) for thread in threads}
        with console.status("compiling each setting"):
            prompts, num_lively, num_decoded = _find_prompts(workers, settings, trained, num_prompts)
        measured = _measure_settings(console, workers, settings, prompts, rounds, depths)
        # Greedy speculation must give the same text as plain decoding, token for token, in every setting.
        texts = [[row["tokens"] for row in measured.answers[setting]] for setting in settings]
        identical = all(of_setting == texts[0] for of_setting in texts)
        # 3. Compare each depth with the fastest plain setting.
        plain = _best_plain(measured.seconds)
        rows = [_depth_result(depth, plain, settings, measured) for depth in depths]
        best = min(rows, key=lambda row: (bool(row.problem), -row.ratio))
        # Use the worker with one thread, because `mtpjax generate` runs models of this size on one thread.
        with console.status("looking for a prompt to continue with"):
            example = _choose_example(workers[1], best.num_steps)
    # First, print whether the speeds can be trusted.
    trust = verdict([row.problem for row in rows], max(row.waited for row in rows))
    print_parts(console, ["", trust])
    texts_are = f"{num_lively} of {num_decoded} continuations of held-out text do not loop"
    _print_result(console, plain, measured.seconds[plain], rows, best, identical=identical, loops=not num_lively)

    title = (
        f"Quickstart: '{config.preset}' trained for {_training_length(config)}, then {len(prompts)} held-out prompts "
    )
    title += f"decoded greedily, one at a time\n{describe_device()}"
    plot = pathlib.Path(config.output) / "quickstart"
    plot_quickstart(plot, trained.history, rows, config.plot_formats, title=title)
    plots = [file.name for name in ("panel", "quickstart") for file in picture_paths(name, config.plot_formats)]
    files = ", ".join(["metrics.jsonl", "checkpoint/", *plots])
    console.print(f"\nwrote {config.output}/: {files}", soft_wrap=True)
    command = f"mtpjax generate --model {shlex.quote(config.output)} {example} --max-new-tokens {NEW_TOKENS}"
    command += f" --speculative-num-steps {best.num_steps}"
    console.print(f"next: {command}", soft_wrap=True, markup=False, highlight=False, style="bold")
    # The last line repeats how far the timings can be trusted.
    num_updates = max(row["step"] for row in trained.history)
    print_parts(console, [f"model: {num_updates} updates; {texts_are}", trust])
    return 0 if identical else 4


def _training_length(config: TrainConfig) -> str:
    if not np.isfinite(config.seconds):
        return count_of(config.steps, "update")
    return f"{config.seconds:.0f} s and at least {count_of(config.min_steps, 'update')}"


def _find_prompts(
    workers: dict[int, TimingWorker], settings, trained: TrainResult, count: int
) -> tuple[list[list[int]], int, int]:
    """Compiles every setting, and chooses held-out prompts whose plain continuation does not loop.

    Also returns the number of continuations that do not loop, and the total number of continuations. If all of them
    loop, the first prompts are used anyway.
    """
    lengths = {"prompt_length": PROMPT_TOKENS, "continuation_length": NEW_TOKENS}
    candidates = held_out_prompts(trained.held_out, count=4 * count, seed=0, **lengths)
    # Send one prompt per setting to all workers before reading answers, so that they compile side by side.
    for setting in settings:
        _send_prompts(workers, setting, candidates[:1])
    for setting in settings:
        workers[setting.threads].receive()
    # Drafting is easy on looping text, which would inflate the speed-up.
    _send_prompts(workers, settings[0], candidates)
    rows = workers[settings[0].threads].receive()["rows"]
    lively = [prompt for prompt, row in zip(candidates, rows, strict=True) if not is_looping(row["tokens"])]
    return (lively or candidates)[:count], len(lively), len(candidates)


def _choose_example(worker: TimingWorker, num_steps: int) -> str:
    """Returns flags for `mtpjax generate` with which this model's text hardly repeats itself.

    The greedy text of a small model often repeats itself. If so, the flags set a temperature.
    """
    prompts = [list(text.encode()) for text in STATEMENTS]
    shares = []
    for temperature in EXAMPLE_TEMPERATURES:
        answer = worker.call(**_decode_request(prompts, num_steps, temperature=temperature))
        flags = f" --temperature {temperature:g}" if temperature else ""
        shares += [
            (repeated_share(row["tokens"]), f"--prompt {shlex.quote(text)}{flags}")
            for text, row in zip(STATEMENTS, answer["rows"], strict=True)
        ]
        if min(shares)[0] <= MAX_REPEATED_SHARE:
            break
    return min(shares)[1]


def _send_prompts(workers: dict[int, TimingWorker], setting: DecoderSetting, prompts: list[list[int]]) -> None:
    """Sends a decoding request to the setting's worker without waiting for the answer."""
    workers[setting.threads].send(_decode_request(prompts, setting.num_steps, setting.min_rows))


def _decode_request(
    prompts: list[list[int]], num_steps: int, min_rows: int | None = None, temperature: float = 0.0
) -> dict[str, Any]:
    limits = {"max_new_tokens": NEW_TOKENS, "num_steps": num_steps, "min_rows": min_rows}
    return {"method": "decode", "prompts": prompts, "temperature": temperature, **limits}


def _measure_settings(
    console, workers: dict[int, TimingWorker], settings, prompts, rounds: int, depths: tuple[int, ...]
) -> Measured:
    """Times every setting on every prompt, and measures the costs of a round's passes."""
    # All settings take turns within each round, in alternating order, so that a machine that slows down or speeds up
    # affects them equally.
    seconds: dict[DecoderSetting, list] = {setting: [] for setting in settings}
    waited: dict[DecoderSetting, list] = {setting: [] for setting in settings}
    answers, negative, costs, waited_for_costs, plain = {}, set(), None, [], settings[0]
    with console.status("measuring") as status:
        for number in range(rounds):
            status.update(
                f"measuring: round {number + 1} of {rounds}, {count_of(len(prompts), 'prompt')}, "
                f"{len(settings)} settings each"
            )
            for setting in settings if number % 2 == 0 else reversed(settings):
                _send_prompts(workers, setting, prompts)
                answer = workers[setting.threads].receive()
                seconds[setting].append(answer["seconds"])
                waited[setting].append(answer["waited"])
                answers[setting] = answer["rows"]
                negative |= {setting} if answer["is_negative"] else set()
                # The process that is fastest at plain decoding, known after the first round, measures the costs.
                if number:
                    context = PROMPT_TOKENS + NEW_TOKENS // 2
                    worker = workers[plain.threads]
                    answer = worker.call(method="costs", num_steps=depths, context=context, capacity=CAPACITY)
                    costs = RoundCosts.from_json(answer)
                    waited_for_costs.append(answer["waited"])
            plain = _best_plain(seconds)
    assert costs is not None  # `run` rejects fewer than 2 rounds
    return Measured(
        seconds={setting: np.array(times) for setting, times in seconds.items()},
        answers=answers,
        waited={setting: float(np.mean(shares)) for setting, shares in waited.items()},
        negative=negative,
        costs=costs,
        waited_for_costs=float(np.mean(waited_for_costs)),
    )


def _best_plain(seconds: dict[DecoderSetting, Any]) -> DecoderSetting:
    """Returns the plain setting with the smallest median time per round."""
    plain = (setting for setting in seconds if not setting.num_steps)
    return min(plain, key=lambda setting: np.median(np.sum(seconds[setting], axis=1)))


def _depth_result(depth: int, plain: DecoderSetting, settings, measured: Measured) -> DepthResult:
    # Find the fastest setting of this depth.
    seconds = measured.seconds
    same_depth = [setting for setting in settings if setting.num_steps == depth]
    setting = min(same_depth, key=lambda setting: np.median(seconds[setting].sum(1)))
    # Compute acceptance from the counts over all prompts.
    rows = measured.answers[setting]
    num_rounds = sum(row["rounds"] for row in rows)
    accepted = np.sum([row["accepted"] for row in rows], axis=0)
    accept_length = float(1 + accepted.sum() / num_rounds)
    # Pair the times by prompt and round, and bootstrap the median ratio by drawing whole prompts, because the rounds of
    # one prompt are not independent.
    pairs = seconds[plain] / seconds[setting]  # [rounds, prompts]
    (drawn,) = resample(pairs.shape[1])
    ratio = estimate_from(float(np.median(pairs)), np.median(pairs[:, drawn], axis=(0, 2)))
    # The first token of a text comes from prefill, not from a round.
    tokens = sum(len(row["tokens"]) - 1 for row in rows)
    # The costs are relative to an unpadded plain step in the process of the plain setting. They limit the ratio only if
    # both settings ran under these conditions.
    ideal = measured.costs.ideal_ratio(accept_length, chain_shape(depth))
    has_own_costs = (setting.threads, 1) == (plain.threads, plain.min_rows)
    waited = max(measured.waited[setting], measured.waited[plain], measured.waited_for_costs)
    problem = speed_up_problem(
        ratio,
        accept_length,
        waited=waited,
        ideal=ideal if has_own_costs else None,
        is_negative=bool(measured.negative & {setting, plain}),
    )
    return DepthResult(
        num_steps=depth,
        setting=setting,
        accept_length=accept_length,
        survival=(accepted / num_rounds).tolist(),
        tokens_per_second=tokens / float(np.median(seconds[setting].sum(1))),
        ratio=ratio.value,
        interval=(ratio.low, ratio.high),
        ideal=ideal,
        waited=waited,
        problem=problem,
    )


def _print_result(
    console,
    plain: DecoderSetting,
    plain_seconds,
    rows: list[DepthResult],
    best: DepthResult,
    *,
    identical: bool,
    loops: bool = False,
) -> None:
    # The first row is the plain baseline, with ratio 1; one row per depth follows.
    def threads(setting: DecoderSetting) -> str:
        return "1" if setting.threads == 1 else "all"

    texts = "(all loop, which makes drafting easy)" if loops else "that do not loop"
    table = narrow_table(f"greedy decoding at batch 1 of held-out prompts {texts}")
    for heading in ("drafts", "threads", "accept\nlength", "survival", "tokens/s", "ratio", "95 %", "ideal"):
        table.add_column(heading, justify="right", no_wrap=True)
    count = plain_seconds.shape[1] * (NEW_TOKENS - 1)
    plain_rate = count / float(np.median(plain_seconds.sum(1)))
    padded = ", 2 rows" if plain.min_rows == 2 else ""
    table.add_row("0", threads(plain) + padded, "1.00", "", f"{plain_rate:.0f}", "1.00", "", "1.00")
    for row in rows:
        low, high = row.interval
        table.add_row(
            str(row.num_steps),
            threads(row.setting),
            f"{row.accept_length:.2f}",
            " ".join(f"{rate:.2f}" for rate in row.survival),
            f"{row.tokens_per_second:.0f}",
            f"{row.ratio:.2f}{mark(row.problem)}",
            f"{low:.2f}-{high:.2f}",
            f"{row.ideal:.2f}",
        )
    console.print(table)
    console.print(f"identical: {'yes' if identical else 'NO'}", style="bold green" if identical else "bold red")
    low, high = best.interval
    # For an untrusted ratio, print the reason instead of its share of the ideal.
    rest = best.problem or f"{best.ratio / best.ideal:.2f} of the ideal {best.ideal:.2f}"
    ratio = f"{best.ratio:.2f} ({low:.2f}-{high:.2f}){mark(best.problem)}"
    console.print(f"speculative/plain: {ratio} with {count_of(best.num_steps, 'draft')}; {rest}", soft_wrap=True)
