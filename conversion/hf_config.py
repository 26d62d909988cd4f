"""`config.json` of the published families <-> `ModelConfig`. Our own parser: no remote code, every value checked."""

import dataclasses
import itertools
import math
from typing import Any

from conversion.names import Layout
from mtpjax.errors import ConfigError
from mtpjax.models.config import Llama3Scaling, ModelConfig, Yarn

MOST = 2**31  # no size in a configuration may reach this


@dataclasses.dataclass(frozen=True)
class Family:
    """What the configurations of a `model_type` leave unsaid."""

    layout: Layout = dataclasses.field(default_factory=Layout)
    attention: str = "grouped"
    fixed: tuple[tuple[str, Any], ...] = ()  # of ModelConfig


_QWEN_HYBRID = (
    ("zero_centred_norm", True),
    ("use_qk_norm", True),
    ("attn_output_gate", True),
    ("scoring_func", "softmax"),
    ("shared_expert_gate", True),
)
_DEEPSEEK = (("rope_interleave", True), ("router_correction_bias", True))

FAMILIES = {
    "deepseek_v3": Family(attention="latent", fixed=_DEEPSEEK),
    "kimi_k2": Family(attention="latent", fixed=_DEEPSEEK),
    "deepseek_v32": Family(attention="latent", fixed=_DEEPSEEK),
    "glm_moe_dsa": Family(attention="latent", fixed=_DEEPSEEK),
    "glm4_moe": Family(fixed=(("router_correction_bias", True),)),
    "qwen3_next": Family(Layout(mtp="mtp", packed_delta=True), fixed=_QWEN_HYBRID),
    "qwen3_5": Family(Layout("model.language_model.", mtp="mtp"), fixed=_QWEN_HYBRID),
    "qwen3_5_text": Family(Layout(mtp="mtp"), fixed=_QWEN_HYBRID),
    "qwen3_5_moe": Family(Layout("model.language_model.", mtp="mtp"), fixed=_QWEN_HYBRID),
    "qwen3_5_moe_text": Family(Layout(mtp="mtp"), fixed=_QWEN_HYBRID),
    "qwen3": Family(fixed=(("use_qk_norm", True),)),
    "llama": Family(),
    "mimo": Family(
        Layout(mtp="mimo"),
        fixed=(("mtp_input", "hidden_embedding"), ("mtp_chaining", "trunk"), ("attention_bias", True)),
    ),
}

