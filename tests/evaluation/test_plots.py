"""Pictures: their formats and names, one style for all, and what a reader sees in them.

What a picture shows is asserted on matplotlib's objects: which panels there are, their limits, labels and legends.
"""

import itertools
import math
import re
import sys
import types

import matplotlib
import matplotlib.colors
import matplotlib.container
import matplotlib.figure
import matplotlib.patches
import matplotlib.text
import pytest

from mtpjax.ablation.heatmap import plot_heatmap
from mtpjax.ablation.panels import panel_rows
from mtpjax.ablation.pareto import plot_pareto
from mtpjax.ablation.positions import plot_positions
from mtpjax.cli.main import main
from mtpjax.errors import UsageError
from mtpjax.evaluation import plot_style
from mtpjax.evaluation.intervals import Estimate
from mtpjax.evaluation.plan import Plan, Temp, list_meshes
from mtpjax.evaluation.plan_plots import plot_plan
from mtpjax.evaluation.plan_report import Candidate, Comparison, Load
from mtpjax.evaluation.plot_style import STYLE, line_style, picture, picture_paths, share_limits, shorten
from mtpjax.evaluation.plots import plot_acceptance, plot_quickstart
from mtpjax.evaluation.roofline import DEVICES, Round
from mtpjax.training.plots import plot_comparison, plot_run
from tests.helpers.ablation_rows import cell_row

BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF-"}
LONG = "a very long name of something $x_1$ that goes on/and on/and on"
TITLE = "What was measured, of which model, with which prompts and settings\nNVIDIA H100 80GB HBM3"


def history(levels=2, *, decoded=True, rate=0.5):
    panel = {name: [rate] * levels for name in ("agreement", "survival", "overlap", "sampled_survival")}
    length = {"real": 1.5, "real_low": 1.4, "real_high": 1.6, "predicted": 1.5}
    panel["bits_per_token"] = [2.0 + level for level in range(levels + 1)]
    if decoded:
        panel["decoded"] = {"overall": {"greedy": length, "sampled": length}}
    bits = [{"step": step, "seconds": 2.0 * step, "bits": [9.0] * (levels + 1)} for step in (1, 2)]
    return [*bits, {"step": 2, "seconds": 4.0, "eval": panel}]


def metrics(*categories, levels=2):
    rate, length = Estimate(0.5, 0.4, 0.6), Estimate(1.5, 1.4, 1.6)
    undefined = Estimate(*[float("nan")] * 3)
    rates = [rate, undefined][:levels]
    row = {"decoded": {"accept_length": length, "survival": rates}, "predicted": {"accept_length": length}}
    row |= {"teacher_forced": {"survival": [rate] * levels}, "prompts": 8}
    return dict.fromkeys(["overall", *categories], row)


def depths(*num_steps):
    ideal = {"accept_length": 1.8, "ideal": 1.4, "problem": None}
    return [types.SimpleNamespace(num_steps=each, ratio=1.2, interval=(1.1, 1.3), **ideal) for each in num_steps]


def grid(*drafters, num_steps=(1, 2), topk=(1, 2), batch_sizes=(1, 4)):
    product = itertools.product(drafters, num_steps, topk, batch_sizes)
    return [
        cell_row(1 + 0.1 * steps, num_steps=steps, topk=width, batch_size=batch, drafter=drafter)
        for drafter, steps, width, batch in product
    ]


def planned(num_steps, *meshes):
    temps, rounds = (Temp("experts", 2e9),), [Round(steps, (), (0.02,), 1, 0.0, ()) for steps in (0, num_steps)]
    plans = [Plan(mesh, 8, 5120, 70 * 10**9, 5 * 10**9, temps, 1e6, 1e6, 64) for mesh in meshes]
    candidates = [Candidate(each, *rounds) for each in plans]
    return Comparison(Load(8, 4096, num_steps, 1 + 0.8 * num_steps), candidates, [], candidates[0])


