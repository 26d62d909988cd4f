"""What rows ask for, as arrays: `SamplingParams` checked and laid out for a batch."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mtpjax.decoding.config import SamplingParams
from mtpjax.decoding.rng import seeds_from
from mtpjax.decoding.sampling import Sampling
from mtpjax.models.config import ModelConfig

# Field, its dtype, the value that asks for nothing, and the least and largest that are allowed.
NUMBERS = {
    "top_k": (np.int32, 0, 0, np.inf),
    "top_p": (np.float32, 1, 0, 1),
    "min_p": (np.float32, 0, 0, 1),
    "repetition_penalty": (np.float32, 1, 0, np.inf),
    "frequency_penalty": (np.float32, 0, -np.inf, np.inf),
    "presence_penalty": (np.float32, 0, -np.inf, np.inf),
    "min_new_tokens": (np.int32, 0, 0, np.inf),
}
EXCLUSIVE = ("top_p", "repetition_penalty")  # 0 itself has no meaning


def temperatures(sampling: SamplingParams, batch: int) -> np.ndarray:
    """`[B]` float32. Raises `ValueError`."""
    return _numbers(sampling, "temperature", batch, np.float32, 0, np.inf)


def sampling_arrays(
    sampling: SamplingParams, batch: int, config: ModelConfig, key: jax.Array | None, stops: tuple[int, ...] = ()
) -> Sampling:
    """What the loop takes in, on the host; fields that no row uses are None. `stops` are the single stop tokens.

    Raises `ValueError` naming the field and the value.
    """
    V = config.vocab_size
    temperature = temperatures(sampling, batch)
    arrays: dict[str, np.ndarray | None] = {}
    for name, (dtype, neutral, least, most) in NUMBERS.items():
        values = _numbers(sampling, name, batch, dtype, least, most)
        if name in EXCLUSIVE and (values == 0).any():
            raise ValueError(f"{name} must be above 0")
        arrays[name] = values if (values != neutral).any() else None
    if arrays["top_k"] is not None:
        arrays["top_k"] = np.where(arrays["top_k"] == 0, V, arrays["top_k"]).astype(np.int32)
    least = arrays["min_new_tokens"]
    bias = _bias(sampling, batch, config, stops, np.zeros(batch) if least is None else least)

    fields: dict[str, Any] = {
        "temperature": temperature,
        "seed": _seeds(sampling, batch, key, is_needed=bool(temperature.any())),
        "top_k": arrays["top_k"],
        "top_p": arrays["top_p"],
        "min_p": arrays["min_p"],
        "bias": bias,
        "repetition": arrays["repetition_penalty"],
        "frequency": arrays["frequency_penalty"],
        "presence": arrays["presence_penalty"],
        "min_new": arrays["min_new_tokens"],
    }
    return Sampling(**fields)  # jit takes the host's arrays in one go


def _numbers(sampling: SamplingParams, name: str, batch: int, dtype, least: float, most: float) -> np.ndarray:
    """One value per row."""
    try:
        values = np.asarray(getattr(sampling, name), np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {getattr(sampling, name)!r} is no number, nor one per row") from error
    if values.ndim > 1 or (values.ndim and len(values) != batch):
        raise ValueError(f"{name} has shape {values.shape}; there are {batch} rows")
    if not (np.isfinite(values).all() and (values >= least).all() and (values <= most).all()):
        raise ValueError(f"{name} {getattr(sampling, name)} is not within {least}..{most}")
    if np.issubdtype(dtype, np.integer) and (values != np.round(values)).any():
        raise ValueError(f"{name} {getattr(sampling, name)} is no whole number")
    return np.broadcast_to(np.minimum(values, np.iinfo(np.int32).max).astype(dtype), (batch,)).copy()


def _per_row(name: str, value, batch: int, is_one) -> list:
    """`value` for every row if it `is_one`, else the sequence with one (or None) for each."""
    if is_one(value):
        return [value] * batch
    values = list(value)
    if len(values) != batch or not all(row is None or is_one(row) for row in values):
        raise ValueError(f"{name} is neither one for all rows nor a sequence with one (or None) for each of {batch}")
    return values


def _bias(sampling: SamplingParams, batch: int, config: ModelConfig, stops, min_new) -> np.ndarray | None:
    """`[B, V]` float32: logit_bias, and -inf for what is banned or not allowed."""
    asked = (sampling.logit_bias, sampling.allowed_tokens, sampling.banned_tokens)
    if all(part is None for part in asked):
        return None
    V, count = config.vocab_size, config.num_tokens or config.vocab_size
    bias = np.zeros((batch, V), np.float32)

    def ids(name: str, values) -> np.ndarray:
        values = np.asarray(list(values))
        if values.size and not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"{name} holds {values.dtype}, not token ids")
        if values.size and not (values.min() >= 0 and values.max() < V):
            wrong = values[(values < 0) | (values >= V)][0]
            raise ValueError(f"{name} holds token id {wrong}, outside 0..{V - 1}")
        return values.astype(int)

    def is_mapping(value) -> bool:
        return isinstance(value, Mapping)

    def is_ids(value) -> bool:
        is_list = np.iterable(value) and not isinstance(value, str)
        return is_list and all(isinstance(token, (int, np.integer)) for token in value)

    if sampling.logit_bias is not None:
        for row, mapping in zip(bias, _per_row("logit_bias", sampling.logit_bias, batch, is_mapping), strict=True):
            values = np.asarray(list((mapping or {}).values()), np.float32)
            if not np.isfinite(values).all():
                raise ValueError("logit_bias holds a value that is not finite; banned_tokens bans")
            row[ids("logit_bias", (mapping or {}).keys())] += values
    if sampling.allowed_tokens is not None:
        for row, allowed in zip(bias, _per_row("allowed_tokens", sampling.allowed_tokens, batch, is_ids), strict=True):
            if allowed is not None:
                is_out = np.ones(V, bool)
                is_out[ids("allowed_tokens", allowed)] = False
                row[is_out] = -np.inf
    if sampling.banned_tokens is not None:
        for row, banned in zip(bias, _per_row("banned_tokens", sampling.banned_tokens, batch, is_ids), strict=True):
            row[ids("banned_tokens", () if banned is None else banned)] = -np.inf
    is_left = ~np.isneginf(bias[:, :count])
    for number, row in enumerate(is_left):
        if not row.any():
            raise ValueError(f"row {number} may not emit any token: allowed_tokens and banned_tokens leave none")
    is_left[:, [token for token in stops if token < count]] = False
    for number, (row, least) in enumerate(zip(is_left, min_new, strict=True)):
        if least and not row.any():
            raise ValueError(f"row {number} may emit only stop tokens, and none of them before min_new_tokens {least}")
    return bias


def _seeds(sampling: SamplingParams, batch: int, key: jax.Array | None, *, is_needed: bool) -> np.ndarray | jax.Array:
    """`[B, 2]` uint32."""
    if sampling.seed is None:
        if key is None and is_needed:
            raise ValueError("a temperature above 0 needs a seed (SamplingParams) or a key")
        return np.zeros((batch, 2), np.uint32) if key is None else seeds_from(key, batch)
    given = sampling.seed if np.iterable(sampling.seed) else [sampling.seed] * batch
    seeds = list(given)
    if len(seeds) != batch:
        raise ValueError(f"there are {len(seeds)} seeds for {batch} rows")
    for seed in seeds:
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed!r} is no whole number within 0..2^64-1")
    return np.array([divmod(int(seed), 2**32) for seed in seeds], np.uint32)
