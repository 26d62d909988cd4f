"""Makes the model that a run begins with: new weights of an architecture, or those of a checkpoint."""

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mtpjax.io import checkpoint
from mtpjax.models.model import MTPModel
from mtpjax.models.overrides import model_changes
from mtpjax.models.params import add_mtp_modules, init_params
from mtpjax.models.trunk import stack_layers
from mtpjax.training.config import TrainConfig

logger = logging.getLogger("mtpjax.train")


def init_model(config: TrainConfig) -> tuple[MTPModel, Callable[[], dict]]:
    """Makes the model of a run, with stacked trunk layers.

    Args:
        config: the settings.

    Returns:
        The model, and a function that makes its initial float32 parameters.

    Raises:
        ValueError: `model.num_mtp_modules` is below the number of modules of the checkpoint, or a run of the modules
            alone has none.
        CheckpointError: `init_from` cannot be loaded.
    """
    key = jax.random.key(config.seed)
    if config.init_from is None:
        # New weights.
        model = MTPModel(config.model_config, scan_layers=True, implementation=config.implementation)
        _check_trained_modules(config, model)
        return model, functools.partial(init_params, model, key)
    # A checkpoint. A trunk that comes without MTP modules gets one to train, or as many as the settings ask for.
    model, params = checkpoint.load(config.init_from, dtype=jnp.float32, model_type=config.model_type)
    existing = model.config.num_mtp_modules
    wanted = model_changes(config.model).get("num_mtp_modules", existing or int(config.num_depths > 0))
    if wanted < existing:
        raise ValueError(
            f"model.num_mtp_modules {wanted} is below the {existing} MTP modules of {config.init_from}: modules can be"
            " added, not removed"
        )
    if wanted > existing:
        model, params = add_mtp_modules(model, params, wanted - existing, key)
    model = MTPModel(model.config, scan_layers=True, implementation=config.implementation)
    _check_trained_modules(config, model)
    return model, functools.partial(stack_layers, params, model.config)


def num_trained_depths(config: TrainConfig, model: MTPModel) -> int:
    """Returns the number of draft depths to train: none for a model without MTP modules.

    Args:
        config: the settings.
        model: the model of the run.

    Returns:
        The number of depths.
    """
    return config.num_depths if model.config.num_mtp_modules else 0


def _check_trained_modules(config: TrainConfig, model: MTPModel) -> None:
    """Raises `ValueError` if nothing would be trained, and warns of modules without a loss."""
    modules = model.config.num_mtp_modules
    if config.trains == "modules" and not modules:
        raise ValueError("trains 'modules' needs a model with MTP modules, and this one has 0 (model.num_mtp_modules)")
    # num_depths 0 is the way to train a trunk alone, so it needs no warning.
    if 0 < config.num_depths < modules:
        logger.warning(
            "num_depths %d trains the first %d of %d MTP modules: set num_depths=%d to train all",
            config.num_depths,
            config.num_depths,
            modules,
            modules,
        )
