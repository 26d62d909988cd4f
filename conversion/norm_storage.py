"""Determines whether a checkpoint stores norm weights as `w` (zero-centred) or as `1 + w`.

Norm weights are initialized to 0 or 1 and stay close to that value, so their means show the convention. Conversion
programs add 1 to some or all norms, often to the trunk's norms but not to those of the MTP modules.
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

CENTRED, SHIFTED = 0.4, 0.6  # a mean weight below the first means w, above the second 1 + w


def with_norm_storage(config: ModelConfig, specs: dict[str, ParamSpec], files: CheckpointFiles) -> ModelConfig:
    """Sets `zero_centred_norm` and `mtp_norm_differs` to match how the files store norm weights.

    Only families whose norms scale by `1 + w` need this.

    Raises:
        CheckpointFileError: some modules store `w` and others `1 + w`.
    """
    if not config.zero_centred_norm:
        return config
    means = _norm_means(specs, files)
    trunk = {name: found for name, found in means.items() if not name.startswith("mtp_")}
    # The final norm and the query and key norms may drift far from 1, but the norms before attention do not.
    first = [found for name, found in trunk.items() if name.endswith("norm_attention/scale")]
    is_centred = find_norm_storage("the trunk", [mean for _, mean, _ in first], default=True)
    if not is_centred:
        log.warning(
            "norm weights have a mean of %.2f: the files store 1 + w, so 1 is not added",
            np.median([mean for _, mean, _ in first]),
        )
    _warn_of_mixture("the trunk", trunk.values(), is_centred)
    # A module has only a few norms, so use all of them.
    found = {}
    for number in range(config.num_mtp_modules):
        own = [each for name, each in means.items() if name.startswith(f"mtp_{number}/")]
        default = is_centred != config.mtp_norm_differs
        found[number] = find_norm_storage(f"MTP module {number}", [mean for _, mean, _ in own], default=default)
        _warn_of_mixture(f"MTP module {number}", own, found[number])
    if len(set(found.values())) > 1:
        raise CheckpointFileError(
            f"{files.path}: some MTP modules store norms as w and others as 1 + w: "
            + ", ".join(f"module {number}: {'w' if value else '1 + w'}" for number, value in found.items())
        )
    modules = found.get(0, is_centred)
    if modules != is_centred:
        log.warning(
            "norm weights are stored as %s in the trunk and as %s in the MTP modules; both are handled",
            *("w", "1 + w") if is_centred else ("1 + w", "w"),
        )
    return dataclasses.replace(config, zero_centred_norm=is_centred, mtp_norm_differs=modules != is_centred)


def _norm_means(specs: dict[str, ParamSpec], files: CheckpointFiles) -> dict[str, tuple[str, float, float]]:
    """Returns `(tensor, mean, minimum)`, by parameter name, for every norm that may be stored either way."""
    means = {}
    for path, spec in specs.items():
        name = spec.slices[0].name
        # Tensors with other shapes and dtypes are rejected later.
        if not path.endswith("/scale") or name not in files.tensors:
            continue
        if files.tensors[name].dtype in FLOATS and files.tensors[name].shape == spec.shape:
            values = files.read(name).astype(np.float32)
            means[path] = (name, float(values.mean()), float(values.min()))
    return means


def find_norm_storage(what: str, means: list[float], *, default: bool) -> bool:
    """Determines from the median of the norms' means whether they are stored as `w`.

    Args:
        default: the result if there are no norms or, with a warning, if the means fit neither convention.
    """
    if not means:
        return default
    typical = float(np.median(means))
    if not CENTRED < typical < SHIFTED:
        return typical <= CENTRED
    log.warning(
        "norm weights of %s have a mean of %.2f, which is neither near 0 nor near 1: they are read as %s; if the "
        "logits are wrong, a conversion program has changed them",
        *(what, typical, "w, applied as 1 + w" if default else "1 + w"),
    )
    return default


def _warn_of_mixture(what: str, norms: Iterable[tuple[str, float, float]], is_centred: bool) -> None:
    """Warns if one kind of norm seems to be stored in the other way."""
    kinds: dict[str, list[tuple[str, float, float]]] = collections.defaultdict(list)
    for name, mean, least in norms:
        kinds[".".join(part for part in name.split(".") if not part.isdecimal())].append((name, mean, least))
    for found in kinds.values():
        mean, least = np.median([mean for _, mean, _ in found]), min(least for _, _, least in found)
        # Weights near 0 have both signs; weights near 1 are positive.
        looks_shifted = 0.8 < mean < 1.25 and least > 0
        looks_centred = abs(mean) < 0.2 and least < 0
        if looks_shifted if is_centred else looks_centred:
            log.warning(
                "norm weights of %s are stored as %s, but %s has a mean of %.2f: if a program has added 1 to only some "
                "norms, the logits are wrong",
                *(what, "w, applied as 1 + w" if is_centred else "1 + w", found[0][0], mean),
            )