# Keys that change nothing here: training, tokens, caches, and what other code wants to know.
IGNORED = {
    *("architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "initializer_range", "pretraining_tp"),
    *("ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits", "mlp_bias"),
    *("max_window_layers", "sliding_window", "use_sliding_window", "index_topk_freq", "index_topk_pattern"),
    *("index_skip_topk_offset", "index_share_for_mtp_iteration", "mamba_ssm_dtype", "vision_config", "text_config"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "quantization_config"),
    *("language_model_only", "scale_fmt", "moe_router_dtype", "rope_parameters", "rope_scaling", "name_or_path"),
}


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A configuration in our terms. `mtp_given`: whether it says how many MTP modules there are; `unknown`: keys."""

    model_type: str
    model: ModelConfig
    layout: Layout
    quantization: dict[str, Any] | None
    block: tuple[int, int] | None  # rows, columns of a block-fp8 scale
    mtp_given: bool
    unknown: tuple[str, ...]


class _Reader:
    """Typed access to one level of a configuration; remembers what was asked for."""

    def __init__(self, values: dict[str, Any]):
        self.values, self.seen = values, set()

    def get(self, key: str) -> Any:
        self.seen.add(key)
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json lacks {key}")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < MOST:
            raise ConfigError(f"config.json: {key} is {value!r}, not an integer from {low} on")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"config.json: {key} is {value!r}, not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} is {value!r}, not true or false")
        return value

    def items(self, key: str, kind: type) -> tuple:
        value = self.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ConfigError(f"config.json: {key} is no list of {kind.__name__}")
        return tuple(value)

    def section(self, key: str) -> "_Reader":
        value = self.get(key)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: {key} is {value!r}, not an object")
        return _Reader(value)

    def require(self, key: str, *allowed: Any) -> None:
        """Refuses a value that would need other arithmetic than ours."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise ConfigError(f"config.json: {key} {value!r} is not supported, only {', '.join(map(repr, allowed))}")


def parse(values: Any, model_type: str | None = None) -> Parsed:
    """Reads the object that `config.json` holds; `model_type` is taken instead of its own.

    Raises `ConfigError`, one line with the key and its value.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"config.json holds a {type(values).__name__}, not an object")
    model_type = values.get("model_type") if model_type is None else model_type
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} is not known; there are {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    top = _Reader(values)
    text = top.section("text_config")
    reader = _Reader({**values, **text.values})
    fields = dict(family.fixed)
    try:
        fields |= _common(reader)
        fields |= {"latent": _latent, "grouped": _grouped}[family.attention](reader, fields)
        fields |= _linear(reader, fields)
        fields |= _experts(reader, fields)
        fields["num_mtp_modules"], mtp_given = _mtp(reader)
        fields["mtp_own_embedding"] = reader.flag("mtp_use_dedicated_embeddings", False)
        if model_type == "deepseek_v3" and fields.get("index_topk"):
            raise ConfigError("config.json: index_topk with model_type deepseek_v3; sparse attention is deepseek_v32")
        model = ModelConfig(**fields)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"config.json: {error}") from error
    unknown = tuple(sorted(set(reader.values) - reader.seen - IGNORED))
    quantization, block = _quantization(_Reader(values))
    return Parsed(model_type, model, family.layout, quantization, block, mtp_given, unknown)


def _common(reader: _Reader) -> dict[str, Any]:
    reader.require("hidden_act", "silu", "swish")
    reader.require("use_sliding_window", False)
    reader.require("mlp_bias", False)
    moe_width = reader.get("moe_intermediate_size")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": reader.integer("num_attention_heads"),
        "intermediate_size": reader.integer("intermediate_size", moe_width),
        "max_position_embeddings": reader.integer("max_position_embeddings", 4096),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        **_rope(reader),
    }


def _rope(reader: _Reader) -> dict[str, Any]:
    scaling = reader.section("rope_parameters")
    scaling = scaling if scaling.values else reader.section("rope_scaling")
    theta = scaling.number("rope_theta", reader.number("rope_theta", 10000.0))
    partial = scaling.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "yarn", "mrope", "llama3"):
        raise ConfigError(f"config.json: rotary scaling {kind!r} is not supported, only yarn and llama3")
    made: Yarn | Llama3Scaling | None = None
    if kind in ("yarn", "llama3"):
        longest = reader.get("max_position_embeddings")
        sizes: dict[str, Any] = {
            "factor": scaling.number("factor", 1.0),
            "original_max_position_embeddings": scaling.integer("original_max_position_embeddings", longest),
        }
        if kind == "llama3":
            low, high = scaling.number("low_freq_factor", 1.0), scaling.number("high_freq_factor", 4.0)
            made = Llama3Scaling(**sizes, low_freq_factor=low, high_freq_factor=high)
        else:
            scaling.require("truncate", True)
            scaling.require("attention_factor")
            made = Yarn(
                **sizes,
                beta_fast=scaling.number("beta_fast", 32.0),
                beta_slow=scaling.number("beta_slow", 1.0),
                mscale=scaling.number("mscale", 1.0),
                mscale_all_dim=scaling.number("mscale_all_dim", 1.0) if scaling.get("mscale_all_dim") else 0.0,
            )
    return {"rope_theta": theta, "partial_rotary_factor": partial, "rope_scaling": made}


def _grouped(reader: _Reader, fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    made = {
        "num_key_value_heads": reader.integer("num_key_value_heads", heads),
        "head_dim": reader.integer("head_dim", fields["hidden_size"] // heads or 1),
        "attention_bias": reader.flag("attention_bias", fields.get("attention_bias", False)),
    }
    if not fields.get("use_qk_norm"):
        made["use_qk_norm"] = reader.flag("use_qk_norm", False)
    if fields.get("attn_output_gate"):
        reader.require("attn_output_gate", True)
    return made


def _latent(reader: _Reader, fields: dict[str, Any]) -> dict[str, Any]:
    reader.require("attention_bias", False)
    reader.seen |= {"head_dim", "num_key_value_heads", "qk_head_dim"}  # of no account here
    made = {
        "attention": "latent",
        "q_lora_rank": reader.integer("q_lora_rank", 0, low=0),
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "qk_nope_head_dim": reader.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": reader.integer("qk_rope_head_dim"),
        "v_head_dim": reader.integer("v_head_dim"),
        "rope_interleave": reader.flag("rope_interleave", True),
        "partial_rotary_factor": 1.0,
    }
    if reader.get("index_topk") is not None:
        made |= {
            "index_topk": reader.integer("index_topk"),
            "index_n_heads": reader.integer("index_n_heads"),
            "index_head_dim": reader.integer("index_head_dim"),
            "indexer_rope_interleave": reader.flag("indexer_rope_interleave", False),
            "indexer_types": _indexer_types(reader, fields["num_hidden_layers"]),
        }
    return made


def _indexer_types(reader: _Reader, layers: int) -> tuple[str, ...]:
    """Which layers share the indexer of a layer before: as listed, by a pattern, or every so many (GLM-5.2).

    Empty where none does.
    """
    types = _listed_indexer_types(reader, layers)
    return () if set(types) == {"full"} else types


def _listed_indexer_types(reader: _Reader, layers: int) -> tuple[str, ...]:
    listed = reader.items("indexer_types", str)
    if listed:
        return listed
    pattern = reader.get("index_topk_pattern")
    if isinstance(pattern, str) and pattern:
        return tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    freq = reader.integer("index_topk_freq", 1)
    offset = reader.integer("index_skip_topk_offset", 2, low=0)
    shares = (max(layer - offset + 1, 0) % freq != 0 for layer in range(layers))
    return tuple("shared" if is_shared else "full" for is_shared in shares)


def _linear(reader: _Reader, fields: dict[str, Any]) -> dict[str, Any]:
    interval = reader.get("full_attention_interval")
    if interval is None and not fields.get("zero_centred_norm"):
        reader.require("layer_types", ["full_attention"] * fields["num_hidden_layers"])
        return {}
    layers = range(1, fields["num_hidden_layers"] + 1)
    interval = reader.integer("full_attention_interval", 4)
    types = reader.items("layer_types", str) or tuple(
        "linear_attention" if layer % interval else "full_attention" for layer in layers
    )
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = {
        f"linear_{name}": reader.integer(f"linear_{name}", 4 if name == "conv_kernel_dim" else None) for name in names
    }
    reader.require("output_gate_type", "swish", "silu", "sigmoid")
    gate = "sigmoid" if reader.get("output_gate_type") == "sigmoid" else "silu"
    return {"layer_types": types, **sizes, "linear_output_gate": gate}


def _experts(reader: _Reader, fields: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in ("n_routed_experts", "num_experts") if reader.get(name) is not None]
    if not names or not reader.integer(names[0], low=0):
        for field in ("scoring_func", "shared_expert_gate", "router_correction_bias"):
            fields.pop(field, None)
        reader.seen |= {"mlp_only_layers", "decoder_sparse_step", "num_experts_per_tok", "norm_topk_prob"}
        return {}
    reader.require("topk_method", "noaux_tc")
    reader.require("scoring_func", fields.get("scoring_func", "sigmoid"))
    layers = fields["num_hidden_layers"]
    made = {
        "n_routed_experts": reader.integer(names[0]),
        "num_experts_per_tok": reader.integer("num_experts_per_tok"),
        "moe_intermediate_size": reader.integer("moe_intermediate_size"),
        "n_shared_experts": reader.integer("n_shared_experts", 0, low=0),
        "shared_expert_intermediate_size": reader.integer("shared_expert_intermediate_size", 0, low=0),
        "n_group": reader.integer("n_group", 1),
        "topk_group": reader.integer("topk_group", 1),
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0),
    }
    first = reader.integer("first_k_dense_replace", 0, low=0)
    each = reader.integer("moe_layer_freq", reader.integer("decoder_sparse_step", 1))
    phase = 0 if reader.get("moe_layer_freq") is not None else 1  # DeepSeek counts layers from 0, Qwen from 1
    only = set(reader.items("mlp_only_layers", int))
    kinds = reader.items("mlp_layer_types", str)
    dense = [
        kinds[layer] == "dense" if kinds else layer < first or layer in only or (layer + phase) % each != 0
        for layer in range(layers)
    ]
    made["first_k_dense_replace"] = dense.index(False) if False in dense else layers
    made["mlp_only_layers"] = tuple(layer for layer in range(made["first_k_dense_replace"], layers) if dense[layer])
    return made


def _mtp(reader: _Reader) -> tuple[int, bool]:
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"):
        if reader.get(key) is not None:
            return reader.integer(key, low=0), True
    return 0, False


def _quantization(reader: _Reader) -> tuple[dict[str, Any] | None, tuple[int, int] | None]:
    """What `quantization_config` says, and the block of its scales. Which tensors are scaled, the files decide."""
    given = reader.section("quantization_config")
    if not given.values:
        return None, None
    method = given.get("quant_method")
    if method != "fp8":
        return given.values, None
    block = given.items("weight_block_size", int) or (128, 128)
    if len(block) != 2 or min(block) < 1:
        raise ConfigError(f"config.json: weight_block_size is {list(block)}, not two positive integers")
    return given.values, (block[0], block[1])


def describe(config: ModelConfig, model_type: str | None = None) -> tuple[str, dict[str, Any]]:
    """The family that `config` belongs to, or `model_type`, and the content of its `config.json`.

    What is written is what `parse` reads the same configuration from. Raises `ConfigError` if there is no such family,
    naming what the nearest cannot say.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} is not known; there are {', '.join(FAMILIES)}")
    nested = [name for name, family in FAMILIES.items() if family.layout.trunk != "model."]
    names = [name for name in FAMILIES if name not in nested] if model_type is None else [model_type]
    nearest: list[str] | None = None
    for name in names:
        values = {"architectures": [], "model_type": name, **_values(config, FAMILIES[name].layout)}
        try:
            found = parse(values).model
        except ConfigError:
            continue
        fields = [field.name for field in dataclasses.fields(config)]
        differing = [field for field in fields if getattr(found, field) != getattr(config, field)]
        if not differing:
            return name, values
        nearest = min(nearest or differing, differing, key=len)
    raise ConfigError(f"no published family has this model: {', '.join(nearest or ['none'])} cannot be said")


