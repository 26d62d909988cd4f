"""Names of the tensors of EAGLE-3 drafters.

Axes: D width of the drafter, Dt of the trunk, V vocabulary, R draft vocabulary.
"""

from conversion.attention_names import grouped_names
from conversion.families import Layout
from conversion.tensor_slice import ParamSpec, copied, gate_up, linear, prefixed
from mtpjax.drafters.eagle3.network import Eagle3Config


def eagle3_specs(config: Eagle3Config) -> dict[str, ParamSpec]:
    """Lists every parameter with the tensors that hold it, by their plain names."""
    block, Dt = config.block, config.target_hidden_size
    D, V = block.hidden_size, block.vocab_size
    specs = {"fc": linear("fc.weight", config.features_size, D), "norm_final/scale": copied("norm.weight", D)}
    if config.norm_before_fc:
        specs["norm_features/scale"] = copied("input_norm.weight", config.features_size)
    if config.fc_norm:
        for index in range(len(config.layer_ids)):
            specs[f"norm_state_{index}/scale"] = copied(f"fc_norm.{index}.weight", Dt)
    for index, kind in enumerate(block.trunk_kinds):
        prefix = f"layers.{index}."
        # The first layer normalises its two inputs one by one; its attention reads both.
        first = {"norm_embedding": "input_layernorm", "norm_hidden": "hidden_norm"}
        norms = (first if index == 0 else {"norm_attention": "input_layernorm"}) | {
            "norm_feed_forward": "post_attention_layernorm"
        }
        layer = {f"{path}/scale": copied(f"{prefix}{name}.weight", D) for path, name in norms.items()}
        input_size = 2 * D if index == 0 else D
        layer |= prefixed("attention/", grouped_names(block, kind, prefix, Layout(), input_size=input_size))
        layer["dense/gate_up"] = gate_up(f"{prefix}mlp.", D, block.intermediate_size)
        layer["dense/down"] = linear(f"{prefix}mlp.down_proj.weight", block.intermediate_size, D)
        specs |= prefixed(f"layer_{index}/", layer)
    if config.own_embedding:
        specs["embedding"] = copied("embed_tokens.weight", V, D)
    if config.own_head:
        specs["head"] = linear("lm_head.weight", D, config.draft_vocab_size)
    return specs
