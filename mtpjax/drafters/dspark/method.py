"""Defines the DSpark `DraftMethod`, and creates new DSpark drafters for training."""

import functools
from typing import Any

from mtpjax.drafters.architecture import init_layers
from mtpjax.drafters.dflash.hf_config import block_files
from mtpjax.drafters.dflash.method import BLOCK_SETTINGS, block_fields, block_settings, with_mask_token
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.hf_files import DSPARK_FORMAT, dspark_specs
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig
from mtpjax.drafters.method import DraftMethod, DraftTraining
from mtpjax.models.config import ModelConfig

MARKOV_RANK = 256  # 2607.05147


def _new_architecture(settings: Any, trunk: ModelConfig, num_drafted: int) -> DSparkConfig:
    """Returns the architecture that DeepSpec trains, with Markov and confidence heads and a first slot that drafts."""
    return DSparkConfig(
        block_size=settings.num_depths,
        sample_from_anchor=True,
        markov_head="vanilla",
        markov_rank=settings.draft_markov_rank or min(MARKOV_RANK, trunk.vocab_size),
        has_confidence=True,
        confidence_with_markov=True,
        **block_fields(settings, trunk, num_drafted),
    )


DSPARK = DraftMethod(
    name="dspark",
    title="DSpark",
    drafter=DSparkDrafter,
    algorithms=("DSPARK",),
    files=block_files(
        DSPARK_FORMAT,
        dspark_specs,
        keys={"dspark_config": None, "projector_type": "dspark"},
        tensor="markov_head.markov_w1.weight",
    ),
    training=DraftTraining(
        architecture=_new_architecture,
        init=functools.partial(init_layers, DSpark),
        settings_of=lambda config: block_settings(config) | {"draft_markov_rank": config.markov_rank},
        settings=(*BLOCK_SETTINGS, "draft_markov_rank"),
        fit_to_data=with_mask_token,
        min_levels=2,  # minimum number of slots in a block
    ),
)
