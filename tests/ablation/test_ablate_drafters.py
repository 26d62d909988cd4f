"""An ablation over several drafters on one trunk: their cells, fingerprints, costs of training, and the report."""

import csv
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import pytest
import rich.console

from mtpjax import save_drafter
from mtpjax.ablation import bench as bench_module
from mtpjax.ablation.bench import Bench
from mtpjax.ablation.cells import Cell, Settings
from mtpjax.ablation.comparison import best_of_each_drafter, format_comparison
from mtpjax.ablation.drafters import (
    MTP,
    AblatedDrafter,
    drafter_digest,
    load_methods,
    short_names,
)
from mtpjax.ablation.grid import list_cells
from mtpjax.ablation.heatmap import plot_heatmap
from mtpjax.ablation.pareto import plot_pareto
from mtpjax.ablation.positions import deepest, plot_positions
from mtpjax.ablation.report import format_recommendation, print_cells, to_csv
from mtpjax.ablation.run import fingerprint
from mtpjax.cli.main import main
from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig
from mtpjax.drafters.methods import find_method
from mtpjax.drafters.trained import DraftParams
from mtpjax.errors import CheckpointError
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import full_view
from mtpjax.models.model import MTPModel
from mtpjax.training.cost import TrainingCost
from tests.helpers.ablation_rows import ENVIRONMENT, SETTINGS, WORKLOAD, cell_row
from tests.helpers.small_models import constructed_drafter

LOOKUP = AblatedDrafter("lookup", find_method("lookup"), "lookup")
# Batch size, temperature, depth and topk.
SHAPES = [(1, 0.0, 2, 1), (1, 0.0, 3, 1), (1, 1.0, 3, 1), (4, 0.0, 3, 1), (1, 0.0, 3, 2)]


@pytest.fixture(scope="module")
def trunk(small):
    return small("grouped", "mixed", vocab_size=256)


def dflash(model):
    """A random DFlash drafter with a block of 4, which drafts 3 tokens."""
    own = model.config
    block = ModelConfig(
        vocab_size=own.vocab_size, hidden_size=own.hidden_size, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, use_qk_norm=True,
    )  # fmt: skip
    layers = {"layer_ids": (1,), "num_target_layers": own.num_hidden_layers}
    config = DFlashConfig(block=block, block_size=4, mask_token_id=0, **layers)
    view = full_view(block, jnp.ones((1, 2), jnp.int32))
    zeros = jnp.zeros((1, 2, own.hidden_size))
    params = jax.jit(DFlash(config).init)(jax.random.key(0), zeros, zeros, view)["params"]
    return DFlashDrafter(architecture=config), DraftParams(params)


@pytest.fixture(scope="module")
def folders(trunk, tmp_path_factory):
    """An EAGLE-3, a Medusa and a DFlash drafter on disk."""
    folder = tmp_path_factory.mktemp("drafters")
    for kind, form in (("eagle3", "speculators"), ("medusa", "vllm")):
        save_drafter(folder / kind, *constructed_drafter(kind, *trunk), format=form)
    save_drafter(folder / "dflash", *dflash(trunk[0]))
    return folder


@pytest.fixture(scope="module")
def methods(trunk, folders):
    paths = [str(folders / kind) for kind in ("eagle3", "medusa", "dflash")]
    return load_methods(["mtp", "lookup", "ngram", *paths, paths[0]], model=trunk[0])


def test_drafters_are_loaded_once_and_named_by_their_folders(methods, folders):
    assert [method.name for method in methods] == ["mtp", "lookup", "eagle3", "medusa", "dflash"]
    assert [method.kind for method in methods] == ["MTP modules", "n-gram lookup", "EAGLE-3", "Medusa", "DFlash"]
    flags = ["", "--drafter lookup", f"--speculative-draft-model-path {folders / 'eagle3'}"]
    assert [method.flags for method in methods[:3]] == flags
    assert [bool(method.digest) for method in methods] == [False, False, True, True, True]


