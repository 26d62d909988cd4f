"""Counts the bytes that a decoding round moves on an H100, with and without kernels, and the minimum possible.

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m experiments.kernels.bytes_moved
    python -m experiments.kernels.bytes_moved --models S --output result.json
    python -m experiments.kernels.bytes_moved --models M 16B-A2.4B --page-size 16   # caches in pages too

Nothing runs: the round is compiled ahead of time for an H100 (`compat.h100_devices` says what that needs) from shapes
alone, and its bytes are counted in the compiled loop (`experiments/common/hlo_bytes.py`); for a Triton kernel, the
bytes that it declares count. The minimum counts every weight that a pass needs once, and every cache once.

Only bytes that are requested from memory count. For XLA's kernels, each operand counts once. For our kernels,
everything that their programs load counts, but data that programs share through the L2 cache (at most a few MB of
activations, `pallas_kernels/cost.py`) counts once. Loads from the L2 cache have a separate column. Caches and weights
that are loaded twice always count twice.

The count assumes the maximum, so every row is as long as its cache, and the tokens of a pass choose as many different
experts as possible. The weights are bfloat16, or fp8 with scales in the experts if the model has them.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh
from rich.console import Console
from rich.table import Table

from experiments.common import RESULTS
from experiments.common.decode_checkpoints import SHAPES
from experiments.common.hlo_bytes import Counter, Instruction, Moved, parse
from experiments.common.results import about, write
from experiments.kernels.kernel_bytes import Declared, declared_calls
from mtpjax import ModelConfig, MTPModel, compat
from mtpjax.decoding.capacity import min_rows_per_pass
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, make_spec
from mtpjax.decoding.loop import run_round
from mtpjax.decoding.state import StateShape
from mtpjax.evaluation.plot_style import COLOURS, GREY, picture
from mtpjax.inference.requests import make_drafter
from mtpjax.models.config import Implementation
from mtpjax.models.presets import presets
from mtpjax.models.quantized import BlockScaled

BAR = 1.10  # maximum ratio to the minimum, with kernels
MAX_TEMP = 100 * 10**6  # bytes of temporary memory in addition to one layer's cache
BANDWIDTH = 3.35e12  # of an H100 SXM, in bytes per second
RESULT = RESULTS / "bytes_moved.json"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model whose rounds are counted."""

    config: ModelConfig
    slots: int  # of each row's cache
    has_fp8_experts: bool = False


LITE = ModelConfig(  # DeepSeek-V2-Lite with one MTP module
    vocab_size=102400,
    hidden_size=2048,
    num_hidden_layers=27,
    num_attention_heads=16,
    intermediate_size=10944,
    attention="latent",
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_interleave=True,
    n_routed_experts=64,
    num_experts_per_tok=6,
    moe_intermediate_size=1408,
    n_shared_experts=2,
    first_k_dense_replace=1,
    scoring_func="softmax",
    norm_topk_prob=False,
    num_mtp_modules=1,
)
SUBJECTS = {
    **{name: Subject(SHAPES[name], 2048) for name in ("S", "M", "D")},
    "16B-A2.4B": Subject(LITE, 4096),
    "V3, 4 layers": Subject(dataclasses.replace(presets["deepseek-v3"], num_hidden_layers=4), 4096, True),
}
CELLS = ((1, 0), (1, 1), (1, 3), (8, 0), (8, 3))  # rows and draft levels


