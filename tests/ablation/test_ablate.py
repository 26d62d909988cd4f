"""The grid, its resumption, what is measured of a cell, and what is advised."""

import csv
import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys

import jax
import matplotlib
import numpy as np
import pytest
import rich.console

from mtpjax import generate, program_memory
from mtpjax.ablation import bench as bench_module
from mtpjax.ablation import run
from mtpjax.ablation.advice import advise
from mtpjax.ablation.bench import Bench, paired_ratio
from mtpjax.ablation.cells import Cell, Settings, cell_of
from mtpjax.ablation.drafters import MTP
from mtpjax.ablation.grid import list_cells
from mtpjax.ablation.heatmap import cell_texts, plot_heatmap
from mtpjax.ablation.pareto import plot_pareto
from mtpjax.ablation.report import format_recommendation, format_summary, print_cells, to_csv
from mtpjax.ablation.run import fingerprint
from mtpjax.ablation.workload import find_workload
from mtpjax.cli.main import main
from mtpjax.data.jsonl_writer import JsonlWriter
from mtpjax.data.packing import split_held_out
from mtpjax.decoding.config import DecodeConfig
from mtpjax.evaluation.prompt_choice import PromptChoice
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts
from mtpjax.io.checkpoint import save_model
from mtpjax.training.decoding_eval import is_looping
from tests.helpers import training_runs
from tests.helpers.ablation_rows import ENVIRONMENT, SETTINGS, WORKLOAD, cell_row
from tests.helpers.documents import file_documents


def test_the_grid_leaves_out_what_is_impossible_with_its_reason(small):
    settings = Settings(
        depths=(1, 2), topk=(1, 2), num_draft_tokens=(0, 4), rules=("greedy", "block", "recursive"), batch_sizes=(1,)
    )
    model, _ = small("grouped", "right")
    cells, reasons = list_cells(settings, model=model)
    shapes = {(cell.num_steps, cell.topk, cell.num_nodes) for cell in cells}
    assert shapes == {(1, 1, 2), (2, 1, 3), (1, 2, 3), (2, 2, 7), (2, 2, 4)}
    assert {(cell.acceptance, cell.temperature, cell.topk) for cell in cells} == {
        ("greedy", 0, 1),
        ("greedy", 0, 2),
        ("block", 1, 1),
        ("recursive", 1, 2),
    }
    assert len(cells) == len(set(cells)) == 10
    said = (
        "greedy supports only temperature 0",
        "recursive supports only trees",
        "'block' supports only chains",
        "must be at most 3",
    )
    for part in said:
        assert any(part in reason for reason in reasons), part


def test_auto_is_the_default_rule_and_exact_is_all_that_fit(small):
    model, _ = small("grouped", "right")

    def rules(*names):
        settings = Settings(depths=(2,), topk=(1, 2), rules=names, batch_sizes=(1,))
        cells, _ = list_cells(settings, model=model)
        assert len(cells) == len(set(cells))
        return {(cell.topk, cell.temperature, cell.acceptance) for cell in cells}

    greedy = {(1, 0, "greedy"), (2, 0, "greedy")}
    assert rules("auto", "block", "greedy") == {*greedy, (1, 1, "block"), (2, 1, "recursive")}
    chains, trees = {(1, 1, rule) for rule in ("sample", "token", "block")}, {(2, 1, "sample"), (2, 1, "recursive")}
    assert rules("exact") >= {*greedy, *chains, *trees}
    assert not rules("exact") & {(1, 1, "recursive"), (2, 1, "token"), (2, 1, "block"), (1, 1, "typical")}
    assert {rule for _, _, rule in rules("typical")} == {"typical"}


