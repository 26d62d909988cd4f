"""The record of EAGLE-3, and how its drafters are made for training."""

from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.drafters.architecture import dense_layers
from mtpjax.drafters.eagle3.drafting import Eagle3Drafter
from mtpjax.drafters.eagle3.hf_config import describe_eagle3, eagle3_specs, parse_eagle3
from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config
from mtpjax.drafters.files.tensor_names import ALIASES, MIDLAYER
from mtpjax.drafters.method import DrafterFiles, DraftMethod, DraftTraining
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import full_view

MIN_DEFAULT_LAYERS = 7  # from this depth on, the default layers are three different ones


def default_draft_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose input states are read: 2, L / 2 and L - 3, or thirds of a smaller trunk."""
    if num_layers >= MIN_DEFAULT_LAYERS:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({num_layers // 3, 2 * num_layers // 3, num_layers}))


def _new_architecture(settings: Any, trunk: ModelConfig, num_drafted: int) -> Eagle3Config:
    """Returns one Llama layer of the trunk's width, with as many attention heads."""
    return Eagle3Config(
        block=dense_layers(trunk, num_hidden_layers=1),
        layer_ids=settings.draft_layers or default_draft_layers(trunk.num_hidden_layers),
        num_target_layers=trunk.num_hidden_layers,
        target_hidden_size=trunk.hidden_size,
        draft_vocab_size=num_drafted,
    )


def _init(config: Eagle3Config, key: jax.Array) -> dict[str, Any]:
    # Only the shapes of the inputs matter here.
    tokens = jnp.zeros((1, 2), jnp.int32)
    features, view = jnp.zeros((1, 2, config.features_size)), full_view(config.block, tokens + 1)
    return jax.jit(Eagle3(config).init)(key, features, tokens, view)["params"]


def _rename(name: str, form: str) -> str:
    """Returns SpecForge's own name of a tensor of the only layer."""
    return name.replace(ALIASES[MIDLAYER], MIDLAYER) if form == "specforge" else name


EAGLE3 = DraftMethod(
    name="eagle3",
    title="EAGLE-3",
    drafter=Eagle3Drafter,
    algorithms=("EAGLE3", "EAGLE"),
    default_levels=3,
    files=DrafterFiles(
        # The first format has one reading; SpecForge's list of layers has two.
        formats=("speculators", "specforge"),
        parse=parse_eagle3,
        specs=lambda config, form: eagle3_specs(config),
        describe=describe_eagle3,
        rename=_rename,
        is_of_speculators=True,
        tensors=("layers.0.hidden_norm.weight",),
        owners=("eagle_module", "eagle"),
    ),
    training=DraftTraining(
        architecture=_new_architecture,
        init=_init,
        settings_of=lambda config: {"draft_layers": config.layer_ids},
        settings=("draft_layers",),
    ),
)