def edited(
    values: dict[str, Any],
    layout: Layout,
    *,
    num_mtp_modules: int | None = None,
    dtypes: set[str] | None = None,
    drop_quantization: bool = False,
) -> dict[str, Any]:
    """A `config.json` after its weights have changed: number of MTP modules, dtypes of the weights, quantisation."""
    values = {**values}
    if drop_quantization:
        values.pop("quantization_config", None)
    level = values
    if "text_config" in values:
        level = values["text_config"] = {**values["text_config"]}
    if num_mtp_modules is not None:
        level["mtp_num_hidden_layers" if layout.mtp == "mtp" else "num_nextn_predict_layers"] = num_mtp_modules
    if dtypes is not None:
        main = sorted(dtypes, key=lambda name: (name == "float32", name))[0]  # beside bf16 weights, some are float32
        for part, key in itertools.product((values, level), ("torch_dtype", "dtype")):
            if key in part and (drop_quantization or part[key] not in dtypes):
                part[key] = main
    return values


def _values(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """The keys of `config.json`, without defaults of sections that the model has not."""
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names = [*same, "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta"]
    names += ["partial_rotary_factor", "attention_bias", *(["use_qk_norm"] if config.use_qk_norm else [])]
    if config.attention == "latent":
        names += ["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        names += ["rope_interleave"]
    else:
        names += ["num_key_value_heads", "head_dim"]
    if config.index_topk:
        names += ["index_topk", "index_n_heads", "index_head_dim", "indexer_rope_interleave", "indexer_types"]
    if config.layer_types:
        names += [f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
        names += ["linear_conv_kernel_dim", "layer_types"]
    if config.is_moe:
        names += ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"]
        names += ["n_shared_experts", "shared_expert_intermediate_size", "norm_topk_prob", "routed_scaling_factor"]
        names += ["scoring_func", "first_k_dense_replace", "mlp_only_layers"]
    values = {name: getattr(config, name) for name in names}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    if config.rope_scaling is not None:
        kind = "llama3" if isinstance(config.rope_scaling, Llama3Scaling) else "yarn"
        values["rope_scaling"] = {"rope_type": kind, **dataclasses.asdict(config.rope_scaling)}
    if config.linear_output_gate == "sigmoid":
        values["output_gate_type"] = "sigmoid"
    values["mtp_num_hidden_layers" if layout.mtp == "mtp" else "num_nextn_predict_layers"] = config.num_mtp_modules
    if config.mtp_own_embedding:
        values["mtp_use_dedicated_embeddings"] = True
    return values
