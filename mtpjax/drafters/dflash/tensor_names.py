"""Names of the tensors of DFlash and DSpark drafters, which are the same in all formats.

Axes: D width, V vocabulary, R draft vocabulary, r rank of the Markov head.
"""

from conversion.attention_names import grouped_names
from conversion.families import Layout
from conversion.layer_names import prefixed
from conversion.tensor_slice import ParamSpec, copied, gate_up, linear
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dspark.network import DSparkConfig

STEPS = {"gated": "gate_proj", "rnn": "joint_proj"}  # of the Markov head


def dflash_specs(config: DFlashConfig) -> dict[str, ParamSpec]:
    """Lists every parameter with the tensors that hold it, by their plain names (`mtpjax.drafters.files.tensor_names`).

    Args:
        config: the architecture.

    Returns:
        The specs by flat parameter name.
    """
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
    return specs | (_head_specs(config) if isinstance(config, DSparkConfig) else {})


def _head_specs(config: DSparkConfig) -> dict[str, ParamSpec]:
    """Lists the parameters of DSpark's Markov and confidence heads."""
    D, r, specs = config.block.hidden_size, config.markov_rank, {}
    if r:
        specs["markov_in"] = copied("markov_head.markov_w1.weight", config.block.vocab_size, r)
        specs["markov_out"] = linear("markov_head.markov_w2.weight", r, config.draft_vocab_size)
    if config.markov_head in STEPS:
        name = f"markov_head.{STEPS[config.markov_head]}"
        sizes = (D + r, r) if config.markov_head == "gated" else (2 * r + D, 3 * r)
        specs["markov_step"] = linear(f"{name}.weight", *sizes)
        specs["markov_step_bias"] = copied(f"{name}.bias", sizes[1])
    if config.has_confidence:
        specs["confidence_out"] = linear("confidence_head.proj.weight", D + r * config.confidence_with_markov, 1)
        specs["confidence_bias"] = copied("confidence_head.proj.bias", 1)
    return specs
