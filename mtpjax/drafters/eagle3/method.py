"""Defines the EAGLE-3 `DraftMethod`, and creates new EAGLE-3 drafters for training."""

import functools
from typing import Any

from mtpjax.drafters.architecture import dense_layers, init_layers
from mtpjax.drafters.eagle3.drafting import Eagle3Drafter
from mtpjax.drafters.eagle3.hf_config import describe_eagle3, eagle3_specs, parse_eagle3
from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config
from mtpjax.drafters.files.tensor_names import ALIASES, MIDLAYER
from mtpjax.drafters.method import DrafterFiles, DraftMethod, DraftTraining
from mtpjax.models.config import ModelConfig

MIN_DEFAULT_LAYERS = 7  # minimum depth at which the three default layers differ


def default_draft_layers(num_layers: int) -> tuple[int, ...]:
    """Returns a new drafter's trunk layers: 2, L / 2 and L - 3 of L layers, or L / 3, 2 L / 3 and L if L is below 7."""
    if num_layers >= MIN_DEFAULT_LAYERS:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({num_layers // 3, 2 * num_layers // 3, num_layers}))


def _new_architecture(settings: Any, trunk: ModelConfig, num_drafted: int) -> Eagle3Config:
    """Returns an architecture with one Llama layer, which has the trunk's width and number of attention heads."""
    return Eagle3Config(
        block=dense_layers(trunk, num_hidden_layers=1),
        layer_ids=settings.draft_layers or default_draft_layers(trunk.num_hidden_layers),
        num_target_layers=trunk.num_hidden_layers,
        target_hidden_size=trunk.hidden_size,
        draft_vocab_size=num_drafted,
    )


def _rename(name: str, form: str) -> str:
    """Returns a tensor's name in this format; SpecForge uses a different name for the only layer."""
    return name.replace(ALIASES[MIDLAYER], MIDLAYER) if form == "specforge" else name


EAGLE3 = DraftMethod(
    name="eagle3",
    title="EAGLE-3",
    drafter=Eagle3Drafter,
    algorithms=("EAGLE3", "EAGLE"),
    default_levels=3,
    files=DrafterFiles(
        # The first format is the default because it is unambiguous; SpecForge's list of layers has two readings.
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
        init=functools.partial(init_layers, Eagle3),
        settings_of=lambda config: {"draft_layers": config.layer_ids},
        settings=("draft_layers",),
    ),
)