def test_a_model_that_cannot_draft_trees_has_chains_only(small):
    model, _ = small("grouped", "right", num_mtp_modules=2)
    cells, reasons = list_cells(Settings(), model=model)
    assert {cell.topk for cell in cells} == {1} and any("need exactly one MTP module" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depths": ()}, "depths is empty"),
        ({"depths": (0,)}, "num_steps must be at least 1"),
        ({"batch_sizes": (1, 0)}, "batch_size must be at least 1"),
        ({"temperatures": (-1.0,)}, "temperature -1.0"),
        ({"temperatures": (float("nan"),)}, "temperature nan"),
        ({"rules": ("fast",)}, "unknown acceptance rule 'fast'; supported: auto, greedy"),
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2"),
        ({"repeats": 0}, "repeats must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        Settings(**changes)


def test_a_cell_of_a_right_drafter_has_its_figures(small, monkeypatch):
    model, params = small("grouped", "right")
    chain, tree = Cell(2, 2, 1, 3, "greedy", 0.0), Cell(2, 2, 2, 5, "greedy", 0.0)
    bench = Bench(model, params, SETTINGS, WORKLOAD, [chain, tree])
    time_calls = bench._time_calls

    def with_steady_times(batch, config, *arguments):
        # A call of a model this small can take less time than its prefill did, on a machine with other work.
        seconds = 1.5 if config.num_steps else 3.0
        return 0.5, seconds, time_calls(batch, config, *arguments)[2]

    monkeypatch.setattr(bench, "_time_calls", with_steady_times)
    monkeypatch.setattr(bench_module, "waiting_problem", lambda waited: None)  # would measure the shared costs again
    wide, figures = bench.measure(tree), bench.measure(chain)
    assert wide["accept_length"]["value"] == 3 and wide["lossless"] == "identical"
    assert figures["accept_length"] == {"value": 3, "low": 3, "high": 3}
    assert figures["lossless"] == "identical" and figures["compared_rows"] == 8
    assert figures["costs"]["plain"] == wide["costs"]["plain"] and figures["costs"]["parts"] != wide["costs"]["parts"]
    assert figures["ideal_ratio"] == pytest.approx(3 * figures["costs"]["plain"] / figures["costs"]["parts"])
    assert figures["ratio"] == pytest.approx({"value": 2.5, "low": 2.5, "high": 2.5})
    for row, cell in ((figures, chain), (wide, tree)):
        assert json.loads(json.dumps(row, allow_nan=False))["cell"] == dataclasses.asdict(cell)


@pytest.mark.slow
def test_sampled_rows_have_seeds_of_their_own_the_same_for_both_ways(small, monkeypatch):
    model, params = small("grouped", "right")
    bench = Bench(model, params, SETTINGS, WORKLOAD)
    decode, calls = bench_module.speculative_generate, []

    def watched(params, prompts, *, model, config, sampling):
        calls.append((config.num_steps, config.acceptance, sampling.temperature, tuple(sampling.seed)))
        return decode(params, prompts, model=model, config=config, sampling=sampling)

    monkeypatch.setattr(bench_module, "speculative_generate", watched)
    monkeypatch.setattr(
        bench, "_part_costs", lambda cell: (RoundCosts(2, {cell.shape: 1.0}, {PLAIN_STEP: 1.0, cell.shape: 1.0}), 0.0)
    )
    figures = bench.measure(Cell(2, 1, 1, 2, "sample", 0.7))
    assert figures["lossless"] == "identical"
    assert {(steps, rule) for steps, rule, _, _ in calls} == {(0, "auto"), (1, "sample")}
    seeds = [{row for steps, _, _, row in calls if steps == way} for way in (0, 1)]
    assert seeds[0] == seeds[1] and len({seed for row in seeds[0] for seed in row}) == 2 * 4  # repeats x rows
    assert bench.measure(Cell(2, 1, 1, 2, "block", 0.7))["lossless"] == "exact by rule"
    assert bench.measure(Cell(2, 1, 1, 2, "typical", 0.7))["lossless"] == "lossy"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_that_differs_is_noticed(dtype, small, monkeypatch):
    model, params = small("grouped", "right")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    bench = Bench(model, params, SETTINGS, WORKLOAD)
    monkeypatch.setattr(
        bench, "_part_costs", lambda cell: (RoundCosts(2, {cell.shape: 1.0}, {PLAIN_STEP: 1.0, cell.shape: 1.0}), 0.0)
    )
    decode = bench_module.speculative_generate

    def altered(*arguments, config, **options):
        result = decode(*arguments, config=config, **options)
        return dataclasses.replace(result, tokens=result.tokens + 1) if config.num_steps else result

    monkeypatch.setattr(bench_module, "speculative_generate", altered)
    figures = bench.measure(Cell(2, 1, 1, 2, "greedy", 0.0))
    assert figures["lossless"] == "DIFFERS" and figures["differing_rows"] == figures["compared_rows"]


def test_a_fingerprint_tells_every_setting_apart():
    cell = Cell(1, 1, 1, 2, "greedy", 0.0)
    first = fingerprint(cell, SETTINGS, WORKLOAD, ENVIRONMENT)
    assert first == fingerprint(cell, dataclasses.replace(SETTINGS, depths=(3,)), WORKLOAD, ENVIRONMENT)
    others = [
        fingerprint(dataclasses.replace(cell, batch_size=2), SETTINGS, WORKLOAD, ENVIRONMENT),
        fingerprint(cell, dataclasses.replace(SETTINGS, repeats=3), WORKLOAD, ENVIRONMENT),
        fingerprint(cell, dataclasses.replace(SETTINGS, max_new_tokens=13), WORKLOAD, ENVIRONMENT),
        fingerprint(cell, SETTINGS, dataclasses.replace(WORKLOAD, prompts=[[1]]), ENVIRONMENT),
        fingerprint(cell, SETTINGS, WORKLOAD, {**ENVIRONMENT, "model": "n"}),
    ]
    assert len({first, *others}) == 6


class FakeBench:
    """Measures nothing; ends the run like Ctrl-C at the n-th cell."""

    def __init__(self, ends_at=None, settings=SETTINGS):
        self.settings, self.workload, self.ends_at, self.measured = settings, WORKLOAD, ends_at, []

    def method(self, cell):
        return MTP

    def measure(self, cell):
        if len(self.measured) == self.ends_at:
            raise KeyboardInterrupt
        self.measured.append(cell)
        return {**cell_row(1.2, num_steps=cell.num_steps), "cell": dataclasses.asdict(cell)}


def run_cells(tmp_path, bench, cells):
    with JsonlWriter(tmp_path / "cells.jsonl") as writer:
        return run.run_cells(cells, bench, writer, ENVIRONMENT, log=lambda line: None)


def test_an_ended_run_goes_on_behind_its_last_cell(tmp_path, small):
    cells, _ = list_cells(SETTINGS, model=small("grouped", "right")[0])
    first = FakeBench(ends_at=2)
    rows, is_complete = run_cells(tmp_path, first, cells)
    assert len(rows) == 2 and not is_complete
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes() + b'{"fingerprint": "torn')
    second = FakeBench()
    rows, is_complete = run_cells(tmp_path, second, cells)
    assert is_complete and first.measured + second.measured == cells
    assert [cell_of(row) for row in rows] == cells
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 4
    third = FakeBench()
    run_cells(tmp_path, third, cells)
    assert not third.measured
    changed = FakeBench(settings=dataclasses.replace(SETTINGS, repeats=4))
    rows, _ = run_cells(tmp_path, changed, cells)
    assert changed.measured == cells and len(rows) == 4


def test_a_long_grid_frees_programs_after_each_cell(tmp_path, small, monkeypatch):
    cleared = []
    (tmp_path / "limit").write_text("1")
    monkeypatch.setattr(program_memory, "LIMIT_FILE", tmp_path / "limit")
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    cells, _ = list_cells(SETTINGS, model=small("grouped", "right")[0])
    run_cells(tmp_path, FakeBench(), cells)
    assert len(cleared) == len(cells) == 4


@pytest.mark.parametrize("line", ["nonsense", '{"cell": {}}'])
def test_a_damaged_line_is_told(tmp_path, line):
    (tmp_path / "cells.jsonl").write_text(f'{{"fingerprint": "a"}}\n{line}\n{{"fingerprint": "b"}}\n')
    with pytest.raises(ValueError, match="line 2 is damaged"):
        run_cells(tmp_path, FakeBench(), [])


@pytest.mark.parametrize(
    "change",
    [
        {"cell": {}},
        {"cell": None},
        {"ratio": 1.2},
        {"ratio": {"value": None, "low": 1.0, "high": 1.3}},
        {"ratio": {"value": 0, "low": 0, "high": 0}},
        {"accept_length": {"value": "x", "low": 1.0, "high": 2.0}},
        {"survival": []},
        {"conditional": 3},
        {"costs": {"plain": 1.0}},
        {"costs": {"plain": 1.0, "verify": 1.0, "parts": math.inf}},
        {"lossless": ["identical"]},
        {"problem": 3},
        {"waited": None},
        {"categories": None},
        {"categories": {"code": {"prompts": 1}}},
    ],
)
def test_a_spoilt_row_is_measured_again(change, tmp_path, small):
    cells, _ = list_cells(SETTINGS, model=small("grouped", "right")[0])
    rows, _ = run_cells(tmp_path, FakeBench(), cells)
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(json.dumps(row | (change if n == 1 else {})) + "\n" for n, row in enumerate(rows)))
    again, said = FakeBench(), []
    with JsonlWriter(path) as writer:
        rows, is_complete = run.run_cells(cells, again, writer, ENVIRONMENT, log=said.append)
    assert is_complete and again.measured == [cells[1]] and [cell_of(row) for row in rows] == cells
    assert f"its line in {path} is damaged; measuring again" in said[0]
    # The newer line counts from now on.
    third = FakeBench()
    run_cells(tmp_path, third, cells)
    assert not third.measured


