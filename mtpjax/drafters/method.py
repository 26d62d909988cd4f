"""The record that describes one draft method to the rest of the library."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypedDict

import jax
import numpy as np

from conversion.tensor_slice import ParamSpec
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.drafter import Drafter
from mtpjax.drafters.architecture import DraftArchitecture, TrunkSizes
from mtpjax.drafters.files.draft_ids import OFFSETS_AND_MARKS, IdsTensors
from mtpjax.drafters.files.trunk_layers import LastLayerState
from mtpjax.models.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by plain name (`mtpjax.drafters.files.tensor_names`)


class Reading(TypedDict, total=False):
    """How to read files that do not say it, by the argument of `mtpjax.load_drafter`."""

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
            `Reading` of what the files do not say. Returns the architecture and the name of the format.
        specs: lists the parameters of an architecture with the tensors that hold them in a format, by plain name.
        describe: makes a `config.json` of a format, which `parse` reads as the architecture; raises `ConfigError` if
            the format cannot express it.
        rename: gives a tensor its name in a new file, from the plain one and the format.
        ids: the tensors of a draft vocabulary.
        is_of_speculators: the method's name is one of speculators' `speculators_model_type`.
        keys: keys of `config.json` that only this method has, with their value; None: any.
        tensors: plain names of tensors that no method before it in `METHODS` has.
        owners: attributes that may hold the whole drafter, in front of its tensors' names, like the method's own name.
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
        settings_of: the settings that an architecture implies, without `draft_vocab_size`; those that training would
            have to be given to make it again.
        settings: settings of `TrainConfig` that begin with `draft_`, beyond those that every drafter has.
        fit_to_data: completes an architecture, from the settings, how often each token `[V]` is a target, and the ids
            that end a text.
        is_head: whether a parameter is a head, by its name: it begins as the trunk's.
        min_levels: the fewest levels that train.
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

    A record of a user has the same road in every command, as `package.module:RECORD`.

    Attributes:
        name: its name in settings, such as "eagle3".
        title: its name in texts, such as "EAGLE-3".
        drafter: the class that drafts. What it cannot do, such as trees, windows or a mesh, and why, is in its `check`
            and `prepare`.
        algorithms: SGLang's names of `--speculative-algorithm`, the usual one first.
        from_settings: makes the drafter from the settings of a call; None: it is read from files.
        default_levels: draft levels where the command line names none; 0: all that the drafter has.
        is_of_model: the drafts come from the model's own MTP modules, which are loaded, saved and trained with it.
        files: its files; None: it has no parameters of its own.
        training: how it trains on a frozen trunk; None: it does not.
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
