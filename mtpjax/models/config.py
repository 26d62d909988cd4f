"""The static descriptions: what a model is, how to train it. All frozen and hashable."""

import dataclasses
import difflib
import math
from typing import Any, Literal, NamedTuple


def require(condition: bool, message: str) -> None:
    """Raises `ValueError` with the message."""
    if not condition:
        raise ValueError(message)


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, f"{name} '{value}' is not one of {', '.join(choices)}")


class LayerKind(NamedTuple):
    """What one decoder layer is made of."""

    attention: Literal["grouped", "latent", "delta"]
    is_moe: bool
    indexer: Literal["", "full", "shared"] = ""  # of sparse latent attention: its own, or the choice of a layer before


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN rotary scaling (Peng et al. 2309.00071), with DeepSeek's two softmax terms; names as in `rope_scaling`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def magnitude(self, mscale: float) -> float:
        """`0.1 * mscale * ln(factor) + 1`: YaRN's attention temperature."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 and mscale else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's rotary scaling, by wavelength; names as in `rope_scaling` of `rope_type` "llama3"."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        low, high = self.low_freq_factor, self.high_freq_factor
        require(low < high, f"low_freq_factor {low} is not below high_freq_factor {high}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One architecture. A family is a set of these fields, never a class; names are Hugging Face's where it has one.

    Letters of the shapes elsewhere: V vocab_size, D hidden_size, N num_attention_heads, K num_key_value_heads,
    H head_dim, F a feed-forward width, E n_routed_experts, M num_mtp_modules.

    Raises `ValueError`, naming the numbers, for values that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    zero_centred_norm: bool = False  # multiply by (1 + w): Qwen3-Next, Qwen3.5
    tie_word_embeddings: bool = False
    num_tokens: int = 0  # ids from here on only pad the tables, and are never decoded; 0: all are tokens

    # attention
    attention: Literal["grouped", "latent"] = "grouped"
    num_key_value_heads: int = 0  # 0: as many as query heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    attention_bias: bool = False  # on q, k, v; never on the output
    use_qk_norm: bool = False  # RMSNorm over each head, before rotary
    attn_output_gate: bool = False  # output times sigmoid(gate) before the output projection
    q_lora_rank: int = 0  # latent only; 0: queries straight from the hidden state
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    latent_norm_eps: float = 1e-6  # of the two latent norms, whatever rms_norm_eps says (transformers)

    # sparse latent attention: an indexer chooses index_topk keys for each query; 0: every key is seen
    index_topk: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    indexer_rope_interleave: bool = False
    indexer_types: tuple[Literal["full", "shared"], ...] = ()  # per layer; (): all have their own

    # linear attention (gated delta rule) in the layers that layer_types names
    layer_types: tuple[Literal["full_attention", "linear_attention"], ...] = ()  # (): full attention everywhere
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    linear_output_gate: Literal["silu", "sigmoid"] = "silu"

    # rotary
    rope_theta: float = 10000.0
    rope_interleave: bool = False  # channel pairs (2j, 2j+1) instead of halves
    partial_rotary_factor: float = 1.0
    rope_scaling: Yarn | Llama3Scaling | None = None

    # mixture of experts; n_routed_experts 0 means a dense feed-forward in every layer
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0  # 0: n_shared_experts * moe_intermediate_size
    shared_expert_gate: bool = False  # shared output times sigmoid(x w): Qwen
    first_k_dense_replace: int = 0  # the first layers are dense
    mlp_only_layers: tuple[int, ...] = ()  # so are these
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    router_correction_bias: bool = False  # chooses experts, does not weigh them (DeepSeek-V3 `noaux_tc`)
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    # multi-token prediction
    num_mtp_modules: int = 0
    mtp_chaining: Literal["chain", "trunk"] = "chain"  # module k takes module k-1's output, or always the trunk's
    mtp_input: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"  # order of the pair
    mtp_hidden_post_norm: bool = True  # which trunk hidden enters: after the final norm
    mtp_chain_post_norm: bool = True  # which module hidden goes on: after the module's own norm
    mtp_mask_first: bool = False  # zero the embedding at position 0 (vLLM's DeepSeek and GLM classes)
    mtp_own_embedding: bool = False
    mtp_own_head: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        require(
            0 <= self.num_tokens <= self.vocab_size, f"num_tokens {self.num_tokens} is not within 0..{self.vocab_size}"
        )
        require(self.num_mtp_modules >= 0, f"num_mtp_modules must not be negative, is {self.num_mtp_modules}")
        require_choice("attention", self.attention, ("grouped", "latent"))
        require_choice("scoring_func", self.scoring_func, ("sigmoid", "softmax"))
        require_choice("mtp_chaining", self.mtp_chaining, ("chain", "trunk"))
        require_choice("mtp_input", self.mtp_input, ("embedding_hidden", "hidden_embedding"))
        for name in ("indexer_types", "layer_types"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            given = len(getattr(self, name))
            require(given in (0, self.num_hidden_layers), f"{given} {name} for {self.num_hidden_layers} layers")
        for kind in self.layer_types:
            require_choice("layer type", kind, ("full_attention", "linear_attention"))
        for kind in self.indexer_types:
            require_choice("indexer type", kind, ("full", "shared"))
        require_choice("linear_output_gate", self.linear_output_gate, ("silu", "sigmoid"))
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        if "linear_attention" in self.layer_types:
            self._check_linear()
        if self.index_topk:
            require(
                self.attention == "latent" and self.q_lora_rank > 0,
                "an indexer needs latent attention with q_lora_rank",
            )
            require(
                min(self.index_n_heads, self.index_head_dim) > 0, "an indexer needs index_n_heads and index_head_dim"
            )
            require(self.indexer_types[:1] != ("shared",), "the first layer has no indexer before it to share")
        if self.attention == "grouped":
            self._check_grouped()
        else:
            for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                require(getattr(self, name) > 0, f"latent attention needs a positive {name}, not {getattr(self, name)}")
        require(self.rotary_dim % 2 == 0, f"the rotated width {self.rotary_dim} is odd")
        if self.n_routed_experts:
            self._check_experts()

    def _check_grouped(self):
        heads = self.num_attention_heads
        if not self.head_dim:
            require(self.hidden_size % heads == 0, f"hidden_size {self.hidden_size} is no multiple of {heads} heads")
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or heads)
        kv_heads = self.num_key_value_heads
        require(heads % kv_heads == 0, f"{heads} query heads are no multiple of {kv_heads} key/value heads")

    def _check_linear(self):
        for name in ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
            require(getattr(self, name) > 0, f"linear attention needs a positive {name}, not {getattr(self, name)}")
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        require(values > 0 and values % keys == 0, f"{values} linear value heads are no multiple of {keys} key heads")

    def _check_experts(self):
        experts, groups = self.n_routed_experts, self.n_group
        require(
            self.moe_intermediate_size > 0, f"experts need a moe_intermediate_size, not {self.moe_intermediate_size}"
        )
        require(experts % groups == 0, f"{experts} experts are no multiple of {groups} groups")
        require(1 <= self.topk_group <= groups, f"topk_group {self.topk_group} is not within 1..{groups}")
        reach = self.topk_group * (experts // groups)
        picked = self.num_experts_per_tok
        require(1 <= picked <= reach, f"num_experts_per_tok {picked} is not within 1..{reach} reachable experts")

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that rotate."""
        if self.attention == "latent":
            return self.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def is_moe(self) -> bool:
        return self.n_routed_experts > 0

    @property
    def shared_width(self) -> int:
        """Width of the shared experts, which are one feed-forward; 0 without any."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.moe_intermediate_size

    def layer_kind(self, layer: int) -> LayerKind:
        """Trunk layer `layer` (0-based)."""
        is_moe = self.is_moe and layer >= self.first_k_dense_replace and layer not in self.mlp_only_layers
        if self.layer_types and self.layer_types[layer] == "linear_attention":
            return LayerKind("delta", is_moe)
        indexer = (self.indexer_types[layer] if self.indexer_types else "full") if self.index_topk else ""
        return LayerKind(self.attention, is_moe, indexer)

    @property
    def trunk_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(self.layer_kind(layer) for layer in range(self.num_hidden_layers))

    @property
    def mtp_kind(self) -> LayerKind:
        """An MTP block: full attention with an indexer of its own, and experts whenever the family has any."""
        return LayerKind(self.attention, self.is_moe, "full" if self.index_topk else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`. Raises `ValueError` for a key it does not know, naming the nearest."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"; the nearest is {nearest[0]}" if nearest else ""
            require(name in known, f"unknown model setting '{name}'{hint}")
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict):
            scaling = Llama3Scaling(**scaling) if "low_freq_factor" in scaling else Yarn(**scaling)
        return cls(**{**values, "rope_scaling": scaling})
