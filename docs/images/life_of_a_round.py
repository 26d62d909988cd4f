"""Draws the pictures of docs/design.md: one round with a chain of drafts, and a draft tree.

python docs/images/life_of_a_round.py writes life_of_a_round.svg and draft_tree.svg next to this file.
"""

import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

FOLDER = pathlib.Path(__file__).parent
INK, GREY = "#1f2733", "#6b7684"
# Fill of a cell, by what the cell holds.
COLOURS = {
    "committed": "#cfd8e3",
    "pending": "#7fb3e6",
    "drafted": "#f6d28b",
    "accepted": "#a8d8a0",
    "rejected": "#efb0a8",
    "empty": "#ffffff",
    "new": "#c9b6e4",
}
NUM_POSITIONS = 10
LEFT = -2.7  # where the labels of the strips begin


def cell(axes: Axes, x: float, y: float, text: str = "", kind: str = "empty", *, width: float = 1.0) -> None:
    """Draws one cell of a strip."""
    edge = "#c3cad3" if kind == "empty" else INK
    axes.add_patch(Rectangle((x, y), width, 0.8, facecolor=COLOURS[kind], edgecolor=edge, linewidth=0.8))
    axes.text(x + width / 2, y + 0.38, text, ha="center", va="center", fontsize=9, color=INK)


def strip(axes: Axes, y: float, label: str, cells: dict[int, tuple[str, str]]) -> None:
    """Draws a labelled row of cells, one per position."""
    axes.text(-0.25, y + 0.38, label, ha="right", va="center", fontsize=9.5, color=INK)
    for position in range(NUM_POSITIONS):
        text, kind = cells.get(position, ("", "empty"))
        cell(axes, position, y, text, kind)


def fill(positions: range, kind: str, text: str = "") -> dict[int, tuple[str, str]]:
    """Returns cells of one kind; `{}` in the text becomes the position."""
    return {position: (text.format(position), kind) for position in positions}


def heading(axes: Axes, y: float, title: str, explanation: str) -> None:
    """Writes a stage's title and explanation above its strips."""
    axes.text(LEFT, y, title, ha="left", va="top", fontsize=11.5, color=INK, weight="bold")
    axes.text(LEFT, y - 0.62, explanation, ha="left", va="top", fontsize=9.5, color=INK, linespacing=1.45)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draws a thin arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": GREY, "linewidth": 1.1})


