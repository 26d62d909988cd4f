"""The drafters of an ablation: MTP modules, n-gram lookup, and drafters with their own files."""

import dataclasses
import hashlib
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any, Literal, Unpack

import jax
import numpy as np

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.drafter import Drafter
from mtpjax.drafters.files.read import Reading
from mtpjax.drafters.load import load_drafter
from mtpjax.models.model import MTPModel
from mtpjax.training.cost import TrainingCost, read_training_cost

# Values that name no files. "ngram" is vLLM's name, and SGLang's NGRAM.
NAMES: dict[str, Literal["mtp", "lookup"]] = {"mtp": "mtp", "lookup": "lookup", "ngram": "lookup"}


@dataclasses.dataclass(frozen=True)
class DraftMethod:
    """A drafter of an ablation.

    Attributes:
        name: its name in tables: that of its folder, if it has one.
        drafter: the drafter, as in `DecodeConfig`.
        params: its parameters, if it has its own.
        path: the folder or repository that it was read from; None: it has no files.
        digest: of its architecture and parameters; "": it has no parameters of its own.
        training: what training it cost, if its files are a training run.
    """

    name: str
    drafter: Literal["mtp", "lookup"] | Drafter
    params: Any = None
    path: str | None = None
    digest: str = ""
    training: TrainingCost | None = None

    @property
    def kind(self) -> str:
        """The draft method in words, such as "Medusa"."""
        if isinstance(self.drafter, str):
            return {"mtp": "MTP modules", "lookup": "n-gram lookup"}[self.drafter]
        return {"Eagle3Drafter": "EAGLE-3"}.get(kind := type(self.drafter).__name__, kind.removesuffix("Drafter"))

    @property
    def flags(self) -> str:
        """The flags of `mtpjax generate` that choose the drafter; "" for MTP modules, the default."""
        if isinstance(self.drafter, str):
            return "" if self.drafter == "mtp" else f"--drafter {self.drafter}"
        return f"--speculative-draft-model-path {shlex.quote(str(self.path))}"

    def config(self, config: DecodeConfig) -> DecodeConfig:
        """Returns `config` with this drafter."""
        return dataclasses.replace(config, drafter=self.drafter)


MTP = DraftMethod("mtp", "mtp")


def load_methods(
    values: Sequence[str],
    *,
    model: MTPModel,
    model_path: Any = None,
    **reading: Unpack[Reading],
) -> tuple[DraftMethod, ...]:
    """Loads the drafters that `--drafters` names.

    Args:
        values: "mtp", "lookup" or "ngram", or what `mtpjax.load_drafter` reads: a folder, a training run, a repository.
        model: the trunk that all of them draft for.
        model_path: where the model was read from: the training cost of its MTP modules is read there.
        **reading: how to read files that do not say it, as in `load_drafter`.

    Returns:
        One method per value, without duplicates.

    Raises:
        ValueError: `values` is empty, "mtp" is named for a model without MTP modules, or a drafter is for another
            trunk.
        CheckpointError: the files of a drafter are damaged, missing or not supported.
    """
    # 1. Drop duplicates, and reject drafters that cannot run under any setting.
    values = tuple(dict.fromkeys(NAMES.get(value, value) for value in values))
    if not values:
        raise ValueError("drafters is empty")
    if "mtp" in values and not model.config.num_mtp_modules:
        raise ValueError("the model has no MTP module to draft with")
    # 2. Load the others, all before the first measurement.
    names = short_names([value for value in values if value not in NAMES])
    methods = []
    for value in values:
        if value in NAMES:
            training = None if value == "lookup" or model_path is None else read_training_cost(model_path)
            methods.append(DraftMethod(value, NAMES[value], training=training))
            continue
        drafter, params = load_drafter(value, model=model, **reading)
        # Any drafter can draft one token, unless it is for another trunk.
        drafter.check(model, DecodeConfig(num_steps=1, drafter=drafter))
        digest, training = drafter_digest(drafter, params), read_training_cost(value)
        methods.append(DraftMethod(names[value], drafter, params, value, digest, training))
    return tuple(methods)


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Shortens paths to the fewest last parts by which they differ from each other, and from "mtp" and "lookup".

    Args:
        paths: different paths.

    Returns:
        The name of each path.
    """
    # "runs/a/drafter" and "runs/b/drafter" need two parts each.
    parts = {path: pathlib.PurePath(path).parts for path in paths}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(of[-count:]) for path, of in parts.items()}
        if len({*names.values(), *NAMES}) == len(names) + len(NAMES):
            return names
    return {path: path for path in paths}


def drafter_digest(drafter: Drafter, params: Any) -> str:
    """Computes a digest of a drafter's architecture and parameters.

    Args:
        drafter: the drafter.
        params: its parameters.

    Returns:
        16 hexadecimal digits.
    """
    # The drafter is a frozen dataclass of plain values, so its text holds all of them.
    digest = hashlib.sha256(repr(drafter).encode())
    # The bytes alone would not tell a bfloat16 array from a float32 one of half the size.
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:16]
