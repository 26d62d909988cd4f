"""`ModelConfig`, the static, hashable description of an architecture."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, get_args

from mtpjax.field_types import check_scalar_fields
from mtpjax.messages import did_you_mean, require, require_divisible
from mtpjax.models.config_checks import check_layers, check_sizes
from mtpjax.models.rope_scaling import RopeScaling, Yarn, make_scaling

Implementation = Literal["auto", "xla", "triton", "interpreted"]  # see `pallas_kernels.dispatch`
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
Remat = Literal["none", "attention", "layers"]  # see `MTPModel`


class LayerKind(NamedTuple):
    """The kind of one decoder layer."""

    attention: Literal["grouped", "latent", "delta"]
    is_moe: bool
    indexer: Literal["", "full", "shared"] = ""  # sparse latent attention: "shared" uses an earlier layer's indexer
    is_sliding: bool = False  # attention is limited to a window of the newest positions
    expert_limit: float = 0.0  # activation limit in routed experts; 0: no limit
    dense_limit: float = 0.0  # activation limit in shared experts and dense layers; 0: no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One architecture. Differences between model families are fields here, not classes.

    Fields are named as in Hugging Face configs where possible. Shape letters: V is `vocab_size`, D `hidden_size`, N
    `num_attention_heads`, K `num_key_value_heads`, H `head_dim`, F a feed-forward width, E `n_routed_experts`, and M
    `num_mtp_modules`.

    Args:
        vocab_size: rows of the embedding table, V.
        hidden_size: width of the residual stream, D.
        num_hidden_layers: trunk layers.
        num_attention_heads: query heads per layer, N.
        intermediate_size: width of dense feed-forward layers, F.
        max_position_embeddings: maximum length of a sequence, in tokens.
        rms_norm_eps: epsilon of every RMSNorm, added to the mean square; the latent norms use `latent_norm_eps`.
        zero_centred_norm: norms multiply by 1 + weight instead of by the weight (Qwen3-Next, Qwen3.5).
        tie_word_embeddings: use the transposed embedding as the head.
        num_tokens: number of real tokens; higher ids only pad the tables and are never decoded. 0: all ids are real.
        attention: type of full attention, "grouped" (grouped-query) or "latent" (multi-head latent).
        num_key_value_heads: key/value heads of grouped attention, K; 0: the number of query heads.
        head_dim: head width of grouped attention, H; 0: `hidden_size / num_attention_heads`.
        attention_bias: add biases to q, k, v and the gates of `attn_output_gate`; in latent attention, to the two
            projections that compute the latents.
        attention_output_bias: add a bias to the output projection of attention.
        use_qk_norm: apply an RMSNorm to each query and key head, before the rotary embedding.
        attn_output_gate: multiply the attention output by the sigmoid of a gate per channel, before the output
            projection.
        attn_head_gate: multiply the attention output by the sigmoid of one gate per head (Step-3.5).
        attention_sinks: layers that have attention sinks, "none", "sliding" or "all". A sink is a learned logit per
            head that enters the softmax but has no value.
        attention_value_scale: factor that multiplies the values of grouped attention (MiMo-V2).
        q_lora_rank: width of the query latent in latent attention; 0: queries are computed from the hidden state.
        kv_lora_rank: width of the key/value latent.
        qk_nope_head_dim: channels per latent-attention head that are not rotated.
        qk_rope_head_dim: channels per latent-attention head that are rotated.
        v_head_dim: value channels per head; 0 (grouped attention only): `head_dim`.
        latent_norm_eps: epsilon of the two latent norms; transformers uses a fixed value, not `rms_norm_eps`.
        index_topk: keys that the indexer of sparse latent attention selects per query; 0: no indexer.
        index_n_heads: heads of the indexer.
        index_head_dim: head width of the indexer.
        indexer_rope_interleave: the indexer rotates channel pairs (2j, 2j+1) instead of halves.
        indexer_types: for each layer, "full" (it has an indexer) or "shared" (it uses the selection of the last
            indexer before it); (): all "full".
        layer_types: for each layer, "full_attention", "sliding_attention" or "linear_attention" (gated delta rule);
            (): all full.
        sliding_window: positions that a "sliding_attention" layer attends to, including the query's own.
        sliding_num_attention_heads: query heads of sliding-window layers; 0: `num_attention_heads`.
        sliding_num_key_value_heads: key/value heads of sliding-window layers; 0: `num_key_value_heads`.
        sliding_rope_theta: base of the rotary frequencies in sliding-window layers; 0: `rope_theta`.
        sliding_partial_rotary_factor: fraction of each head's channels that is rotated in sliding-window layers; 0:
            `partial_rotary_factor`.
        sliding_rope_scaling: apply `rope_scaling` in sliding-window layers too.
        linear_num_key_heads: key heads of linear attention.
        linear_num_value_heads: value heads of linear attention, a multiple of `linear_num_key_heads`.
        linear_key_head_dim: key width of linear attention.
        linear_value_head_dim: value width of linear attention.
        linear_conv_kernel_dim: taps of the causal convolution in linear attention.
        linear_output_gate: activation of the output gate in linear attention, "silu" or "sigmoid".
        rope_theta: base of the rotary frequencies.
        rope_interleave: rotate channel pairs (2j, 2j+1) instead of halves.
        partial_rotary_factor: fraction of each head's channels that is rotated in grouped attention.
        rope_scaling: scaling of the rotary frequencies: `Yarn`, `Llama3Scaling` or `LinearScaling`; None: unscaled.
        n_routed_experts: routed experts per layer, E; 0: dense layers only.
        num_experts_per_tok: experts per token.
        moe_intermediate_size: width of a routed expert.
        n_shared_experts: experts that process every token.
        shared_expert_intermediate_size: total width of the shared experts; 0:
            `n_shared_experts * moe_intermediate_size`.
        shared_expert_gate: multiply the shared experts' output by the sigmoid of a gate per token (Qwen).
        first_k_dense_replace: number of layers at the start of the trunk that are dense.
        mlp_only_layers: indices of additional dense layers.
        scoring_func: function that maps router logits to scores, "sigmoid" or "softmax".
        router_correction_bias: add a bias to the scores that select experts, but not to their weights (DeepSeek-V3
            `noaux_tc`).
        n_group: number of groups into which the experts are divided.
        topk_group: number of groups from which a token may choose experts.
        norm_topk_prob: normalise the weights of a token's experts so that they sum to 1.
        routed_scaling_factor: factor that multiplies the expert weights.
        expert_bias: add biases to the router's logits and in the routed experts (gpt-oss).
        swiglu_limits: for each layer, the limit to which gate and up of the routed experts are clamped, 0 for no limit;
            (): no limits.
        swiglu_limits_shared: the same for shared experts and dense layers.
        swiglu_alpha: if positive, experts clamp `gate` and `up` and compute `(up + 1) * gate * sigmoid(alpha * gate)`
            (gpt-oss); if 0, they compute `silu(gate) * up` and clamp after the activation (Step-3.5).
        num_mtp_modules: MTP modules, M.
        mtp_chaining: hidden states that a module reads, "chain" (the previous module's output) or "trunk" (always the
            trunk's states).
        mtp_input: order of the projection's two inputs, "embedding_hidden" or "hidden_embedding".
        mtp_hidden_post_norm: modules read the trunk's hidden states after the trunk's final norm, not before it.
        mtp_chain_post_norm: the next depth reads a module's output after the module's final norm, not before it.
        mtp_mask_first: zero the embedding at position 0, as vLLM's DeepSeek, GLM and Ernie classes do.
        mtp_layer_type: attention type of the modules' layers, "full_attention" or "sliding_attention".
        mtp_dense: the modules have dense layers although the trunk has experts (Ernie-4.5).
        mtp_output_norm: norm between a module and the head, "own" (a norm in the module), "trunk" (the trunk's final
            norm, Ernie-4.5) or "none".
        mtp_own_embedding: each module has a separate embedding.
        mtp_own_head: each module has a separate head.
        mtp_norm_differs: the modules' norms use the opposite of the trunk's `zero_centred_norm`.

    Raises:
        ValueError: if values are inconsistent; the message contains them.

    Example:
        >>> from mtpjax import ModelConfig
        >>> config = ModelConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        ...                      intermediate_size=192, num_mtp_modules=1)
        >>> config.head_dim
        16
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    zero_centred_norm: bool = False
    tie_word_embeddings: bool = False
    num_tokens: int = 0

    # Full attention, which is grouped-query or multi-head latent.
    attention: Literal["grouped", "latent"] = "grouped"
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_bias: bool = False
    attention_output_bias: bool = False
    use_qk_norm: bool = False
    attn_output_gate: bool = False
    attn_head_gate: bool = False
    attention_sinks: Literal["none", "sliding", "all"] = "none"
    attention_value_scale: float = 1.0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    latent_norm_eps: float = 1e-6

    # Sparse latent attention, in which an indexer selects the keys for each query.
    index_topk: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    indexer_rope_interleave: bool = False
    indexer_types: tuple[Literal["full", "shared"], ...] = ()

    # Sliding-window attention, in the layers that layer_types marks as such.
    layer_types: tuple[Literal["full_attention", "sliding_attention", "linear_attention"], ...] = ()
    sliding_window: int = 0
    sliding_num_attention_heads: int = 0
    sliding_num_key_value_heads: int = 0
    sliding_rope_theta: float = 0.0
    sliding_partial_rotary_factor: float = 0.0
    sliding_rope_scaling: bool = True

    # Linear attention (gated delta rule), in the layers that layer_types marks as such.
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    linear_output_gate: Literal["silu", "sigmoid"] = "silu"

    # Rotary position embedding.
    rope_theta: float = 10000.0
    rope_interleave: bool = False
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeScaling | None = None

    # Mixture of experts.
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    first_k_dense_replace: int = 0
    mlp_only_layers: tuple[int, ...] = ()
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    router_correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    expert_bias: bool = False
    swiglu_limits: tuple[float, ...] = ()
    swiglu_limits_shared: tuple[float, ...] = ()
    swiglu_alpha: float = 0.0

    # Multi-token prediction.
    num_mtp_modules: int = 0
    mtp_chaining: Literal["chain", "trunk"] = "chain"
    mtp_input: Literal["embedding_hidden", "hidden_embedding"] = "embedding_hidden"
    mtp_hidden_post_norm: bool = True
    mtp_chain_post_norm: bool = True
    mtp_mask_first: bool = False
    mtp_layer_type: Literal["full_attention", "sliding_attention"] = "full_attention"
    mtp_dense: bool = False
    mtp_output_norm: Literal["own", "trunk", "none"] = "own"
    mtp_own_embedding: bool = False
    mtp_own_head: bool = False
    mtp_norm_differs: bool = False

    def __post_init__(self):
        check_scalar_fields(self)
        # Lists become tuples, so that the config is hashable; missing sizes get their defaults.
        for name in ("indexer_types", "layer_types", "mlp_only_layers", "swiglu_limits", "swiglu_limits_shared"):
            self._set(name, tuple(getattr(self, name)))
        check_sizes(self)
        if self.attention == "grouped":
            heads = self.num_attention_heads
            if not self.head_dim:
                require_divisible("hidden_size", self.hidden_size, "num_attention_heads", heads)
                self._set("head_dim", self.hidden_size // heads)
            self._set("num_key_value_heads", self.num_key_value_heads or heads)
            if self.v_head_dim == self.head_dim:
                self._set("v_head_dim", 0)
        if self.has_sliding_layers:
            for name in ("num_attention_heads", "num_key_value_heads", "rope_theta", "partial_rotary_factor"):
                self._set(f"sliding_{name}", getattr(self, f"sliding_{name}") or getattr(self, name))
        check_layers(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def rotary_dim(self) -> int:
        if self.attention == "latent":
            return self.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    def softmax_scale(self, width: int) -> float:
        """Returns `width^-0.5`, times YaRN's squared magnitude in latent attention if `mscale_all_dim` is set."""
        yarn = self.rope_scaling
        if self.attention != "latent" or not isinstance(yarn, Yarn) or not yarn.mscale_all_dim:
            return width**-0.5
        return width**-0.5 * yarn.magnitude(yarn.mscale_all_dim) ** 2

    @property
    def is_moe(self) -> bool:
        return self.n_routed_experts > 0

    @property
    def shared_width(self) -> int:
        """Total width of the shared experts, which are computed as one feed-forward layer; 0 without shared experts."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.moe_intermediate_size

    @property
    def value_dim(self) -> int:
        """Value channels per head in grouped attention."""
        return self.v_head_dim or self.head_dim

    @property
    def has_sliding_layers(self) -> bool:
        """True if any layer uses sliding-window attention."""
        in_modules = self.num_mtp_modules > 0 and self.mtp_layer_type == "sliding_attention"
        return in_modules or "sliding_attention" in self.layer_types

    def of_layer(self, kind: LayerKind) -> "ModelConfig":
        """Returns the config with the heads and rotary embedding that layers of this kind use."""
        return _sliding_config(self) if kind.is_sliding else self

    @property
    def of_modules(self) -> "ModelConfig":
        """The config with the norm convention of the MTP modules."""
        return _module_config(self) if self.mtp_norm_differs else self

    def has_sinks(self, kind: LayerKind) -> bool:
        """Returns whether attention layers of this kind have a learned sink per head."""
        return self.attention_sinks == "all" or (self.attention_sinks == "sliding" and kind.is_sliding)

    def layer_kind(self, layer: int) -> LayerKind:
        """Returns the kind of trunk layer `layer`; indices start at 0."""
        is_moe = self.is_moe and layer >= self.first_k_dense_replace and layer not in self.mlp_only_layers
        limits = tuple(limits[layer] if limits else 0.0 for limits in (self.swiglu_limits, self.swiglu_limits_shared))
        if self.layer_types and self.layer_types[layer] == "linear_attention":
            return LayerKind("delta", is_moe, "", False, *limits)
        indexer = (self.indexer_types[layer] if self.indexer_types else "full") if self.index_topk else ""
        is_sliding = bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"
        return LayerKind(self.attention, is_moe, indexer, is_sliding, *limits)

    @property
    def trunk_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the trunk's layers."""
        return tuple(self.layer_kind(layer) for layer in range(self.num_hidden_layers))

    @property
    def mtp_kind(self) -> LayerKind:
        """Kind of the layer in an MTP module, with an indexer and experts if the trunk has them.

        Attention is full by default, and activations are not clamped.
        """
        indexer, is_sliding = "full" if self.index_topk else "", self.mtp_layer_type == "sliding_attention"
        return LayerKind(self.attention, self.is_moe and not self.mtp_dense, indexer, is_sliding)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Makes a config from the result of `to_dict`. Raises `ValueError`, with a suggestion, for an unknown key."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            require(name in known, f"unknown model setting '{name}'{did_you_mean(name, known)}")
        scaling = values.get("rope_scaling")
        if isinstance(scaling, dict):
            scaling = make_scaling(scaling)
        return cls(**{**values, "rope_scaling": scaling})


@functools.cache
def _module_config(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, zero_centred_norm=not config.zero_centred_norm, mtp_norm_differs=False)


@functools.cache
def _sliding_config(config: ModelConfig) -> ModelConfig:
    """Returns a copy of the config whose full-attention fields hold the values for sliding-window layers."""
    return dataclasses.replace(
        config,
        num_attention_heads=config.sliding_num_attention_heads,
        num_key_value_heads=config.sliding_num_key_value_heads,
        rope_theta=config.sliding_rope_theta,
        partial_rotary_factor=config.sliding_partial_rotary_factor,
        rope_scaling=config.rope_scaling if config.sliding_rope_scaling else None,
    )
