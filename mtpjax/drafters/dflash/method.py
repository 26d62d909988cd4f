"""Defines the DFlash `DraftMethod`, and creates new block drafters for training."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import numpy as np

from mtpjax.drafters.architecture import dense_layers, init_layers
from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dflash.hf_config import DFLASH_FORMAT, block_files, dflash_specs
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig
from mtpjax.drafters.method import DraftMethod, DraftTraining
from mtpjax.models.config import ModelConfig

NUM_BLOCK_LAYERS = 5  # number of drafter layers, and of trunk layers that the drafter reads (2602.06036)
MIN_BLOCK_LAYERS = 8  # minimum trunk depth L for five different layers between 2 and L - 2
BLOCK_SETTINGS = ("draft_layers", "draft_num_layers", "draft_anchors", "draft_mask_token")


def default_block_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the five trunk layers whose input states a new drafter reads, evenly spaced from 2 to L - 2.

    In a trunk with fewer than 8 layers, they are spaced from 1 to L.
    """
    first, last = (2, num_layers - 2) if num_layers >= MIN_BLOCK_LAYERS else (1, num_layers)
    return tuple(sorted({round(each) for each in np.linspace(first, last, NUM_BLOCK_LAYERS)}))


def block_fields(settings: Any, trunk: ModelConfig, num_drafted: int) -> dict[str, Any]:
    """Returns the fields of a new `DFlashConfig`, with bidirectional Qwen3 layers of the trunk's width."""
    num_layers = settings.draft_num_layers or NUM_BLOCK_LAYERS
    return {
        "block": dense_layers(trunk, num_hidden_layers=num_layers, use_qk_norm=True),
        "layer_ids": settings.draft_layers or default_block_layers(trunk.num_hidden_layers),
        "num_target_layers": trunk.num_hidden_layers,
        "mask_token_id": settings.draft_mask_token or 0,
        "draft_vocab_size": num_drafted,
        # The trunk's head has columns for all tokens, so a smaller draft vocabulary needs a separate head.
        "own_head": num_drafted < trunk.vocab_size,
    }


def block_settings(config: DFlashConfig) -> dict[str, Any]:
    """Returns the training settings that an architecture implies."""
    return {
        "num_depths": config.num_drafts,
        "draft_layers": config.layer_ids,
        "draft_num_layers": config.block.num_hidden_layers,
        "draft_mask_token": config.mask_token_id,
    }


def with_mask_token(config: DFlashConfig, settings: Any, counts: np.ndarray, end_ids: Collection[int]) -> DFlashConfig:
    """Sets the mask token to the rarest target (the highest id among ties), unless the settings choose one."""
    if settings.draft_mask_token is not None:
        return config
    counts = counts.copy()
    # Never choose an end token, however rare, because drafts contain it.
    counts[list(end_ids)] = np.iinfo(np.int64).max
    return dataclasses.replace(config, mask_token_id=len(counts) - 1 - int(np.argmin(counts[::-1])))


DFLASH = DraftMethod(
    name="dflash",
    title="DFlash",
    drafter=DFlashDrafter,
    algorithms=("DFLASH",),
    files=block_files(DFLASH_FORMAT, dflash_specs, tensor="hidden_norm.weight"),
    training=DraftTraining(
        # The anchor's slot does not draft, so the block has one slot more than there are levels.
        architecture=lambda settings, *trunk: DFlashConfig(
            block_size=settings.num_depths + 1, **block_fields(settings, *trunk)
        ),
        init=functools.partial(init_layers, DFlash),
        settings_of=block_settings,
        settings=BLOCK_SETTINGS,
        fit_to_data=with_mask_token,
    ),
)
