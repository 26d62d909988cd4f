"""Makes the drafter that a run begins with: new weights of an architecture, or those of a drafter's files."""

import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.drafters.dspark.network import DSparkConfig
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.files.write import find_form
from mtpjax.drafters.forward import DraftArchitecture
from mtpjax.drafters.load import TrainedParams, load_drafter
from mtpjax.drafters.medusa.drafting import MedusaParams
from mtpjax.drafters.medusa.network import MedusaConfig
from mtpjax.errors import UsageError
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus
from mtpjax.training.draft_architecture import draft_architecture
from mtpjax.training.new_drafter import add_new_drafter, choose_draft_ids, with_mask_token


class InitialDrafter(NamedTuple):
    """The drafter of a run before its first update."""

    architecture: DraftArchitecture
    params: TrainedParams | None  # None: new weights, which `add_drafter` makes


def initial_drafter(config: TrainConfig, model: MTPModel) -> InitialDrafter | None:
    """Chooses the architecture of a run's drafter, or loads the drafter that the run continues to train.

    Args:
        config: the settings.
        model: the trunk.

    Returns:
        The drafter; None for MTP modules.

    Raises:
        ValueError: the settings do not fit the trunk, or contradict the files of `draft_init_from`.
        CheckpointError: these files cannot be read, or no format can express the drafter.
    """
    if config.draft_init_from is None:
        architecture = draft_architecture(config, model.config)
        return None if architecture is None else InitialDrafter(architecture, None)
    # A run replaces the drafter in its folder, and a resumed one reads where it began.
    path, output = (pathlib.Path(each).resolve() for each in (config.draft_init_from, config.output))
    if path.is_relative_to(output):
        raise UsageError(f"draft_init_from {path} is in output {output}: choose another output")
    reading: dict[str, Any] = dict(config.draft_reading)
    drafter, params = load_drafter(config.draft_init_from, model=model, dtype=jnp.float32, **reading)
    architecture = drafter.architecture
    _check_settings(config, architecture)
    # What cannot be saved at the end of the run is an error now.
    find_form(architecture, has_draft_ids=params.draft_ids is not None)
    return InitialDrafter(architecture, params)


def add_drafter(
    params: dict, initial: InitialDrafter, *, config: TrainConfig, corpus: Corpus, model: MTPModel
) -> tuple[dict, DraftArchitecture]:
    """Adds a drafter to its trunk's parameters.

    Args:
        params: the trunk's parameters.
        initial: the drafter.
        config: the settings.
        corpus: the data of the run, from which a new drafter takes its draft vocabulary and its mask token.
        model: the trunk.

    Returns:
        The parameters with `DRAFTER` (float32), and `DRAFT_IDS` if there are any; and the architecture.
    """
    if initial.params is None:
        architecture = with_mask_token(initial.architecture, config, corpus)
        ids, key = choose_draft_ids(corpus, architecture, model.config.vocab_size), jax.random.key(config.seed)
        return add_new_drafter(params, model=model, architecture=architecture, draft_ids=ids, key=key), architecture
    ids = initial.params.draft_ids
    return params | {DRAFTER: network_of(initial.params)} | ({} if ids is None else {DRAFT_IDS: ids}), (
        initial.architecture
    )


def network_of(params: TrainedParams) -> dict[str, Any]:
    """Returns the parameters of a drafter's network."""
    return dict(params.heads if isinstance(params, MedusaParams) else params.network)


def _check_settings(config: TrainConfig, found: DraftArchitecture) -> None:
    """Raises `UsageError` if settings differ from what the files hold."""
    own: dict[str, Any]
    if isinstance(found, Eagle3Config):
        kind, own = "eagle3", {"draft_layers": found.layer_ids}
    elif isinstance(found, MedusaConfig):
        kind, own = "medusa", {"num_depths": found.num_heads}
    else:
        kind = "dspark" if isinstance(found, DSparkConfig) else "dflash"
        own = {
            "num_depths": found.num_drafts,
            "draft_layers": found.layer_ids,
            "draft_num_layers": found.block.num_hidden_layers,
            "draft_mask_token": found.mask_token_id,
        }
        own |= {"draft_markov_rank": found.markov_rank} if isinstance(found, DSparkConfig) else {}
    path = config.draft_init_from
    if kind != config.drafter:
        raise UsageError(f"draft_init_from {path} is of kind '{kind}': set drafter={kind}, not {config.drafter}")
    own["draft_vocab_size"] = found.draft_vocab_size
    # Settings that are left out are those of the files. The number of depths has no such value.
    defaults = {name: getattr(TrainConfig, name) for name in own if name != "num_depths"}
    wrong = [
        f"{name} is {value}, not {given}"
        for name, value in own.items()
        if (given := getattr(config, name)) != value and (name not in defaults or given != defaults[name])
    ]
    if wrong:
        raise UsageError(
            f"settings differ from the drafter of draft_init_from {path}, whose {'; '.join(wrong)}: set these values, "
            "or leave out settings that begin with draft_; a drafter of another architecture is a new one"
        )
