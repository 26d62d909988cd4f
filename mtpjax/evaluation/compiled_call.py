"""Compiles a model's decoding call for H100s or TPUs from shapes alone, and reports memory, collectives and kernels.

Nothing runs, so no H100 or TPU is needed; `h100_devices` and `tpu_devices` in `mtpjax.compat` list the requirements.

Several functions here and in `mtpjax.evaluation.plan` share these arguments: `params` are shapes, as returned by
`stored_shapes`; `sizes` are the sizes of the mesh axes by name; `rows` is the batch size, `slots` the number of cache
slots per row, and `num_steps` the number of draft levels. `prefill_chunk` is the number of tokens per row in a prefill
pass; by default, it is the number that `speculative_generate` chooses for prompts that fill half the slots.
"""

import collections
import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh

from mtpjax import compat
from mtpjax.decoding.capacity import choose_prefill_chunk
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Decoder, make_spec
from mtpjax.decoding.loop import decode
from mtpjax.decoding.state import StateShape
from mtpjax.inference.requests import make_drafter
from mtpjax.models.config import Implementation, ModelConfig
from mtpjax.models.decoding_layout import align_blocks, copy_key_value_heads, fit_config, part_specs
from mtpjax.models.model import MTPModel
from mtpjax.models.params import param_shapes
from mtpjax.models.quantized import BlockScaled
from mtpjax.models.sharding import num_shards, path_name, platform_of

FP8_PLACES = re.compile(r"(query|query_down|query_up|latent_down|qkv|output|gate_up|down)$")
COLLECTIVE = re.compile(
    r"= (?P<results>.*?) (?P<name>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled call.

    Attributes:
        arguments: bytes of weights and state per device.
        temp: bytes of temporary memory per device.
        collectives: number of occurrences of each (operation, shapes, location in the program).
        kernels: number of Triton calls in the compiled module.
        seconds: CPU seconds that compilation took.
        text: the compiled module.
    """

    arguments: int
    temp: int
    collectives: Mapping[tuple[str, str, str], int]
    kernels: int
    seconds: float
    text: str = dataclasses.field(repr=False)


def stored_shapes(config: ModelConfig, *, has_fp8: bool) -> dict:
    """Returns the shapes and dtypes of a model's parameters in a published checkpoint.

    Args:
        has_fp8: store the matrices in fp8 with one scale per 128 x 128 block, as DeepSeek-V3 does. The embedding, the
            head and all other parameters are bfloat16 in any case.

    Returns:
        A tree of `jax.ShapeDtypeStruct` and `BlockScaled`.
    """
    store = functools.partial(_as_stored, has_fp8=has_fp8)
    return jax.eval_shape(lambda params: jax.tree_util.tree_map_with_path(store, params), param_shapes(config))


def _as_stored(path, leaf, *, has_fp8: bool):
    name = path_name(path)
    if not has_fp8 or leaf.ndim < 2 or not FP8_PLACES.search(name):
        return leaf.astype(jnp.bfloat16)
    # The input axis is the first one, except in stacks of experts, where it follows the expert axis.
    is_stack = re.search(r"experts/(gate_up|down)$", name) is not None
    axis = (1 if is_stack else 0) - leaf.ndim
    shape = list(leaf.shape)
    shape[axis] = -(-shape[axis] // 128)
    return BlockScaled(leaf.astype(jnp.float8_e4m3fn), jnp.ones(shape, jnp.float32), axis=axis, block=128)


def call_shapes(
    config: ModelConfig, params: dict, sizes: Mapping[str, int], *, rows: int, slots: int, num_steps: int
) -> tuple[ModelConfig, dict, Any]:
    """Returns the shapes of a decoding call's arguments, including the copies of key and value heads that a mesh needs.

    Returns:
        The config to decode with, the parameters, and the state. The shapes are global, not per device.
    """
    fitted = fit_config(config, sizes)

    def make(params):
        if fitted != config:
            params = copy_key_value_heads(params, config, fitted.num_key_value_heads)
        settings = DecodeConfig(num_steps=num_steps)
        spec = make_spec(settings, is_greedy=True)
        state = Decoder(MTPModel(fitted), make_drafter(settings), spec).empty_state(
            StateShape(rows, slots), jnp.bfloat16
        )
        return align_blocks(params, fitted, sizes), state

    # `eval_shape` computes only shapes and allocates nothing.
    return fitted, *jax.eval_shape(make, params)


def bytes_of_shards(
    tree: Any, config: ModelConfig, sizes: Mapping[str, int], *, is_state: bool = False
) -> Iterator[tuple[str, tuple, float]]:
    """Yields the path, global shape and bytes per device of each parameter, or of each array in a decoding state."""
    specs = part_specs(tree, config, sizes, is_state=is_state)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        yield path_name(path), leaf.shape, math.prod(leaf.shape) * leaf.dtype.itemsize / num_shards(spec, sizes)


def h100_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Makes a mesh of H100s, even on a machine without them; raises `RuntimeError` if the CUDA plug-in is missing."""
    return compat.make_mesh(sizes, compat.h100_devices(f"1x1x{math.prod(sizes.values())}"))


def compile_call(
    config: ModelConfig,
    mesh: Mesh,
    *,
    rows: int,
    slots: int,
    params: dict,
    num_steps: int = 1,
    implementation: Implementation = "triton",
    prefill_chunk: int | None = None,
) -> Compiled:
    """Compiles a model's decoding call for a mesh such as `h100_mesh`, with the kernels of `implementation`."""
    # 1. Get the shapes of the arguments, and the static settings that decoding would choose for this batch.
    sizes = dict(mesh.shape)
    config, shapes, state = call_shapes(config, params, sizes, rows=rows, slots=slots, num_steps=num_steps)
    model = MTPModel(config, implementation=implementation)
    settings = DecodeConfig(num_steps=num_steps)
    drafter = make_drafter(settings)
    if prefill_chunk is None:
        prefill_chunk = choose_prefill_chunk(
            model.config,
            rows,
            platform_of(mesh),
            implementation=model.implementation,
            longest_prompt=slots // 2,
            max_length=slots,
        )
    spec = make_spec(settings, is_greedy=True, prefill_chunk=prefill_chunk)
    # 2. Shard the shapes over the mesh, as decoding shards the arrays.
    placed = _place(shapes, part_specs(shapes, config, sizes), mesh)
    state = _place(state, part_specs(state, config, sizes, is_state=True), mesh)
    draft_params = drafter.default_params(placed, settings, model=model)
    # 3. Compile, and read memory, collectives and kernels from the result.
    begin = time.process_time()
    with use_abstract_mesh(mesh.abstract_mesh):
        lowered = decode.plain.lower(placed, draft_params, state, decoder=Decoder(model, drafter, spec))
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports no memory for this platform"
    text = str(compiled.as_text())
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        collectives=find_collectives(text),
        kernels=text.count('custom_call_target="__gpu$xla.gpu.triton"'),
        seconds=time.process_time() - begin,
        text=text,
    )


def _place(tree, specs, mesh: Mesh):
    def shape(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree, specs)


def find_collectives(text: str) -> dict[tuple[str, str, str], int]:
    """Counts a compiled module's collectives by (operation, shapes, location); all layers count as one location."""
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for line in text.splitlines():
        match = COLLECTIVE.search(line)
        if match:
            source = re.search(r'op_name="([^"]*)"', line)
            place = re.sub(r"layer_\d+", "layer_*", source[1]) if source else ""
            found[match["name"], re.sub(r"\{[^}]*\}", "", match["results"]), place] += 1
    return dict(found)