def test_ratios_are_paired_within_a_repeat():
    """A machine that slows down to a half from one repeat to the next changes no ratio."""
    pace = np.array([1.0, 2.0, 0.5])[:, None] * np.array([1.0, 1.5])
    seconds = np.stack([pace, pace / 1.25])
    ratio = paired_ratio(seconds, np.full((2, 3, 2), 11.0))
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([1.25] * 3)
    twice = paired_ratio(seconds, np.stack([np.full((3, 2), 11.0), np.full((3, 2), 22.0)]))
    assert twice.value == pytest.approx(2.5)


def test_advice_says_what_how_sure_and_when_not():
    rows = [
        cell_row(1.5, num_steps=2),
        cell_row(1.2, num_steps=1),
        cell_row(1.32, num_steps=3, batch_size=4),
        cell_row(1.3, num_steps=1, batch_size=4),
        cell_row(0.9, batch_size=8),
        cell_row(1.02, batch_size=16),
        cell_row(1.4, 0.45, batch_size=32),
        cell_row(1.3, batch_size=32, num_steps=2),
        cell_row(1.7, batch_size=16, lossless="lossy", rule="typical", temperature=0.0),
        cell_row(2.5, batch_size=16, lossless="DIFFERS", num_steps=2),
    ]
    one, four, eight, sixteen, wide = advise(rows)
    assert one.best is rows[0] and one.certainty.startswith("clearly faster than mtp, depth 1, greedy: 1.20")
    assert four.best is rows[2] and four.certainty.startswith("not distinguishable from mtp, depth 1, greedy")
    assert eight.best is None and eight.text == "do not speculate"
    assert sixteen.best is None and "not clearly faster" in sixteen.text
    assert wide.best is rows[7] and wide.certainty.startswith("not distinguishable from mtp, depth 1")
    text = format_recommendation(rows, {"a reason": 3}, WORKLOAD, SETTINGS, ENVIRONMENT)
    assert "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3" in text
    assert "When not to speculate: batch 8 at temperature 0, batch 16 at temperature 0." in text
    assert text.startswith("# Which draft settings to use\n\ntrust in the timings: yes; threads waited up to 0.0% ")
    assert "one batch" not in text and "--acceptance" not in text
    assert "typical" in text and "1 of 10 texts" in text and "left out: a reason (3 cells)" in text
    settings = dataclasses.replace(SETTINGS, batch_sizes=(2, 4))
    text = format_recommendation([cell_row(1.5, temperature=1.0, rule="token")], {}, WORKLOAD, settings, ENVIRONMENT)
    assert "--speculative-num-draft-tokens 2 --acceptance token`" in text
    assert "at batch 4, all prompts are one batch: intervals include only the variation of timings" in text


