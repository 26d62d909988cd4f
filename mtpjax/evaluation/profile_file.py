"""Reads and writes `profile.json`, the costs of rounds on a device, which adaptive depth uses to choose depths."""

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
MAX_FILE_BYTES = 16 << 20  # maximum file size of a profile or of measured acceptance; both need only kilobytes
MIN_RATE = 0.01  # floor of a level's acceptance rate; a measured rate may be 0
log = logging.getLogger("mtpjax.decode")


def config_digest(config: ModelConfig) -> str:
    """Computes the digest that ties a profile to a model. Costs depend on the configuration, not on the weights."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def describe_drafter(drafter: Any) -> str | None:
    """Returns the class of a drafter and a digest of its architecture, on which costs depend.

    Returns None for drafters that are given by name, because the model's configuration describes its MTP modules.
    """
    if not isinstance(drafter, Drafter):
        return None
    architecture = getattr(drafter, "architecture", drafter)
    return f"{type(drafter).__name__} {hashlib.sha256(repr(architecture).encode()).hexdigest()[:16]}"


def device_properties() -> dict[str, Any]:
    """Returns the properties of this process that affect costs: device, JAX version, and threads on a CPU."""
    threads = {"threads": num_threads()} if jax.default_backend() == "cpu" else {}
    return {"device_kind": jax.devices()[0].device_kind, "jax_version": jax.__version__, **threads}


def default_path(folder) -> pathlib.Path:
    """Returns the path of the profile in a model's folder; raises `ValueError` if the folder is not writable."""
    folder = pathlib.Path(folder)
    # GGUF files and Hub repositories have no model folder.
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} is not a writable folder: choose a file with --output FILE")
    return folder / FILE_NAME


def save(path, profile: dict[str, Any]) -> None:
    """Writes a profile atomically."""
    write_text(path, json.dumps(profile, indent=1) + "\n")


def read(path) -> tuple[dict[str, Any], tuple[RoundCosts, ...]]:
    """Reads and checks a profile, given its file or folder. Returns the profile, and its costs per batch size.

    Raises:
        ValueError: the file is missing or damaged, or has a different format.
    """
    # 1. Parse the file, and check its format and version.
    path = pathlib.Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        profile = read_json_file(path, max_bytes=MAX_FILE_BYTES)
    except FileNotFoundError:
        raise ValueError(f"no profile at {path}: run `mtpjax profile` to measure one") from None
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
    """Reads the settings for `DecodeConfig(depth_policy="adaptive", …, **settings)` from a profile.

    Logs a warning if the profile cannot be trusted, or was measured with a different device, JAX version or number of
    threads.

    Args:
        path: a profile, or a folder that contains `profile.json`.
        batch: number of rows that will be decoded; the costs for the nearest measured batch size are used.
        num_steps: maximum draft depth.
        config: the model's configuration, which is compared with the profile; None: do not compare.
        drafter: the drafter, as in `DecodeConfig`.

    Returns:
        `depth_costs` and `depth_rates`; see `depth_settings`.

    Raises:
        ValueError: the profile is missing or damaged, is for a different model or drafter, or has no costs for chains
            up to this depth.
    """
    # 1. Reject costs for a different model or drafter, which are useless here.
    profile, measured = read(path)
    if config is not None and profile.get("model_config_sha256") != config_digest(config):
        raise ValueError(f"{path} was measured on a different model: run `mtpjax profile` for this one")
    found, wanted = profile.get("drafter"), describe_drafter(drafter)
    if found != wanted:
        raise ValueError(
            f"{path} was measured with {found or 'MTP modules'}, not with {wanted or 'MTP modules'}: run `mtpjax "
            "profile` for this drafter, with --speculative-draft-model-path if it has its own checkpoint"
        )
    # 2. Disturbed costs, or costs for a different device, may still help, so they only cause a warning.
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
        measured: round costs per batch size; the costs for the size nearest to `batch` are used.
        acceptance: acceptance rates measured on similar prompts (`usable_acceptance`); None: not measured.
        origin: the file or model to name in errors.
        batch: number of rows that will be decoded.
        num_steps: maximum draft depth.

    Returns:
        `depth_costs`, relative to a round without drafts, and `depth_rates`, which is None without `acceptance`.

    Raises:
        ValueError: chains of `num_steps` levels were not measured.
    """
    # Take the nearest batch size by ratio, or the larger of two equally near ones.
    nearest = min(measured, key=lambda costs: (abs(math.log(costs.batch / batch)), -costs.batch))
    # Adaptive depth drafts chains, so it ignores the costs of trees.
    rounds = {shape.num_steps: seconds for shape, seconds in nearest.round.items() if shape.topk == 1}
    missing = [depth for depth in range(1, num_steps + 1) if depth not in rounds]
    if missing:
        deepest = f"costs for chains of 1..{max(rounds)} levels" if max(rounds) else "no costs for chains"
        raise ValueError(f"{origin} has {deepest}; depth {missing[0]} needs `mtpjax profile --num-steps {num_steps}`")
    plain = rounds[0]
    return {
        "depth_costs": tuple(rounds[depth] / plain for depth in range(num_steps + 1)),
        "depth_rates": None if acceptance is None else _rates_to_depth(acceptance["rates"], num_steps),
    }


def _rates_to_depth(rates: list[float], num_steps: int) -> tuple[float, ...]:
    """Returns a rate per level; levels that were not decoded get the rate of the deepest level that was decoded."""
    return tuple([*rates, *rates[-1:] * num_steps][:num_steps])


def usable_acceptance(metrics: dict[str, Any]) -> dict[str, list[float]]:
    """Extracts the rates and lengths that adaptive depth starts from.

    Args:
        metrics: the metrics of one category in a report, as JSON (`mtpjax.evaluation.metrics.report` and `to_json`).

    Returns:
        "rates", the conditional acceptance rate per level, at least `MIN_RATE`; levels that were never reached are
        left out. "lengths", the predicted accept length per depth; empty if none was predicted.

    Raises:
        ValueError: a value is out of range, or there is no rate.
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
    """Reads `usable_acceptance` over all prompts from a file that `mtpjax eval acceptance --output` wrote.

    Raises:
        ValueError: the file was not written by that command, or it measured trees or a lossy rule. Both accept more
            tokens than chains under an exact rule, which adaptive depth uses.
    """
    # A file that lacks a value was written by something else.
    try:
        content = read_json_file(path, max_bytes=MAX_FILE_BYTES)
        acceptance, settings = usable_acceptance(content["figures"]["overall"]), content["settings"]
        is_chain = settings["topk"] == 1
        thresholds = (settings[f"threshold_{name}"] for name in ("single", "acc"))
        rule = settings["acceptance"]
        is_exact = rule == "auto" or (rule in RULES and RULES[rule].is_exact)
        is_lossy = not is_exact or min(thresholds) < 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} was not written by `mtpjax eval acceptance --output`: {error!r}") from error
    if is_lossy or not is_chain:
        raise ValueError(
            f"{path} measured {'a lossy rule' if is_chain else 'trees'}: adaptive depth needs chains and an exact rule"
        )
    return acceptance
