"""The benchmark counts what a server with known timing does: tokens, times, accept length, failures."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading

import matplotlib.figure
import pytest

pytest.importorskip("httpx")

from mtpjax.cli.main import main
from mtpjax.evaluation.intervals import Estimate
from mtpjax.serving.bench.backends import BACKENDS, BenchRequest
from mtpjax.serving.bench.client import Client, merge
from mtpjax.serving.bench.outcome import Outcome
from mtpjax.serving.bench.sending import measure
from mtpjax.serving.bench.speedup import PUBLISHED, Run, Speedup, speedups
from mtpjax.serving.bench.speedup_report import format_markdown, notes, plot_speedup, speedup_table, write_report
from mtpjax.serving.bench.summary import format_table, summarize
from mtpjax.serving.bench.workload import RandomLengths, arrival_times, random_requests, read_dataset
from tests.helpers.generation_server import FIRST_SECONDS, STEP_SECONDS, TOKENS_PER_STEP, serve_generation

# 1 token of the prefill, then 3 per step: 10 tokens take 3 steps.
REQUEST = BenchRequest((5, 6, 7), 10)


@pytest.fixture
def server():
    with serve_generation() as server:
        yield server


def run(server, requests, *, backend="mtpjax", max_concurrency=None, **settings):
    """Returns outcomes and summary of requests that are sent at once."""
    outcomes = []

    async def work():
        async with Client(server.url, BACKENDS[backend], **settings) as client:
            times = [0.0] * len(requests)
            return await measure(client, requests, outcomes, times=times, max_concurrency=max_concurrency)

    return outcomes, asyncio.run(work())


def bench(server, *flags):
    """Runs the command and returns its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(["bench-serving", "--base-url", server.url, *map(str, flags)])
    return exit_.value.code


SMALL = ("--num-prompts", 6, "--random-input-len", 8, "--random-output-len", 10, "--random-range-ratio", 1)


@pytest.mark.parametrize("backend", ["mtpjax", "sglang", "openai", "vllm"])
def test_tokens_times_and_accept_length_are_the_servers(server, backend):
    outcomes, summary = run(server, [REQUEST] * 4, backend=backend)
    assert summary["completed"] == 4 and summary["failed"] == 0
    assert summary["total_input_tokens"] == 12 and summary["total_output_tokens"] == 40
    assert summary["accept_length"] == TOKENS_PER_STEP
    # Timers are never early; how late they are depends on the machine's load.
    assert FIRST_SECONDS <= summary["median_ttft_ms"] / 1e3 < FIRST_SECONDS + 1
    for outcome in outcomes:
        assert [count for _, count in outcome.arrivals] == [1, 4, 7, 10]
        gaps = outcome.inter_token_latencies
        # Nine tokens after the first. Three of them share a step.
        assert len(gaps) == 9 and sum(gaps) == pytest.approx(outcome.latency - outcome.time_to_first_token)
        assert outcome.latency >= FIRST_SECONDS + 3 * STEP_SECONDS
    assert summary["mean_itl_ms"] == pytest.approx(summary["mean_tpot_ms"], rel=0.01)


def test_a_total_without_running_counts_is_spread_over_the_chunks(server):
    server.tells_usage = False
    (outcome,), summary = run(server, [REQUEST], backend="openai")
    assert [count for _, count in outcome.arrivals] == [2, 5, 7, 10]
    assert summary["total_output_tokens"] == 10


def test_whole_answers_and_chats(server):
    (outcome,), summary = run(server, [REQUEST], stream=False)
    assert outcome.num_new_tokens == 10 and summary["mean_itl_ms"] is None
    assert server.bodies[-1]["stream"] is False
    (outcome,), _ = run(server, [BenchRequest("hello there", 7)], backend="openai-chat")
    assert outcome.num_new_tokens == 7 and outcome.text == "xxx"
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "hello there"}]
    (outcome,), summary = run(server, [BenchRequest("hello there", 7)])
    assert outcome.text == "x" * 7 and summary["total_input_tokens"] == 2


