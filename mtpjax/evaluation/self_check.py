"""Checks that the MTP modules of a loaded model draft as well as they did in training.

Wrong norms, swapped inputs or modules from a different checkpoint raise no error and do not change texts; they only
lower the acceptance rate. Training therefore saves a few held-out rows in the checkpoint's metadata, with the model's
agreement on them, and `check_acceptance` measures the agreement again.
"""

import dataclasses
import logging
import pathlib
from typing import Any

import numpy as np

from mtpjax.errors import printable
from mtpjax.evaluation.teacher_forced import PaddedTexts, compare_levels
from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.io.huggingface_files import SELF_CHECK_FILE
from mtpjax.models.model import MTPModel
from mtpjax.safe_open import read_json_file

MAX_ROWS, MAX_COLUMNS = 4, 128  # maximum numbers of saved held-out rows and of tokens per row
MAX_RECORD_BYTES = 1 << 20
# Differences up to these values count as rounding, because loading in bfloat16 changes the means by less.
TOLERANCE = {"agreement": 0.05, "overlap": 0.02}
log = logging.getLogger("mtpjax.decode")


def make_record(params: dict, tokens: np.ndarray, *, model: MTPModel, num_depths: int) -> dict[str, list]:
    """Makes the self-check record, which training saves in the checkpoint's metadata.

    The record uses the first 4 rows and 128 columns of the held-out `tokens`, `[R, T]` int32.

    Returns:
        "tokens" (the rows), and for each level "agreement" (the share of positions where the draft's arg-max equals the
        trunk's) and "overlap" (the mean of 1 - TV between their distributions).
    """
    rows = tokens[:MAX_ROWS, :MAX_COLUMNS]
    # Level k needs a row of at least k + 2 tokens.
    num_depths = max(0, min(num_depths, rows.shape[1] - 2))
    return {"tokens": rows.tolist(), **_measure(params, rows, model=model, num_depths=num_depths)}


def check_acceptance(path, model: MTPModel, params: dict) -> list[str]:
    """Compares how well a loaded model drafts with its record from training, in one pass over at most 512 tokens.

    Args:
        path: the checkpoint, run folder or Hugging Face directory that the model was loaded from.
        model: the loaded model.
        params: its parameters.

    Returns:
        A line for each draft level and metric that differs by more than rounding; an empty list if none differs, or if
        the checkpoint has no record. The lines are also logged as a warning.

    Raises:
        ValueError: the record is damaged.

    Example:
        >>> import tempfile
        >>> import jax
        >>> import numpy as np
        >>> from mtpjax import ModelConfig, MTPModel, check_acceptance, init_params, load
        >>> from mtpjax.evaluation.self_check import make_record
        >>> from mtpjax.io.checkpoint import save_model
        >>> model = MTPModel(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                              intermediate_size=32, max_position_embeddings=64, num_mtp_modules=1))
        >>> params = init_params(model, jax.random.key(0))
        >>> tokens = np.arange(32, dtype=np.int32).reshape(2, 16)
        >>> with tempfile.TemporaryDirectory() as folder:  # training saves the record in the same way
        ...     metadata = {"self_check": make_record(params, tokens, model=model, num_depths=1)}
        ...     save_model(f"{folder}/checkpoint", model, params, metadata=metadata)
        ...     check_acceptance(folder, *load(folder))
        []
    """
    # A checkpoint without a record, or a model that was trained without drafts, has nothing to compare.
    path = find_checkpoint(path)
    stored = _read_record(path)
    if not stored or not stored["agreement"]:
        return []
    levels = len(stored["agreement"])
    if not model.config.num_mtp_modules:
        differences = [f"the model has no MTP modules, but training measured {levels} draft levels"]
    else:
        # Measure the same rows with the loaded model. `not ... <=` also catches nan.
        measured = _measure(params, np.array(stored["tokens"], np.int32), model=model, num_depths=levels)
        differences = [
            f"{name} of draft level {level} with the trunk is {now:.3f}; training measured {before:.3f}"
            for name, limit in TOLERANCE.items()
            for level, (now, before) in enumerate(zip(measured[name], stored[name], strict=True), start=1)
            if not abs(now - before) <= limit
        ]
    if differences:
        log.warning("%s does not draft as it did when it was trained: %s", path, "; ".join(differences))
    return differences


def _read_record(path: pathlib.Path) -> dict[str, list] | None:
    """Reads the record in an mtpjax checkpoint or a Hugging Face directory; returns None if there is none."""
    # A checkpoint that training wrote has the record in its metadata. A converted checkpoint has it among the Hugging
    # Face files that the conversion keeps.
    if is_checkpoint(path):
        record = CheckpointReader(path, verify=False).metadata.get("self_check")
        if record is not None:
            return _checked_record(record, path)
        path = path / "huggingface"
    file = path / SELF_CHECK_FILE
    if not file.is_file():
        return None
    try:
        record = read_json_file(file, max_bytes=MAX_RECORD_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    return _checked_record(record, file)


def _checked_record(record: Any, place: pathlib.Path) -> dict[str, list]:
    """Returns the record, or raises `ValueError` if it has the wrong form or is larger than training writes."""
    try:
        rows, levels = record["tokens"], len(record["agreement"])
        # Check the sizes first, because they determine how much memory the measurement needs.
        if not 0 < len(rows) <= MAX_ROWS or not all(len(row) <= MAX_COLUMNS for row in rows) or levels > MAX_COLUMNS:
            raise ValueError(f"the record must have 1 to {MAX_ROWS} rows of at most {MAX_COLUMNS} tokens")
        metrics = np.array([record["agreement"], record["overlap"]], np.float32)
        tokens = np.array(rows, np.int32)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{place} is damaged: {type(error).__name__}: {printable(error, 200)}") from error
    if metrics.ndim != 2 or tokens.ndim != 2 or (levels and levels > tokens.shape[1] - 2):
        raise ValueError(f"{place} is damaged: its tokens are not a list of rows of equal length")
    return record


def _measure(params: dict, tokens: np.ndarray, *, model: MTPModel, num_depths: int) -> dict[str, list[float]]:
    """Averages agreement and overlap over the positions where every level has a trunk token to compare with."""
    if not num_depths:
        return {"agreement": [], "overlap": []}
    # Training scores all columns of the head, including padding ids, so the check does too.
    model = model.clone(config=dataclasses.replace(model.config, num_tokens=0))
    B, T = tokens.shape
    rows = PaddedTexts(tokens, np.full(B, T, np.int32), np.ones(B, np.float32))
    comparison = compare_levels(params, rows, model=model, num_depths=num_depths)
    fields = {"agreement": comparison.agrees, "overlap": comparison.overlap}
    return {name: field[:, : T - num_depths].mean((0, 1)).tolist() for name, field in fields.items()}
