"""Loads a Hugging Face checkpoint directory into a model and its parameters, tensor by tensor."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from conversion.gguf_files import open_checkpoint
from conversion.load_plan import LoadPlan, make_plan
from conversion.read_params import ReadPart
from conversion.tensor_slice import ParamSpec
from mtpjax.errors import CheckpointFileError
from mtpjax.models.decoding_layout import choose_layout
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import read_parts


def load(
    path,
    *,
    dtype=None,
    mesh: Mesh | None = None,
    allow_copies: bool = False,
    layout: Literal["decoding", "training"] = "decoding",
    model_type: str | None = None,
) -> tuple[MTPModel, dict]:
    """Loads a checkpoint directory.

    Args:
        path: a directory with `config.json` and safetensors files.
        dtype: dtype to cast the parameters to. `None` keeps the files' dtypes; block-quantized fp8 weights stay fp8
            with their scales (`BlockScaled`).
        mesh: mesh over which the parameters are sharded. Each process reads only its devices' shards.
        allow_copies: replicate dimensions that are not divisible by the size of their mesh axis.
        layout: whether to shard the parameters for decoding or for training.
        model_type: the family to use instead of the one in `config.json`.

    Returns:
        `(model, params)`: the model, and its parameters as nested dicts of JAX arrays.

    Raises:
        CheckpointFileError: the files are damaged, incomplete or not supported, or do not fit into memory.
        ConfigError: `config.json` is damaged or not supported.
        ValueError: the model cannot be sharded over the mesh.
    """
    with open_checkpoint(path) as files:
        # Check everything that the headers show before any weight is read.
        plan = make_plan(files, dtype=dtype, model_type=model_type)
        sharding_of = None if mesh is None else choose_layout(plan.config, mesh, layout, allow_copies=allow_copies)
        _check_memory(plan, mesh)

        def place(path: str, spec: ParamSpec, dtype: np.dtype, read: ReadPart) -> jax.Array:
            if sharding_of is None:
                return jax.device_put(read(tuple((0, size) for size in spec.shape)))
            return read_parts(spec.shape, sharding_of(path, spec.shape), read)

        # Reading and transposing release the interpreter lock, so threads load several parameters at once.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            values = pool.map(lambda path: plan.make_param(files, path, place), plan.specs)
            params = unflatten_dict(dict(zip(plan.specs, values, strict=True)), sep="/")
        files.report()
    return MTPModel(plan.config), params


def _check_memory(plan: LoadPlan, mesh: Mesh | None) -> None:
    """On CPUs, rejects a model that does not fit into this machine's memory."""
    # Count the bytes for this process's devices, which is their share under a mesh, or everything without a mesh.
    need = sum(np.prod(spec.shape, dtype=np.int64) * plan.dtypes[path].itemsize for path, spec in plan.specs.items())
    devices = len(mesh.local_devices) / mesh.size if mesh is not None else 1
    # Windows does not report its memory, so loading fails when memory runs out.
    if not hasattr(os, "sysconf"):
        return
    # Accelerators raise an error when they run out of memory, but a CPU machine would swap or kill the process.
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    if platform == "cpu" and need * devices > have:
        raise CheckpointFileError(
            f"out of memory: the parameters need {need * devices:.3g} bytes, and this machine has {have:.3g} bytes"
        )