def test_names_have_as_many_parts_as_tell_them_apart():
    assert short_names(["runs/a", "runs/b"]) == {"runs/a": "a", "runs/b": "b"}
    assert short_names(["x/a/draft", "x/b/draft"]) == {"x/a/draft": "a/draft", "x/b/draft": "b/draft"}
    assert short_names(["x/mtp"]) == {"x/mtp": "x/mtp"}
    assert short_names([]) == {}


def test_cells_that_a_drafter_cannot_do_are_left_out_with_its_reason(trunk, methods):
    settings = Settings(depths=(2, 3, 4), topk=(1, 2), temperatures=(0.0,), batch_sizes=(1,))
    cells, reasons = list_cells(settings, model=trunk[0], methods=methods)
    found = {name: {(c.num_steps, c.topk) for c in cells if c.drafter == name} for name in (m.name for m in methods)}
    everything = {(depth, topk) for depth in (2, 3, 4) for topk in (1, 2)}
    assert found == {
        "mtp": everything,
        "lookup": {(2, 1), (3, 1), (4, 1)},
        "eagle3": everything,
        "medusa": {(depth, topk) for depth, topk in everything if depth < 4},
        "dflash": {(2, 1), (3, 1)},
    }
    said = {
        "lookup: drafter 'lookup' supports only chains": 3,
        "medusa: num_steps 4 exceeds the 3 Medusa heads": 2,
        "dflash: DFlash drafts chains only": 3,
        "dflash: num_steps 4 exceeds the 3 drafts of a DFlash block": 1,
    }
    for part, count in said.items():
        assert sum(number for reason, number in reasons.items() if reason.startswith(part)) == count, part


def test_one_bad_drafter_is_an_error_before_anything_runs(trunk, folders, small, tmp_path):
    without, _ = small("grouped", "mixed", vocab_size=256, num_mtp_modules=0)
    with pytest.raises(ValueError, match="no MTP module to draft with"):
        load_methods(["mtp"], model=without)
    assert load_methods(["lookup"], model=without) == (LOOKUP,)
    with pytest.raises(CheckpointError):
        load_methods(["lookup", str(tmp_path / "missing")], model=trunk[0])
    with pytest.raises(ValueError, match="drafters is empty"):
        load_methods([], model=trunk[0])
    other = MTPModel(dataclasses.replace(trunk[0].config, vocab_size=250))
    with pytest.raises((ValueError, CheckpointError), match="is for a trunk of"):
        load_methods([str(folders / "medusa")], model=other)


def test_a_changed_drafter_gives_a_new_fingerprint(trunk):
    cell = Cell(1, 1, 1, 2, "greedy", 0.0, "medusa")
    drafter, params = constructed_drafter("medusa", *trunk)

    def of(drafter, params):
        method = AblatedDrafter(
            "medusa", find_method("medusa"), drafter, params, "runs/medusa", drafter_digest(drafter, params)
        )
        return fingerprint(cell, SETTINGS, WORKLOAD, ENVIRONMENT, method)

    changed = params.replace(network=params.network | {"output_0": params.network["output_0"].at[0, 0].add(1e-3)})
    fewer = dataclasses.replace(drafter, architecture=dataclasses.replace(drafter.architecture, num_heads=2))
    assert of(drafter, params) == of(*constructed_drafter("medusa", *trunk))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert len({of(drafter, params), of(drafter, changed), of(fewer, params), of(drafter, narrow)}) == 4
    assert fingerprint(cell, SETTINGS, WORKLOAD, ENVIRONMENT, MTP) != of(drafter, params)