def test_measurements_that_cannot_be_trusted_are_marked_and_never_advised():
    """The verdict comes first; the fastest trusted setting is advised, beside faster ones that are not."""
    rows = [cell_row(2.5), cell_row(1.2, num_steps=2), cell_row(1.7, num_steps=3, waited=0.54)]
    (advice,) = advise(rows)
    assert advice.best is rows[1] and "?" not in advice.text
    assert advice.certainty == "no other setting to compare with; not compared, because they cannot be trusted: 2"
    text = format_recommendation(rows, {}, WORKLOAD, SETTINGS, ENVIRONMENT)
    verdict = (
        "trust in the timings: for 1 of 3 (1 impossible, 1 disturbed, marked ?); threads waited up to 54.0% of the"
    )
    assert text.splitlines()[2].startswith(verdict)
    assert "depth 3, greedy: disturbed: waited 54% of the time for a core" in text.split("## Measured")[1]
    table = list(csv.DictReader(io.StringIO(to_csv(rows))))
    problems = ["impossible: above the accept length 1.80", "", "disturbed: waited 54% of the time for a core"]
    assert [line["problem"] for line in table] == problems
    file = io.StringIO()
    print_cells(rich.console.Console(file=file, width=80), rows)
    printed = file.getvalue()
    assert printed.startswith(verdict) and "2.50 2.45-2.55 ?" in printed and "1.70 1.65-1.75 ?" in printed
    # The trusted row is the first of its table, and gives the speed of plain decoding.
    assert "plain 100 tokens/s ?" not in printed and printed.index("1.20") < printed.index("2.50")
    assert format_summary(rows[2]) == "accept length 3.40, ratio 1.70 (1.65-1.75) ?, identical"
    file = io.StringIO()
    print_cells(rich.console.Console(file=file, width=80), rows[1:2])
    assert "?" not in file.getvalue() and file.getvalue().startswith("trust in the timings: yes")