def draw_round() -> plt.Figure:
    """Draws the four stages of one round: three drafts of one recycled module, of which two are accepted."""
    figure, axes = plt.subplots(figsize=(8.2, 11.4))
    text = fill(range(5), "committed", "t{}")
    before = {**text, 5: ("t5", "pending")}
    drafted = {**before, 6: ("d6", "drafted"), 7: ("d7", "drafted"), 8: ("d8", "drafted")}
    trunk = fill(range(5), "committed")

    heading(
        axes,
        23.9,
        "Before the round: length = 6",
        "t5 is pending: committed, but the trunk has not processed it. The last round kept the trunk's hidden\n"
        "states h3 and h4, which the module has not processed yet.",
    )
    for position in range(NUM_POSITIONS):
        axes.text(position + 0.5, 22.0, str(position), ha="center", va="center", fontsize=9, color=GREY)
    axes.text(-0.25, 22.0, "position, slot", ha="right", va="center", fontsize=9.5, color=GREY)
    strip(axes, 20.9, "tokens", before)
    strip(axes, 20.0, "trunk KV cache", trunk)
    strip(axes, 19.1, "module KV cache", fill(range(3), "committed"))
    strip(axes, 18.2, "hidden states", fill(range(3, 5), "committed", "h{}"))

    heading(
        axes,
        17.5,
        "1. Draft",
        "Draft extend: slots 3 and 4 read a true hidden state and the next token. The output g4 of slot 4 gives d6.\n"
        "Then the module runs on its own output and its own draft: slot 5 gives d7, and slot 6 gives d8.",
    )
    made = {3: ("h3 t4", "new"), 4: ("h4 t5", "new"), 5: ("g4 d6", "drafted"), 6: ("g5 d7", "drafted")}
    strip(axes, 14.8, "module KV cache", {**fill(range(3), "committed"), **made})
    strip(axes, 13.5, "tokens", drafted)
    for slot in (4, 5, 6):
        arrow(axes, (slot + 0.6, 14.78), (slot + 2.35, 14.33))

    heading(
        axes,
        12.8,
        "2. Verify",
        "One trunk pass over t5, d6, d7 and d8. Each token sees the text, its ancestors and itself. The output\n"
        "after each token scores the next one.",
    )
    strip(axes, 10.1, "trunk KV cache", {**trunk, **fill(range(5, 9), "new", "new")})
    strip(axes, 9.2, "trunk's choice", fill(range(6, 10), "new", "c{}"))

    heading(
        axes,
        8.5,
        "3. Accept",
        "The greedy rule accepts drafts until one differs from the trunk's choice. c8 is the bonus token.",
    )
    compared = {6: ("d6=c6", "accepted"), 7: ("d7=c7", "accepted"), 8: (r"d8$\neq$c8", "rejected")}
    strip(axes, 6.3, "drafts", compared)

    heading(
        axes,
        5.6,
        "4. Commit: length = 9",
        "The drafts are t6 and t7; t8 = c8 is pending. The entry of d8 stays behind the trunk's 8 committed slots.\n"
        "In the next round the module computes slots 5 to 7 from h5, h6 and h7.",
    )
    strip(axes, 2.9, "tokens", {**fill(range(8), "committed", "t{}"), 8: ("t8", "pending")})
    strip(axes, 2.0, "trunk KV cache", {**fill(range(8), "committed"), 8: ("stale", "rejected")})
    strip(axes, 1.1, "module KV cache", {**fill(range(5), "committed"), **fill(range(5, 7), "rejected", "stale")})
    strip(axes, 0.2, "hidden states", fill(range(5, 8), "committed", "h{}"))

    # The meaning of the colours.
    legend = [
        ("committed", "committed"),
        ("pending", "pending"),
        ("new", "new in this stage"),
        ("drafted", "from a draft"),
        ("accepted", "accepted"),
        ("rejected", "overwritten later"),
    ]
    x = LEFT
    for kind, meaning in legend:
        axes.add_patch(Rectangle((x, -0.9), 0.4, 0.5, facecolor=COLOURS[kind], edgecolor=INK, linewidth=0.8))
        axes.text(x + 0.5, -0.67, meaning, ha="left", va="center", fontsize=9, color=INK)
        x += 1.0 + 0.098 * len(meaning)

    for y in (17.8, 13.1, 8.8, 5.9):
        axes.plot([LEFT, NUM_POSITIONS], [y, y], color="#d9dee5", linewidth=0.8)
    axes.set_xlim(LEFT - 0.1, NUM_POSITIONS + 0.2)
    axes.set_ylim(-1.1, 24.1)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure


# A tree of six nodes: parents, depths, and names of the drafted tokens.
PARENTS = (-1, 0, 0, 1, 1, 3)
DEPTHS = (0, 1, 1, 2, 2, 3)
NAMES = ("t5", "a", "b", "c", "d", "e")
ACCEPTED = (0, 1, 4)


def ancestors(node: int) -> set[int]:
    """Returns a node and its ancestors."""
    return {node} if PARENTS[node] < 0 else {node} | ancestors(PARENTS[node])


def node_kind(node: int) -> str:
    """Returns a node's key in COLOURS once the rule has decided."""
    if node == 0:
        return "pending"
    return "accepted" if node in ACCEPTED else "drafted"


