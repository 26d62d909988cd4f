"""How to train: objectives and the settings of a run. Frozen and hashable."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from mtpjax.data.config import Source
from mtpjax.models.config import require, require_choice

OBJECTIVES = ("cross_entropy", "kl", "lk_hybrid", "end_to_end_tv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What the draft depths minimise; `mtpjax.training.losses` says how. The trunk always minimises cross-entropy.

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
        trunk_states: folder of a frozen trunk's states (`mtpjax.training.hidden_state_cache`), computed once for all
            runs on the same
            trunk and rows; None: the trunk runs in every step. It needs trains "modules".
        trunk_states_dtype: "float32" as they are; "bfloat16" takes half the disk.
        output: run folder (`mtpjax.training.run_dir`).
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
