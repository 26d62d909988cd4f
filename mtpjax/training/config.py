"""Defines `TrainConfig`, the frozen and hashable settings of a training run."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from mtpjax.data.config import Source
from mtpjax.drafters.method import DraftMethod, Reading
from mtpjax.drafters.methods import METHODS, find_method
from mtpjax.errors import printable
from mtpjax.field_types import check_mapping, check_range, check_scalar_fields, check_used
from mtpjax.messages import require, require_choice
from mtpjax.models.config import Implementation, ModelConfig
from mtpjax.models.context import AXIS
from mtpjax.models.overrides import model_changes, override_config
from mtpjax.models.presets import presets
from mtpjax.training.objective import Objective

MAX_LEARNING_RATE = 100.0  # far above any real value, so a larger value is a typo
MAX_DEPTHS = 64  # each depth is compiled, so many more would take hours
READING = tuple(Reading.__annotations__)  # arguments of `load_drafter`
# Settings of every drafter with separate files; a method may add more (`DraftTraining.settings`).
DRAFTER_SETTINGS = ("draft_init_from", "draft_reading", "draft_vocab_size")
# Smallest and largest values of settings.
LIMITS = (
    (0, math.inf, ("extra_tokens", "save_every", "panel_prompts", "profile_start", "profile_steps")),
    (0, math.inf, ("draft_vocab_size", "weight_decay", "mtp_loss_scale", "mtp_loss_scale_final", "gradient_clip")),
    (0, 1, ("warmup", "final_learning_rate", "mtp_loss_switch")),
    (0, MAX_LEARNING_RATE, ("learning_rate",)),
    (0, MAX_DEPTHS, ("num_depths",)),
    (0, 2**63 - 1, ("seed",)),
    (1, math.inf, ("steps", "log_every", "keep_states", "accumulation", "max_consecutive_bad_steps")),
    (1, math.inf, ("draft_num_layers", "draft_anchors", "draft_markov_rank")),
    (1, 2**20, ("batch_size",)),
    (2, 2**20, ("row_length",)),
)
# Settings that have no effect without draft depths.
DEPTH_SETTINGS = ("attention_layout", "mtp_loss_scale", "mtp_loss_scale_final", "mtp_loss_switch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run, which ends after `steps` updates or `seconds` of wall-clock time, whichever is first.

    Args:
        preset: name of the architecture in `mtpjax.presets`.
        model: fields of `ModelConfig` that differ from the preset, as a dict or as pairs, such as
            `{"num_mtp_modules": 3}`; or a complete `ModelConfig`, which replaces the preset. Stored as pairs. On the
            command line: `model.num_mtp_modules=3`, or `model=FILE.yaml` for a complete architecture.
        init_from: checkpoint (mtpjax or Hugging Face) to continue training from, instead of new weights of `preset`:
            a folder, or `org/name` or `org/name@revision` on the Hugging Face Hub. A checkpoint without MTP modules
            gets one, or the number in `model.num_mtp_modules`, which is the only field of `model` that may be set. Its
            `tokenizer.json`, if it has one, is the default tokenizer.
        model_type: model family of `init_from`; overrides the `model_type` in its `config.json`.
        drafter: the drafter to train. "mtp" trains the model's MTP modules. The other methods train a drafter with
            separate files on the frozen trunk of `init_from`, without its MTP modules, and set `trains` to "modules":
            "eagle3" (2503.01840) over `num_depths` levels, "medusa" (2401.10774) with `num_depths` heads, "dflash"
            (2602.06036) or "dspark" (2607.05147) with blocks of `num_depths` drafts, or your own method, as
            `package.module:RECORD`.
        draft_init_from: drafter to continue training, instead of a new one: a folder or a Hugging Face Hub repository
            that `mtpjax.load_drafter` reads, or the run folder in which it was trained. It keeps its architecture and
            draft vocabulary, so leave out the other `draft_*` settings or set them to the drafter's values.
            `num_depths` must equal the number of Medusa heads, or the number of drafts in a block.
        draft_reading: arguments of `load_drafter` that say how to read `draft_init_from`, such as
            `{"aux_layers": "output"}`, as a dict or as pairs. On the command line: `draft_reading.aux_layers=output`.
        draft_vocab_size: size of a new drafter's draft vocabulary, which has the most frequent tokens of the training
            rows. 0: all tokens.
        draft_layers: trunk layers whose input states EAGLE-3, DFlash and DSpark read. With L layers, L means the output
            of the last layer, and L + 1 the output of the final norm. (): for EAGLE-3, layers 2, L / 2 and L - 3, or
            L / 3, 2 L / 3 and L in a trunk with fewer than 7 layers; for the others, five layers from 2 to L - 2, or
            from 1 to L in a trunk with fewer than 8 layers.
        draft_num_layers: number of layers in a DFlash or DSpark drafter. None: 5.
        draft_anchors: maximum number of blocks per row for DFlash and DSpark. Every update draws new anchors. None:
            512.
        draft_mask_token: token id in the slots after an anchor. None: the rarest token of the training rows.
        draft_markov_rank: rank of DSpark's Markov head. None: 256, or the vocabulary size if that is smaller.
        trains: "all" trains everything. "modules" freezes the trunk, with the embedding and head that the modules share
            with it. "detached" trains everything, but the draft losses send no gradients into the trunk.
        trunk_dtype: weight dtype of a frozen trunk, including embedding and head: "float32", "bfloat16", or "stored",
            which keeps the checkpoint's dtypes, such as block-scaled fp8. Modules are always float32. "bfloat16" and
            "stored" need `init_from` and `trains="modules"`.
        trunk_states: folder in which to cache the frozen trunk's hidden states
            (`mtpjax.training.hidden_state_cache`). Runs with the same trunk and rows can share it. None: every step
            runs the trunk. Needs `trains="modules"`.
        trunk_states_dtype: dtype of the cached states: "float32"; "bfloat16", which halves the disk space; or
            "fp8_e4m3" with a scale per token, which takes about a quarter and keeps 4 significant bits.
        output: run folder to write (`mtpjax.training.run_dir`).
        data: file or folder to train on. None: the standard library of the running Python. The suffix of a file
            decides whether it is read as text or as records with texts or conversations (`mtpjax.data.config.Source`).
        pattern: glob pattern that selects files in the folder `data`, such as `*.md`. The default reads all files
            except hidden and binary ones.
        sources: data sources to use instead of `data`, mixed by their weights.
        tokenizer: folder or Hub repository with a `tokenizer.json`. None: the tokenizer of `init_from`, or bytes if
            there is none.
        extra_tokens: number of tokens by which a row overlaps the next one. `num_depths + 1` keeps all targets of every
            depth.
        held_out_fraction: fraction of the documents to hold out for evaluation, at least 0 and below 1. If there is
            only one text, its end is held out. With 0, the panel measures training rows and decodes no prompts.
        steps: maximum number of updates.
        seconds: maximum wall-clock time of training, in seconds.
        min_steps: minimum number of updates, even if they take longer than `seconds`.
        batch_size: rows per update, B.
        row_length: tokens per packed row, T, without `extra_tokens`.
        num_depths: number of draft depths with a loss. Depth k predicts the token k + 1 positions ahead, with MTP
            module k. Depths beyond the model's `num_mtp_modules` run the last module again on its own output; modules
            beyond `num_depths` are not trained.
        mtp_loss_scale: lambda of DeepSeek-V3 (section 2.2), the weight of the draft losses.
        mtp_loss_scale_final: lambda after the fraction `mtp_loss_switch` of the run.
        mtp_loss_switch: fraction of the run at which lambda changes, 0..1.
        objective: losses of the draft depths and their weights.
        attention_layout: keys that a recycled depth attends to: "ttt" (as in training-time test and in decoding), or
            "stream" (only keys of the same depth).
        optimizer: "adamw", or "muon", which uses Muon for the matrices inside the layers and AdamW for the rest.
        learning_rate: peak learning rate.
        weight_decay: decoupled weight decay, applied to matrices only.
        warmup: fraction of the run over which the learning rate rises linearly.
        final_learning_rate: learning rate at the end of the cosine schedule, as a fraction of `learning_rate`.
        gradient_clip: maximum global norm of the gradients.
        log_every: number of updates between logged rows.
        save_every: number of updates between saved training states, from which an interrupted run can resume. 0: save
            only when the run receives a stop signal, and at the end.
        keep_states: number of saved states to keep. Older ones are deleted.
        max_consecutive_bad_steps: number of consecutive updates with a non-finite loss or gradient after which the run
            stops.
        panel_prompts: number of held-out prompts to decode at the end of the run. Some of them are also decoded during
            the run. 0: decode none.
        panel_acceptance: acceptance rule for the decoded prompts, as in `DecodeConfig`. It must allow temperature 1.
        accumulation: number of microbatches per update, which run one after the other. This saves memory and changes
            the update only by rounding.
        remat: what is stored for the backward pass. "none": each layer's matmul outputs and, in rows of more than 128
            tokens, the outputs of attention; norms and activations are recomputed. "attention": each layer's input and
            the outputs of attention. "layers": each layer's input. "auto": "none" on a CPU, and on GPUs the first of
            the three whose estimated memory fits. The run's settings hold the choice.
        implementation: how kernels run: "xla" (plain JAX), "triton" (GPU kernels), "interpreted" (the GPU kernels in an
            interpreter: slow, on any device), or "auto" (`pallas_kernels.dispatch`).
        dtype: compute dtype inside the layers. Trained parameters, gradient sums and optimiser state stay float32.
        mesh: sizes of the mesh axes "data", "fsdp", "expert" and "context", as a dict or as pairs. "context" splits
            each row by its tokens, for rows that do not fit on one device. Rows are sharded over the other axes,
            parameters and optimiser state over "fsdp" and "context", and experts also over "expert".
        plot_formats: file formats of the run's plot: "png", "svg", "pdf". (): no plot.
        tensorboard: also write the metrics to `tensorboard/` in the run folder.
        wandb: Weights & Biases project to which the metrics are also sent. None: do not use Weights & Biases.
        profile_start: number of updates before profiling starts.
        profile_steps: number of updates to profile; the traces are written to `profile/`. 0: do not profile.
        seed: random seed for the initial parameters and the row order.

    Raises:
        ValueError: a value is out of range, or settings contradict each other.

    Example:
        >>> from mtpjax import TrainConfig
        >>> config = TrainConfig(preset="tiny", trains="modules", init_from="runs/joint", num_depths=3, steps=500)
        >>> config.objective.mix  # the default for modules on a frozen trunk
        (('kl', 1.0),)
    """

    preset: str = "tiny"
    model: ModelConfig | Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = ()
    init_from: str | None = None
    model_type: str | None = None
    drafter: str = "mtp"
    draft_init_from: str | None = None
    draft_reading: Mapping[str, bool | str] | tuple[tuple[str, bool | str], ...] = ()
    draft_vocab_size: int = 0
    draft_layers: tuple[int, ...] = ()
    draft_num_layers: int | None = None
    draft_anchors: int | None = None
    draft_mask_token: int | None = None
    draft_markov_rank: int | None = None
    trains: Literal["all", "modules", "detached"] = "all"
    trunk_dtype: Literal["float32", "bfloat16", "stored"] = "float32"
    trunk_states: str | None = None
    trunk_states_dtype: Literal["float32", "bfloat16", "fp8_e4m3"] = "float32"
    output: str = "runs/train"
    data: str | None = None
    pattern: str = "*"
    sources: tuple[Source, ...] = ()
    tokenizer: str | None = None
    extra_tokens: int = 0
    held_out_fraction: float = 0.05
    steps: int = 1000
    seconds: float = math.inf
    min_steps: int = 0
    batch_size: int = 8
    row_length: int = 128
    num_depths: int = 2
    mtp_loss_scale: float = 0.3
    mtp_loss_scale_final: float = 0.1
    mtp_loss_switch: float = 0.7
    objective: Objective = Objective()  # noqa: RUF009, frozen
    attention_layout: Literal["ttt", "stream"] = "ttt"
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup: float = 0.02  # fraction of the run
    final_learning_rate: float = 0.05  # of learning_rate, at the end of the cosine
    gradient_clip: float = 1.0
    log_every: int = 10
    save_every: int = 500
    keep_states: int = 2
    max_consecutive_bad_steps: int = 10
    panel_prompts: int = 128
    panel_acceptance: str = "auto"
    accumulation: int = 1
    remat: Literal["auto", "none", "attention", "layers"] = "auto"
    implementation: Implementation = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    plot_formats: tuple[Literal["png", "svg", "pdf"], ...] = ("png", "svg")
    tensorboard: bool = False
    wandb: str | None = None
    profile_start: int = 10
    profile_steps: int = 0
    seed: int = 0

    def __post_init__(self):
        check_scalar_fields(self)
        self._check_model()
        self._check_drafter()
        self._check_unused()
        for low, high, names in LIMITS:
            for name in names:
                check_range(name, getattr(self, name), low, high)
        for name in ("learning_rate", "gradient_clip", "seconds"):
            require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        check_range("min_steps", self.min_steps, 0, self.steps)
        require(0 <= self.held_out_fraction < 1, f"held_out_fraction {self.held_out_fraction} is not in [0, 1)")
        require(
            isinstance(self.objective, Objective),
            f"objective must be an Objective, not {printable(repr(self.objective), 80)}",
        )
        # By default, learn from the data if the draft losses change the trunk, and imitate the trunk otherwise.
        mix = {"cross_entropy" if self.trains == "all" else "kl": 1.0}
        if not self.objective.mix:
            object.__setattr__(self, "objective", dataclasses.replace(self.objective, mix=mix))
        is_used = self.num_depths > 0 or self.objective == Objective(mix=mix)
        require(is_used, "objective is unused: it needs num_depths above 0")
        # Check settings that need other settings.
        require(self.num_depths > 0 or self.trains == "all", f"trains={self.trains!r} needs num_depths of at least 1")
        object.__setattr__(self, "plot_formats", tuple(self.plot_formats))
        for name in self.plot_formats:
            require_choice("plot_formats", name, ("png", "svg", "pdf"))
        self._check_mesh()
        require(
            self.trunk_dtype == "float32" or (self.trains == "modules" and self.init_from is not None),
            f"trunk_dtype '{self.trunk_dtype}' needs the frozen trunk of a checkpoint: set init_from, and trains to "
            f"'modules', not '{self.trains}'",
        )
        require(
            self.trunk_states is None or self.trains == "modules",
            f"trunk_states needs a frozen trunk: set trains to 'modules', not '{self.trains}'",
        )

    @property
    def draft_method(self) -> DraftMethod:
        """The `DraftMethod` that `drafter` selects."""
        return find_method(self.drafter)

    @property
    def model_config(self) -> ModelConfig:
        """The architecture of new weights, which is the preset overridden by the fields in `model`."""
        return override_config(presets[self.preset], model_changes(self.model))

    def _check_model(self):
        """Checks the architecture. A checkpoint determines it, except that MTP modules can be added."""
        if isinstance(self.model, ModelConfig):
            require(self._is_default("preset"), f"preset '{self.preset}' is unused: `model` is a complete architecture")
        changes = model_changes(self.model)
        object.__setattr__(self, "model", tuple(changes.items()))
        if self.init_from is None:
            _ = self.model_config
            return
        others = ", ".join(f"model.{name}" for name in sorted(set(changes) - {"num_mtp_modules"})[:3])
        require(
            not others,
            f"init_from determines the architecture: only model.num_mtp_modules can be set, not {others}",
        )

    def _check_drafter(self):
        """Checks the settings of a separate drafter, which trains on a frozen trunk."""
        method = self.draft_method
        require(
            _trains(method),
            f"drafter '{self.drafter}' cannot be trained; choose one of "
            + ", ".join(each.name for each in METHODS if _trains(each)),
        )
        require(not isinstance(self.draft_layers, int), f"draft_layers must be a sequence, got {self.draft_layers!r}")
        object.__setattr__(self, "draft_layers", tuple(self.draft_layers))
        reading = check_mapping("draft_reading", self.draft_reading)
        object.__setattr__(self, "draft_reading", tuple(reading.items()))
        for name, _ in self.draft_reading:
            require_choice("draft_reading", name, READING)
        # Reject settings that the drafter would ignore.
        for name in (field.name for field in dataclasses.fields(self) if field.name.startswith("draft_")):
            is_used = _uses(method, name) or self._is_default(name)
            choices = ", ".join(repr(each.name) for each in METHODS if _uses(each, name))
            require(is_used, f"{name} needs drafter {choices}, not '{self.drafter}'")
        if method.training is None:
            return
        least = method.training.min_levels
        for holds, problem in (
            (self.init_from is not None, "trains on the frozen trunk of a checkpoint: set init_from"),
            (self.trains != "detached", "trains on a frozen trunk: trains must be 'modules', not 'detached'"),
            (self.num_depths >= least, f"needs num_depths of at least {least}, not {self.num_depths}"),
            (not self.model, "does not use MTP modules: do not set model.num_mtp_modules"),
            (self.attention_layout == "ttt", "trains as it decodes: attention_layout must be 'ttt'"),
            (
                self.remat in ("auto", "none"),
                "has a frozen trunk, whose layers have no backward pass: remat must be 'auto' or 'none'",
            ),
        ):
            require(holds, f"drafter '{self.drafter}' {problem}")
        object.__setattr__(self, "trains", "modules")

    def _check_unused(self):
        """Rejects settings that other settings make ineffective, because a user who sets them expects an effect."""
        # Sources replace `data`. A list becomes a tuple, so that the config is hashable.
        is_sources = not isinstance(self.sources, str) and all(isinstance(each, Source) for each in self.sources)
        require(is_sources, f"sources must be a sequence of Source, got {self.sources!r:.80}")
        object.__setattr__(self, "sources", tuple(self.sources))
        require(self.data is None or not self.sources, "data and sources are both given: add the folder as a source")
        rows = (
            ("preset", self.init_from is None, "new weights: leave out init_from, which determines the architecture"),
            ("model_type", self.init_from is not None, "init_from: it says how a checkpoint is read"),
            ("draft_reading", self.draft_init_from is not None, "draft_init_from: it says how its files are read"),
            ("trunk_states_dtype", self.trunk_states is not None, "trunk_states, the folder for the states"),
            ("pattern", self.data is not None, "data, which is a folder; each source has a separate pattern"),
            ("panel_prompts", self.held_out_fraction > 0 or not self.panel_prompts, "held_out_fraction above 0"),
            ("mtp_loss_scale_final", self.mtp_loss_switch < 1, "mtp_loss_switch below 1"),
            ("profile_start", self.profile_steps > 0, "profile_steps above 0"),
            *((name, self.num_depths > 0, "num_depths above 0") for name in DEPTH_SETTINGS),
        )
        check_used(self, rows)
        require(
            self.profile_start < self.steps or not self.profile_steps,
            f"profile_start {self.profile_start} must be below steps {self.steps}, or no update is traced",
        )

    def _is_default(self, name: str) -> bool:
        """Returns whether a setting has its default value."""
        return getattr(self, name) == getattr(type(self), name)

    def _check_mesh(self):
        """Checks the mesh, and that all devices get the same number of rows and tokens of each microbatch."""
        sizes = check_mapping("mesh", self.mesh)
        for name, size in sizes.items():
            require_choice("mesh axis", name, ("data", "fsdp", "expert", AXIS))
            require(type(size) is int, f"mesh axis {name} must be an integer, got {size!r:.80}")
            check_range(f"mesh axis {name}", size, 1)
        object.__setattr__(self, "mesh", tuple(sizes.items()))
        context = sizes.get(AXIS, 1)
        parts, rows = self.accumulation * math.prod(sizes.values()) // context, self.batch_size
        require(
            rows % parts == 0,
            f"batch_size {rows} is not a multiple of {parts} (accumulation {self.accumulation} x mesh {sizes}"
            f"{' without ' + AXIS if context > 1 else ''})",
        )
        if context == 1:
            return
        # A device has two chunks of a row. A depth reads the states of the next chunk up to `num_depths` positions on.
        tokens, chunks = self.row_length + self.extra_tokens, 2 * context
        require(
            tokens % chunks == 0,
            f"mesh axis {AXIS} = {context} cuts a row into {chunks} chunks, which do not divide its {tokens} tokens "
            f"(row_length {self.row_length} + extra_tokens {self.extra_tokens})",
        )
        require(
            tokens // chunks >= self.num_depths,
            f"mesh axis {AXIS} = {context} cuts a row into chunks of {tokens // chunks} tokens, fewer than num_depths "
            f"{self.num_depths}",
        )
        require(self.draft_method.is_of_model, f"drafter '{self.drafter}' does not support the mesh axis {AXIS}")


def _trains(method: DraftMethod) -> bool:
    return method.is_of_model or method.training is not None


def _uses(method: DraftMethod, setting: str) -> bool:
    """Returns whether a setting that starts with `draft_` applies to a method."""
    return method.training is not None and setting in (*DRAFTER_SETTINGS, *method.training.settings)
