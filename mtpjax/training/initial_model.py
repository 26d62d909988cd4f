"""Makes the initial model of a run, with new weights or with the weights of a checkpoint."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mtpjax.io import checkpoint
from mtpjax.models.config import ModelConfig
from mtpjax.models.context import AXIS
from mtpjax.models.model import MTPModel
from mtpjax.models.overrides import model_changes
from mtpjax.models.params import add_mtp_modules, init_params, is_of_modules
from mtpjax.models.quantized import is_scaled
from mtpjax.models.trunk import stack_layers
from mtpjax.training.config import TrainConfig

logger = logging.getLogger("mtpjax.train")


def init_model(config: TrainConfig, mesh: Mesh | None = None) -> tuple[MTPModel, Callable[[], dict]]:
    """Makes a run's model with stacked trunk layers, or only its unrolled trunk if a separate drafter trains.

    Args:
        mesh: mesh on whose devices the parameters are drawn or read as shards; None: one device.

    Returns:
        The model, and a function that makes its initial parameters, which are float32 except for a frozen trunk.
    """
    key = jax.random.key(config.seed)
    if config.init_from is None:
        # Make new weights.
        model = MTPModel(config.model_config, scan_layers=True, implementation=config.implementation)
        _check_modules_and_experts(config, model)
        return model, functools.partial(init_params, model, key, mesh)
    # Load a checkpoint. A trunk without MTP modules gets one to train, or as many as the settings say.
    model, params = checkpoint.load(
        config.init_from,
        dtype=jnp.float32 if config.trunk_dtype == "float32" else None,
        mesh=mesh,
        layout="training",
        model_type=config.model_type,
    )
    # A separate drafter needs only the trunk, which stays unrolled because stacked layers cannot return their states.
    if not config.draft_method.is_of_model:
        trunk = {name: leaf for name, leaf in params.items() if not is_of_modules(name)}
        if config.trunk_dtype == "bfloat16":
            trunk = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trunk, is_leaf=is_scaled)
        check_mesh_fits(dict(config.mesh), model.config)
        bare = dataclasses.replace(model.config, num_mtp_modules=0)
        return MTPModel(bare, implementation=config.implementation), lambda: trunk
    existing = model.config.num_mtp_modules
    wanted = model_changes(config.model).get("num_mtp_modules", existing or int(config.num_depths > 0))
    if wanted < existing:
        raise ValueError(
            f"model.num_mtp_modules {wanted} is below the {existing} MTP modules in {config.init_from}: modules can be"
            " added, not removed"
        )
    if wanted > existing:
        model, params = add_mtp_modules(model, params, wanted - existing, key)
    model = MTPModel(model.config, scan_layers=True, implementation=config.implementation)
    _check_modules_and_experts(config, model)
    # Trained modules are float32, regardless of the frozen trunk's dtype.
    for name in params:
        dtype = jnp.float32 if is_of_modules(name) else jnp.bfloat16 if config.trunk_dtype == "bfloat16" else None
        if dtype is not None:
            params[name] = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), params[name], is_leaf=is_scaled)
    return model, functools.partial(stack_layers, params, model.config)


def num_trained_depths(config: TrainConfig, model: MTPModel) -> int:
    """Returns the number of draft depths to train, which is 0 without MTP modules and without a separate drafter."""
    return config.num_depths if model.config.num_mtp_modules or not config.draft_method.is_of_model else 0


def check_mesh_fits(sizes: Mapping[str, int], config: ModelConfig) -> None:
    """Raises `ValueError` if the axes of a mesh do not fit the model: its experts, or its sparse indexer."""
    parts, experts = sizes.get("expert", 1), config.n_routed_experts
    if experts % parts or (parts > 1 and not experts):
        raise ValueError(f"mesh axis expert = {parts} does not divide the model's n_routed_experts {experts}")
    if sizes.get(AXIS, 1) > 1 and config.index_topk:
        raise ValueError(f"mesh axis {AXIS} does not support the sparse indexer of index_topk {config.index_topk}")


def _check_modules_and_experts(config: TrainConfig, model: MTPModel) -> None:
    """Raises `ValueError` if nothing would be trained, a setting is unused, or the mesh does not fit the model.

    Warns about modules that have no loss.
    """
    check_mesh_fits(dict(config.mesh), model.config)
    modules = model.config.num_mtp_modules
    if config.trains == "modules" and not modules:
        raise ValueError("trains='modules' needs a model with MTP modules, and this one has 0 (model.num_mtp_modules)")
    if not modules and config.num_depths not in (0, TrainConfig.num_depths):
        raise ValueError(
            f"num_depths {config.num_depths} is unused: the model has 0 MTP modules (model.num_mtp_modules)"
        )
    if config.attention_layout != "ttt" and config.num_depths <= modules:
        raise ValueError(
            f"attention_layout '{config.attention_layout}' is unused: it needs a recycled depth, so num_depths must "
            f"exceed the model's {modules} MTP modules"
        )
    # num_depths 0 trains only the trunk, so it needs no warning.
    if 0 < config.num_depths < modules:
        what = "num_depths %d trains only the first modules: set num_depths=%d to train all"
        logger.warning(what, config.num_depths, modules)