MANY = [f"{LONG} {number}" for number in range(9)]
# Pictures by situation; each is a function of the path.
PICTURES = {
    "quickstart": lambda path: plot_quickstart(path, history(), depths(1, 2, 3), title=TITLE),
    "quickstart, one depth": lambda path: plot_quickstart(path, history(1), depths(1), title=TITLE),
    "run": lambda path: plot_run(path, history(), title=TITLE),
    "run, many levels": lambda path: plot_run(path, history(8), title=TITLE),
    "run, no draft is right": lambda path: plot_run(path, history(2, rate=0.0), title=TITLE),
    "run, nothing decoded": lambda path: plot_run(path, history(decoded=False), title=TITLE),
    "comparison": lambda path: plot_comparison(path, {"a": history(), "b": history(3)}, title=TITLE),
    "comparison, many runs": lambda path: plot_comparison(path, dict.fromkeys(MANY, history()), title=TITLE),
    "acceptance": lambda path: plot_acceptance(path, metrics(), title=TITLE),
    "acceptance, many categories": lambda path: plot_acceptance(path, metrics(*MANY, levels=1), title=TITLE),
    "heatmap": lambda path: plot_heatmap(path, grid("mtp"), title=TITLE),
    # The first batch size has no cell at the first temperature.
    "heatmap, a missing group": lambda path: plot_heatmap(
        path, [cell_row(1.2, batch_size=4), cell_row(1.1, temperature=1.0)], title=TITLE
    ),
    "pareto, a missing group": lambda path: plot_pareto(
        path, [cell_row(1.2, batch_size=4), cell_row(1.1, temperature=1.0)], title=TITLE
    ),
    "heatmap, one cell": lambda path: plot_heatmap(path, [cell_row(1.2)], title=TITLE),
    "heatmap, many drafters": lambda path: plot_heatmap(path, grid(*MANY), title=TITLE),
    "pareto": lambda path: plot_pareto(path, grid("mtp"), title=TITLE),
    "pareto, one cell": lambda path: plot_pareto(path, [cell_row(1.2)], title=TITLE),
    "pareto, many drafters": lambda path: plot_pareto(path, grid(*MANY), title=TITLE),
    "pareto, wide range": lambda path: plot_pareto(path, [cell_row(0.1), cell_row(3.0, num_steps=9)], title=TITLE),
    "plan": lambda path: plot_plan(path, planned(1, *list_meshes(256)), DEVICES["h100"], title=TITLE),
    "plan, one mesh without drafts": lambda path: plot_plan(path, planned(0, {}), DEVICES["h200"], title=TITLE),
    "positions": lambda path: plot_positions(path, grid("mtp", "lookup"), title=TITLE),
    "positions, many drafters": lambda path: plot_positions(path, grid(*MANY, num_steps=(1,)), title=TITLE),
}


@pytest.fixture
def figure_of(tmp_path, monkeypatch):
    """Draws a picture, and returns its figure with the final layout."""

    def draw(plot):
        figures = []
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        plot(tmp_path / "picture.png")
        [figure] = figures
        with matplotlib.rc_context(STYLE):
            figure.draw_without_rendering()
        return figure

    return draw


def shown_texts(figure):
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]
    # matplotlib also makes labels of ticks beyond the limits, and does not draw them.
    hidden = set()
    for axis in figure.axes:
        for side, place, limits in ((axis.xaxis, 0, axis.get_xlim()), (axis.yaxis, 1, axis.get_ylim())):
            low, high = sorted(limits)
            hidden |= {label for label in side.get_ticklabels() if not low <= label.get_position()[place] <= high}
    return [text for text in texts if text not in hidden]


def legends(figure):
    return [legend for legend in (*figure.legends, *(axis.get_legend() for axis in figure.axes)) if legend]


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_cut_covered_or_empty(name, figure_of):
    figure = figure_of(PICTURES[name])
    # 1. All text is inside of the picture, and no panel is too small to read.
    for text in shown_texts(figure):
        box = text.get_window_extent()
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside or not text.get_in_layout(), text.get_text()
    # 2. Each panel shows something, and says what with which unit. A colour bar has a label on one side.
    for axis in figure.axes:
        assert axis.has_data() and axis.get_window_extent().height > 0.8 * figure.dpi
        assert axis.get_xlabel() or axis.get_ylabel() or axis.get_xticklabels()
    # 3. Titles do not run into each other, and legends cover no panel.
    titles = [axis.title.get_window_extent() for axis in figure.axes if axis.get_title()]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(titles, 2))
    for legend, axis in itertools.product(legends(figure), figure.axes):
        assert not legend.get_window_extent().overlaps(axis.get_window_extent())
    # 4. The picture says what was measured and where.
    assert "NVIDIA H100" in figure.get_suptitle()


