"""`mtpjax compare`: what differs between runs, from their folders alone; what is no run is told in one line."""

import json

import pytest

from mtpjax.cli.main import main

PANEL = {
    "bits_per_token": [2.0, 3.0],
    "agreement": [0.5],
    "survival": [0.5],
    "overlap": [0.4],
    "sampled_survival": [0.4],
}


def figures(real, **changes):
    row = {"prompts": 8, "looping": 0, "real": real, "real_low": real - 0.1, "real_high": real + 0.1}
    return {**row, "predicted": real + 0.01, "teacher_forced": 1.4, "survival": [real - 1], "speed_up": 1.2, **changes}


def write_run(folder, *, survival=0.5, decoded=None, fingerprint="a" * 64, rows=None, **settings):
    folder.mkdir()
    settings = {"output": str(folder), "seed": 0, "objective": {"mix": [["kl", 1.0]], "warmup": 0.0}} | settings
    (folder / "run.json").write_text(json.dumps({"settings": settings, "fingerprint": fingerprint}))
    if rows is None:
        panel = {**PANEL, "survival": [survival], "decoded": decoded or {}}
        rows = [
            {"step": 5, "seconds": 1.0, "bits": [2.5, 3.5], "tokens_per_second": 9.0},
            {"step": 10, "seconds": 2.5, "eval": panel},
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1')
    return folder


def run(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *map(str, arguments)])
    return exit_.value.code


def test_settings_and_figures_stand_side_by_side(tmp_path, capsys):
    decoded = {"overall": {"greedy": figures(1.5), "sampled": figures(1.3)}, "code": {"greedy": figures(1.6)}}
    write_run(tmp_path / "first", decoded=decoded)
    busy = {"speed_up": 1.6, "waited": 0.4, "problem": "disturbed: waited 40% of the time for a core"}
    better = {"overall": {"greedy": figures(1.75, **busy)}}
    objective = {"mix": [["kl", 1.0]], "warmup": 0.5}
    write_run(tmp_path / "second", survival=0.75, decoded=better, fingerprint="b" * 64, seed=1, objective=objective)
    picture = tmp_path / "compare.png"
    assert run(tmp_path / "first", tmp_path / "second", "--output", picture) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if not line.startswith("trust")) <= 80
    lines = {" ".join(line.split()) for line in out.splitlines()}
    for line in (
        "seed 0 1",
        "objective.warmup 0.0 0.5",
        "data (fingerprint) aaaaaaaa bbbbbbbb",
        "updates 10 10",
        "bits per token, draft 1 3.000 3.000 (+0.000)",
        "survival, level 1 0.500 0.750 (+0.250)",
        "greedy: accept length 1.500 1.750 (+0.250)",
        "greedy: speed-up 1.200 1.600 ?",
        "sampled: speed-up 1.200 -",
        "sampled: predicted 1.310 -",
        "code, greedy: accept length 1.600 -",
    ):
        assert line in lines, line
    assert "second, greedy: disturbed: waited 40% of the time for a core" in lines
    assert out.index("trust in the timings: for 2 of 3 (1 disturbed, marked ?)") < out.index("at the last evaluation")
    assert "objective.mix" not in out and "output" not in out
    assert picture.read_bytes()[1:4] == b"PNG"


def test_runs_that_do_not_fit_beside_each_other_are_in_further_tables(tmp_path, capsys):
    folders = [write_run(tmp_path / f"learning_rate_{number}", seed=number) for number in range(8)]
    assert run(*folders) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    # Every name and every number is whole, and each table names its rows.
    words = [word for line in lines for word in line.split()]
    assert all(words.count(folder.name) == 2 for folder in folders)
    assert words.count("(+0.000)") == 7 * 6  # seconds, two losses and three rates, beside the first run's


@pytest.mark.parametrize(
    ("output", "extra", "names"),
    [
        ("picture", [], {"picture.png", "picture.svg"}),
        ("picture", ["--plot-formats", "pdf"], {"picture.pdf"}),
        ("picture.svg", ["--plot-formats", "pdf"], {"picture.svg"}),
    ],
)
def test_the_suffix_or_a_flag_chooses_the_formats(output, extra, names, tmp_path, capsys):
    write_run(tmp_path / "run")
    (tmp_path / "pictures").mkdir()
    assert run(tmp_path / "run", "--output", tmp_path / "pictures" / output, *extra) == 0
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == names
    assert all(name in capsys.readouterr().err for name in sorted(names)[:1])


def test_a_picture_of_an_unknown_format_is_refused(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert run(tmp_path / "run", "--output", "picture.jpg") == 2
    assert capsys.readouterr().err == ("mtpjax compare: the suffix of picture.jpg must be png, svg, pdf, not 'jpg'\n")
    assert run(tmp_path / "run", "--output", "picture", "--plot-formats", "gif") == 2


def test_one_run_and_equal_runs_are_shown(tmp_path, capsys):
    write_run(tmp_path / "first")
    (tmp_path / "other").mkdir()
    write_run(tmp_path / "other" / "first")
    assert run(tmp_path / "first", tmp_path / "other" / "first") == 0
    assert "the settings are the same" in capsys.readouterr().out
    assert run(tmp_path / "first") == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not a run folder: it has no run.json"),
        ({}, "is not a run folder: it has no run.json"),
        ({"run.json": "{"}, "is damaged: ValueError"),
        ({"run.json": "[1]"}, "is damaged: TypeError"),
        ({"run.json": '{"settings": {}, "fingerprint": "x"}'}, "has no evaluation yet: metrics.jsonl holds 0 rows"),
        (
            {"run.json": '{"settings": {}, "fingerprint": "x"}', "metrics.jsonl": '{"step": 1, "bits": [2.0]}\n'},
            "has no evaluation yet: metrics.jsonl holds 1 rows and no panel",
        ),
    ],
)
def test_what_is_no_run_is_one_line(content, said, tmp_path, capsys):
    if content is not None:
        (tmp_path / "run").mkdir()
        for name, text in content.items():
            (tmp_path / "run" / name).write_text(text)
    assert run(tmp_path / "run") == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1