def test_without_a_measurement_to_trust_nothing_is_advised():
    rows = [cell_row(2.5), cell_row(1.2, num_steps=2, waited=0.1), cell_row(0.5, batch_size=2)]
    one, two = advise(rows)
    assert one.best is None and not one.is_known and one.text.startswith("not known: no measurement can be trusted")
    assert "ratio to plain of 2.50 (2.45-2.55) ?: impossible" in one.certainty or "1.20 (1.15-1.25) ?" in one.certainty
    assert two.is_known and two.text == "do not speculate"
    assert "When not" not in format_recommendation(rows[:2], {}, WORKLOAD, SETTINGS, ENVIRONMENT)
    text = format_recommendation(rows, {}, WORKLOAD, SETTINGS, ENVIRONMENT)
    assert "--speculative" not in text and "When not to speculate: batch 2 at temperature 0." in text


def test_calls_no_longer_than_their_prefill_give_no_negative_speed(small, monkeypatch):
    model, params = small("grouped", "right")
    cell = Cell(2, 1, 1, 2, "greedy", 0.0)
    bench = Bench(model, params, SETTINGS, WORKLOAD, [cell])
    time_calls = bench._time_calls

    def disturbed(batch, config, *arguments):
        # Other programs delayed every call for one token.
        return 2.0, 1.0 if config.num_steps else 1.5, time_calls(batch, config, *arguments)[2]

    monkeypatch.setattr(bench, "_time_calls", disturbed)
    costs = RoundCosts(2, {cell.shape: 1.0}, {PLAIN_STEP: 1.0, cell.shape: 1.2})
    monkeypatch.setattr(bench, "_part_costs", lambda cell: (costs, 0.0))
    figures = bench.measure(cell)
    assert figures["problem"].startswith("impossible: a call for all tokens took no longer than a call for one")
    assert figures["ratio"]["low"] > 0 and min(figures["tokens_per_second"], figures["plain_tokens_per_second"]) > 0
    assert json.loads(json.dumps(figures, allow_nan=False))["cell"] == dataclasses.asdict(cell)


