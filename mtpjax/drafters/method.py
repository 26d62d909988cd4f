"""Defines `DraftMethod`, which describes one draft method to the rest of the library."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypedDict

import jax
import numpy as np

from conversion.tensor_slice import ParamSpec
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Drafter
from mtpjax.decoding.limits import DraftLimits
from mtpjax.drafters.architecture import DraftArchitecture, TrunkSizes
from mtpjax.drafters.files.draft_ids import OFFSETS_AND_MARKS, IdsTensors
from mtpjax.drafters.files.trunk_layers import STATES, LastLayerState
from mtpjax.errors import UsageError
from mtpjax.models.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]  # tensor shapes by plain name (`mtpjax.drafters.files.tensor_names`)


class Reading(TypedDict, total=False):
    """Settings that the files may lack. They are also arguments of `mtpjax.load_drafter`."""

    aux_layers: Literal["entered", "output"] | None
    norm_before_residual: bool | None
    sample_from_anchor: bool | None
    last_layer_state: LastLayerState | None


# The values that `Reading` allows.
READINGS: dict[str, tuple[Any, ...]] = {
    "aux_layers": ("entered", "output"),
    "norm_before_residual": (True, False),
    "sample_from_anchor": (True, False),
    "last_layer_state": STATES,
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DrafterFiles:
    """Describes a method's drafter files, which are a `config.json` and tensors in safetensors files.

    Attributes:
        formats: names of the formats that can be written, with the default format first.
        format_with_ids: format in which training saves a drafter with a draft vocabulary; None means the default.
        parse: returns the architecture and the format's name, given the content of `config.json`, the tensor shapes,
            the trunk's sizes and the `Reading`.
        specs: lists an architecture's parameters with their tensors in a format, by plain name.
        describe: makes the `config.json` for an architecture in a format; raises `ConfigError` if the format cannot
            express it.
        rename: returns a tensor's name in a new file, from its plain name and the format.
        ids: the tensors of a draft vocabulary.
        is_of_speculators: whether the method's name can be a value of `speculators_model_type`.
        keys: `config.json` keys that identify the method, with their values; None means any value.
        tensors: plain tensor names that no earlier method in `METHODS` has.
        owners: attributes, besides the method's name, that may hold the drafter and therefore prefix its tensor names.
    """

    formats: tuple[str, ...]
    parse: Callable[[dict[str, Any], Shapes, TrunkSizes, Reading], tuple[Any, str]]
    specs: Callable[[Any, str], dict[str, ParamSpec]]
    describe: Callable[[Any, str], dict[str, Any]]
    rename: Callable[[str, str], str] = lambda name, format: name
    format_with_ids: str | None = None
    ids: IdsTensors = OFFSETS_AND_MARKS
    is_of_speculators: bool = False
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftTraining:
    """Describes how a method's drafters are created and trained on a frozen trunk.

    Attributes:
        architecture: makes the architecture of a new drafter from the run's `TrainConfig`, the trunk's config and the
            number of tokens that can be drafted; raises `ValueError` if they do not fit.
        init: makes float32 parameters for an architecture from a `jax.random` key.
        settings_of: returns the settings that produce an architecture, except `draft_vocab_size`.
        settings: the `draft_*` settings of `TrainConfig` that this method supports in addition to the common ones.
        fit_to_data: completes an architecture, given the settings, how often each token is a target `[V]`, and the ids
            that end a text.
        min_levels: minimum number of levels to train.
    """

    architecture: Callable[[Any, ModelConfig, int], Any]
    init: Callable[[Any, jax.Array], dict[str, Any]]
    settings_of: Callable[[Any], dict[str, Any]]
    settings: tuple[str, ...] = ()
    fit_to_data: Callable[[Any, Any, np.ndarray, Collection[int]], Any] = lambda own, *_: own
    min_levels: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftMethod:
    """A draft method. A new method needs a folder with its drafter and its `DraftMethod`, and an entry in `METHODS`.

    Every command accepts a user-defined `DraftMethod` as `package.module:RECORD`.

    Attributes:
        name: name in settings, such as "eagle3".
        title: name in messages and tables, such as "EAGLE-3".
        drafter: the drafter class. Its `limits` list what the method does not support.
        algorithms: SGLang's values for `--speculative-algorithm`, with the usual value first.
        from_settings: makes the drafter from the settings of a call; None if drafters are read from files.
        default_levels: number of draft levels without `--num-steps`; 0 means all levels of the drafter.
        is_of_model: whether the drafter is the model's MTP modules, which are loaded, saved and trained with the model.
        files: the drafters' files; None if drafters have no separate files.
        training: how drafters are trained on a frozen trunk; None if this is not supported.
    """

    name: str
    title: str
    drafter: type[Drafter]
    algorithms: tuple[str, ...] = ()
    from_settings: Callable[[DecodeConfig], Drafter] | None = None
    default_levels: int = 0
    is_of_model: bool = False
    files: DrafterFiles | None = None
    training: DraftTraining | None = None

    def require_files(self) -> DrafterFiles:
        """Returns `files`; raises `UsageError` if the method has no drafter files."""
        if self.files is None:
            raise UsageError(f"draft method {self.name} has no drafter files")
        return self.files

    @property
    def limits(self) -> DraftLimits:
        """What the method does not support, and why."""
        return self.drafter.limits

    def for_architecture(self, architecture: DraftArchitecture) -> Any:
        """Returns the `mtpjax.drafters.trained.TrainedDrafter` for an architecture."""
        return self.drafter(architecture=architecture)  # pyright: ignore[reportCallIssue]
