"""The file `profile.json`: costs of rounds, the device and model that they are for, and settings of adaptive depth."""

import hashlib
import json
import logging
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from mtpjax.atomic import write_text
from mtpjax.decoding.acceptance.rules import RULES
from mtpjax.decoding.decoder import Drafter
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts
from mtpjax.host import num_threads
from mtpjax.models.config import ModelConfig
from mtpjax.safe_open import read_json_file

FORMAT, VERSION = "mtpjax-profile", 4
FILE_NAME = "profile.json"
MAX_FILE_BYTES = 16 << 20  # of a profile or of measured acceptance, which take kilobytes
MIN_RATE = 0.01  # floor of a level's acceptance rate; a measured rate may be 0
log = logging.getLogger("mtpjax.decode")


def config_digest(config: ModelConfig) -> str:
    """Computes the digest that ties a profile to a model: costs depend on the configuration, not on the weights."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def describe_drafter(drafter: Any) -> str | None:
    """Returns the class of a drafter and a digest of its architecture, on which costs depend.

    None for drafters by name: the configuration of MTP modules is the model's.
    """
    if not isinstance(drafter, Drafter):
        return None
    architecture = getattr(drafter, "architecture", drafter)
    return f"{type(drafter).__name__} {hashlib.sha256(repr(architecture).encode()).hexdigest()[:16]}"


def device_properties() -> dict[str, Any]:
    """Returns the properties of this process that costs depend on: device, JAX version, and threads on a CPU."""
    threads = {"threads": num_threads()} if jax.default_backend() == "cpu" else {}
    return {"device_kind": jax.devices()[0].device_kind, "jax_version": jax.__version__, **threads}


def default_path(folder) -> pathlib.Path:
    """Returns the path of the profile in a model's folder; raises `ValueError` if the folder is not writable."""
    folder = pathlib.Path(folder)
    # A GGUF file and a repository of the Hub have no model folder.
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not a writable folder: choose another place with --output FILE")
    return folder / FILE_NAME


def save(path, profile: dict[str, Any]) -> None:
    """Writes a profile atomically."""
    write_text(path, json.dumps(profile, indent=1) + "\n")


