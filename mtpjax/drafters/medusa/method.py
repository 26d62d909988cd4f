"""Defines the Medusa `DraftMethod`, and creates new heads for training."""

from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.drafters.medusa.drafting import MedusaDrafter
from mtpjax.drafters.medusa.hf_files import MEDUSA_IDS, describe_medusa, medusa_specs, parse_medusa
from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
from mtpjax.drafters.method import DrafterFiles, DraftMethod, DraftTraining
from mtpjax.models.config import ModelConfig


def _new_architecture(settings: Any, trunk: ModelConfig, num_drafted: int) -> MedusaConfig:
    """Returns an architecture with `num_depths` heads, each with one residual layer."""
    return MedusaConfig(
        hidden_size=trunk.hidden_size,
        vocab_size=trunk.vocab_size,
        num_heads=settings.num_depths,
        draft_vocab_size=num_drafted,
        num_layers=1,
    )


MEDUSA = DraftMethod(
    name="medusa",
    title="Medusa",
    drafter=MedusaDrafter,
    algorithms=("MEDUSA",),
    files=DrafterFiles(
        formats=("medusa", "vllm"),
        format_with_ids="vllm",
        parse=lambda values, shapes, trunk, reading: parse_medusa(values, shapes, trunk),
        specs=medusa_specs,
        describe=describe_medusa,
        ids=MEDUSA_IDS,
        keys={"medusa_num_heads": None},
        tensors=("0.0.linear.weight", "blocks.0.layers.0.weight"),
        owners=("medusa_heads", "medusa_head"),
    ),
    training=DraftTraining(
        architecture=_new_architecture,
        init=lambda config, key: jax.jit(Medusa(config).init)(key, jnp.zeros((1, config.hidden_size)))["params"],
        settings_of=lambda config: {"num_depths": config.num_heads},
    ),
)
