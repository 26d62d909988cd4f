"""Times variants of the kernels of a decoding layer on this GPU, inside layers and alone.

    python -m experiments.gpu.kernel_variants                  # variants, inside layers and alone
    python -m experiments.gpu.kernel_variants --only xla       # the products by XLA, without the kernels
    python -m experiments.gpu.kernel_variants --only once      # each kernel once, for a profiler
    python -m experiments.gpu.kernel_variants --quick          # interpreted, on any machine: shows that it runs

A layer is a layer of Llama-3.2-1B without attention: the products qkv, o, gate and up, and down, and two
`add_rms_norm`. The layers have different weights, which therefore come from memory, and run in turn inside one CUDA
graph. The variants:

- unchanged: the kernels of the library.
- trigger: each kernel lets the next one start early (`griddepcontrol.launch_dependents`). Every kernel that XLA
  compiles waits for the end of the one before it first (`griddepcontrol.wait`), so results stay the same.
- 2 parts, 4 parts: qkv, o and down split their sums into at most this many parts.
- narrow tiles: 256 inputs x 32 columns, with which the same number of programs needs fewer parts.
- last program: of the programs that share columns of o and down, the last one adds their parts.
- prefetch: while one program of `add_rms_norm` adds and normalizes, others read the next weights into the L2 cache.
- one row: one row instead of two.

Every variant's result is compared with the result of the unchanged kernels. Alone, each product is timed with different
weights, which come from memory, and with the same weights again, which stay in the L2 cache if they fit. The difference
is the maximum that a prefetch could gain. Results are written after every figure.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.kernels.bench_kernels import limits, relative_error
from mtpjax.decoding.gpu_graph import GRAPH_OPTIONS
from mtpjax.evaluation.tune import seconds_per_call
from pallas_kernels import add_rms_norm as norms
from pallas_kernels.backend import triton as plt
from pallas_kernels.block_scaled_matmul import kernel as products
from pallas_kernels.block_scaled_matmul import partial_matmul
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.partial_sums import PartialSums, load_sum

RESULT = RESULTS / "kernel_variants.json"
NUM_PREFETCHING = 128  # programs
PREFETCH_TILE = 8, 1024  # the numbers of inputs and (at most) columns that a program reads at a time
MAX_PREFETCHED = 2**23  # elements
TILE = 256, 32  # "narrow tiles": inputs and columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The width of a layer, the outputs of qkv, the width of the feed-forward network, and the number of layers."""

    D: int = 2048
    qkv: int = 3072
    F: int = 8192
    num_layers: int = 16
    repeats: int = 8  # passes over all layers in one call

    def shapes(self) -> dict[str, tuple[int, int]]:
        return {
            "qkv": (self.D, self.qkv),
            "o": (self.D, self.D),
            "gate_up": (self.D, 2 * self.F),
            "down": (self.F, self.D),
        }


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of the kernels.

    Attributes:
        patches: replacements for functions of the kernels' modules while the layers are traced.
        adds_in_last_program: o and down add their parts.
        prefetches: `add_rms_norm` reads the next weights.
        rows: rows of the residual stream.
    """

    patches: Callable[[], Sequence[Any]] = tuple
    adds_in_last_program: bool = False
    prefetches: bool = False
    rows: int = 2


def start_next_early() -> list[Any]:
    """Makes every kernel launch its dependents where it reads its first program index."""
    program_id = pl.program_id

    def trigger(axis: int):
        index = program_id(axis)
        if axis:
            return index
        # The index passes through the instruction, because an unused result would be removed.
        asm = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
        result = jax.ShapeDtypeStruct((1,), jnp.int32)
        (passed,) = plt.elementwise_inline_asm(
            asm, args=[jnp.full(1, index)], constraints="=r,r", pack=1, result_shape_dtypes=[result]
        )
        return jnp.sum(passed)

    return [mock.patch.object(pl, "program_id", trigger)]


def split_into(parts: int) -> list[Any]:
    count = products.count_parts
    return [mock.patch.object(products, "count_parts", lambda *args, **kwargs: min(parts, count(*args, **kwargs)))]


def use_narrow_tiles() -> list[Any]:
    return [mock.patch.object(products, "choose_tile", lambda F, weights_dtype, dtype, block: TILE)]


VARIANTS = {
    "unchanged": Variant(),
    "trigger": Variant(start_next_early),
    "2 parts": Variant(functools.partial(split_into, 2)),
    "4 parts": Variant(functools.partial(split_into, 4)),
    "narrow tiles": Variant(use_narrow_tiles),
    "last program": Variant(adds_in_last_program=True),
    "prefetch": Variant(prefetches=True),
    "last program, trigger": Variant(start_next_early, adds_in_last_program=True),
    "narrow tiles, trigger": Variant(lambda: [*use_narrow_tiles(), *start_next_early()]),
    "one row": Variant(rows=1),
}


def matmul_in_last_program(x, weights, counters, *, interpret: bool) -> tuple[PartialSums, jax.Array]:
    """Multiplies rows by a matrix; the last program of a column of tiles adds the parts in order.

    Args:
        x: [n, D].
        weights: [D, F].
        counters: [columns of tiles] or more, int32; they are zero before and after the call.

    Returns:
        The product [n, F] as one part, and the counters.
    """
    (n, D), F = x.shape, weights.shape[1]
    padded, _ = products.tile_rows(n)
    inputs, columns = products.choose_tile(F, weights.dtype, x.dtype, None)
    num_columns = pl.cdiv(F, columns)
    num_parts = products.count_parts(pl.cdiv(D, inputs), num_columns, inputs, padded, is_one_byte=False)

    def kernel(x_ref, weights_ref, _, parts_ref, out_ref, counters_ref):
        program = pl.program_id(0)
        products._multiply_kernel(
            x_ref, weights_ref, parts_ref, padded=padded, tile=(inputs, columns), block=128, dtype=x.dtype,
            num_columns=[num_columns], has_row_blocks=False, has_scales=False, is_integer_fp8=False,
        )  # fmt: skip
        # All stores of this program precede its count, and the count precedes the last program's loads.
        if not interpret:
            plt.debug_barrier()
        count = plt.atomic_add(counters_ref, (program,), jnp.int32(1))

        @pl.when(count == num_parts - 1)
        def _():
            row, column = jnp.arange(padded), program * columns + jnp.arange(columns)
            index = jnp.broadcast_arrays(row[:, None], column[None, :])
            mask = (row < n)[:, None] & (column < F)[None, :]
            total = load_sum(parts_ref, index, mask, x.dtype)
            plt.store(out_ref.at[tuple(index)], total, mask=mask)
            plt.store(counters_ref.at[program], jnp.int32(0))

    _, total, counters = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((num_parts, n, F), jnp.float32),
            jax.ShapeDtypeStruct((n, F), x.dtype),
            jax.ShapeDtypeStruct(counters.shape, counters.dtype),
        ],
        grid=(num_columns, num_parts),
        input_output_aliases={2: 2},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="matmul_in_last_program",
    )(x, weights, counters)
    return PartialSums(total[None], x.dtype), counters


def norm_with_prefetch(x, update: PartialSums, scale, weights, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Runs `add_rms_norm` in one program, while other programs read `weights` [D, F] into the L2 cache."""
    rows, width = x.shape
    D, F = weights.shape
    inputs, columns = PREFETCH_TILE[0], min(F & -F, PREFETCH_TILE[1])
    num_columns = F // columns
    num_tiles = min(D // inputs * num_columns, MAX_PREFETCHED // (inputs * columns))
    whole = pl.BlockSpec((rows, width), lambda i: (0, 0))

    def kernel(x_ref, parts_ref, scale_ref, weights_ref, total_ref, normed_ref, read_ref):
        program = pl.program_id(0)

        @pl.when(program == 0)
        def _():
            refs = x_ref, parts_ref, scale_ref, total_ref, normed_ref
            with mock.patch.object(pl, "program_id", lambda axis: jnp.int32(0)):
                norms._add_rms_norm_kernel(
                    *refs, dtype=update.dtype, num_rows=rows, width=width, eps=1e-6, zero_centred=False
                )

        @pl.when(program > 0)
        def _():
            def read(index, total):
                row = index // num_columns * inputs + jnp.arange(inputs)
                place = products.elements(weights_ref, row, index % num_columns * columns + jnp.arange(columns))
                return total + plt.load(place, eviction_policy="evict_last").astype(jnp.float32)

            first, last = ((program - 1 + each) * num_tiles // NUM_PREFETCHING for each in (0, 1))
            total = jax.lax.fori_loop(first, last, read, jnp.zeros((inputs, columns)))
            plt.store(read_ref.at[program - 1], jnp.sum(total))  # otherwise the loads would be removed

    total, normed, _ = pl.pallas_call(
        kernel,
        out_shape=[
            *([jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2),
            jax.ShapeDtypeStruct((NUM_PREFETCHING,), jnp.float32),
        ],
        grid=(1 + NUM_PREFETCHING,),
        in_specs=[
            whole,
            pl.BlockSpec((len(update.parts), rows, width), lambda i: (0, 0, 0)),
            pl.BlockSpec((width,), lambda i: (0,)),
            pl.BlockSpec(memory_space=None),
        ],
        out_specs=[whole, whole, pl.BlockSpec(memory_space=None)],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="norm_with_prefetch",
    )(x, update.parts, scale, weights)
    return total, normed


def run_layers(stream, layers: Sequence[dict], counters, *, variant: Variant, implementation: str) -> tuple[Any, Any]:
    """Runs layers on a residual stream [rows, D]; returns it and the counters."""
    interpret, width = implementation == "interpreted", stream.shape[1]
    multiply = functools.partial(partial_matmul, implementation=implementation)

    def add(x, weights, counters):
        if variant.adds_in_last_program:
            return matmul_in_last_program(x, weights, counters, interpret=interpret)
        return multiply(x, weights), counters

    def norm(x, update, scale, weights):
        if variant.prefetches:
            return norm_with_prefetch(x, update, scale, weights, interpret=interpret)
        return norms.add_rms_norm(x, update, scale, implementation=implementation)

    normed = stream
    for layer, following in zip(layers, [*layers[1:], layers[0]], strict=True):
        qkv = multiply(normed, layer["qkv"])
        heads = qkv.total()[:, :width]  # one small kernel instead of attention
        update, counters = add(heads, layer["o"], counters)
        # The weights that the next kernel reads. Gate and up are too large to be read during one `add_rms_norm`.
        stream, normed = norm(stream, update, layer["scale"], layer["gate_up"])
        gated = gated_matmul(normed, layer["gate_up"], implementation=implementation)
        update, counters = add(gated, layer["down"], counters)
        stream, normed = norm(stream, update, layer["scale"], following["qkv"])
    return stream, counters


def make_layers(sizes: Sizes, dtype) -> list[dict[str, jax.Array]]:
    @functools.partial(jax.jit, static_argnums=1)
    def make(key, shape):
        return (jax.random.normal(key, shape) * shape[0] ** -0.5).astype(dtype)

    return [
        {
            "scale": jnp.ones(sizes.D, dtype),
            **{
                name: make(jax.random.fold_in(jax.random.key(number), place), shape)
                for place, (name, shape) in enumerate(sizes.shapes().items())
            },
        }
        for number in range(sizes.num_layers)
    ]


def timed(step: Callable[[Any, Any], Any], carry: Any, weights: Any, repeats: int) -> tuple[float, Any]:
    """Returns the seconds per step, and the carry after one step. Steps run in a loop in one CUDA graph.

    The weights are arguments: arrays that a function closes over would become constants of the program.
    """
    first = jax.block_until_ready(jax.jit(step)(carry, weights))
    options = GRAPH_OPTIONS if jax.default_backend() == "gpu" else None
    run = jax.jit(
        lambda carry, weights: jax.lax.fori_loop(0, repeats, lambda _, each: step(each, weights), carry),
        compiler_options=options,
    )
    took = min(seconds_per_call(functools.partial(run, carry, weights), 0.05) for _ in range(3))
    return took / repeats, first


def measure_layers(sizes: Sizes, names: Sequence[str], implementation: str, dtype) -> Iterator[dict[str, Any]]:
    """Times the layers by variant. Yields a row after each."""
    layers = make_layers(sizes, dtype)
    expected = {}
    for name in names:
        variant = VARIANTS[name]
        stream = jax.random.normal(jax.random.key(9), (variant.rows, sizes.D)).astype(dtype)
        carry = stream, jnp.zeros(sizes.D, jnp.int32)

        def step(carry, layers, variant=variant):
            stream, counters = run_layers(carry[0], layers, carry[1], variant=variant, implementation=implementation)
            return (stream * jnp.asarray(0.5, dtype)), counters  # so that the stream does not grow

        row: dict[str, Any] = {"variant": name}
        try:
            jax.clear_caches()  # cached traces ignore the replacements
            with contextlib.ExitStack() as stack:
                for patch in variant.patches():
                    stack.enter_context(patch)
                seconds, (found, counters) = timed(step, carry, layers, sizes.repeats)
            expected.setdefault(variant.rows, found)
            row |= {"us_per_layer": 1e6 * seconds / sizes.num_layers, "counters_are_zero": not np.any(counters)}
            row |= {"error": relative_error(found, expected[variant.rows])}
        except Exception as reason:  # a failing variant must not stop the others
            row |= {"failed": f"{type(reason).__name__}: {reason}"[:500]}
        yield row


def measure_products(sizes: Sizes, implementation: str, dtype, rows: int) -> Iterator[dict[str, Any]]:
    """Times each product alone, with weights from memory and with the same weights again."""
    for name, (D, _) in sizes.shapes().items():
        x = jax.random.normal(jax.random.key(9), (rows, D)).astype(dtype)
        weights = [layer[name] for layer in make_layers(sizes, dtype)]
        row: dict[str, Any] = {"product": name, "bytes": weights[0].nbytes}
        for form, used in {"memory": weights, "again": weights[:1]}.items():

            def step(x, used, name=name):
                for each in used:
                    if implementation == "xla":
                        out = jnp.matmul(x, each)
                    elif name == "gate_up":
                        out = gated_matmul(x, each, implementation=implementation)
                    else:
                        out = partial_matmul(x, each, implementation=implementation).parts[0]
                    # A small kernel makes the next product depend on all of this one, so that XLA computes every
                    # output.
                    out = jax.lax.optimization_barrier(out)
                    x = jnp.where(out[0, 0] > 1e30, 0, x)
                return x

            jax.clear_caches()
            seconds, _ = timed(step, x, used, sizes.repeats * (len(weights) if form == "again" else 1))
            row[f"us_{form}"] = 1e6 * seconds / len(used)
            yield row


def measure_norms(sizes: Sizes, implementation: str, dtype) -> Iterator[dict[str, Any]]:
    """Times `add_rms_norm` alone on one and two rows with 1 to 16 parts, which are in the L2 cache."""
    for rows, parts in itertools.product((1, 2), (1, 2, 4, 8, 16)):
        update = PartialSums(1e-3 * jax.random.normal(jax.random.key(1), (parts, rows, sizes.D)), jnp.dtype(dtype))
        scale = jnp.ones(sizes.D, dtype)

        def step(x, weights):
            for _ in range(16):
                x, _ = norms.add_rms_norm(x, *weights, implementation=implementation)
            return x

        jax.clear_caches()
        seconds, _ = timed(step, jnp.zeros((rows, sizes.D), dtype), (update, scale), sizes.repeats)
        yield {"rows": rows, "parts": parts, "us": 1e6 * seconds / 16}


def main(argv: list[str] | None = None) -> int:
    """Measures one part, or all parts that run kernels of the library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("layers", "alone", "xla", "once"), help="(default: layers and alone)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes on any machine, to check that the script runs"
    )
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    options = parser.parse_args(argv)
    if not options.quick and jax.default_backend() != "gpu":
        print("this measures a GPU, and jax has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    sizes, implementation, dtype = Sizes(), "triton", jnp.bfloat16
    if options.quick:
        sizes, implementation = Sizes(D=512, qkv=640, F=512, num_layers=1, repeats=1), "interpreted"
        options.variants = ["unchanged", "2 parts", "last program", "prefetch"]
    if options.only == "once":
        sizes = dataclasses.replace(sizes, num_layers=1)
        stream = jnp.ones((2, sizes.D), dtype)
        args = stream, make_layers(sizes, dtype), jnp.zeros(sizes.D, jnp.int32)
        run = functools.partial(run_layers, variant=VARIANTS["unchanged"], implementation=implementation)
        jax.block_until_ready(jax.jit(run)(*args))
        return 0
    console = Console(highlight=False)
    output = options.output or (None if options.quick else RESULT)
    bandwidth, _ = limits(2**24, 1024) if options.quick else limits()
    found: dict[str, Any] = about(
        argv,
        device=jax.devices()[0].device_kind,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        bytes_a_second=bandwidth,
        sizes=dataclasses.asdict(sizes),
        rows=[],
    )
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "layers": lambda: measure_layers(sizes, options.variants, implementation, dtype),
        "alone": lambda: itertools.chain(
            measure_norms(sizes, implementation, dtype), measure_products(sizes, implementation, dtype, rows=2)
        ),
        "xla": lambda: measure_products(sizes, "xla", dtype, rows=2),
    }
    for part in ("layers", "alone") if options.only is None else (options.only,):
        for row in parts[part]():
            if row not in found["rows"]:
                found["rows"].append(row)
            write(output, found)
            console.print(f"{part}: {row}", soft_wrap=True)
    return 1 if any("failed" in row for row in found["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