def test_disturbed_cells_are_measured_again_last(tmp_path, small):
    cells, _ = list_cells(SETTINGS, model=small("grouped", "right")[0])
    rows, _ = run_cells(tmp_path, FakeBench(), cells)
    path, changes = tmp_path / "cells.jsonl", [{"problem": "disturbed: waited 9%"}, {"problem": "uncertain: wide"}, {}]
    # The first row is disturbed, the second uncertain, which no idle machine changes, and the last is missing.
    path.write_text(
        "".join(json.dumps(run.seal(row | change)) + "\n" for row, change in zip(rows, changes, strict=False))
    )
    again, said = FakeBench(), []
    with JsonlWriter(path) as writer:
        rows, is_complete = run.run_cells(cells, again, writer, ENVIRONMENT, log=said.append)
    assert is_complete and again.measured == [cells[3], cells[0]] and rows[0]["problem"] is None
    assert "measuring again, because they could not be trusted: 1 cell" in said


def test_tables_csv_and_pictures_show_every_cell(tmp_path):
    rows = [
        cell_row(1 + 0.1 * depth - 0.2 * (topk - 1), num_steps=depth, topk=topk, batch_size=batch, temperature=heat)
        for depth in (1, 2, 3)
        for topk in (1, 2)
        for batch in (1, 16)
        for heat in (0.0, 1.0)
    ] + [cell_row(0.7, num_steps=2, temperature=1.0, rule="typical", lossless="lossy")]
    table = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert len(table) == len(rows) and table[-1]["acceptance"] == "typical" and table[-1]["survival"] == "0.8000 0.8000"
    assert all(float(line["ratio_low"]) < float(line["ratio"]) for line in table)
    file = io.StringIO()
    print_cells(rich.console.Console(file=file, width=80), rows)
    assert max(map(len, file.getvalue().splitlines())) <= 80 and "…" not in file.getvalue()
    for plot in (plot_heatmap, plot_pareto):
        for part in (
            rows,
            rows[:1],
            [cell_row(2.5)],
            [*rows, cell_row(9.0, num_steps=4), cell_row(1.1, num_steps=5, waited=0.5)],
        ):
            plot(tmp_path / "picture.png", part)
            assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_heat_map_shows_intervals_and_doubts(tmp_path):
    assert cell_texts(cell_row(1.5)) == ("1.50", "1.45-1.55", "1.80 tok/round")
    assert cell_texts(cell_row(2.5, lossless="DIFFERS")) == ("2.50 ?", "2.45-2.55", "1.80 tok/round, DIFFERS")
    # With text as text, the SVG file holds what the picture shows.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_heatmap(tmp_path / "heatmap", [cell_row(1.5), cell_row(1.2, num_steps=2)], ["svg"])
    assert [file.name for file in tmp_path.iterdir()] == ["heatmap.svg"]
    shown = (tmp_path / "heatmap.svg").read_text()
    assert "1.45-1.55" in shown and "1.15-1.25" in shown


@pytest.fixture(scope="module")
def checkpoint(small, tmp_path_factory):
    """Of a run that was trained on a folder of files, half of which it held out."""
    model, params = small("grouped", "mixed", vocab_size=256)
    folder = tmp_path_factory.mktemp("model")
    for number in range(16):
        (folder / f"{number}.txt").write_text(f"{number} and {number + 1} make {2 * number + 1}.\n" * 20)
    train = {"data": str(folder), "pattern": "*.txt", "held_out_fraction": 0.5}
    save_model(folder / "checkpoint", model, params, metadata={"train": train})
    return folder / "checkpoint"