def look_of(handle):
    """Returns colour and, of lines, all else that tells them apart."""
    if isinstance(handle, matplotlib.container.BarContainer | matplotlib.patches.Patch):
        return (matplotlib.colors.to_hex(handle.get_facecolor()),)
    colours = map(matplotlib.colors.to_hex, (handle.get_color(), handle.get_markeredgecolor()))
    return (*colours, handle.get_marker(), handle.get_linestyle(), handle.get_linewidth())


@pytest.mark.parametrize("name", [name for name in PICTURES if "heatmap" not in name])
def test_a_look_means_one_thing(name, figure_of):
    handles = [legend.legend_handles for legend in legends(figure_of(PICTURES[name]))]
    shown = [[(look_of(handle), handle.get_label()) for handle in keys] for keys in handles]
    assert shown and all(len({look for look, _ in keys}) == len(keys) for keys in shown)
    # Panels beside each other do not use a colour for two things, apart from black and grey.
    meanings = {}
    for (colour, *_), label in itertools.chain(*shown):
        if name.startswith(("run", "quickstart", "plan", "acceptance")) and colour not in ("#000000", "#777777"):
            meanings.setdefault(colour, set()).add(label)
    assert all(len(labels) == 1 for labels in meanings.values()), meanings


def test_panels_without_data_are_left_out(figure_of):
    def titles(plot):
        return [axis.get_title() for axis in figure_of(plot).axes]

    assert len(titles(lambda path: plot_run(path, history(0, decoded=False)))) == 1
    two = {"a": history(decoded=False), "b": history(decoded=False)}
    assert [title.split()[0] for title in titles(lambda path: plot_comparison(path, two))] == ["trunk's", "survival"]
    none = {"a": history(0, decoded=False)}
    assert titles(lambda path: plot_comparison(path, none)) == ["trunk's loss on held-out text"]
    # Of 5 batch sizes the sixth place is empty; 4 make a square.
    assert len(figure_of(lambda path: plot_pareto(path, grid("mtp", batch_sizes=(1, 2, 4, 8, 16)))).axes) == 5
    groups = {(batch, 0.0): [] for batch in (1, 2, 4, 8)}
    assert [len(line) for line in panel_rows(groups)] == [2, 2]


def test_axes_show_all_values_in_a_range_that_fits(figure_of):
    losses, agreement, speed = figure_of(PICTURES["quickstart"]).axes
    low, high = losses.get_ylim()
    assert low < 2 and high > 9  # the first loss and the last one
    assert agreement.get_ylim() == pytest.approx(share_limits([0.5])) and losses.get_xlim()[0] == 0
    assert speed.get_ylim()[0] < 1 < speed.get_ylim()[1]
    # A single evaluation is not spread over a range around it.
    assert all(axis.get_xlim()[0] == 0 for axis in figure_of(PICTURES["run"]).axes)
    # Accept lengths begin at 1, where no draft is accepted, in all pictures.
    for name, place in {"run": 2, "comparison": 2, "run, no draft is right": 2}.items():
        assert 0.9 < figure_of(PICTURES[name]).axes[place].get_ylim()[0] < 1
    assert 0.9 < figure_of(PICTURES["acceptance"]).axes[0].get_xlim()[0] < 1


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.81, 0.82], 0.7, 0.9),
        ([0.84, 0.86], 0.8, 0.9),
        ([0.0], 0.0, 0.1),
        ([1.0], 0.9, 1.0),
        ([0.02, 0.97], 0.0, 1.0),
        ([math.nan, 0.55], 0.5, 0.6),
        ([], 0.0, 1.0),
    ],
)
def test_limits_of_shares_are_tenths_around_the_values(values, low, high):
    bottom, top = share_limits(values)
    assert (bottom, top) == pytest.approx((low, high), abs=0.04)
    assert all(math.isnan(value) or bottom < value < top for value in values)