def test_bodies_have_the_fields_of_their_route(server):
    run(server, [REQUEST], extra_body={"sampling_params": {"temperature": 0.5}, "speculative": False})
    assert server.bodies[-1] == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0.5, "max_new_tokens": 10, "ignore_eos": True},
        "stream": True,
        "speculative": False,
    }
    run(server, [REQUEST], backend="vllm", ignore_eos=False)
    assert server.bodies[-1] == {
        "model": "fake",
        "prompt": [5, 6, 7],
        "max_tokens": 10,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_extra_fields_are_merged_into_objects():
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": {"e": 5},
    }


@pytest.mark.parametrize("limit", [1, 3])
def test_concurrency_stays_below_its_limit(server, limit):
    _, summary = run(server, [REQUEST] * 7, max_concurrency=limit)
    assert server.peak == limit == summary["max_concurrent_requests"]
    assert limit / 2 < summary["concurrency"] <= limit


@pytest.mark.parametrize("late", [False, True])
def test_failures_are_counted_and_named(server, late):
    server.is_failing, server.fails_late = lambda number: number % 3 == 0, late
    _, summary = run(server, [REQUEST] * 6)
    assert summary["completed"] == 4 and summary["failed"] == 2
    assert summary["errors"] == {"out of luck" if late else "HTTP 500: out of luck": 2}
    assert summary["total_output_tokens"] == 40


@pytest.mark.parametrize(
    "arrivals",
    [
        # Less than a second: a count of tokens is not their number per second.
        [(0.25, 8)],
        # A second and a half: the window of the last second would be cut short.
        [(0.1, 50), (1.5, 100)],
        [(0.5, 1), (1.01, 2)],
        # Bursts at the borders of windows.
        [(1.0, 10), (2.0, 20), (3.0, 30)],
        [(0.9999, 10), (1.9999, 20), (2.9999, 400)],
    ],
)
def test_peak_throughput_is_at_least_the_mean(arrivals):
    summary = summarize([Outcome(REQUEST, 0.0, arrivals), Outcome(REQUEST, 0.0, arrivals[:1])])
    assert summary["max_output_tokens_per_s"] >= summary["output_throughput"] > 0


def test_peak_throughput_is_that_of_the_busiest_window():
    summary = summarize([Outcome(REQUEST, 0.0, [(0.5, 10), (1.5, 100), (2.5, 110), (4.0, 120)])])
    assert summary["max_output_tokens_per_s"] == 90 and summary["output_throughput"] == 30
    # One window: its rate is the run's.
    assert summarize([Outcome(REQUEST, 0.0, [(0.5, 10)])])["max_output_tokens_per_s"] == 20
    assert summarize([])["max_output_tokens_per_s"] is None


def test_accept_length_weighs_requests_by_their_passes():
    outcomes = [Outcome(REQUEST, 0.0, [(1.0, 1)], 0, steps, length) for steps, length in ((10, 2.0), (30, 3.0))]
    assert summarize(outcomes)["accept_length"] == 2.75
    assert summarize([Outcome(REQUEST, 0.0, [(1.0, 1)])], (8.0, 4.0))["accept_length"] == 1.5
    assert summarize([Outcome(REQUEST, 0.0, [(1.0, 1)])])["accept_length"] is None


def test_accept_length_by_category_is_in_the_table():
    def outcome(category, length):
        return Outcome(BenchRequest("x", 1, category), 0.0, [(1.0, 1)], 0, 10, length)

    summary = summarize([outcome("math", 3.0), outcome("rag", 2.0), outcome("math", 2.5)])
    assert summary["accept_length_by_category"] == {"math": 2.75, "rag": 2.0}
    table = format_table({"backend": "x", "request_rate": 1.0, "max_concurrency": None}, summary)
    assert "Accept length, math:                     2.75" in table


def test_same_seed_same_requests():
    lengths = RandomLengths(16, 8, 0.5)
    requests = random_requests([3, 5, 9], 50, lengths, seed=1)
    assert requests == random_requests([3, 5, 9], 50, lengths, seed=1)
    assert requests != random_requests([3, 5, 9], 50, lengths, seed=2)
    assert {len(request.prompt) for request in requests} == set(range(8, 17))
    assert {request.max_new_tokens for request in requests} == set(range(4, 9))
    assert {token for request in requests for token in request.prompt} == {3, 5, 9}