GRID = ["--num-steps", "1", "2", "--topk", "1", "--temperature", "0", "--batch-size", "2"]
GRID += ["--max-new-tokens", "8", "--repeats", "2", "--num-prompts", "3"]


@pytest.mark.slow
def test_a_killed_run_goes_on(checkpoint, tmp_path):
    """The process is killed behind its first cell; the second run measures the other and writes the results."""
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("one\ntwo\nthree\n")
    command = [sys.executable, "-m", "mtpjax.cli.main", "ablate", "--model", str(checkpoint), "--output", str(output)]
    command += ["--prompts", str(prompts), *GRID]
    environment = training_runs.environment(tmp_path / "cache") | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("1/2 "):
                process.send_signal(signal.SIGKILL)
                break
    first = (output / "cells.jsonl").read_bytes()
    assert first.count(b"\n") == 1 and not (output / "cells.csv").exists()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert "already measured: 1 of 2 cells" in done.stdout
    content = (output / "cells.jsonl").read_bytes()
    # The first cell is measured again if other programs disturbed it.
    assert content.startswith(first) and len({json.loads(line)["fingerprint"] for line in content.splitlines()}) == 2
    assert {file.name for file in output.iterdir()} == {
        "cells.jsonl",
        "cells.csv",
        *("heatmap.png", "heatmap.svg", "pareto.png", "pareto.svg"),
        "recommendation.md",
    }


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        (["--num-steps", "0"], 2, "num_steps must be at least 1"),
        (["--num-steps", "1", "127"], 2, "num_steps must be at most 32, not 127"),
        (["--output", "/dev/null"], 2, "/dev/null is not a folder"),
        (["--acceptance", "fast"], 2, "--acceptance must be one of auto, exact, greedy"),
        (["--prompts", "missing.jsonl"], 2, "missing.jsonl"),
        (["--num-prompts", "0"], 2, "at least 1, not 0"),
        (["--max-new-tokens", "256"], 2, "leaves no room"),
        (["--threads", "-1"], 2, "threads must be at least 0"),
        (["--model", "missing"], 3, "missing does not exist"),
        (["--temperature", "1", "--acceptance", "greedy"], 2, "no combination of the settings is possible"),
    ],
)
def test_bad_input_is_one_line(checkpoint, tmp_path, capsys, extra, code, said):
    with pytest.raises(SystemExit) as exit_:
        main(["ablate", "--model", str(checkpoint), "--output", str(tmp_path / "out"), *GRID, *extra])
    assert exit_.value.code == code
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1, error


def test_ctrl_c_says_how_to_go_on(checkpoint, tmp_path, capsys, monkeypatch):
    def interrupt(bench, cell):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "measure", interrupt)
    with pytest.raises(SystemExit) as exit_:
        main(["ablate", "--model", str(checkpoint), "--output", str(tmp_path / "out"), *GRID])
    assert exit_.value.code == 75
    assert "stopped after 0 of 2 cells: run it again to continue" in capsys.readouterr().out


def test_prompts_without_a_file_are_of_files_that_training_held_out(small, checkpoint):
    """Those whose plain continuation repeats itself are left out, unless all do."""
    model, params = small("grouped", "mixed", vocab_size=256)
    workload = find_workload(checkpoint, model, params, SETTINGS, PromptChoice(count=2, max_tokens=16))
    assert len(workload.prompts) == 2 and all(len(prompt) == 16 for prompt in workload.prompts)
    _, held_out = split_held_out(file_documents(sorted(checkpoint.parent.glob("*.txt"))), 0.5)
    texts = [document.tokens.tobytes() for document in held_out]
    assert 0 < len(texts) < 16 and all(any(bytes(prompt) in text for text in texts) for prompt in workload.prompts)
    rows = generate(params, workload.prompts, model=model, config=DecodeConfig(max_new_tokens=12)).rows()
    assert not any(is_looping(row) for row in rows)
