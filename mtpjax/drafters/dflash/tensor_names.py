"""Names of the tensors of DFlash drafters, which are the same in all formats.

Axes: D width, V vocabulary, R draft vocabulary.
"""

from conversion.attention_names import grouped_names
from conversion.families import Layout
from conversion.tensor_slice import ParamSpec, copied, gate_up, linear, prefixed
from mtpjax.drafters.dflash.network import DFlashConfig


def dflash_specs(config: DFlashConfig) -> dict[str, ParamSpec]:
    """Lists every parameter with the tensors that hold it, by their plain names."""
    block, R = config.block, config.draft_vocab_size
    D, V = block.hidden_size, block.vocab_size
    specs = {
        "fc": linear("fc.weight", config.features_size, D),
        "norm_context/scale": copied("hidden_norm.weight", D),
        "norm_final/scale": copied("norm.weight", D),
    }
    for index, kind in enumerate(config.kinds):
        prefix = f"layers.{index}."
        norms = {"norm_attention": "input_layernorm", "norm_feed_forward": "post_attention_layernorm"}
        layer = {f"{path}/scale": copied(f"{prefix}{name}.weight", D) for path, name in norms.items()}
        layer |= prefixed("attention/", grouped_names(block, kind, prefix, Layout()))
        layer["dense/gate_up"] = gate_up(f"{prefix}mlp.", D, block.intermediate_size)
        layer["dense/down"] = linear(f"{prefix}mlp.down_proj.weight", block.intermediate_size, D)
        specs |= prefixed(f"layer_{index}/", layer)
    if config.own_embedding:
        specs["embedding"] = copied("embed_tokens.weight", V, D)
    if config.own_head:
        specs["head"] = linear("lm_head.weight", D, R)
    return specs