def test_poisson_arrivals_have_the_mean_of_their_rate():
    times = arrival_times(4000, 20.0, seed=3)
    assert times == arrival_times(4000, 20.0, seed=3) and times == sorted(times) and times[0] == 0
    # 4000 gaps: the mean is within 5 % but for three in a thousand seeds.
    assert times[-1] / 3999 == pytest.approx(1 / 20, rel=0.05)
    assert arrival_times(3, float("inf"), seed=0) == [0, 0, 0]
    with pytest.raises(ValueError, match="request_rate must be above 0"):
        arrival_times(3, 0.0, seed=0)


def test_requests_are_sent_at_their_times(server):
    outcomes = []

    async def work():
        async with Client(server.url, BACKENDS["mtpjax"]) as client:
            await measure(client, [REQUEST] * 3, outcomes, times=[0.0, 0.1, 0.2])

    asyncio.run(work())
    sent = sorted(outcome.sent for outcome in outcomes)
    # The first may be late itself.
    assert all(later - sooner >= 0.05 for sooner, later in itertools.pairwise(sent)) and sent[2] - sent[0] < 1


def test_conversations_have_replies_and_prompts_categories(tmp_path):
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "the reply"}]
    records = [
        {"conversations": turns},
        {"conversations": turns[:1]},
        {"conversations": [{"content": "two"}, turns[1]]},
    ]
    (tmp_path / "share.json").write_text(json.dumps(records))
    chosen = read_dataset(tmp_path / "share.json", 9, seed=0)
    assert {(prompt.text, reply) for prompt, reply in chosen} == {("one", "the reply"), ("two", "the reply")}
    questions = [{"question_id": n, "category": "math" if n % 2 else "rag", "turns": [f"q{n}"]} for n in range(6)]
    (tmp_path / "spec.jsonl").write_text("\n".join(map(json.dumps, questions)))
    chosen = read_dataset(tmp_path / "spec.jsonl", 4, categories=["math"], seed=0)
    assert [(prompt.category, reply) for prompt, reply in chosen] == [("math", None)] * 3


