"""Compiles a training update for GPUs from shapes alone, to get its exact memory. Nothing runs, so no GPU is needed."""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from mtpjax.data.packing import Batch
from mtpjax.models.config import Implementation, ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import is_of_modules
from mtpjax.models.quantized import is_scaled
from mtpjax.models.sharding import param_shardings
from mtpjax.models.trunk import stack_layers
from mtpjax.training.config import TrainConfig
from mtpjax.training.data_parallel import row_spec
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state, trainable_params
from mtpjax.training.update_memory import UpdateShape


class CompiledUpdate(NamedTuple):
    """A compiled update.

    Attributes:
        arguments: bytes per device of parameters, optimizer and batch.
        temp: bytes per device of temporary memory.
        seconds: CPU seconds of the compilation.
        text: the compiled module.
    """

    arguments: int
    temp: int
    seconds: float
    text: str


def compile_update(
    config: ModelConfig,
    params: dict,
    mesh: Mesh,
    shape: UpdateShape,
    *,
    implementation: Implementation = "xla",
    compiler_options: dict[str, str | bool] | None = None,
) -> CompiledUpdate:
    """Compiles an update in bfloat16 with AdamW.

    Args:
        config: the model's config.
        params: shapes of the parameters with unrolled layers, such as `stored_shapes`; trained ones become float32.
        mesh: devices to compile for, such as `h100_mesh`.
        shape: rows of each device, policy and losses.
        implementation: how kernels run.
        compiler_options: options for XLA, such as `xla_dump_to`.
    """
    # 1. The shapes of the state. Moments have the layout of their parameters.
    model = MTPModel(config, scan_layers=True, implementation=implementation, remat=shape.remat, dtype=jnp.bfloat16)
    settings = TrainConfig(trains=shape.trains)
    objective = dataclasses.replace(settings.objective, vocab_chunk=shape.vocab_chunk)
    optimizer = make_optimizer(settings)

    def make(params):
        widen = lambda tree: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree, is_leaf=is_scaled)
        is_trained = lambda name: shape.trains != "modules" or is_of_modules(name)
        params = {name: widen(leaf) if is_trained(name) else leaf for name, leaf in params.items()}
        return init_train_state(stack_layers(params, config), optimizer, shape.trains)

    state = jax.eval_shape(make, params)
    replicated, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, row_spec(mesh))
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    placed = jax.tree.map(place, state.params, param_shardings(state.params, mesh))
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, param: place(leaf, param.sharding),
        state.optimizer,
        trainable_params(placed, shape.trains),
        transform_non_params=lambda leaf: place(leaf, replicated),
    )
    state = state.replace(params=placed, optimizer=moments, step=place(state.step, replicated))
    # 2. The batch, and the numbers that depend on the progress.
    size = mesh.size * shape.tokens // shape.row_length, shape.row_length
    arrays: list[Any] = [jax.ShapeDtypeStruct(size, dtype, sharding=rows) for dtype in (jnp.int32, jnp.int32, bool)]
    numbers = [jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)] * 3
    # 3. Compile, and read the memory.
    spec = TrainSpec(model=model, num_depths=shape.num_depths, objective=objective, trains=shape.trains, mesh=mesh)
    step = functools.partial(train_step, spec=spec, optimizer=optimizer)
    shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), replicated)
    begin = time.process_time()
    with use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(step, donate_argnames="state", out_shardings=shardings)
        lowered = jitted.lower(state, Batch(*arrays), *numbers)
        compiled = lowered.compile(compiler_options)
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports no memory for this platform"
    seconds = time.process_time() - begin
    return CompiledUpdate(memory.argument_size_in_bytes, memory.temp_size_in_bytes, seconds, str(compiled.as_text()))