def round_of(
    subject: Subject, batch: int, num_steps: int, implementation: Implementation, page_size: int | None = None
):
    """Returns a jitted loop of rounds and its arguments' shapes. With a page size, the caches are in pages."""
    model = MTPModel(subject.config, implementation=implementation)
    config = DecodeConfig(num_steps=num_steps)
    drafter = make_drafter(config)
    spec = make_spec(config, is_greedy=True, min_rows=min_rows_per_pass(model.config, batch, "cuda"))
    if page_size is not None:
        spec = dataclasses.replace(spec, pool=(batch * subject.slots // page_size, page_size))
    decoder = Decoder(model, drafter, spec)

    def make():
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
        state = decoder.empty_state(StateShape(batch, subject.slots), jnp.bfloat16)
        keep = functools.partial(as_stored, dtype=jnp.bfloat16, has_fp8_experts=subject.has_fp8_experts)
        return jax.tree_util.tree_map_with_path(keep, params), state

    def rounds(params, state):
        own = drafter.default_params(params, config, model=model)
        body = functools.partial(run_round, decoder, decoder.prepare(params, own))
        return jax.lax.while_loop(lambda state: ~state.done.all(), body, state)

    return jax.jit(rounds, donate_argnums=1, keep_unused=True), jax.eval_shape(make)


def as_stored(path, leaf, *, dtype, has_fp8_experts: bool):
    """Converts a parameter to the form in which a checkpoint stores it; `path` is its path of keys."""
    axis = {"experts/gate_up": -3, "experts/down": -2}.get("/".join(key.key for key in path[-2:]))  # of the input
    if axis is None or not has_fp8_experts:
        return leaf.astype(dtype)
    shape = list(leaf.shape)
    shape[axis] = -(-shape[axis] // 128)
    return BlockScaled(leaf.astype(jnp.float8_e4m3fn), jnp.ones(shape, jnp.float32), axis=axis, block=128)


def passes_of(config: ModelConfig, batch: int, num_steps: int) -> dict[str, list[int]]:
    """Returns the number of tokens in each pass of a round, for the trunk and for each module."""
    modules = min(config.num_mtp_modules, num_steps)
    passes = {"trunk": [batch * (num_steps + 1)], **{f"mtp_{index}": [] for index in range(modules)}}
    for level in range(1, num_steps + 1):  # as in `mtpjax.drafters.cached`: the last module is recycled
        rows = batch * (num_steps + modules if level <= modules else 1)
        passes[f"mtp_{min(level, modules) - 1}"].append(rows)
    return passes


def least_bytes(config: ModelConfig, batch: int, num_steps: int, path: str, leaf) -> int:
    """Returns the bytes that a round must read of one array of `params` and `state`, once per pass that needs it."""
    passes, nbytes = passes_of(config, batch, num_steps), math.prod(leaf.shape) * leaf.dtype.itemsize
    if path == "params/embedding":
        looked_up = sum(map(sum, passes.values())) * config.hidden_size * leaf.dtype.itemsize
        return looked_up + (nbytes * (num_steps + 1) if config.tie_word_embeddings else 0)
    if path == "params/head":
        return nbytes * (num_steps + 1)
    if path.startswith("params/norm_final"):
        return nbytes
    found = re.match(r"(?:params|state)/(trunk|mtp_\d+|drafter/caches/\d+)/(?!length)", path)
    rows = passes.get(found[1].replace("drafter/caches/", "mtp_"), []) if found else []
    if "/experts/" in path and leaf.shape[:1] == (config.n_routed_experts,) and len(leaf.shape) > 2:
        share = config.num_experts_per_tok / config.n_routed_experts
        return round(nbytes * sum(min(1.0, count * share) for count in rows))
    return nbytes * len(rows)


def least_of_all(config: ModelConfig, batch: int, num_steps: int, shapes) -> list[int]:
    """Returns `least_bytes` for each array of parameters and state, in the order of `jax.tree.leaves(shapes)`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(dict(zip(("params", "state"), shapes, strict=True)))
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
    return [least_bytes(config, batch, num_steps, name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]


def layer_cache_bytes(subject: Subject, batch: int) -> int:
    """Returns the bytes of the trunk's largest layer cache."""
    _, (_, state) = round_of(subject, batch, 0, "xla")
    return max(sum(leaf.size * leaf.dtype.itemsize for leaf in layer.values()) for layer in state.trunk.layers)


@dataclasses.dataclass(frozen=True)
class Group:
    """The bytes that instructions from one place of the program move in a round, and how many of them are needed."""

    place: str
    nbytes: int
    excess: int


@dataclasses.dataclass(frozen=True)
class Count:
    """The bytes of one compiled round."""

    nbytes: int
    groups: tuple[Group, ...]  # the largest excess first
    kernels: Mapping[str, int]  # bytes that Triton kernels declare, by name
    from_l2: int  # bytes that the kernels load again from the L2 cache; not in `nbytes`
    outside: int  # bytes moved before and after the loop, not per round
    unread: int  # bytes of the minimum that no counted read covers; if not small, an array was missed
    temp: int = 0  # bytes of memory in addition to arguments and results


def count_round(
    subject: Subject, batch: int, num_steps: int, implementation: Implementation, page_size: int | None = None
) -> tuple[Count, int]:
    """Compiles a round and counts it. Returns the minimum, too."""
    config = subject.config
    function, shapes = round_of(subject, batch, num_steps, implementation, page_size)
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with use_abstract_mesh(mesh.abstract_mesh):
        declared = list(declared_calls(function, *shapes))
        compiled = function.lower(*shapes).compile()
    least = least_of_all(config, batch, num_steps, shapes)
    computations, entry = parse(str(compiled.as_text()))

    def moved(is_from_l2: bool):
        counter = Counter(computations, _declared_bytes(declared, is_from_l2), functools.partial(_turns, config))
        return counter.moved(entry, list(range(len(least))))

    from_l2 = sum(one.total for one in moved(True) if one.loops and "triton" in one.instruction.target)
    count = tally(moved(False), least, from_l2)
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports no memory for this platform"
    return dataclasses.replace(count, temp=memory.temp_size_in_bytes), sum(least)


def _declared_bytes(declared: Iterable[Declared], is_from_l2: bool):
    """Returns a function for `Counter`: the bytes that a Triton call loads from memory, or again from the L2 cache."""

    def key(name, arrays):
        return re.sub(r"\W", "_", name), tuple(arrays)

    known = {}
    for call in declared:
        if call.nbytes is None:
            raise ValueError(f"kernel {call.name} declares no bytes: it needs a cost_estimate")
        arrays = [(shape, jnp.dtype(dtype).itemsize) for dtype, shape in (*call.operands, *call.results)]
        name = key(call.name, arrays)
        known[name] = max(known.get(name, 0), call.from_l2 if is_from_l2 else call.nbytes - call.from_l2)

    def of(instruction: Instruction, operands) -> int:
        arrays = [(array.shape, array.itemsize) for array in (*operands, *instruction.results)]
        return known[key(kernel_name(instruction), arrays)]

    return of


def kernel_name(instruction: Instruction) -> str:
    return re.findall(r'\bname = "(\w+)", num_stages', instruction.attributes)[-1]


def _turns(config: ModelConfig, loop: Instruction) -> int:
    """Returns the turns of a loop that ends depending on data: one round, or all experts that a pass can choose."""
    if re.search(r"/experts/(.*/)?while$", loop.source):
        matrices = {array.shape for array in loop.results if len(array.shape) == 2}
        [rows] = {rows for rows, width in matrices if width == config.hidden_size}
        return min(config.n_routed_experts, rows * config.num_experts_per_tok)
    if loop.source.count("while") == 1:
        return 1
    raise ValueError(f"a loop of unknown length: {loop.source}")


def tally(moved: Iterable[Moved], least: list[int], from_l2: int = 0) -> Count:
    """Sums the moved bytes. Up to `least` bytes read from an array are needed; the rest is excess."""
    left = list(least)
    groups: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    kernels: collections.Counter[str] = collections.Counter()
    outside = 0
    for one in moved:
        if not one.loops:
            outside += one.total
            continue
        excess = one.total
        for operand, nbytes in one.read.items():
            origin = one.origins[operand]
            if origin is not None:
                needed = min(left[origin], round(nbytes * one.times))
                left[origin] -= needed
                excess -= needed
        if "triton" in one.instruction.target:
            kernels[kernel_name(one.instruction)] += one.total
        group = groups[_place(one)]
        group[0] += one.total
        group[1] += excess
    ordered = sorted(groups.items(), key=lambda item: -item[1][1])
    rows = tuple(Group(place, *sums) for place, sums in ordered)
    return Count(sum(group.nbytes for group in rows), rows, dict(kernels), from_l2, outside, sum(left))


def _place(one: Moved) -> str:
    """Returns an instruction's source, the same for all layers. Bodies that XLA merged have the name of one of them."""
    rounds, *inner = one.loops
    source = one.instruction.source or one.instruction.opcode
    if inner:
        source = f"{inner[-1]}/{source.rsplit('/', 1)[-1]}"
    source = source.removeprefix(rounds).removeprefix("/body").lstrip("/")
    return re.sub(r"MTPModel\.|trunk/(?=layer)", "", re.sub(r"layer_\d+", "layer_*", source))


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="bytes of a decoding round on an H100: compiled, not run")
    table.add_column("model", no_wrap=True)
    for name in ("batch", "drafts", "minimum", "at 3.35 TB/s", "xla", "with kernels", "from L2", "temp"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most bytes beyond the minimum, with kernels")
    for row in rows:
        forms = [f"{row[form]['ratio']:.2f} x" for form in ("xla", "triton")]
        forms.append(f"+ {row['triton']['from_l2'] / row['minimum']:.2f}")
        forms.append(" / ".join(f"{row[form]['temp'] / 1e6:.0f}" for form in ("xla", "triton")) + " MB")
        top = [f"{group['excess'] / 1e6:.1f} MB {group['place']}" for group in row["triton"]["most_excess"]]
        table.add_row(
            row["model"],
            *(str(row[name]) for name in ("batch", "drafts")),
            f"{row['minimum'] / 1e6:,.1f} MB",
            f"{row['minimum'] / BANDWIDTH * 1e3:.3f} ms",
            *forms,
            "\n".join(top),
            end_section=True,
        )
    console.print(table)


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Plots the bytes divided by the minimum as a pair of bars for each cell."""
    with picture(path, (9, 0.42 * len(rows) + 1.2)) as figure:
        draw(figure.subplots(), rows)


def draw(axes, rows: list[dict[str, Any]]) -> None:
    """Draws the bars of `plot`."""
    for turn, (form, label) in enumerate((("xla", "XLA alone"), ("triton", "with kernels"))):
        heights = [place + 0.36 * turn for place in range(len(rows))]
        ratios = [row[form]["ratio"] for row in rows]
        bars = axes.barh(heights, ratios, 0.34, color=COLOURS[turn], label=label)
        if form == "triton":
            again = [row[form]["from_l2"] / row["minimum"] for row in rows]
            label = "and loaded again from the L2 cache"
            bars = axes.barh(heights, again, 0.34, ratios, color=COLOURS[turn], alpha=0.4, label=label)
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=7)
    names = [f"{row['model']}: batch {row['batch']}, drafts {row['drafts']}" for row in rows]
    axes.set_yticks([place + 0.18 for place in range(len(rows))], names, fontsize=8)
    axes.set(xscale="log", xlim=(1, 1.3 * max(row["xla"]["ratio"] for row in rows)), ylim=(len(rows), -0.5))
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16) if tick < axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bytes of a decoding round over the fewest possible (H100, compiled, not run)")
    axes.axvline(BAR, color=GREY, linestyle="--", linewidth=1, label=f"{BAR:g}, the bar for kernels")
    axes.legend(loc="upper right")


def measure(name: str, batch: int, num_steps: int) -> dict[str, Any]:
    """Measures one cell; returns the minimum and the counts of both forms."""
    with_kernels, least = count_round(SUBJECTS[name], batch, num_steps, "triton")
    without = with_kernels  # the same program, if it has no kernels
    if with_kernels.kernels:
        without, _ = count_round(SUBJECTS[name], batch, num_steps, "xla")
    row: dict[str, Any] = {"model": name, "batch": batch, "drafts": num_steps, "minimum": least}
    row["layer_cache"] = layer_cache_bytes(SUBJECTS[name], batch)
    for form, count in (("xla", without), ("triton", with_kernels)):
        row[form] = {
            "bytes": count.nbytes,
            "ratio": count.nbytes / least,
            "from_l2": count.from_l2,
            "outside_the_loop": count.outside,
            "unread": count.unread,
            "temp": count.temp,
            "kernels": count.kernels,
            "most_excess": [dataclasses.asdict(group) for group in count.groups[:5]],
        }
    return row


def compare_pages(names: Iterable[str], page_size: int, output: pathlib.Path) -> None:
    """Compares rounds whose caches are in pages with rounds that have contiguous caches. All caches are full."""
    rows = []
    description = about(page_size=page_size)
    for name, batch, form in itertools.product(names, (1, 8), ("triton", "xla")):
        plain, least = count_round(SUBJECTS[name], batch, 3, form)
        paged, _ = count_round(SUBJECTS[name], batch, 3, form, page_size)
        row = {"model": name, "batch": batch, "form": form, "ratio": paged.nbytes / plain.nbytes, "minimum": least}
        rows.append({**row, "contiguous": plain.nbytes, "paged": paged.nbytes, "temp": paged.temp})
        print(f"{name}, batch {batch}, 3 drafts, {form}: {row['ratio']:.3f} of contiguous caches", flush=True)
        write(output, {**description, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--page-size", type=int, default=None, help="compare pages of this size with contiguous caches")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="default: a file in results/")
    options = parser.parse_args()
    if options.page_size is not None:
        return compare_pages(options.models, options.page_size, options.output or RESULT.with_name("paged_bytes.json"))
    options.output = options.output or RESULT
    wanted, rows = [(name, *cell) for name in options.models for cell in CELLS], []
    for number, cell in enumerate(wanted, start=1):
        print(f"{number}/{len(wanted)} {cell[0]}: batch {cell[1]}, drafts {cell[2]}", file=sys.stderr)
        rows.append(measure(*cell))
    show(rows, Console(width=None if sys.stdout.isatty() else 160))
    write(options.output, about(compiled_for="NVIDIA H100 80GB HBM3, not run", bar=BAR, rows=rows))
    plot(rows, options.output.with_suffix(".png"))
    is_within = all(
        row["triton"]["ratio"] <= BAR and row[form]["temp"] <= row["layer_cache"] + MAX_TEMP
        for row in rows
        for form in ("xla", "triton")
    )
    sys.exit(not is_within)


if __name__ == "__main__":
    main()
