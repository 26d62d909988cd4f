"""Loads the drafters that an ablation compares, such as MTP modules, n-gram lookup, and drafters from files."""

import dataclasses
import hashlib
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import numpy as np

from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import Drafter
from mtpjax.drafters.method import DraftMethod, Reading
from mtpjax.drafters.methods import METHODS, find_method, load_drafter, method_of
from mtpjax.models.model import MTPModel
from mtpjax.training.cost import TrainingCost, read_training_cost

# Drafters without files are selected by our name for their method, or by SGLang's name in lower case.
NAMES = {
    name: method
    for method in METHODS
    if method.from_settings is not None
    for name in (method.name, *map(str.lower, method.algorithms))
}
RECORD = re.compile(r"([\w.]+:\w+)(?:=(.+))?")


@dataclasses.dataclass(frozen=True)
class AblatedDrafter:
    """A drafter in an ablation.

    Attributes:
        name: its name in tables, which is the name of its folder, or the name of its method if it has no files.
        method: its draft method.
        drafter: the drafter, as in `DecodeConfig`.
        params: the drafter's own parameters, or None if it has none.
        path: the folder or repository that it was read from, or None if it has no files.
        digest: digest of its architecture and parameters; "" if it has no parameters of its own.
        training: its training cost, if its files belong to a training run.
        record: `package.module:RECORD` of a user-defined method with files.
    """

    name: str
    method: DraftMethod
    drafter: str | Drafter
    params: Any = None
    path: str | None = None
    digest: str = ""
    training: TrainingCost | None = None
    record: str | None = None

    @property
    def kind(self) -> str:
        """The draft method in words, such as "Medusa"."""
        return self.method.title

    @property
    def flags(self) -> str:
        """The `mtpjax generate` flags that select the drafter; "" for MTP modules, which are the default."""
        if self.path is None:
            return "" if self.method.is_of_model else f"--drafter {self.drafter}"
        method = "" if self.record is None else f"--speculative-algorithm {self.record} "
        return f"{method}--speculative-draft-model-path {shlex.quote(str(self.path))}"

    def config(self, config: DecodeConfig) -> DecodeConfig:
        """Returns a copy of `config` that uses this drafter."""
        return dataclasses.replace(config, drafter=self.drafter)


MTP = AblatedDrafter("mtp", find_method("mtp"), "mtp")


def load_methods(
    values: Sequence[str], *, model: MTPModel, model_path: Any = None, **reading: Unpack[Reading]
) -> tuple[AblatedDrafter, ...]:
    """Loads the drafters that `--drafters` lists.

    Args:
        values: names of methods without files, such as "mtp", "lookup" or `package.module:RECORD`, or anything that
            `mtpjax.load_drafter` can read, such as a folder, a training run or a repository.
            `package.module:RECORD=FOLDER` reads a folder with a user-defined method.
        model: the trunk that all drafters draft for.
        model_path: the model's folder, which may record the training cost of the MTP modules.
        **reading: settings that the files may leave open, as in `load_drafter`.

    Returns:
        One drafter per value, without duplicates.

    Raises:
        ValueError: `values` is empty, "mtp" is requested for a model without MTP modules, or a drafter is for a
            different trunk.
        CheckpointError: the files of a drafter are damaged, missing or not supported.
    """
    # Load all drafters before the first measurement, and reject those that cannot run with any setting.
    chosen = tuple(dict.fromkeys(map(_parse, values)))
    if not chosen:
        raise ValueError("drafters is empty")
    names, loaded = short_names([path for _, _, path in chosen if path is not None]), []
    for name, method, path in chosen:
        if path is None:
            assert method is not None
            if method.is_of_model and not model.config.num_mtp_modules:
                raise ValueError("the model has no MTP module to draft with")
            is_trained = method.is_of_model and model_path is not None
            training = read_training_cost(model_path) if is_trained else None
            loaded.append(AblatedDrafter(name, method, name, training=training))
            continue
        drafter, params = load_drafter(path, model=model, method=method, **reading)
        # Any drafter for this trunk can draft one token, so a failure means that it is for a different trunk.
        drafter.check(model, DecodeConfig(num_steps=1, drafter=drafter))
        found = method or method_of(drafter)
        assert found is not None
        digest, training = drafter_digest(drafter, params), read_training_cost(path)
        record = None if method is None else name
        loaded.append(AblatedDrafter(names[path], found, drafter, params, path, digest, training, record))
    return tuple(loaded)


def _parse(value: str) -> tuple[str, DraftMethod | None, str | None]:
    """Returns a method's name, the method (None if its files decide), and the path of its files (None for no files)."""
    if found := RECORD.fullmatch(value):
        return found[1], find_method(found[1]), found[2]
    if (method := NAMES.get(value)) is not None:
        return method.name, method, None
    return "", None, value


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Shortens paths to the fewest trailing components that are unique and differ from the names of methods."""
    # "runs/a/drafter" and "runs/b/drafter" need two components each.
    parts = {path: pathlib.PurePath(path).parts for path in paths}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(of[-count:]) for path, of in parts.items()}
        if len({*names.values(), *NAMES}) == len(names) + len(NAMES):
            return names
    return {path: path for path in paths}


def drafter_digest(drafter: Drafter, params: Any) -> str:
    """Returns a digest of a drafter's architecture and parameters, as 16 hexadecimal digits."""
    # The drafter is a frozen dataclass of plain values, so its `repr` contains all of them.
    digest = hashlib.sha256(repr(drafter).encode())
    # The bytes alone would not distinguish a bfloat16 array from a float32 array with half as many elements.
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    return digest.hexdigest()[:16]