def test_table_has_sglangs_rows(server, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    file = tmp_path / "new" / "runs.jsonl"
    for _ in range(2):
        assert bench(server, *SMALL, "--output-file", file, "--output-details", "--tag", "mine", "--header", "a=b") == 0
    names = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if ":" in line]
    assert names[: len(names) // 2] == [
        "Backend",
        "Traffic request rate",
        "Max request concurrency",
        "Successful requests",
        "Failed requests",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Input token throughput (tok/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total token throughput (tok/s)",
        "Concurrency",
        "Accept length",
        *(
            f"{kind} {latency} (ms)"
            for latency in ("E2E Latency", "TTFT", "TPOT", "ITL")
            for kind in ("Mean", "Median", "P90", "P95", "P99")
        ),
        "Max ITL (ms)",
    ]
    assert server.headers[-1]["a"] == "b" and server.headers[-1]["authorization"] == "Bearer secret"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 2 and "secret" not in file.read_text()
    assert records[0]["tag"] == "mine" and records[0]["model"] == "fake" and records[0]["accept_length"] == 3
    assert records[0]["output_lens"] == [10] * 6 and records[0]["input_lens"] == [8] * 6


def test_a_run_without_success_has_a_table_and_exit_code_1(server, capsys):
    server.is_failing = lambda number: True
    assert bench(server, *SMALL) == 1
    printed = capsys.readouterr()
    assert "Successful requests:                     0" in printed.out and "n/a" in printed.out
    assert "6 requests failed: HTTP 500: out of luck" in printed.err
    assert format_table({"backend": "x", "request_rate": 1.0, "max_concurrency": None}, summarize([]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dataset-name", "random-ids"), "--vocab-size"),
        (("--dataset-name", "sharegpt"), "--dataset-path"),
        (("--request-rate", "0"), "request_rate must be above 0"),
        (("--random-range-ratio", "2"), "random_range_ratio must be from 0 to 1"),
        (("--num-prompts", "0"), "--num-prompts must be at least 1"),
        (("--extra-request-body", "[1]"), "must be a JSON object"),
        (("--header", "x"), "KEY=VALUE"),
        (("--backend", "openai-chat"), "token ids"),
        (("--with-and-without-mtp", "--concurrencies", "65"), "--num-prompts"),
        (("--with-and-without-mtp", "--concurrencies", "1", "--output", "run_0.5"), "the suffix of run_0.5"),
    ],
)
def test_wrong_settings_are_one_line(server, flags, message, capsys):
    assert bench(server, *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "9"), "no server answers at http://127.0.0.1:9"),
        (("--port", "99999"), "Port out of range"),
        (("--base-url", "localhost:9"), "must start with http:// or https://"),
    ],
)
def test_no_server_is_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench-serving", *flags])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_ctrl_c_keeps_what_was_measured(server, capsys):
    # Requests one after another take about 0.06 s each.
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    handler = signal.getsignal(signal.SIGINT)
    code = bench(server, *SMALL, "--num-prompts", 500, "--max-concurrency", 1)
    timer.cancel()  # a benchmark that ended early must not interrupt the tests
    assert code == 130
    printed = capsys.readouterr()
    completed = int(printed.out.partition("Successful requests:")[2].split()[0])
    assert 0 < completed < 500 and f"interrupted after {completed} of 500 requests" in printed.err
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_with_and_without_mtp(server, capsys, tmp_path):
    output = tmp_path / "speed"
    flags = ("--with-and-without-mtp", "--concurrencies", 1, 3, "--repeats", 2, "--output", output)
    assert bench(server, *SMALL, *flags, "--plot-formats", "png", "--num-prompts", 3, "--random-output-len", 31) == 0
    # Two requests to warm up, then runs of three: with, without, without, with at each concurrency.
    sides = [body.get("speculative", True) for body in server.bodies[2:]]
    assert sides == [side for side in (True, False, False, True) * 2 for _ in range(3)]
    assert server.num_flushes == 9
    # All runs have the same prompts.
    prompts = [sorted(tuple(body["input_ids"]) for body in server.bodies[2 + 3 * n : 5 + 3 * n]) for n in range(8)]
    assert all(each == prompts[0] for each in prompts)
    result = json.loads((tmp_path / "speed.json").read_text())
    for row in result["speedups"]:
        # 30 tokens after the first take 10 steps with drafts and 30 without: (0.03 + 0.3) / (0.03 + 0.1).
        assert row["ratio"]["value"] == pytest.approx(2.5, abs=1.0)
        assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]
        assert row["accept_length"] == 3 and row["accept_length_without"] == 1
    # Speed-ups of another machine are neither in the files nor in the table, unless --reference asks for them.
    assert "published" not in result
    assert len(result["runs"]) == 8 and result["settings"]["model"] == "fake"
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    assert "| 1 |" in (tmp_path / "speed.md").read_text()
    printed = capsys.readouterr()
    assert "AMD" not in (tmp_path / "speed.md").read_text() + printed.out
    assert max(map(len, printed.out.splitlines())) <= 80 and "…" not in printed.out
    assert "run 8 of 8: 3 at once, with MTP" in printed.err


def fake_run(concurrency, repeat, speculative, tokens, **changes):
    summary = {"total_output_tokens": tokens, "duration": 2.0, "failed": 0, "mean_ttft_ms": 10.0, "mean_itl_ms": 5.0}
    return Run(concurrency, repeat, speculative, {**summary, "accept_length": 2.0 if speculative else 1.0, **changes})


def test_speedups_pair_runs_and_leave_out_what_has_no_partner():
    runs = [fake_run(4, repeat, side, tokens) for repeat, side, tokens in ((0, True, 300), (0, False, 200))]
    runs += [fake_run(4, 1, False, 200), fake_run(4, 1, True, 340), fake_run(4, 2, True, 999)]
    runs += [fake_run(8, 0, True, 100), fake_run(8, 0, False, 0)]
    (row,) = speedups(runs)
    assert row.num_pairs == 2 and row.throughput == (100, 160)
    assert (row.ratio.value, row.ratio.low, row.ratio.high) == (1.6, 1.5, 1.7)


def test_notes_name_a_server_that_drafts_all_the_same():
    runs = [fake_run(1, 0, True, 10, accept_length=2.0), fake_run(1, 0, False, 10, accept_length=2.0, failed=3)]
    runs += [fake_run(2, 0, side, 10, client_cpu_share=0.9) for side in (True, False)]
    text = format_markdown(speedups(runs), {"model": "fake"}, {})
    assert "the client was overloaded at 2 requests at once" in text
    assert "the comparison is not valid" in text and "3 requests failed" in text and "raise --repeats" in text
    assert len(notes(speedups([fake_run(1, n, side, 10) for n in (0, 1) for side in (True, False)]), {})) == 2


