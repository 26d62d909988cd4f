"""The record that describes one draft method to the rest of the library."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypedDict

import jax
import numpy as np

from conversion.tensor_slice import ParamSpec
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Drafter
from mtpjax.drafters.architecture import DraftArchitecture, TrunkSizes
from mtpjax.drafters.files.draft_ids import OFFSETS_AND_MARKS, IdsTensors
from mtpjax.drafters.files.trunk_layers import LastLayerState
from mtpjax.models.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by plain name (`mtpjax.drafters.files.tensor_names`)


class Reading(TypedDict, total=False):
    """Choices for what the files leave open, named as the arguments of `mtpjax.load_drafter`."""

    aux_layers: Literal["entered", "output"] | None
    norm_before_residual: bool | None
    sample_from_anchor: bool | None
    last_layer_state: LastLayerState | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DrafterFiles:
    """How files hold the drafters of a method: a `config.json`, and tensors in safetensors files.

    Attributes:
        formats: names of the formats that are written, the default one first.
        format_with_ids: the format that training prefers for a drafter with a draft vocabulary; None: the default one.
        parse: reads the content of `config.json`, with the shapes of the tensors, the sizes of the trunk and the
            `Reading`. Returns the architecture and the name of the format.
        specs: lists the parameters of an architecture with the tensors that hold them in a format, by plain name.
        describe: makes a `config.json` of a format, which `parse` reads as the architecture; raises `ConfigError` if
            the format cannot express it.
        rename: gives a tensor its name in a new file, from the plain one and the format.
        ids: the tensors of a draft vocabulary.
        is_of_speculators: whether the method's name is a value of `speculators_model_type`.
        keys: keys of `config.json` that only this method has, with their value; None: any.
        tensors: plain names of tensors that no method before it in `METHODS` has.
        owners: attributes that may hold the whole drafter and so prefix its tensors' names, like the method's name.
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
        architecture: chooses a new drafter's from the run's settings, a `mtpjax.TrainConfig`, the trunk's config, and
            the number of tokens that can be drafted; raises `ValueError` if they do not fit.
        init: makes float32 parameters of an architecture from a `jax.random` key.
        settings_of: the settings that would make training choose this architecture, without `draft_vocab_size`.
        settings: settings of `TrainConfig` that start with `draft_`, beyond those that every drafter has.
        fit_to_data: completes an architecture, from the settings, how often each token `[V]` is a target, and the ids
            that end a text.
        is_head: whether a parameter is a head, by its name: it is initialised from the trunk's.
        min_levels: minimum number of levels to train.
    """

    architecture: Callable[[Any, ModelConfig, int], Any]
    init: Callable[[Any, jax.Array], dict[str, Any]]
    settings_of: Callable[[Any], dict[str, Any]]
    settings: tuple[str, ...] = ()
    fit_to_data: Callable[[Any, Any, np.ndarray, Collection[int]], Any] = lambda own, *_: own
    is_head: Callable[[str], bool] = lambda name: name == "head"
    min_levels: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftMethod:
    """One way to draft. A new method is one folder with its drafter and record, and a row in `METHODS`.

    Every command accepts a user-defined record as `package.module:RECORD`.

    Attributes:
        name: its name in settings, such as "eagle3".
        title: its name in texts, such as "EAGLE-3".
        drafter: the class that drafts. Its `check` and `prepare` reject what it does not support, such as trees,
            windows or a mesh.
        algorithms: SGLang's names of `--speculative-algorithm`, the usual one first.
        from_settings: makes the drafter from the settings of a call; None: it is read from files.
        default_levels: draft levels if the command line gives none; 0: all that the drafter has.
        is_of_model: whether the model's own MTP modules draft, which are loaded, saved and trained with it.
        files: its files; None: it has no parameters.
        training: how it trains on a frozen trunk; None: it cannot be trained.
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

    def for_architecture(self, architecture: DraftArchitecture) -> Any:
        """Returns the drafter of an architecture, a `mtpjax.drafters.trained.TrainedDrafter`."""
        return self.drafter(architecture=architecture)  # pyright: ignore[reportCallIssue]
