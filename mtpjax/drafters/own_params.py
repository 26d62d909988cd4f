"""The checks shared by all drafters with parameters of their own."""

from collections.abc import Mapping
from typing import NoReturn

from mtpjax.decoding.config import DecodeConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.parallel import num_parts


def check_sizes(name: str, vocab_size: int, hidden_size: int, model: MTPModel) -> None:
    """Raises `ValueError` if a drafter is for a trunk of another vocabulary or width."""
    config = model.config
    if (vocab_size, hidden_size) != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"the {name} drafter is for a trunk of width {hidden_size} and vocabulary {vocab_size}; "
            f"this one has {config.hidden_size} and {config.vocab_size}"
        )


def require_whole_vocabulary(name: str, config: DecodeConfig) -> None:
    """Raises `ValueError` if the settings name a draft vocabulary."""
    if config.draft_vocabulary is not None:
        raise ValueError(
            f"draft_vocabulary applies only to drafter 'mtp': the head of a {name} drafter has a vocabulary of its own"
        )


def require_params(name: str) -> NoReturn:
    """Raises the `ValueError` for a call without the drafter's parameters."""
    raise ValueError(f"{name} has parameters of its own: pass draft_params, the second result of mtpjax.load_drafter")


def require_whole_trunk(sizes: Mapping[str, int] | None = None) -> None:
    """Raises `ValueError` if a mesh axis splits the trunk's width or heads: only MTP modules are split with the trunk.

    `sizes` are those of the mesh axes by name; None: those of the call that is traced.
    """
    for axis in ("tensor", "expert"):
        count = num_parts(axis) if sizes is None else sizes.get(axis, 1)
        if count > 1:
            raise ValueError(
                f"drafters with parameters of their own do not support a mesh that splits the trunk ({axis} {count}): "
                "split only the rows, over data"
            )