def comparisons(*concurrencies, speed=10.0):
    return [
        Speedup(n, Estimate(1.5, 1.4, 1.6), (speed * n, 1.5 * speed * n), (9.0, 9.0), (9.0, 6.0), 2.0, 1.0, 3, 0)
        for n in concurrencies
    ]


def test_published_speedups_are_shown_only_on_request(tmp_path):
    rows, settings = comparisons(1, 3), {"model": "fake"}
    for reference, count in (({}, 0), (PUBLISHED, 1)):
        write_report(tmp_path / "speed", rows, [], settings, ["svg"], reference)
        content = json.loads((tmp_path / "speed.json").read_text())
        assert ("published" in content) == bool(reference)
        [heading] = [line for line in (tmp_path / "speed.md").read_text().splitlines() if line.startswith("| at once")]
        assert heading.count("AMD") == count and len(speedup_table(rows, reference).columns) == 7 + count
        assert (tmp_path / "speed.svg").read_text().count("AMD") == count
    # The published value stands in the row of its own concurrency only.
    assert "| 2.11 |" in (tmp_path / "speed.md").read_text() and "| - |" in (tmp_path / "speed.md").read_text()


@pytest.mark.parametrize("speed", [0.4, 40.0, 150.0, 40_000.0])
@pytest.mark.parametrize("concurrencies", [(1, 2), (1, 4, 64)])
def test_throughput_is_labelled_with_plain_numbers(concurrencies, speed, tmp_path):
    figures, savefig = [], matplotlib.figure.Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig", lambda self, *_, **__: figures.append(self))
        plot_speedup(tmp_path / "speed", comparisons(*concurrencies, speed=speed), ("png",), {})
    [figure] = figures
    savefig(figure, tmp_path / "speed.png")
    low, high = figure.axes[0].get_ylim()
    labels = [
        label.get_text()
        for label in figure.axes[0].get_yticklabels(which="both")
        if low <= label.get_position()[1] <= high
    ]
    assert len(labels) >= 2 and all(re.fullmatch(r"[\d,]*\d(\.\d+)?", label) for label in labels), labels


def test_a_speed_up_that_cannot_be_trusted_is_marked(tmp_path):
    """A ratio above the accept length, one of a client that waited for a core, and one without an interval."""
    runs = [fake_run(1, n, side, 250 if side else 100) for n in (0, 1) for side in (True, False)]
    busy = {"client_waited_share": 0.5}
    runs += [fake_run(2, n, side, 150 if side else 100, **busy) for n in (0, 1) for side in (True, False)]
    runs += [fake_run(4, 0, side, 150 if side else 100) for side in (True, False)]
    runs += [fake_run(8, n, side, 150 if side else 100) for n in (0, 1) for side in (True, False)]
    rows = speedups(runs)
    assert [row.problem for row in rows] == [
        "impossible: above the accept length 2.00",
        "disturbed: waited 50% of the time for a core",
        "uncertain: one measurement has no interval",
        None,
    ]
    text = format_markdown(rows, {}, {})
    assert text.splitlines()[2].startswith("trust in the timings: for 1 of 4 (1 impossible, 1 disturbed, 1 uncertain,")
    assert "| 2.50 2.50-2.50 ? |" in text and "| 1.50 1.50-1.50 |" in text
    assert "- 1 request at once: impossible: above the accept length 2.00" in text
    for part in (rows, rows[:1]):
        plot_speedup(tmp_path / "speed", part, ("svg",), {})
    assert json.dumps([row.to_dict() for row in rows], allow_nan=False)


def test_picture_has_every_format(tmp_path):
    plot_speedup(tmp_path / "speed", comparisons(1, 2), ("png", "svg", "pdf"), {})
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg", ".pdf"}


def test_the_client_imports_neither_jax_nor_the_engine():
    code = """
import sys
from mtpjax.serving.bench import client, requests, sending, speedup_report
loaded = [name for name in sys.modules if name == "jax" or name.startswith("mtpjax.serving.")]
assert all(name.startswith("mtpjax.serving.bench") for name in loaded), loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
