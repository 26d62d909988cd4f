"""Checks `SamplingParams` on the host, and converts them to arrays for a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mtpjax.decoding.config import SamplingParams
from mtpjax.decoding.rng import seeds_from_key
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures
from mtpjax.decoding.sampling_ranges import OPTIONS, check_numbers, check_seed
from mtpjax.messages import require
from mtpjax.models.config import ModelConfig


def temperatures(sampling: SamplingParams, batch: int) -> np.ndarray:
    """Checks the rows' temperatures and returns them as `[B]` float32; raises `ValueError` if one is out of range."""
    return _per_row_numbers(sampling, "temperature", batch)


def make_sampling_arrays(
    sampling: SamplingParams,
    batch: int,
    config: ModelConfig,
    key: jax.Array | None,
    stops: tuple[int, ...] = (),
    *,
    features: SamplingFeatures | None = None,
) -> SamplingArrays:
    """Checks sampling parameters and converts them to arrays.

    Args:
        key: a `jax.random` key that seeds the rows if `sampling` sets no seed.
        stops: single stop tokens, banned until a row has `min_new_tokens`.
        features: options to compile in; None: the options that at least one row uses.

    Returns:
        `SamplingArrays` with host arrays.

    Raises:
        ValueError: a value is out of range, or a row uses an option that is not in `features`. The message contains the
            field and the value.
    """
    V = config.vocab_size
    # 1. Numeric options. An option is in use if some row's value differs from the neutral value.
    arrays: dict[str, Any] = {}  # host arrays, which jit transfers
    used: dict[str, bool] = {}
    for name, option in OPTIONS.items():
        values = _per_row_numbers(sampling, name, batch)
        arrays[option.feature], used[option.feature] = values, bool((values != option.neutral).any())
    is_sampled = used.pop("temperature")
    # A user's top_k of 0 means "all tokens". On the device, V means the same and needs no special case.
    arrays["top_k"] = np.where(arrays["top_k"] == 0, V, arrays["top_k"]).astype(np.int32)
    # 2. logit_bias, allowed_tokens and banned_tokens become one bias per token.
    bias = _bias(sampling, batch, config, stops, arrays["min_new"])
    used["bias"] = bias is not None
    # 3. Features: a new call compiles in only the options in use. A running state has fixed features, so a request that
    # uses any other option is rejected.
    if features is None:
        features = SamplingFeatures(**used)
    missing = [name for name, is_used in used.items() if is_used and not getattr(features, name)]
    require(not missing, f"the decoding state was made without these sampling options: {', '.join(missing)}")
    if bias is None:
        bias = np.zeros((batch, V if features.bias else 0), np.float32)
    arrays |= {"seed": _seeds(sampling, batch, key, is_needed=is_sampled), "bias": bias}
    return SamplingArrays(features=features, **arrays)


def _per_row_numbers(sampling: SamplingParams, name: str, batch: int) -> np.ndarray:
    """Returns one value per row, `[B]`; raises `ValueError` for values out of range."""
    # Check before the conversion, which rounds large integers and values near the bounds.
    check_numbers(name, getattr(sampling, name))
    try:
        values = np.asarray(getattr(sampling, name), np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number or one per row, got {getattr(sampling, name)!r}") from error
    require(values.shape in ((), (batch,)), f"{name} has shape {values.shape}, but there are {batch} rows")
    return np.full(batch, np.minimum(values, 2**31 - 1), np.int32 if OPTIONS[name].is_integer else np.float32)


def _per_row_values(name: str, value: Any, batch: int, is_single_value: Callable[[Any], bool]) -> list[Any]:
    """Returns one value or None per row: the elements of `value`, or `value` itself if it is a single value or None."""
    if value is None or is_single_value(value):
        return [value] * batch
    values = list(value)
    if len(values) != batch or not all(row is None or is_single_value(row) for row in values):
        raise ValueError(
            f"{name} must be one value for all rows, or a sequence of {batch} values (or None), one per row"
        )
    return values


def _bias(sampling: SamplingParams, batch: int, config: ModelConfig, stops, min_new) -> np.ndarray | None:
    """Returns the bias `[B, V]` float32, -inf for banned tokens; None if no row uses biases or bans."""
    # A bias array costs B * V floats on the device, so it exists only if some row needs it.
    requested = (sampling.logit_bias, sampling.allowed_tokens, sampling.banned_tokens)
    if all(part is None for part in requested):
        return None
    V, num_tokens = config.vocab_size, config.num_tokens or config.vocab_size
    bias = np.zeros((batch, V), np.float32)

    def ids(name: str, values) -> np.ndarray:
        values = np.asarray(list(values))
        if values.size and not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"{name} must hold token ids, got dtype {values.dtype}")
        if values.size and not (values.min() >= 0 and values.max() < V):
            wrong = values[(values < 0) | (values >= V)][0]
            raise ValueError(f"{name} holds token id {wrong}, outside 0..{V - 1}")
        return values.astype(int)

    def is_ids(value) -> bool:
        is_list = np.iterable(value) and not isinstance(value, str)
        return is_list and all(isinstance(token, (int, np.integer)) for token in value)

    # 1. Add the biases, then ban everything outside allowed_tokens, then ban banned_tokens.
    tests = {"logit_bias": lambda value: isinstance(value, Mapping), "allowed_tokens": is_ids, "banned_tokens": is_ids}
    columns = [_per_row_values(name, getattr(sampling, name), batch, test) for name, test in tests.items()]
    for row, biases, allowed, banned in zip(bias, *columns, strict=True):
        values = np.asarray(list((biases or {}).values()), np.float32)
        if not np.isfinite(values).all():
            raise ValueError("logit_bias holds a value that is not finite; use banned_tokens to ban a token")
        row[ids("logit_bias", biases or ())] += values
        if allowed is not None:
            is_banned = np.ones(V, bool)
            is_banned[ids("allowed_tokens", allowed)] = False
            row[is_banned] = -np.inf
        row[ids("banned_tokens", () if banned is None else banned)] = -np.inf
    # 2. Check that every row can emit some token, even while min_new_tokens bans its stop tokens. Otherwise all of its
    #    logits would be -inf.
    is_allowed = ~np.isneginf(bias[:, :num_tokens])
    for number, row in enumerate(is_allowed):
        if not row.any():
            raise ValueError(
                f"row {number} cannot emit any token: allowed_tokens and banned_tokens exclude all of them"
            )
    is_allowed[:, [token for token in stops if token < num_tokens]] = False
    for number, (row, min_new_tokens) in enumerate(zip(is_allowed, min_new, strict=True)):
        if min_new_tokens and not row.any():
            raise ValueError(
                f"row {number} can emit only stop tokens, which min_new_tokens={min_new_tokens} bans at the start"
            )
    return bias


def _seeds(sampling: SamplingParams, batch: int, key: jax.Array | None, *, is_needed: bool) -> np.ndarray | jax.Array:
    """Returns row seeds `[B, 2]` uint32, high word first."""
    # If no seeds are given, the key seeds the rows. Greedy rows need neither seeds nor a key.
    if sampling.seed is None:
        require(key is not None or not is_needed, "a temperature above 0 needs SamplingParams.seed or a key")
        return np.zeros((batch, 2), np.uint32) if key is None else seeds_from_key(key, batch)
    seeds = list(sampling.seed) if np.iterable(sampling.seed) else [sampling.seed] * batch
    require(len(seeds) == batch, f"seed has {len(seeds)} values, but there are {batch} rows")
    check_seed(seeds)
    return np.array([divmod(int(seed), 2**32) for seed in seeds], np.uint32)