def read(path) -> tuple[dict[str, Any], tuple[RoundCosts, ...]]:
    """Reads and checks a profile, or that of a folder. Returns it, and its costs per batch size.

    Raises:
        ValueError: if the file is missing, has another format, or is damaged.
    """
    # 1. Parse the file, and recognise its format and version.
    path = pathlib.Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        profile = read_json_file(path, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError:
        raise ValueError(f"no profile at {path}: `mtpjax profile` measures one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a profile: {error}") from error
    if not isinstance(profile, dict) or (profile.get("format"), profile.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is not a profile of format {FORMAT!r}, version {VERSION}")
    # 2. Check that every shape has positive, finite durations of each kind, including plain rounds.
    try:
        costs = tuple(RoundCosts.from_json(stored) for stored in profile["batches"])
        complete = bool(costs) and all(
            PLAIN_STEP in kind
            and kind.keys() == cost.parts.keys()
            and all(0 < value < math.inf for value in kind.values())
            for cost in costs
            for kind in (cost.verify, cost.parts, cost.round)
        )
        complete &= profile["acceptance"] is None or _is_usable(**profile["acceptance"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not complete:
        raise ValueError(
            f"{path} is damaged: a duration is missing or not positive, or a rate or length is out of range"
        )
    return profile, costs


def load_depth_settings(
    path, *, batch: int, num_steps: int, config: ModelConfig | None = None, drafter: Any = "mtp"
) -> dict[str, Any]:
    """Reads the settings of adaptive depth from a profile: `DecodeConfig(depth_policy="adaptive", …, **settings)`.

    Logs a warning if the profile cannot be trusted, or was measured with another device, JAX version or number of
    threads.

    Args:
        path: a profile, or a folder that contains `profile.json`.
        batch: rows that will be decoded; the costs of the nearest measured batch size are used.
        num_steps: the deepest draft.
        config: the model's configuration; None skips the comparison with the profile's.
        drafter: the drafter, as in `DecodeConfig`.

    Returns:
        `depth_costs` and `depth_rates`; see `depth_settings`.

    Raises:
        ValueError: if the profile is missing or damaged, belongs to another model or drafter, or has no costs of chains
            of this depth.
    """
    profile, measured = read(path)
    if config is not None and profile.get("model_config_sha256") != config_digest(config):
        raise ValueError(f"{path} was measured on another model: run `mtpjax profile` for this one")
    found, wanted = profile.get("drafter"), describe_drafter(drafter)
    if found != wanted:
        raise ValueError(
            f"{path} was measured with {found or 'MTP modules'}, not with {wanted or 'MTP modules'}: run `mtpjax "
            "profile` for this drafter, with --speculative-draft-model-path if it has its own checkpoint"
        )
    if profile.get("problem"):
        log.warning(
            "%s cannot be trusted: it was %s; run `mtpjax profile` on an idle machine", path, profile["problem"]
        )
    for name, current in device_properties().items():
        if profile.get(name) != current:
            log.warning("%s was measured with %s %r; here it is %r", path, name, profile.get(name), current)
    return depth_settings(measured, profile["acceptance"], path, batch=batch, num_steps=num_steps)


def depth_settings(
    measured: Sequence[RoundCosts], acceptance: dict[str, list[float]] | None, origin, *, batch: int, num_steps: int
) -> dict[str, Any]:
    """Makes the fields of `DecodeConfig` that adaptive depth needs.

    Args:
        measured: round costs, per batch size; those of the size nearest to `batch` are used.
        acceptance: rates of similar prompts, see `usable_acceptance`, if they were measured.
        origin: the file or model that an error names.
        batch: rows that will be decoded.
        num_steps: the deepest draft.

    Returns:
        `depth_costs`, relative to a round without drafts, and `depth_rates`, which are None without `acceptance`.

    Raises:
        ValueError: chains of `num_steps` levels were not measured.
    """
    # The nearest batch size by ratio; of two equally near ones, the larger.
    nearest = min(measured, key=lambda costs: (abs(math.log(costs.batch / batch)), -costs.batch))
    rounds = {shape.num_steps: seconds for shape, seconds in nearest.round.items() if shape.topk == 1}
    missing = [depth for depth in range(1, num_steps + 1) if depth not in rounds]
    if missing:
        deepest = f"chains of 1..{max(rounds)} levels" if max(rounds) else "no chains"
        raise ValueError(f"{origin} holds {deepest}; depth {missing[0]} needs `mtpjax profile --num-steps {num_steps}`")
    plain = rounds[0]
    return {
        "depth_costs": tuple(rounds[depth] / plain for depth in range(num_steps + 1)),
        "depth_rates": None if acceptance is None else _rates_to_depth(acceptance["rates"], num_steps),
    }


def _rates_to_depth(rates: list[float], num_steps: int) -> tuple[float, ...]:
    """Returns a rate per level; levels that were not decoded get the rate of the deepest level that was."""
    return tuple([*rates, *rates[-1:] * num_steps][:num_steps])


def usable_acceptance(metrics: dict[str, Any]) -> dict[str, list[float]]:
    """Extracts from a report the rates and lengths that adaptive depth starts from.

    Args:
        metrics: the metrics of one category, as JSON (`mtpjax.evaluation.metrics.report` and `to_json`).

    Returns:
        "rates", the conditional acceptance rate per level, at least `MIN_RATE`; levels that were never reached are
        left out. "lengths", the predicted accept length per depth; empty if none was predicted.

    Raises:
        ValueError: if a value is out of range, or no rate is present.
    """
    rates, lengths = (
        [level["value"] for level in levels if level["value"] is not None]
        for levels in (metrics["decoded"]["conditional"], metrics["predicted"]["accept_length_at_depth"])
    )
    rates_and_lengths = {"rates": [max(rate, MIN_RATE) for rate in rates], "lengths": lengths[: len(rates)]}
    if not _is_usable(**rates_and_lengths):
        raise ValueError(f"acceptance rates are missing or out of range: {rates_and_lengths}")
    return rates_and_lengths


def _is_usable(rates: list[float], lengths: list[float]) -> bool:
    """Returns whether there are rates, all within (0, 1], and no accept length exceeds depth + 1."""
    are_possible = all(1 <= length <= depth + 1 for depth, length in enumerate(lengths, start=1))
    return bool(rates) and all(0 < rate <= 1 for rate in rates) and len(lengths) <= len(rates) and are_possible


def read_acceptance(path) -> dict[str, list[float]]:
    """Reads `usable_acceptance` of all prompts from the output of `mtpjax eval acceptance --output`.

    Raises:
        ValueError: for other files, and for trees or lossy rules: adaptive depth drafts chains under an exact rule,
            which accept fewer tokens.
    """
    try:
        content = read_json_file(path, max_bytes=MAX_FILE_BYTES)
        acceptance, settings = usable_acceptance(content["figures"]["overall"]), content["settings"]
        is_chain = settings["topk"] == 1
        thresholds = (settings[f"threshold_{name}"] for name in ("single", "acc"))
        rule = settings["acceptance"]
        is_exact = rule == "auto" or (rule in RULES and RULES[rule].is_exact)
        is_lossy = not is_exact or min(thresholds) < 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not what `mtpjax eval acceptance --output` wrote: {error!r}") from error
    if is_lossy or not is_chain:
        raise ValueError(
            f"{path} measured {'a lossy rule' if is_chain else 'trees'}: adaptive depth needs exact chains"
        )
    return acceptance
