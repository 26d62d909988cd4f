"""The record that describes one draft method to the rest of the library."""

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

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by plain name (`mtpjax.drafters.files.tensor_names`)


class Reading(TypedDict, total=False):
    """Choices for what the files do not state: the arguments of `mtpjax.load_drafter` of these names."""

    aux_layers: Literal["entered", "output"] | None
    norm_before_residual: bool | None
    sample_from_anchor: bool | None
    last_layer_state: LastLayerState | None


# The choices of `Reading`.
READINGS: dict[str, tuple[Any, ...]] = {
    "aux_layers": ("entered", "output"),
    "norm_before_residual": (True, False),
    "sample_from_anchor": (True, False),
    "last_layer_state": STATES,
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DrafterFiles:
    """The files of a method's drafters: a `config.json`, and tensors in safetensors files.

    Attributes:
        formats: names of the formats that can be written, the default one first.
        format_with_ids: the format in which training saves a drafter with a draft vocabulary; None: the default one.
        parse: returns the architecture and the name of the format, from the content of `config.json`, the shapes of the
            tensors, the sizes of the trunk and the `Reading`.
        specs: lists the parameters of an architecture with the tensors that hold them in a format, by plain name.
        describe: makes the `config.json` of an architecture in a format; raises `ConfigError` if the format cannot
            express it.
        rename: returns a tensor's name in a new file, from its plain name and the format.
        ids: the tensors of a draft vocabulary.
        is_of_speculators: whether the method's name is a value of `speculators_model_type`.
        keys: keys of `config.json` that identify the method, with their values; None: any value.
        tensors: plain names of tensors that no earlier method of `METHODS` has.
        owners: attributes other than the method's name that may hold the drafter and so prefix its tensors' names.
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
    """How a method's drafters are made and trained on a frozen trunk.

    Attributes:
        architecture: makes the architecture of a new drafter from the run's `TrainConfig`, the trunk's config and the
            number of tokens that can be drafted; raises `ValueError` if they do not fit.
        init: makes float32 parameters of an architecture from a `jax.random` key.
        settings_of: returns the settings that give an architecture, without `draft_vocab_size`.
        settings: the `draft_*` settings of `TrainConfig` that this method has in addition to those of every drafter.
        fit_to_data: completes an architecture from the settings, the count of each token as a target `[V]`, and the
            ids that end a text.
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
    """One way to draft. A new method is one folder with its drafter and record, and a row in `METHODS`.

    Every command accepts a user-defined record as `package.module:RECORD`.

    Attributes:
        name: name in settings, such as "eagle3".
        title: name in messages and tables, such as "EAGLE-3".
        drafter: the class that drafts. Its `limits` state what the method does not support.
        algorithms: SGLang's values of `--speculative-algorithm`, the usual one first.
        from_settings: makes the drafter from the settings of a call; None: drafters are read from files.
        default_levels: draft levels without `--num-steps`; 0: all levels of the drafter.
        is_of_model: whether the model's MTP modules draft, which are loaded, saved and trained with the model.
        files: the files of drafters; None: drafters have no separate files.
        training: how drafters are trained on a frozen trunk; None: not supported.
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
        """Returns its files; raises `UsageError` if it has none."""
        if self.files is None:
            raise UsageError(f"draft method {self.name} has no drafter files")
        return self.files

    @property
    def limits(self) -> DraftLimits:
        """What the method does not support, and why."""
        return self.drafter.limits

    def for_architecture(self, architecture: DraftArchitecture) -> Any:
        """Returns the drafter of an architecture, a `mtpjax.drafters.trained.TrainedDrafter`."""
        return self.drafter(architecture=architecture)  # pyright: ignore[reportCallIssue]
