"""Whether a loaded model still drafts as it did when it was trained.

Wrong norms, a swapped pair of inputs or modules of another checkpoint raise no error and change no text: only
acceptance falls. So training leaves a few held-out rows in the checkpoint's metadata, and what the model made of them.
"""

import dataclasses
import json
import logging
import pathlib

import numpy as np

from mtpjax.evaluation.acceptance import compare_levels
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.io.huggingface_files import SELF_CHECK
from mtpjax.models.model import MTPModel

ROWS, COLUMNS = 4, 128
# bfloat16 moves these means by less (`tests/decode/test_self_check.py`).
TOLERANCE = {"agreement": 0.05, "overlap": 0.02}
log = logging.getLogger("mtpjax.decode")


def record(params: dict, tokens: np.ndarray, *, model: MTPModel, num_depths: int) -> dict[str, list]:
    """What the checkpoint's metadata keep: up to 4 x 128 of `tokens [R, T]`, and what each level makes of them.

    "agreement" is the share of positions where a draft's arg-max is the trunk's, "overlap" the mean of 1 - TV.
    """
    kept = tokens[:ROWS, :COLUMNS]
    num_depths = max(0, min(num_depths, kept.shape[1] - 2))  # those with a position to measure at
    return {"tokens": kept.tolist(), **_measure(params, kept, model=model, num_depths=num_depths)}


def check_acceptance(path, model: MTPModel, params: dict) -> list[str]:
    """How a model that was loaded from `path` drafts otherwise than its trainer measured, a line each; logs warnings.

    Empty where all is well, and for a checkpoint that holds no such record. It takes one pass over 512 tokens. Raises
    `ValueError` for a record that is damaged.
    """
    path = find_checkpoint(path)
    stored = _stored(path)
    if not stored or not stored["agreement"]:
        return []
    levels = len(stored["agreement"])
    if not model.config.num_mtp_modules:
        differences = [f"the model has no MTP modules; {levels} draft levels were measured"]
    else:
        found = _measure(params, np.array(stored["tokens"], np.int32), model=model, num_depths=levels)
        differences = [
            f"{name} of draft level {level} with the trunk is {now:.3f}; training measured {before:.3f}"
            for name, most in TOLERANCE.items()
            for level, (now, before) in enumerate(zip(found[name], stored[name], strict=True), start=1)
            if not abs(now - before) <= most
        ]
    if differences:
        log.warning("%s does not draft as it did when it was trained: %s", path, "; ".join(differences))
    return differences


def _stored(path: pathlib.Path) -> dict[str, list] | None:
    """The record of a checkpoint of ours, or of a Hugging Face directory; None where there is none."""
    if is_checkpoint(path):
        record = CheckpointReader(path, verify=False).metadata.get("self_check")
        if record is not None:
            return record
        path = path / "huggingface"  # of a directory that was converted
    file = path / SELF_CHECK
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_bytes())
        np.array([record["agreement"], record["overlap"]], np.float32)
        is_whole = np.array(record["tokens"], np.int32).ndim == 2
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if not is_whole:
        raise ValueError(f"{file} is damaged: its tokens are no rows")
    return record


def _measure(params: dict, tokens: np.ndarray, *, model: MTPModel, num_depths: int) -> dict[str, list[float]]:
    """Over the positions where all levels have a choice to meet."""
    if not num_depths:
        return {"agreement": [], "overlap": []}
    model = model.clone(config=dataclasses.replace(model.config, num_tokens=0))  # a trainer's has all of its columns
    B, T = tokens.shape
    lengths, temperatures = np.full(B, T, np.int32), np.ones(B, np.float32)
    places = compare_levels(params, tokens, lengths, temperatures, model=model, num_depths=num_depths)
    fields = {"agreement": places.agrees, "overlap": places.overlap}
    return {name: np.asarray(field)[:, : T - num_depths].mean((0, 1)).tolist() for name, field in fields.items()}
