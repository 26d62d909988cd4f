"""The checks shared by all drafters with parameters of their own."""

from collections.abc import Mapping
from typing import NoReturn

from mtpjax.decoding.config import DecodeConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import num_parts


def check_sizes(name: str, vocab_size: int, hidden_size: int, model: MTPModel) -> None:
    """Checks that a drafter is for a trunk of this vocabulary and width.

    Args:
        name: the drafter's name, for the message.
        vocab_size: vocabulary of its trunk.
        hidden_size: width of its trunk.
        model: the model.

    Raises:
        ValueError: the model has other sizes.
    """
    config = model.config
    if (vocab_size, hidden_size) != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"the {name} drafter is for a trunk of width {hidden_size} and vocabulary {vocab_size}; "
            f"this one has {config.hidden_size} and {config.vocab_size}"
        )


def require_whole_vocabulary(name: str, config: DecodeConfig) -> None:
    """Checks that the settings name no draft vocabulary.

    Args:
        name: the drafter's name, for the message.
        config: the settings.

    Raises:
        ValueError: they name one.
    """
    if config.draft_vocabulary is not None:
        raise ValueError(
            f"draft_vocabulary applies only to drafter 'mtp': the head of a {name} drafter has a vocabulary of its own"
        )


def require_params(name: str) -> NoReturn:
    """Raises the error for a call without the drafter's parameters.

    Args:
        name: the drafter's class.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} has parameters of its own: pass draft_params, the second result of mtpjax.load_drafter")


def require_whole_trunk(sizes: Mapping[str, int] | None = None) -> None:
    """Checks that no mesh axis splits the trunk's width or heads.

    Args:
        sizes: sizes of the mesh axes by name; None: those of the call that is traced.

    Raises:
        ValueError: one does. Only MTP modules are split with the trunk.
    """
    for axis in ("tensor", "expert"):
        count = num_parts(axis) if sizes is None else sizes.get(axis, 1)
        if count > 1:
            raise ValueError(
                f"drafters with parameters of their own do not support a mesh that splits the trunk ({axis} {count}): "
                "split only the rows, over data"
            )