def test_many_series_differ_and_long_names_are_shortened():
    assert len({tuple(line_style(number).values()) for number in range(24)}) == 24
    # Also without their lines.
    assert len({(look["color"], look["marker"]) for look in map(line_style, range(24))}) == 24
    assert shorten("short") == "short" and shorten("runs/a/" + "b" * 40 + "/drafter", 16) == "runs/a/b…drafter"
    assert len(shorten(LONG)) == 28


def test_lines_and_bars_of_a_plan_are_labelled(figure_of):
    memory, time = figure_of(PICTURES["plan"]).axes
    said = [text.get_text() for legend in (memory.get_legend(), time.get_legend()) for text in legend.get_texts()]
    assert said[:3] == ["weights", "caches and state", "temporary (estimated)"]
    assert said[3:5] == ["usable: 72 GB (90%)", "H100 SXM: 80 GB"] and "1.80 tokens per round assumed" in said[-1]
    assert [line.get_xdata()[0] for line in memory.lines] == [72, 80]
    assert "GB" in memory.get_xlabel() and "estimated" in time.get_title()
    assert [label.get_text() for label in memory.get_yticklabels()][1] == "data=2,tensor=128"


def test_speed_up_lines_that_would_touch_are_left_out(figure_of):
    def speeds(name):
        return {text.get_text() for text in shown_texts(figure_of(PICTURES[name])) if text.get_text().endswith("x")}

    assert "1.25x" in speeds("pareto, one cell")
    assert {"1x", "2x", "0.5x"} <= speeds("pareto, wide range") and "1.25x" not in speeds("pareto, wide range")


def test_a_picture_is_written_in_every_format(tmp_path):
    plot_run(tmp_path / "picture", history(), ["png", "svg", "pdf"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["picture.pdf", "picture.png", "picture.svg"]
    for suffix, beginning in BEGINNINGS.items():
        assert (tmp_path / f"picture.{suffix}").read_bytes().startswith(beginning)
    plot_run(tmp_path / "other.pdf", history(), ["png"])
    assert (tmp_path / "other.pdf").read_bytes().startswith(b"%PDF-") and not (tmp_path / "other.png").exists()


def test_a_suffix_decides_and_a_wrong_one_is_told():
    assert [file.name for file in picture_paths("a/picture")] == ["picture.png", "picture.svg"]
    assert [file.name for file in picture_paths("a/picture.pdf", ["png"])] == ["picture.pdf"]
    assert picture_paths("picture", []) == []
    with pytest.raises(ValueError, match=r"the suffix of picture.jpg must be png, svg, pdf, not 'jpg'"):
        picture_paths("picture.jpg")
    with pytest.raises(ValueError, match="a plot's format must be png, svg, pdf, not 'gif'"):
        picture_paths("picture", ["gif"])


def test_the_style_holds_inside_a_picture_only(tmp_path):
    before = dict(matplotlib.rcParams)
    with picture(tmp_path / "picture.svg", (3, 2), title="costs $1 and $2\nsecond line") as figure:
        axis = figure.subplots()
        axis.plot([0, 1], [0, 1])
        assert not axis.spines["top"].get_visible() and axis.title.get_fontsize() == STYLE["axes.titlesize"]
        # The title adds its height to the panels', and a dollar sign begins no formula.
        assert figure.get_suptitle() == "costs \\$1 and \\$2\nsecond line" and figure.get_figheight() == 2.5
    assert dict(matplotlib.rcParams) == before
    first = (tmp_path / "picture.svg").read_bytes()
    with picture(tmp_path / "picture.svg", (3, 2), title="costs $1 and $2\nsecond line") as figure:
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
        for draw in PICTURES.values():
            draw(tmp_path / "picture")
        assert not list(tmp_path.iterdir())
        assert picture_paths("run/panel") == [] == picture_paths("panel.pdf")
        advice = r"matplotlib is missing: run pip install -e '\.\[plots\]' in the clone of mtpjax"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert re.search(f"no plots are drawn: {advice}", caplog.text)
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
