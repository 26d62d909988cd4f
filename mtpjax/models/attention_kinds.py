"""The kinds of attention, keyed by the values of `LayerKind.attention`."""

from mtpjax.models.config import ModelConfig
from mtpjax.models.layers.attention_kind import AttentionKind
from mtpjax.models.layers.delta_rule import DELTA
from mtpjax.models.layers.grouped_attention import GROUPED
from mtpjax.models.layers.latent_attention import LATENT

ATTENTION_KINDS: dict[str, AttentionKind] = {"grouped": GROUPED, "latent": LATENT, "delta": DELTA}


def has_recurrent_layers(config: ModelConfig) -> bool:
    """Returns whether any trunk layer keeps a recurrent state, which cannot be rolled back."""
    return any(ATTENTION_KINDS[kind.attention].is_recurrent for kind in config.trunk_kinds)