def draw_tree() -> plt.Figure:
    """Draws a draft tree, its ancestor mask, and how committing gathers the accepted path."""
    figure, (tree, mask, cache) = plt.subplots(1, 3, figsize=(8.6, 3.2), width_ratios=(1.1, 1.2, 1.25))

    # The tree.
    places = {0: (0, 1.0), 1: (1, 1.7), 2: (1, 0.3), 3: (2, 2.3), 4: (2, 1.1), 5: (3, 2.3)}
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            tree.plot(*zip(places[parent], places[node], strict=True), color=GREY, linewidth=1.2, zorder=1)
    for node, (x, y) in places.items():
        tree.scatter(x, y, s=480, color=COLOURS[node_kind(node)], edgecolor=INK, linewidth=0.8, zorder=2)
        tree.text(x, y, f"{node}: {NAMES[node]}", ha="center", va="center", fontsize=8.5, color=INK, zorder=3)
    for depth in range(4):
        label = "root" if depth == 0 else f"level {depth}"
        tree.text(depth, -0.35, label, ha="center", va="center", fontsize=9, color=GREY)
    tree.set_xlim(-0.5, 3.5)
    tree.set_ylim(-0.6, 2.9)
    tree.set_title("Draft tree, W = 6", fontsize=10.5, color=INK, loc="left")

    # The ancestor mask.
    W = len(PARENTS)
    for row in range(W):
        for column in range(W):
            is_seen = column in ancestors(row)
            colour = COLOURS["new"] if is_seen else COLOURS["empty"]
            mask.add_patch(Rectangle((column, W - 1 - row), 1, 1, facecolor=colour, edgecolor="#c3cad3", linewidth=0.8))
        mask.text(-0.2, W - 0.5 - row, f"{row}: {NAMES[row]}", ha="right", va="center", fontsize=9, color=INK)
        mask.text(row + 0.5, W + 0.3, NAMES[row], ha="center", va="center", fontsize=9, color=INK)
    mask.text(W / 2, -0.5, "a row's node sees the filled ones", ha="center", va="center", fontsize=9, color=GREY)
    mask.set_xlim(-1.6, W + 0.6)
    mask.set_ylim(-0.9, W + 0.7)
    mask.set_title("Ancestor mask", fontsize=10.5, color=INK, loc="left")

    # The trunk's cache slots before and after the commit.
    for place in range(W):
        cell(cache, place, 2.6, NAMES[place], node_kind(place))
        cache.text(place + 0.5, 3.62, str(5 + place), ha="center", va="center", fontsize=9, color=GREY)
        kept = place < len(ACCEPTED)
        cell(cache, place, 0.6, NAMES[ACCEPTED[place]] if kept else "", "committed" if kept else "rejected")
        if kept:
            arrow(cache, (ACCEPTED[place] + 0.5, 2.55), (place + 0.5, 1.45))
    cache.text(-0.2, 3.62, "slot", ha="right", va="center", fontsize=9, color=GREY)
    cache.text(-0.2, 2.98, "verified", ha="right", va="center", fontsize=9, color=INK)
    cache.text(-0.2, 0.98, "committed", ha="right", va="center", fontsize=9, color=INK)
    cache.text(W / 2, 0.05, "the accepted path is t5, a, d", ha="center", va="center", fontsize=9, color=GREY)
    cache.set_xlim(-2.6, W + 0.1)
    cache.set_ylim(-0.4, 4.2)
    cache.set_title("Trunk KV cache", fontsize=10.5, color=INK, loc="left")

    for axes in (tree, mask, cache):
        axes.axis("off")
    figure.tight_layout(pad=0.6)
    return figure


def main() -> None:
    """Writes both pictures, byte for byte the same with the same version of matplotlib."""
    plt.rcParams.update({"svg.hashsalt": "mtpjax", "svg.fonttype": "path", "font.family": "DejaVu Sans"})
    for name, draw in (("life_of_a_round", draw_round), ("draft_tree", draw_tree)):
        figure = draw()
        figure.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
