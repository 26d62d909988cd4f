"""Parses the `config.json` of the supported families into a `ModelConfig`.

The parser runs no remote code and checks every value. It rejects values that need arithmetic that is not implemented.
"""

import dataclasses
from typing import Any

from conversion.config_reader import ConfigReader
from conversion.families import FAMILIES, IGNORED_KEYS, NOT_NULL, Layout
from conversion.rope import read_rope, with_defaults
from conversion.step_config import STEP, expand_step
from conversion.windows import read_windows
from mtpjax.errors import ConfigError
from mtpjax.models.config import ModelConfig

MODULE_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # the number of MTP modules


@dataclasses.dataclass(frozen=True)
class ParsedConfig:
    """A parsed `config.json`."""

    model_type: str
    model: ModelConfig
    layout: Layout
    block: tuple[int, int] | None  # rows and columns that share an fp8 scale, or None without fp8
    names_modules: bool  # whether the file contains the number of MTP modules
    unknown: tuple[str, ...]  # keys that are neither read nor listed in `IGNORED_KEYS`
    notes: tuple[str, ...] = ()  # settings that mtpjax handles differently from other programs, one sentence each


def parse_config(values: Any, model_type: str | None = None) -> ParsedConfig:
    """Parses the content of a `config.json`.

    Args:
        model_type: the family to use instead of the one in the file.

    Raises:
        ConfigError: the configuration is damaged or not supported. The one-line message has the key and its value.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"config.json contains a {type(values).__name__}, not an object")
    model_type = values.get("model_type") if model_type is None else model_type
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"unsupported model_type {model_type!r}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    # Multimodal checkpoints nest the language model's values, which take precedence. As in transformers, the outer
    # level determines tying and quantization.
    text = ConfigReader(values).section("text_config")
    outer = {key: values[key] for key in ("tie_word_embeddings", "quantization_config") if values.get(key) is not None}
    stated = {**values, **text.values, **outer}
    values = with_defaults(stated, family.defaults, model_type)
    values = expand_step(values) if model_type in STEP else values
    reader = ConfigReader(values, family.keys)
    # Collect the fields of ModelConfig in several parts. Later parts read the fields from earlier parts.
    fields = dict(family.fixed)
    try:
        for key, value in family.required.items():
            reader.require(key, value)
        for usual, own in family.keys.items():
            if values.get(usual) is not None and values.get(own) not in (None, values[usual]):
                raise ConfigError(
                    f"config.json: {usual} is {values[usual]!r}, but {own} is {values[own]!r}: keep only {own}"
                )
        epsilon = "layernorm_epsilon" if model_type == "mimo_v2_flash" else "rms_norm_eps"
        given = {key: stated[key] for key in (epsilon, "rms_norm_eps") if stated.get(key) is not None}
        if len(set(given.values())) > 1:
            raise ConfigError(
                f"config.json: {' and '.join(f'{key} is {value!r}' for key, value in given.items())}: keep one of them"
            )
        fields |= _common(reader, epsilon)
        fields |= read_rope(reader, rotates_part=family.rotates_part)
        fields["num_mtp_modules"], names_modules = _mtp(reader)
        fields |= {"latent": _latent, "grouped": _grouped}[family.attention](reader, fields)
        fields |= read_windows(reader, fields, model_type) if family.has_windows else _linear(reader, fields)
        fields |= _experts(reader, fields)
        fields |= _mtp_conventions(reader)
        fields["mtp_own_embedding"] = reader.flag("mtp_use_dedicated_embeddings", False)
        if model_type == "deepseek_v3" and fields.get("index_topk"):
            raise ConfigError("config.json: index_topk is not supported with model_type deepseek_v3: use deepseek_v32")
        # Null is an error only for keys that this family reads.
        for key in NOT_NULL:
            if key in reader.seen and key in values and values[key] is None and key not in family.nulls:
                raise ConfigError(f"config.json: {key} is null: set a value, or remove the key")
        model = ModelConfig(**fields)
        for name, value in family.computes.items():
            found = fields.get(name, value)
            if found != value:
                raise ConfigError(
                    f"config.json: {family.keys.get(name, name)} {found!r} is not supported; models of type "
                    f"{model_type} have {value!r}"
                )
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"config.json: {error}") from error
    notes = ()
    if reader.flag("index_share_for_mtp_iteration", False) and model.index_topk and model.num_mtp_modules:
        notes = (
            "index_share_for_mtp_iteration is not supported: every draft step of an MTP module runs the indexer, so "
            "later draft tokens may be accepted less often; generated text does not change",
        )
    unknown = tuple(sorted((set(reader.values) - reader.seen - IGNORED_KEYS) | reader.unknown_within))
    return ParsedConfig(model_type, model, family.layout, _fp8_block(reader), names_modules, unknown, notes)


def _common(reader: ConfigReader, epsilon: str) -> dict[str, Any]:
    """Reads the settings that all families have. `epsilon` is the family's key for the norms' epsilon."""
    # Reject values that the model does not implement.
    reader.require("hidden_act", "silu", "swish")
    reader.require("use_sliding_window", False)
    reader.require("mlp_bias", False)
    moe_width = reader.get("moe_intermediate_size")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {name: reader.integer(name) for name in sizes} | {
        "intermediate_size": reader.integer("intermediate_size", moe_width),
        "max_position_embeddings": reader.integer("max_position_embeddings", 4096),
        "rms_norm_eps": reader.number(epsilon, reader.number("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
    }


def _grouped(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Reads grouped-query attention."""
    heads = fields["num_attention_heads"]
    bias = reader.flag("attention_bias", fields.get("attention_bias", False))
    # Most transformers classes then also have an output bias. For a family without one, `fixed` sets it to False.
    # The key is only written for GGUF files, where the tensors decide.
    has_output_bias = reader.flag("attention_output_bias", fields.get("attention_output_bias", True))
    made = {
        "num_key_value_heads": reader.integer("num_key_value_heads", heads),
        "head_dim": reader.integer("head_dim", fields["hidden_size"] // heads or 1),
        "attention_bias": bias,
        "attention_output_bias": bias and has_output_bias,
    }
    # A family that always normalizes queries and keys has this setting in `fixed`. mtpjax's exports also contain it.
    if fields.get("use_qk_norm"):
        reader.require("use_qk_norm", True)
    else:
        made["use_qk_norm"] = reader.flag("use_qk_norm", False)
    if fields.get("attn_output_gate"):
        reader.require("attn_output_gate", True)
    return made


def _latent(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Reads multi-head latent attention, and the indexer of sparse attention."""
    bias = reader.flag("attention_bias", False)
    # The other sizes imply these.
    reader.seen |= {"head_dim", "num_key_value_heads", "qk_head_dim", "attention_output_bias"}
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    made = {name: reader.integer(name) for name in sizes} | {
        "attention": "latent",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "q_lora_rank": reader.integer("q_lora_rank", 0, low=0),
        "rope_interleave": reader.flag("rope_interleave", True),
        "partial_rotary_factor": 1.0,
    }
    if reader.get("index_topk") is not None:
        made |= {name: reader.integer(name) for name in ("index_topk", "index_n_heads", "index_head_dim")}
        made |= {
            "indexer_rope_interleave": reader.flag("indexer_rope_interleave", False),
            "indexer_types": _indexer_types(reader, fields["num_hidden_layers"], fields["num_mtp_modules"]),
        }
    return made


def _indexer_types(reader: ConfigReader, layers: int, modules: int) -> tuple[str, ...]:
    """Returns "full" or "shared" for each layer, or an empty tuple if every layer has an indexer."""
    listed, of_modules = reader.per_layer("indexer_types", str, layers, modules)
    if of_modules not in (None, "full"):
        raise ConfigError(f"config.json: indexer_types with MTP modules of type {of_modules!r} is not supported")
    types = listed or _patterned_indexer_types(reader, layers)
    return () if set(types) == {"full"} else types


def _patterned_indexer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Reads which layers share an earlier layer's indexer, from a pattern or a frequency."""
    # GLM's pattern has one letter per layer.
    pattern = reader.get("index_topk_pattern")
    if isinstance(pattern, str) and pattern:
        return tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    # With GLM's frequency, every freq-th layer has an indexer, from layer `offset` on.
    freq = reader.integer("index_topk_freq", 1)
    offset = reader.integer("index_skip_topk_offset", 2, low=0)
    shares = (max(layer - offset + 1, 0) % freq != 0 for layer in range(layers))
    return tuple("shared" if is_shared else "full" for is_shared in shares)


def _linear(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Reads which layers have linear attention (Qwen3-Next, Qwen3.5), and the sizes of that attention."""
    interval, count = reader.get("full_attention_interval"), fields["num_hidden_layers"]
    types, of_modules = reader.per_layer("layer_types", str, count, fields["num_mtp_modules"])
    # transformers writes "indexed_attention" for sparse attention, which `index_topk` already implies.
    full = ("full_attention", "indexed_attention") if fields.get("index_topk") else ("full_attention",)
    if of_modules not in (None, *full):
        raise ConfigError(f"config.json: layer_types with MTP modules of type {of_modules!r} is not supported")
    if interval is None and not fields.get("zero_centred_norm"):
        for kind in types:
            if kind not in full:
                raise ConfigError(f"config.json: layer_types with {kind!r} is not supported in this family")
        return {}
    # Qwen's files list the layer types or contain the interval of full-attention layers.
    interval = reader.integer("full_attention_interval", 4)
    types = types or tuple(
        "linear_attention" if layer % interval else "full_attention" for layer in range(1, count + 1)
    )
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = {
        f"linear_{name}": reader.integer(f"linear_{name}", 4 if name == "conv_kernel_dim" else None) for name in names
    }
    reader.require("output_gate_type", "swish", "silu", "sigmoid")
    gate = "sigmoid" if reader.get("output_gate_type") == "sigmoid" else "silu"
    return {"layer_types": types, **sizes, "linear_output_gate": gate}


def _experts(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Reads the mixture of experts, and the dense layers."""
    # transformers 5 writes the last key for Qwen3-MoE.
    aliases = ("n_routed_experts", "num_experts", "num_local_experts")
    names = [name for name in aliases if reader.get(name) is not None]
    for name in names[1:]:
        reader.require(name, reader.get(names[0]))
    # For a dense model, remove the family's settings for experts.
    if not names or not reader.integer(names[0], low=0):
        for field in ("scoring_func", "shared_expert_gate", "router_correction_bias"):
            fields.pop(field, None)
        unused = ("mlp_only_layers", "decoder_sparse_step", "num_experts_per_tok", "norm_topk_prob")
        for key in (*unused, "first_k_dense_replace"):
            reader.get(key)
        return {}
    reader.require("topk_method", "noaux_tc")
    reader.require("scoring_func", fields.get("scoring_func", "sigmoid"))
    layers, modules = fields["num_hidden_layers"], fields["num_mtp_modules"]
    reader.require("experts_per_token", reader.get("num_experts_per_tok"))
    width = reader.integer("moe_intermediate_size", reader.get("expert_hidden_dim"))
    reader.require("expert_hidden_dim", width)
    made = {
        "n_routed_experts": reader.integer(names[0]),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "n_shared_experts": reader.integer("n_shared_experts", 0, low=0),
        "shared_expert_intermediate_size": reader.integer("shared_expert_intermediate_size", 0, low=0),
        "n_group": reader.integer("n_group", 1),
        "topk_group": reader.integer("topk_group", 1),
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
    }
    # Dense layers are the first and last few, the listed layers, all except every n-th, or layers of the type dense.
    first = reader.integer("first_k_dense_replace", 0, low=0)
    marks, of_modules = (), None
    if isinstance(reader.get("moe_layer_freq"), list):  # MiMo-V2
        marks, of_modules = reader.per_layer("moe_layer_freq", int, layers, modules)
    each = 1 if marks else reader.integer("moe_layer_freq", reader.integer("decoder_sparse_step", 1))
    phase = 0 if reader.get("moe_layer_freq") is not None else 1  # DeepSeek counts layers from 0, Qwen from 1
    last = reader.integer("moe_layer_end_index", -1, low=-1)  # Ernie's; -1: the last layer
    only = {*reader.items("mlp_only_layers", int), *range(last + 1 if last >= 0 else layers, layers)}
    kinds, kind_of_modules = reader.per_layer("mlp_layer_types", str, layers, modules)
    if not kinds:
        kinds, names = tuple("sparse" if mark else "dense" for mark in marks), {None: None, 0: "dense"}
        kind_of_modules = names.get(of_modules, "sparse")
    for kind in {*kinds, kind_of_modules} - {None, "dense", "sparse"}:
        raise ConfigError(f"config.json: mlp_layer_types with {kind!r} is not supported; supported: dense, sparse")
    if kind_of_modules is not None:
        made["mtp_dense"] = kind_of_modules == "dense"
    dense = [
        kinds[layer] == "dense" if kinds else layer < first or layer in only or (layer + phase) % each != 0
        for layer in range(layers)
    ]
    made["first_k_dense_replace"] = dense.index(False) if False in dense else layers
    made["mlp_only_layers"] = tuple(layer for layer in range(made["first_k_dense_replace"], layers) if dense[layer])
    return made


def _mtp(reader: ConfigReader) -> tuple[int, bool]:
    """Returns the number of MTP modules, and whether the file contains it (DeepSeek and GLM, Qwen, MiMo)."""
    for key in MODULE_KEYS:
        if reader.get(key) is not None:
            return reader.integer(key, low=0), True
    return 0, False


def _mtp_conventions(reader: ConfigReader) -> dict[str, Any]:
    """Reads MTP module conventions, which an mtpjax export states if they differ from its family's."""
    names = ("mtp_chaining", "mtp_input", "mtp_output_norm", "mtp_layer_type")
    made = {key: value for key in names if (value := reader.get(key)) is not None}
    for key in ("mtp_hidden_post_norm", "mtp_chain_post_norm", "mtp_mask_first", "mtp_dense", "mtp_norm_differs"):
        if reader.get(key) is not None:
            made[key] = reader.flag(key, False)
    return made


def _fp8_block(reader: ConfigReader) -> tuple[int, int] | None:
    """Returns the rows and columns of an fp8 block, or None without fp8."""
    # The tensors determine which weights have scales, and their dtypes show other quantization methods.
    given = reader.section("quantization_config")
    if given.get("quant_method") != "fp8":
        return None
    block = given.items("weight_block_size", int) or (128, 128)
    if len(block) != 2 or min(block) < 1:
        raise ConfigError(f"config.json: weight_block_size is {list(block)}, not two positive integers")
    return block[0], block[1]