def rows_of_drafters():
    """Cells of three drafters, with two categories of prompts."""

    def category(length, ratio):
        around = {"value": length, "low": length - 0.1, "high": length + 0.1}
        measured = None if ratio is None else {"value": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
        figures = {"prompts": 4, "accept_length": around, "survival": [around], "ratio": measured}
        return {**figures, "ideal_ratio": 2.0, "problem": None}

    rows = []
    for number, drafter in enumerate(("mtp", "lookup", "long-name-of-a-run/drafter")):
        for batch, heat, depth, topk in SHAPES:
            if topk > 1 and drafter != "mtp":
                continue
            ratio = 1.2 + 0.1 * number + 0.05 * depth - 0.2 * (topk - 1)
            shape = {"batch_size": batch, "temperature": heat, "num_steps": depth, "topk": topk}
            made = cell_row(ratio, 0.02, **shape, drafter=drafter)
            ratio = ratio if batch == 1 else None
            made["categories"] = {"code": category(2.5, ratio), "chat": category(1.5, ratio)}
            rows.append(made)
    return rows


def test_the_report_names_the_drafter_and_compares_all():
    rows = rows_of_drafters()
    trained = TrainingCost(100, 6400, 50.0, 0.25)
    of_long = ("long-name-of-a-run/drafter", find_method("dflash"), dflash_of_no_params())
    long = AblatedDrafter(*of_long, None, "runs/long", "0123", trained)
    methods = (MTP, dataclasses.replace(LOOKUP, training=None), long)
    text = format_recommendation(rows, {"lookup: a reason": 2}, WORKLOAD, SETTINGS, ENVIRONMENT, methods)
    best = "long-name-of-a-run/drafter, depth 3, greedy: accept length 3.40, ratio to plain 1.55"
    assert f"- **batch 1, temperature 0**: {best}" in text
    assert "`--speculative-draft-model-path runs/long --speculative-num-steps 3 " in text
    assert "| lookup | depth 3, greedy | 3.40 (3.30-3.50) | .80 .80 .80 | 2.34 | 1.20 | 1.45 (1.43-1.47) |" in text
    assert "| chat | 4 | lookup | 1.50 (1.40-1.60) |" in text and "| - | 2.00 |" in text
    assert "| long-name-of-a-run/drafter | DFlash | 100 | 6400 | 0.25 | 50 |" in text
    assert "| lookup | n-gram lookup |  |  |  |  |" in text
    assert "- drafter long-name-of-a-run/drafter: DFlash, 0123, runs/long" in text
    assert "left out: lookup: a reason (2 cells)" in text
    sections = [line for line in text.splitlines() if line.startswith("## ")]
    assert sections == ["## Drafters", "## Categories of prompts", "## Training", "## Measured"]
    # One drafter without categories has nothing to compare.
    assert format_comparison([cell_row(1.5)], [MTP]) == []
    uneven = format_comparison(rows, [*methods, dataclasses.replace(long, training=TrainingCost(1, 64, 1.0, 1.0))])
    assert uneven[-1] == "The drafters were not trained on the same number of tokens."


def dflash_of_no_params():
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    block = ModelConfig(**sizes, intermediate_size=8, use_qk_norm=True)
    config = DFlashConfig(block=block, block_size=4, mask_token_id=0, layer_ids=(1,), num_target_layers=2)
    return DFlashDrafter(architecture=config)


def test_an_exact_setting_stands_for_a_drafter_before_a_faster_lossy_one():
    lossy = cell_row(3.0, num_steps=2, lossless="lossy", rule="typical")
    rows = [
        lossy,
        cell_row(1.5),
        cell_row(1.2, drafter="lookup"),
        cell_row(1.6, drafter="medusa", lossless="lossy", rule="typical"),
    ]
    (best,) = best_of_each_drafter(rows).values()
    assert best == [rows[3], rows[1], rows[2]]
    assert deepest([lossy, cell_row(1.0, num_steps=3, topk=2), rows[1]]) is rows[1] and deepest([lossy]) is None


def test_tables_csv_and_pictures_tell_drafters_apart(tmp_path):
    rows = rows_of_drafters()
    table = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [line["drafter"] for line in table] == [row["cell"]["drafter"] for row in rows]
    assert float(table[0]["round_steps"]) == pytest.approx(2.6 / 1.3) and table[0]["parts_steps"] == "1.2"
    file = io.StringIO()
    print_cells(rich.console.Console(file=file, width=80), rows)
    assert max(map(len, file.getvalue().splitlines())) <= 80 and "…" not in file.getvalue()
    assert "lookup" in file.getvalue() and "tokens/s" in file.getvalue()
    for plot in (plot_heatmap, plot_pareto, plot_positions):
        for part in (rows, rows[:1]):
            plot(tmp_path / "picture.png", part)
            assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ablate_over_drafters_resumes_and_measures_a_changed_one_again(
    trunk, checkpoint, tmp_path, capsys, monkeypatch
):
    """Three drafters with files of their own, and the lookup; then Medusa's heads are others."""
    time_calls = Bench._time_calls

    def with_steady_times(bench, batch, config, *arguments):
        # A call of a model this small can take less time than its prefill did, on a machine with other work.
        return 0.5, 1.5 if config.num_steps else 3.0, time_calls(bench, batch, config, *arguments)[2]

    monkeypatch.setattr(Bench, "_time_calls", with_steady_times)
    # Other work on the machine must not make the second run measure again.
    monkeypatch.setattr(bench_module, "speed_up_problem", lambda *_, **__: None)
    paths = [tmp_path / kind for kind in ("eagle3", "medusa", "dflash")]
    for path, form in zip(paths[:2], ("speculators", "vllm"), strict=True):
        save_drafter(path, *constructed_drafter(path.name, *trunk), format=form)
    save_drafter(paths[2], *dflash(trunk[0]))
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"def f{number}(", "category": "code" if number % 2 else "text"} for number in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["ablate", "--model", str(checkpoint), "--output", str(tmp_path / "out"), "--prompts", str(prompts)]
    command += ["--drafters", "ngram", *map(str, paths), "--num-steps", "2", "--topk", "1", "2"]
    command += ["--temperature", "0", "--batch-size", "1", "--max-new-tokens", "12", "--repeats", "2"]
    command += ["--num-prompts", "4"]

    def run():
        with pytest.raises(SystemExit) as exit_:
            main(command)
        assert exit_.value.code == 0
        lines = (tmp_path / "out" / "cells.jsonl").read_text().splitlines()
        return capsys.readouterr().out, list(map(json.loads, lines))

    printed, rows = run()
    drafters = [row["cell"]["drafter"] for row in rows]
    assert {name: drafters.count(name) for name in drafters} == {"lookup": 1, "eagle3": 2, "medusa": 2, "dflash": 1}
    assert all(row["lossless"] == "identical" and set(row["categories"]) == {"code", "text"} for row in rows)
    assert all(row["costs"]["parts"] > 0 and row["accept_length"]["value"] >= 1 for row in rows)
    assert all(row["categories"]["code"]["ratio"]["value"] == pytest.approx(2.5) for row in rows)
    # The drafts of the constructed drafters are right at times.
    assert max(row["accept_length"]["value"] for row in rows if row["cell"]["drafter"] == "medusa") > 1
    assert "left out: lookup: drafter 'lookup' supports only chains" in printed.replace("\n", " ")
    text = (tmp_path / "out" / "recommendation.md").read_text()
    assert "## Drafters" in text and "left out: dflash: DFlash drafts chains only" in text
    assert (tmp_path / "out" / "positions.png").is_file()
    # An unchanged grid measures nothing.
    printed, again = run()
    assert "already measured: 6 of 6 cells" in printed and again == rows
    # Other heads are another drafter: its two cells are measured, and the others kept.
    save_drafter(tmp_path / "new", *constructed_drafter("medusa", *trunk, seed=1), format="vllm")
    for file in (tmp_path / "new").iterdir():
        file.replace(paths[1] / file.name)
    printed, third = run()
    assert "already measured: 4 of 6 cells" in printed
    assert third[:6] == rows and [row["cell"]["drafter"] for row in third[6:]] == ["medusa"] * 2
