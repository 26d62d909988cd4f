"""The static descriptions: what a model is, how to train it. All frozen and hashable."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

OBJECTIVES = ("cross_entropy", "kl", "lk_hybrid", "end_to_end_tv")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents to train on come from.

    Attributes:
        path: a file, or a folder with its subfolders; None: the running interpreter's standard library.
        pattern: which files of a folder.
        kind: "text": each file is a document; "jsonl": each line is an object that holds one; "chat": each line's
            object holds a conversation, in OpenAI's form, of which only the answers are targets.
        field: where an object holds it; by default `text`, of conversations `messages`.
        weight: the source's share of the rows, beside the other sources' weights.
        most_skipped: how many documents may be of no use before reading stops with an error.
    """

    path: str | None = None
    pattern: str = "*"
    kind: Literal["text", "jsonl", "chat"] = "text"
    field: str = ""
    weight: float = 1.0
    most_skipped: int = 100

    def __post_init__(self):
        require_choice("kind", self.kind, ("text", "jsonl", "chat"))
        require(self.path is not None or self.kind == "text", f"a source of kind '{self.kind}' needs a path")
        require(0 < self.weight < math.inf, f"weight must be positive, not {self.weight}")
        require(self.most_skipped >= 0, f"most_skipped must not be negative, is {self.most_skipped}")
        if not self.field:
            object.__setattr__(self, "field", "messages" if self.kind == "chat" else "text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What the draft depths minimise; `mtpjax.train.losses` says how. The trunk always minimises cross-entropy.

    A mix is the weights of some objectives of `OBJECTIVES`, as a dict or as pairs, and is kept as pairs.

    Attributes:
        mix: the objectives and their weights; (): KL for modules on a trunk that their losses do not reach, which
            drafted best in `experiments/objectives.py`, and cross-entropy where all is trained.
        start: the mix at step 0, which goes linearly into `mix` over the first `warmup` of the run; (): `mix` itself.
        warmup: fraction of the run, 0..1.
        lk_decay: eta of the LK hybrid.
        depth_weights: "mean" (DeepSeek-V3), or "decayed" by `depth_decay` per depth (FastMTP). Both sum to 1, and the
            lambda of the run multiplies either; end-to-end total variation weighs depths by itself.
        vocab_chunk: columns of the head at a time, so that logits are never stored; 0: all of them, plainly.

    Raises `ValueError` for names it does not know and numbers that do not fit.
    """

    mix: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    start: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    warmup: float = 0.0
    lk_decay: float = 3.0
    depth_weights: Literal["mean", "decayed"] = "mean"
    depth_decay: float = 0.6
    vocab_chunk: int = 0

    def __post_init__(self):
        for field in ("mix", "start"):
            weights = dict(getattr(self, field))
            for name, weight in weights.items():
                require_choice("objective", name, OBJECTIVES)
                require(0 <= weight < math.inf, f"the weight of {name} must be finite and at least 0, not {weight}")
            object.__setattr__(self, field, tuple(weights.items()))
        require(0 <= self.warmup <= 1, f"warmup {self.warmup} is not within 0..1")
        require(bool(self.start) == (self.warmup > 0), f"start {self.start} and warmup {self.warmup} need each other")
        require(self.lk_decay >= 0, f"lk_decay must not be negative, is {self.lk_decay}")
        require_choice("depth_weights", self.depth_weights, ("mean", "decayed"))
        require(0 < self.depth_decay <= 1, f"depth_decay {self.depth_decay} is not within 0..1")
        require(self.vocab_chunk >= 0, f"vocab_chunk must not be negative, is {self.vocab_chunk}")

    @property
    def names(self) -> set[str]:
        """The objectives of either mix."""
        return {name for name, _ in (*self.mix, *self.start)}

    @property
    def compares_with_trunk(self) -> bool:
        """Whether anything but the data is a target."""
        return self.names != {"cross_entropy"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. It ends after `steps` updates or `seconds` of wall clock, whichever comes first.

    Attributes:
        preset: name of the architecture in `presets`.
        init_from: checkpoint to go on training, of ours or Hugging Face's, instead of new weights of `preset`; a trunk
            without MTP modules gets one. Where it holds a `tokenizer.json`, that is the default tokenizer.
        trains: "all"; "modules" leaves the trunk, and what they share with it, as they are; "detached" trains all, but
            the depths' losses do not reach the trunk.
        trunk_states: folder of a frozen trunk's states (`mtpjax.train.states`), computed once for all runs on the same
            trunk and rows; None: the trunk runs in every step. It needs trains "modules".
        trunk_states_dtype: "float32" as they are; "bfloat16" takes half the disk.
        output: run folder (`mtpjax.train.runs`).
        data: folder of text files to read; None: the running interpreter's standard library.
        pattern: which files of `data`.
        sources: what to read instead of `data`: several are mixed by their weights.
        tokenizer: Hugging Face directory with the `tokenizer.json` to read by; None: bytes.
        extra_tokens: how far a row goes on into the next; `num_depths + 1` keeps every target of every depth.
        num_depths: draft depths with a loss; beyond the model's modules the last is recycled.
        mtp_loss_scale, mtp_loss_scale_final: lambda of DeepSeek-V3 (2.2), the second from `mtp_loss_switch` on.
        objective: what the draft depths minimise, and how their losses are weighed.
        attention_layout: what a recycled depth attends to: "ttt" as in decoding, or "stream".
        save_every: updates between two saved states, which a killed run goes on from; 0: none but when preempted.
        keep_states: the newest so many stay.
        most_bad_steps: updates in a row that may be skipped for a loss or gradient that is not finite.
        panel_prompts: held-out prompts that are decoded at the end, and a few of them on the way; 0: none.
        accumulation: into how many parts a batch is split, one after the other: memory of one, the update of all.
        remat: what the backward pass runs again: "none" of the products with weights, or "layers" as a whole.
        dtype: what the layers compute in; parameters, their gradients' sums and the optimiser are float32 always.
        mesh: sizes of "data" and "fsdp", as a dict or as pairs: rows go over both, parameters and optimiser over fsdp.
        tensorboard: whether every number of `metrics.jsonl` goes to `tensorboard/` in the run folder, too.
        wandb: project on Weights & Biases that gets them, too.
        profile_start, profile_steps: a trace of so many updates after the first so many, in `profile/`; 0 steps: none.
    """

    preset: str = "tiny"
    init_from: str | None = None
    trains: Literal["all", "modules", "detached"] = "all"
    trunk_states: str | None = None
    trunk_states_dtype: Literal["float32", "bfloat16"] = "float32"
    output: str = "runs/train"
    data: str | None = None
    pattern: str = "*.py"
    sources: tuple[Source, ...] = ()
    tokenizer: str | None = None
    extra_tokens: int = 0
    held_out_fraction: float = 0.05
    steps: int = 1000
    seconds: float = math.inf
    batch_size: int = 8
    row_length: int = 128
    num_depths: int = 2
    mtp_loss_scale: float = 0.3
    mtp_loss_scale_final: float = 0.1
    mtp_loss_switch: float = 0.7
    objective: Objective = Objective()
    attention_layout: Literal["ttt", "stream"] = "ttt"
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup: float = 0.02  # fraction of the run
    final_learning_rate: float = 0.05  # of learning_rate, at the end of the cosine
    gradient_clip: float = 1.0
    log_every: int = 10
    save_every: int = 0
    keep_states: int = 2
    most_bad_steps: int = 10
    panel_prompts: int = 128
    accumulation: int = 1
    remat: Literal["none", "layers"] = "none"
    dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    tensorboard: bool = False
    wandb: str | None = None
    profile_start: int = 10
    profile_steps: int = 0
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "batch_size", "log_every", "keep_states", "most_bad_steps", "accumulation"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(self.row_length >= 2, f"row_length must be at least 2, not {self.row_length}")
        require(self.extra_tokens >= 0, f"extra_tokens must not be negative, is {self.extra_tokens}")
        require(self.data is None or not self.sources, "data and sources are both given: name the folder as a source")
        object.__setattr__(self, "sources", tuple(self.sources))
        require(self.seconds > 0, f"seconds must be positive, not {self.seconds}")
        for name in ("num_depths", "save_every", "panel_prompts", "profile_start", "profile_steps"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, is {getattr(self, name)}")
        require(0 < self.held_out_fraction < 1, f"held_out_fraction {self.held_out_fraction} is not within 0..1")
        require_choice("optimizer", self.optimizer, ("adamw", "muon"))
        if not self.objective.mix:
            mix = {"cross_entropy" if self.trains == "all" else "kl": 1.0}
            object.__setattr__(self, "objective", dataclasses.replace(self.objective, mix=mix))
        require_choice("trains", self.trains, ("all", "modules", "detached"))
        require(self.num_depths > 0 or self.trains != "modules", "trains 'modules' needs num_depths of at least 1")
        require_choice("remat", self.remat, ("none", "layers"))
        require_choice("dtype", self.dtype, ("float32", "bfloat16"))
        self._check_mesh()
        require_choice("trunk_states_dtype", self.trunk_states_dtype, ("float32", "bfloat16"))
        require(
            self.trunk_states is None or self.trains == "modules",
            f"trunk_states are of a frozen trunk: they need trains 'modules', not '{self.trains}'",
        )
        require_choice("attention_layout", self.attention_layout, ("ttt", "stream"))

    def _check_mesh(self):
        sizes = dict(self.mesh)
        for name, size in sizes.items():
            require_choice("mesh axis", name, ("data", "fsdp"))
            require(size >= 1, f"mesh axis {name} must be at least 1, not {size}")
        object.__setattr__(self, "mesh", tuple(sizes.items()))
        parts, rows = self.accumulation * math.prod(sizes.values()), self.batch_size
        require(
            rows % parts == 0,
            f"batch_size {rows} is no multiple of {parts}, accumulation {self.accumulation} times the mesh {sizes}",
        )
