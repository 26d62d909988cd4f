"""Finds out how a checkpoint stores its norm weights: as `w` (zero-centred) or as `1 + w`.

Norm weights are trained from 0 or 1 and stay close to it, so their means show the convention. Programs that convert
checkpoints add 1 to some or all norms, often to those of the trunk but not of the MTP modules.
"""

import collections
import dataclasses
import logging
from collections.abc import Iterable

import numpy as np

from conversion.files import CheckpointFiles
from conversion.safetensors_header import FLOATS
from conversion.tensor_slice import ParamSpec
from mtpjax.errors import CheckpointFileError
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")

CENTRED, SHIFTED = 0.4, 0.6  # stored weights with a mean below the first are w, above the second 1 + w


def with_norm_storage(config: ModelConfig, specs: dict[str, ParamSpec], files: CheckpointFiles) -> ModelConfig:
    """Decides for the trunk and for its MTP modules how norm weights are stored.

    Only families whose norms are `1 + w` need this.

    Returns:
        The configuration with `zero_centred_norm` and `mtp_norm_differs` as the files have it.

    Raises:
        CheckpointFileError: some modules store `w` and others `1 + w`.
    """
    if not config.zero_centred_norm:
        return config
    means = _norm_means(specs, files)
    trunk = {name: found for name, found in means.items() if not name.startswith("mtp_")}
    # The final norm and those of queries and keys may move far from 1; the norms before attention do not.
    first = [found for name, found in trunk.items() if name.endswith("norm_attention/scale")]
    is_centred = find_norm_storage("the trunk", [mean for _, mean, _ in first], default=True)
    if not is_centred:
        log.warning(
            "norm weights have a mean of %.2f: the files store 1 + w, so 1 is not added to them",
            np.median([mean for _, mean, _ in first]),
        )
    _warn_of_mixture("the trunk", trunk.values(), is_centred)
    # A module has only a few norms, so all of them count.
    found = {}
    for number in range(config.num_mtp_modules):
        own = [each for name, each in means.items() if name.startswith(f"mtp_{number}/")]
        default = is_centred != config.mtp_norm_differs
        found[number] = find_norm_storage(f"MTP module {number}", [mean for _, mean, _ in own], default=default)
        _warn_of_mixture(f"MTP module {number}", own, found[number])
    if len(set(found.values())) > 1:
        raise CheckpointFileError(
            f"{files.path}: the norms of some MTP modules are stored as w and those of others as 1 + w: "
            + ", ".join(f"module {number}: {'w' if value else '1 + w'}" for number, value in found.items())
        )
    modules = found.get(0, is_centred)
    if modules != is_centred:
        log.warning(
            "norm weights are stored as %s in the trunk and as %s in the MTP modules: each is read as it is stored",
            *("w", "1 + w") if is_centred else ("1 + w", "w"),
        )
    return dataclasses.replace(config, zero_centred_norm=is_centred, mtp_norm_differs=modules != is_centred)


def _norm_means(specs: dict[str, ParamSpec], files: CheckpointFiles) -> dict[str, tuple[str, float, float]]:
    """Returns `(tensor, mean, least)` of every norm that has a convention, by parameter name."""
    means = {}
    for path, spec in specs.items():
        name = spec.slices[0].name
        # Tensors of other shapes and dtypes are rejected later.
        if not path.endswith("/scale") or name not in files.tensors:
            continue
        if files.tensors[name].dtype in FLOATS and files.tensors[name].shape == spec.shape:
            values = files.read(name).astype(np.float32)
            means[path] = (name, float(values.mean()), float(values.min()))
    return means


def find_norm_storage(what: str, means: list[float], *, default: bool) -> bool:
    """Decides how norms are stored, by the median of their means.

    Args:
        default: the result without norms, and, with a warning, if they show no convention.
    """
    if not means:
        return default
    typical = float(np.median(means))
    if not CENTRED < typical < SHIFTED:
        return typical <= CENTRED
    log.warning(
        "norm weights of %s have a mean of %.2f, which is neither near 0 nor near 1: they are read as %s; if the "
        "logits are wrong, a program that converted the checkpoint has changed them",
        *(what, typical, "w of 1 + w" if default else "1 + w"),
    )
    return default


def _warn_of_mixture(what: str, norms: Iterable[tuple[str, float, float]], is_centred: bool) -> None:
    """Warns if one kind of norm looks like the other convention."""
    kinds: dict[str, list[tuple[str, float, float]]] = collections.defaultdict(list)
    for name, mean, least in norms:
        kinds[".".join(part for part in name.split(".") if not part.isdecimal())].append((name, mean, least))
    for found in kinds.values():
        mean, least = np.median([mean for _, mean, _ in found]), min(least for _, _, least in found)
        # Weights near 0 have both signs, weights near 1 are positive.
        looks_shifted = 0.8 < mean < 1.25 and least > 0
        looks_centred = abs(mean) < 0.2 and least < 0
        if looks_shifted if is_centred else looks_centred:
            log.warning(
                "norm weights of %s are stored as %s, but %s has a mean of %.2f: if a program has added 1 to some "
                "norms only, the logits are wrong",
                *(what, "w of 1 + w" if is_centred else "1 + w", found[0][0], mean),
            )
