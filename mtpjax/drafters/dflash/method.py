"""The record of DFlash, and how drafters with blocks are made for training."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.drafters.architecture import dense_layers
from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dflash.hf_config import DFLASH_FORMAT, describe_blocks, dflash_specs, parse_blocks
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig
from mtpjax.drafters.method import DrafterFiles, DraftMethod, DraftTraining
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import full_view

NUM_BLOCK_LAYERS = 5  # layers of a drafter, and trunk layers that it reads (2602.06036)
MIN_BLOCK_LAYERS = 8  # from this depth on, five different layers fit between 2 and L - 2
BLOCK_SETTINGS = ("draft_layers", "draft_num_layers", "draft_anchors", "draft_mask_token")


def default_block_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose input states are read: five at equal distances from 2 to L - 2, or from 1 to L of fewer
    than 8 layers."""
    first, last = (2, num_layers - 2) if num_layers >= MIN_BLOCK_LAYERS else (1, num_layers)
    return tuple(sorted({round(each) for each in np.linspace(first, last, NUM_BLOCK_LAYERS)}))


def block_fields(settings: Any, trunk: ModelConfig, num_drafted: int) -> dict[str, Any]:
    """Returns fields of a new `DFlashConfig`: Qwen3 layers of the trunk's width; all slots attend to each other."""
    num_layers = settings.draft_num_layers or NUM_BLOCK_LAYERS
    return {
        "block": dense_layers(trunk, num_hidden_layers=num_layers, use_qk_norm=True),
        "layer_ids": settings.draft_layers or default_block_layers(trunk.num_hidden_layers),
        "num_target_layers": trunk.num_hidden_layers,
        "mask_token_id": settings.draft_mask_token or 0,
        "draft_vocab_size": num_drafted,
        # The trunk's head has the columns of all tokens.
        "own_head": num_drafted < trunk.vocab_size,
    }


def block_settings(config: DFlashConfig) -> dict[str, Any]:
    """Returns the settings that an architecture implies."""
    return {
        "num_depths": config.num_drafts,
        "draft_layers": config.layer_ids,
        "draft_num_layers": config.block.num_hidden_layers,
        "draft_mask_token": config.mask_token_id,
    }


def with_mask_token(config: DFlashConfig, settings: Any, counts: np.ndarray, end_ids: Collection[int]) -> DFlashConfig:
    """Chooses the token of the mask slots, unless the settings name one: the last of the rarest targets."""
    if settings.draft_mask_token is not None:
        return config
    counts = counts.copy()
    # Never an end token, however rare: drafts contain it.
    counts[list(end_ids)] = np.iinfo(np.int64).max
    return dataclasses.replace(config, mask_token_id=len(counts) - 1 - int(np.argmin(counts[::-1])))


def init_blocks(network: type[DFlash], config: DFlashConfig, key: jax.Array) -> dict[str, Any]:
    """Makes the parameters of a network."""
    # Only the shapes of the inputs matter here.
    view = full_view(config.block, jnp.ones((1, 2), jnp.int32))
    features, embedded = jnp.zeros((1, 2, config.features_size)), jnp.zeros((1, 2, config.block.hidden_size))
    return jax.jit(network(config).init)(key, features, embedded, view)["params"]


DFLASH = DraftMethod(
    name="dflash",
    title="DFlash",
    drafter=DFlashDrafter,
    algorithms=("DFLASH",),
    files=DrafterFiles(
        formats=("z-lab", "speculators"),
        format_with_ids="speculators",
        parse=lambda *arguments: parse_blocks(DFLASH_FORMAT, *arguments),
        specs=lambda config, form: dflash_specs(config),
        describe=lambda config, form: describe_blocks(DFLASH_FORMAT, config, form),
        is_of_speculators=True,
        tensors=("hidden_norm.weight",),
    ),
    training=DraftTraining(
        # The anchor's slot drafts nothing.
        architecture=lambda settings, *trunk: DFlashConfig(
            block_size=settings.num_depths + 1, **block_fields(settings, *trunk)
        ),
        init=lambda config, key: init_blocks(DFlash, config, key),
        settings_of=block_settings,
        settings=BLOCK_SETTINGS,
        fit_to_data=with_mask_token,
    ),
)
