"""Prepares a call for its devices: shards the parameters, selects the kernels, and applies JAX settings."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtpjax.compat import library_settings
from mtpjax.decoding.config import DecodeConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import fit_to_mesh, shard_for_decoding
from mtpjax.models.sharding import mesh_of, platform_of
from pallas_kernels.batch_invariance import batch_invariant


def fit_params(
    params: dict, model: MTPModel, config: DecodeConfig, mesh: Mesh | None = None
) -> tuple[dict, MTPModel, Mesh | None]:
    """Fits the parameters and the model to a mesh.

    Args:
        config: settings; only `allow_copies` is read.
        mesh: mesh to move the parameters to; None leaves them where they are.

    Returns:
        The parameters and the model to decode with, and the mesh (None: one device).

    Raises:
        ValueError: the mesh axes do not divide the model's sizes.
    """
    if mesh is not None:
        model, params = shard_for_decoding(model, params, mesh, allow_copies=config.allow_copies)
    else:
        mesh = mesh_of(params["embedding"])
        if mesh is not None:
            model, params = fit_to_mesh(model, params, mesh.shape, allow_copies=config.allow_copies)
    return params, model, mesh


def with_implementation(model: MTPModel, config: DecodeConfig) -> MTPModel:
    """Returns the model with the kernel implementation from the settings, if they set one.

    With `deterministic`, "auto" selects the kernels on a GPU.
    """
    implementation = config.implementation or model.implementation
    if config.deterministic and implementation == "auto" and jax.default_backend() == "gpu":
        implementation = "triton"
    return model if implementation == model.implementation else model.clone(implementation=implementation)


@contextlib.contextmanager
def device_settings(params: dict, mesh: Mesh | None, config: DecodeConfig) -> Iterator[None]:
    """Applies the library's settings, the mesh, `deterministic` and, on accelerators, full float32 matmul precision.

    Raises:
        ValueError: `deterministic` is set for several devices.
    """
    if config.deterministic and mesh is not None and mesh.size > 1:
        raise ValueError(f"deterministic decoding runs on one device, not on a mesh of {mesh.size} devices")
    platform = platform_of(mesh)
    with contextlib.ExitStack() as settings:
        settings.enter_context(library_settings())
        settings.enter_context(batch_invariant(config.deterministic))
        if mesh is not None:
            settings.enter_context(jax.set_mesh(mesh))
        if platform != "cpu" and params["embedding"].dtype == jnp.float32:
            # By default XLA rounds float32 matmul inputs to TF32 on a GPU, but the Pallas kernels do not. TF32's error
            # can flip near-tied logits, so that plain and speculative decoding would differ.
            settings.enter_context(jax.default_matmul_precision("highest"))
        yield
