"""Pictures: their formats and names, and one style for all."""

import re
import sys

import matplotlib
import pytest

from mtpjax.cli.main import main
from mtpjax.errors import UsageError
from mtpjax.evaluation import plot_style
from mtpjax.evaluation.intervals import Estimate
from mtpjax.evaluation.plot_style import STYLE, picture, picture_paths
from mtpjax.evaluation.plots import plot_acceptance
from mtpjax.training.plots import plot_comparison, plot_run

BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF-"}


def history():
    panel = {name: [0.5, 0.3] for name in ("agreement", "survival", "overlap", "sampled_survival")}
    decoded = {"real": 1.5, "real_low": 1.4, "real_high": 1.6, "predicted": 1.5}
    panel |= {"bits_per_token": [2.0, 3.0, 3.5], "decoded": {"overall": {"greedy": decoded}}}
    return [{"step": 1, "bits": [2.0, 3.0, 4.0]}, {"step": 2, "eval": panel}]


def metrics():
    rate, length = Estimate(0.5, 0.4, 0.6), Estimate(1.5, 1.4, 1.6)
    undefined = Estimate(*[float("nan")] * 3)
    row = {"decoded": {"accept_length": length, "survival": [rate, undefined]}, "predicted": {"accept_length": length}}
    return {"overall": row | {"teacher_forced": {"survival": [rate, rate]}}, "cost in $ and $x_1$": row}


PLOTS = {
    "run": lambda path, formats: plot_run(path, history(), formats),
    "comparison": lambda path, formats: plot_comparison(path, {"a": history(), "b": history()}, formats),
    "acceptance": lambda path, formats: plot_acceptance(path, metrics(), formats),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_is_written_in_every_format(name, tmp_path):
    PLOTS[name](tmp_path / "picture", ["png", "svg", "pdf"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["picture.pdf", "picture.png", "picture.svg"]
    for suffix, beginning in BEGINNINGS.items():
        assert (tmp_path / f"picture.{suffix}").read_bytes().startswith(beginning)
    PLOTS[name](tmp_path / "other.pdf", ["png"])
    assert (tmp_path / "other.pdf").read_bytes().startswith(b"%PDF-") and not (tmp_path / "other.png").exists()


def test_a_suffix_decides_and_a_wrong_one_is_told():
    assert [file.name for file in picture_paths("a/picture")] == ["picture.png", "picture.svg"]
    assert [file.name for file in picture_paths("a/picture.pdf", ["png"])] == ["picture.pdf"]
    assert picture_paths("picture", []) == []
    with pytest.raises(ValueError, match=r"the suffix of picture.jpg must be png, svg, pdf, not 'jpg'"):
        picture_paths("picture.jpg")
    with pytest.raises(ValueError, match="a picture's format must be png, svg, pdf, not 'gif'"):
        picture_paths("picture", ["gif"])


def test_the_style_holds_inside_a_picture_only(tmp_path):
    before = dict(matplotlib.rcParams)
    with picture(tmp_path / "picture.svg", (3, 2)) as figure:
        axis = figure.subplots()
        axis.plot([0, 1], [0, 1])
        assert not axis.spines["top"].get_visible() and axis.title.get_fontsize() == STYLE["axes.titlesize"]
    assert dict(matplotlib.rcParams) == before
    first = (tmp_path / "picture.svg").read_bytes()
    with picture(tmp_path / "picture.svg", (3, 2)) as figure:
        figure.subplots().plot([0, 1], [0, 1])
    assert (tmp_path / "picture.svg").read_bytes() == first  # no date, no random names
    assert re.search(rb"<dc:date>", first) is None


def test_a_failing_picture_writes_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), picture(tmp_path / "picture", (3, 2)):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_nothing_is_drawn_and_one_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot_style._has_matplotlib.cache_clear()
    try:
        for name in PLOTS:
            PLOTS[name](tmp_path / "picture", ["png", "svg"])
        assert not list(tmp_path.iterdir())
        assert picture_paths("run/panel") == [] == picture_paths("panel.pdf")
        advice = r"matplotlib is missing: run pip install -e '\.\[plots\]' in the clone of mtpjax"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert re.search(f"no pictures are drawn: {advice}", caplog.text)
        with pytest.raises(UsageError, match=advice), picture(tmp_path / "picture", (3, 2)):
            pass
        # No picture is wanted, or a picture is all that is wanted.
        caplog.clear()
        assert picture_paths("picture", []) == [] and not caplog.records
        with pytest.raises(SystemExit, match="2"):
            main(["compare", str(tmp_path), "--output", str(tmp_path / "picture.png")])
        assert not list(tmp_path.iterdir())
    finally:
        plot_style._has_matplotlib.cache_clear()
