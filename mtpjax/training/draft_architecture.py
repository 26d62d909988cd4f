"""Chooses the architecture of the drafter that a run trains beside its trunk."""

from typing import Any

import numpy as np

from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dspark.network import DSparkConfig
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.forward import DraftArchitecture
from mtpjax.drafters.medusa.network import MedusaConfig
from mtpjax.models.config import ModelConfig
from mtpjax.training.config import BLOCK_DRAFTERS, TrainConfig

MIN_DEFAULT_LAYERS = 7  # from here on EAGLE-3's default layers are three different ones
NUM_BLOCK_LAYERS = 5  # layers of DFlash and DSpark, and trunk layers that they read (2602.06036)
MIN_BLOCK_LAYERS = 8  # from here on the latter are five different ones from 2 to L - 2
MARKOV_RANK = 256  # of DSpark (2607.05147)


def default_draft_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose input states EAGLE-3 reads: 2, L / 2 and L - 3, or thirds of a smaller trunk.

    Args:
        num_layers: layers of the trunk, L.

    Returns:
        Layers, ascending; L means the output of the last one.
    """
    if num_layers >= MIN_DEFAULT_LAYERS:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({num_layers // 3, 2 * num_layers // 3, num_layers}))


def default_block_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose input states DFlash and DSpark read: five at equal distances from 2 to L - 2.

    Args:
        num_layers: layers of the trunk, L. With fewer than 8, the layers are within 1..L.

    Returns:
        Layers, ascending; L means the output of the last one.
    """
    first, last = (2, num_layers - 2) if num_layers >= MIN_BLOCK_LAYERS else (1, num_layers)
    return tuple(sorted({round(each) for each in np.linspace(first, last, NUM_BLOCK_LAYERS)}))


def draft_architecture(config: TrainConfig, trunk: ModelConfig) -> DraftArchitecture | None:
    """Returns the architecture of a run's new drafter.

    An EAGLE-3 drafter has one Llama layer of the trunk's width, with as many attention heads. Medusa has one residual
    layer per head. DFlash and DSpark have Qwen3 layers of this width; without a draft vocabulary they use the trunk's
    head. All slots of a block see each other. DSpark's first slot drafts, too.

    Args:
        config: the settings.
        trunk: the trunk's config.

    Returns:
        The architecture, whose mask token `mtpjax.training.new_drafter.with_mask_token` sets; None for MTP modules.

    Raises:
        ValueError: the settings do not fit the trunk.
    """
    if config.drafter == "mtp":
        return None
    V, D = trunk.vocab_size, trunk.hidden_size
    if config.draft_vocab_size > V:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary of {V}")
    # 0 keeps the whole vocabulary.
    num_drafted = config.draft_vocab_size or V
    if config.drafter == "medusa":
        return MedusaConfig(
            hidden_size=D, vocab_size=V, num_heads=config.num_depths, draft_vocab_size=num_drafted, num_layers=1
        )
    if config.drafter in BLOCK_DRAFTERS:
        return _block_architecture(config, trunk, num_drafted)
    return Eagle3Config(
        block=_layers_config(trunk, num_hidden_layers=1),
        layer_ids=config.draft_layers or default_draft_layers(trunk.num_hidden_layers),
        num_target_layers=trunk.num_hidden_layers,
        target_hidden_size=D,
        draft_vocab_size=num_drafted,
    )


def _layers_config(trunk: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns the config of dense layers of the trunk's width, with as many attention heads."""
    D, is_grouped = trunk.hidden_size, trunk.attention == "grouped"
    return ModelConfig(
        vocab_size=trunk.vocab_size,
        hidden_size=D,
        num_attention_heads=trunk.num_attention_heads,
        num_key_value_heads=(trunk.num_key_value_heads if is_grouped else 0) or trunk.num_attention_heads,
        head_dim=(trunk.head_dim if is_grouped else 0) or D // trunk.num_attention_heads,
        intermediate_size=trunk.intermediate_size,
        max_position_embeddings=trunk.max_position_embeddings,
        rms_norm_eps=trunk.rms_norm_eps,
        rope_theta=trunk.rope_theta,
        **changes,
    )


def _block_architecture(config: TrainConfig, trunk: ModelConfig, num_drafted: int) -> DFlashConfig:
    """Returns the architecture of DFlash or DSpark."""
    num_layers, V = config.draft_num_layers or NUM_BLOCK_LAYERS, trunk.vocab_size
    shape: dict[str, Any] = {
        "block": _layers_config(trunk, num_hidden_layers=num_layers, use_qk_norm=True),
        "layer_ids": config.draft_layers or default_block_layers(trunk.num_hidden_layers),
        "num_target_layers": trunk.num_hidden_layers,
        "mask_token_id": config.draft_mask_token or 0,
        "draft_vocab_size": num_drafted,
        # The trunk's head has the columns of all tokens.
        "own_head": num_drafted < V,
    }
    # The slot of DFlash's anchor drafts nothing.
    if config.drafter == "dflash":
        return DFlashConfig(block_size=config.num_depths + 1, **shape)
    # The heads that DeepSpec trains.
    return DSparkConfig(
        block_size=config.num_depths,
        sample_from_anchor=True,
        markov_head="vanilla",
        markov_rank=config.draft_markov_rank or min(MARKOV_RANK, V),
        has_confidence=True,
        confidence_with_markov=True,
        **shape,
    )
