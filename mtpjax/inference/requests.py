"""Checks prompts and settings on the host, and converts them to the arrays of the compiled call."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mtpjax.decoding.acceptance.rules import MAX_PARAMETERS
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.decoding.decoder import Drafter
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.sampling_params import make_sampling_arrays
from mtpjax.decoding.state import NewRows, RowSettings, StateShape
from mtpjax.decoding.unused_settings import warn_of_unused_settings
from mtpjax.drafters.methods import find_method
from mtpjax.messages import count_of, require
from mtpjax.models.attention_kinds import has_recurrent_layers
from mtpjax.models.model import MTPModel
from mtpjax.models.params import check_params
from pallas_kernels.verify_attention import MAX_QUERY_TOKENS


def make_drafter(config: DecodeConfig) -> Drafter:
    """Returns the drafter that `config` selects, or the base `Drafter`, which drafts nothing, for `num_steps=0`.

    Raises:
        ValueError: if `config.drafter` is neither a `Drafter` nor the name of a method that drafts without files.
    """
    if not isinstance(config, DecodeConfig):
        raise ValueError(f"config must be a DecodeConfig, got {type(config).__name__}: use DecodeConfig(**settings)")
    if not config.num_steps:
        return Drafter()
    if isinstance(config.drafter, str):
        method = find_method(config.drafter)
        if method.from_settings is None:
            raise ValueError(
                f"drafter {config.drafter!r} needs files: pass the drafter that mtpjax.load_drafter returns"
            )
        return method.from_settings(config)
    if not isinstance(config.drafter, Drafter):
        raise ValueError(
            f"drafter must be the name of a draft method or an mtpjax.drafters.Drafter, got {config.drafter!r}"
        )
    return config.drafter


def check_argument_types(params: Any, prompts: Any = (), sampling: Any = None, key: Any = None, *, model: Any) -> None:
    """Raises `ValueError` for arguments of the wrong type, which would otherwise fail deep inside the decoding call."""
    rows = prompts if isinstance(prompts, (list, tuple)) else [prompts]
    if any(isinstance(leaf, Tracer) for leaf in (*rows, key, *jax.tree.leaves(params))):
        raise ValueError("decoding is jitted itself: it cannot be called inside jax.jit, jax.vmap or jax.grad")
    if not isinstance(model, MTPModel):
        raise ValueError(f"model must be an MTPModel, got {type(model).__name__}: use MTPModel(config)")
    if not isinstance(params, Mapping) or "embedding" not in params:
        raise ValueError("params must be the parameters of the model, as `load` and `init_params` return them")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"sampling must be SamplingParams, got {type(sampling).__name__}: use SamplingParams(**values)"
        )
    if key is not None and not isinstance(key, (jax.Array, np.ndarray)):
        raise ValueError(f"key must be a jax.random key, got {key!r}: use jax.random.key({key!r})")
    # An integer array is raw key data, as `jax.random.PRNGKey` returns.
    if key is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            jax.random.wrap_key_data(jnp.asarray(key))
        except TypeError as error:
            shape = f"{key.dtype}{list(key.shape)}"
            raise ValueError(f"key must be a jax.random key, got an array {shape}: use jax.random.key(seed)") from error


def params_to_device(params: dict) -> dict:
    """Moves NumPy parameters (for example from `jax.device_get`) to the device; returns others unchanged."""
    if any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params)):
        return jax.tree.map(jnp.asarray, params)
    return params


@contextlib.contextmanager
def explain_param_errors(params: dict, model: MTPModel) -> Iterator[None]:
    """Turns Flax's errors about missing or misshapen parameters into a one-line `ValueError`.

    Flax compares parameters while it traces, so the check costs nothing in correct calls.
    """
    try:
        yield
    except flax.errors.FlaxError as error:
        check_params(params, model)
        raise ValueError(f"the parameters do not match the model: {str(error).splitlines()[0]}") from error


def prompts_to_arrays(prompts: Any, lengths: Any = None) -> list[np.ndarray]:
    """Converts prompts to a list of token id arrays.

    Args:
        prompts: token lists, or an array `[B, T]`.
        lengths: `[B]` prompt lengths of a right-padded array; None: every row is full.

    Returns:
        One array per prompt, without padding.

    Raises:
        ValueError: for inconsistent shapes, or text instead of token ids.
    """
    texts = [prompts] if isinstance(prompts, str) else prompts if isinstance(prompts, (list, tuple)) else []
    if any(isinstance(row, str) for row in texts):
        raise ValueError(
            "prompts must be token ids, not text: encode each text with mtpjax.load_tokenizer(path).encode(text)"
        )
    # An array may be padded; `lengths` is the number of prompt tokens in each row.
    if isinstance(prompts, (np.ndarray, jax.Array)):
        prompts = np.asarray(prompts)
        require(prompts.ndim == 2, f"prompts must be [B, T] or a list of token lists, got shape {prompts.shape}")
        if lengths is None:
            return list(prompts)
        lengths = np.asarray(lengths)
        require(np.issubdtype(lengths.dtype, np.integer), f"lengths must be integers, got dtype {lengths.dtype}")
        if lengths.shape != prompts.shape[:1]:
            raise ValueError(f"lengths has shape {lengths.shape}, but there are {prompts.shape[0]} prompts")
        if (lengths > prompts.shape[1]).any():
            raise ValueError(f"length {lengths.max()} exceeds the {prompts.shape[1]} columns of the prompts")
        return [row[: max(length, 0)] for row, length in zip(prompts, lengths, strict=True)]
    require(np.iterable(prompts), f"prompts must be [B, T] or a list of token lists, got {type(prompts).__name__}")
    require(lengths is None, "lengths must come with an array of prompts, not with a list")
    if any(not np.iterable(row) for row in prompts):
        raise ValueError("prompts must be [B, T] or a list of token lists; a single prompt is a list of one token list")
    try:
        return [np.asarray(row) for row in prompts]
    except ValueError as error:  # NumPy's message about a ragged list does not say which prompt is wrong
        raise ValueError("prompts must be lists of token ids, not lists of lists") from error


def check_request(rows: list[np.ndarray], model: MTPModel, config: DecodeConfig, drafter: Drafter) -> int:
    """Checks prompts and settings. The compiled call would silently clamp out-of-range values.

    Returns:
        The maximum length of a row in tokens, prompt included.

    Raises:
        ValueError: for the first violation, in one line with the value and the limit.
    """
    require(bool(rows), "prompts is empty: decoding needs at least one row")
    limit = check_settings(model, config, drafter)
    vocab_size = model.config.vocab_size
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size:
            raise ValueError(f"prompt {number} is empty" if not row.size else f"prompt {number} has shape {row.shape}")
        require(np.issubdtype(row.dtype, np.integer), f"prompt {number} must hold token ids, got dtype {row.dtype}")
        # The smallest and the largest id are enough to check the range.
        for token in (int(row.min()), int(row.max())):
            require(0 <= token < vocab_size, f"prompt {number} holds token id {token}, outside 0..{vocab_size - 1}")
        if row.size >= limit:
            raise ValueError(
                f"prompt {number} has {count_of(row.size, 'token')}; max_length {limit} leaves room for {limit - 1}"
            )
    return limit


def check_settings(model: MTPModel, config: DecodeConfig, drafter: Drafter) -> int:
    """Checks settings against a model, and warns about settings that have no effect.

    Returns:
        The maximum length of a row in tokens, prompt included.

    Raises:
        ValueError: for the first violation, in one line with the value and the limit.
    """
    warn_of_unused_settings(config)
    # The model was trained on positions up to `max_position_embeddings`; `max_length` may only lower that limit.
    max_positions, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    limit = max_positions if config.max_length is None else config.max_length
    if limit > max_positions:
        raise ValueError(f"max_length {limit} exceeds the model's {max_positions} positions (max_position_embeddings)")
    for token in (*config.stop_token_ids, *(token for sequence in config.stop_sequences for token in sequence)):
        require(0 <= token < vocab_size, f"stop token id {token} is outside 0..{vocab_size - 1}")
    # Each unrolled layer has its own cache. A scan over stacked layers would copy every weight in each step.
    if model.scan_layers:
        raise ValueError("decoding needs unrolled layers: use unstack_layers(params, config) and MTPModel(config)")
    if config.deterministic:
        _check_deterministic(model, config)
    # A recurrent layer has one running state per row, so it cannot follow the branches of a tree.
    if config.num_steps:
        if config.topk > 1 and has_recurrent_layers(model.config):
            raise ValueError(f"linear attention supports only chains: set topk to 1, got {config.topk}")
        check_limits(drafter.limits, config)
        drafter.check(model, config)
    return limit


def check_limits(limits: DraftLimits, config: DecodeConfig) -> None:
    """Raises `ValueError`, with the reason, for settings that a draft method does not support."""
    if config.topk > 1 and limits.trees is not None:
        raise ValueError(f"{limits.trees}; set topk to 1, got {config.topk}")
    for name in ("draft_window", "draft_vocabulary"):
        if getattr(config, name) is not None and (reason := getattr(limits, name)) is not None:
            raise ValueError(reason)


def _check_deterministic(model: MTPModel, config: DecodeConfig) -> None:
    """Raises `ValueError` if XLA would compute matmuls whose sizes depend on the batch."""
    if model.implementation not in ("triton", "interpreted"):
        raise ValueError(
            f"deterministic decoding needs the kernels on a GPU, but runs {model.implementation!r} on a "
            f"{jax.default_backend()}: decode the rows one by one, or set implementation to 'interpreted' (slow)"
        )
    require(not model.config.index_topk, "deterministic decoding does not support a sparse indexer, which runs in XLA")
    if has_recurrent_layers(model.config):
        raise ValueError("deterministic decoding does not support linear attention, which runs in XLA")
    # Passes of up to 16 tokens and longer passes use different attention kernels, so rounds must have at most 16 tokens
    # and prefill chunks more than 16.
    widest = max(config.num_nodes, config.min_rows or 1)
    if widest > MAX_QUERY_TOKENS:
        raise ValueError(f"deterministic decoding supports at most {MAX_QUERY_TOKENS} tokens per round, got {widest}")
    if config.prefill_chunk is not None and config.prefill_chunk <= MAX_QUERY_TOKENS:
        raise ValueError(
            f"deterministic decoding needs a prefill_chunk above {MAX_QUERY_TOKENS}, got {config.prefill_chunk}"
        )


def make_stop_table(config: DecodeConfig) -> np.ndarray:
    """Converts the stop tokens and stop sequences to one table `[N, Z]` int32.

    Sequences are right-aligned, with -1 before shorter sequences and in unused rows. N and Z are rounded up, so that
    similar requests share a compiled program.
    """
    # A stop token is a sequence of length 1. Without longer sequences the table has only one column, which is cheapest.
    sequences = [(token,) for token in config.stop_token_ids] + list(config.stop_sequences)
    longest = max(map(len, sequences), default=1)
    width = 1 if longest == 1 else -(-longest // 8) * 8
    stops = np.full((max(-(-len(sequences) // 8), 1) * 8, width), -1, np.int32)
    for table_row, sequence in zip(stops, sequences, strict=False):
        table_row[-len(sequence) :] = sequence
    return stops


def fit_stops(stops: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Copies a stop table into a table of the state's `shape`; raises `ValueError` if it does not fit."""
    # Sequences fill the table's first rows and last columns, so the used part is one corner of the table.
    is_used = stops != -1
    number, width = int(is_used.any(axis=1).sum()), int(is_used.any(axis=0).sum())
    if number > shape[0] or width > shape[1]:
        raise ValueError(
            f"{number} stop sequences of up to {width} tokens do not fit: the limits are {shape[0]} and {shape[1]}"
        )
    table = np.full(shape, -1, np.int32)
    table[:number, shape[1] - width :] = stops[:number, stops.shape[1] - width :]
    return table


def make_new_rows(
    rows: list[np.ndarray],
    *,
    model: MTPModel,
    config: DecodeConfig,
    limit: int,
    capacity: int,
    sampling: SamplingParams,
    key: jax.Array | None = None,
    shape: StateShape | None = None,
) -> NewRows:
    """Converts checked requests to arrays.

    Args:
        rows: R prompts.
        config: the requests' settings.
        limit: maximum length of a row in tokens, prompt included.
        capacity: cache slots per row, L.
        sampling: the requests' sampling parameters.
        key: a `jax.random` key that seeds the rows if `sampling` sets no seed.
        shape: shape of the state that the rows enter, which determines the sampling options and the stop table. None:
            the requests determine them.

    Returns:
        `NewRows` of host arrays; jit transfers all of them at once.

    Raises:
        ValueError: for out-of-range sampling parameters, or stop sequences that do not fit into the state's table.
    """
    # 1. Prompts, right-padded to the capacity. A row ends at `max_new_tokens` new tokens or at the maximum length.
    R = len(rows)
    lengths = np.array([row.size for row in rows], np.int32)
    limits = np.minimum(lengths + min(config.max_new_tokens, limit), limit).astype(np.int32)
    tokens = np.zeros((R, capacity), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: row.size] = row
    # 2. Stop sequences. `min_new_tokens` bans those with a single token.
    single_stops = (*config.stop_token_ids, *(sequence[0] for sequence in config.stop_sequences if len(sequence) == 1))
    stops, features = make_stop_table(config), None
    if shape is not None:
        stops, features = fit_stops(stops, shape.stops), shape.features
    # 3. Settings per row. Each field has its own buffer, because the compiled call donates the state.
    arrays: dict[str, Any] = {
        "prompt_length": lengths.copy(),
        "limit": limits,
        "stops": np.broadcast_to(stops, (R, *stops.shape)).copy(),
        "rule_params": np.zeros((R, MAX_PARAMETERS), np.float32),
    }
    arrays["rule_params"][:, : len(config.rule_params)] = config.rule_params
    settings = RowSettings(
        sampling=make_sampling_arrays(sampling, R, model.config, key, single_stops, features=features), **arrays
    )
    prompts: dict[str, Any] = {"tokens": tokens, "length": lengths}
    return NewRows(settings=settings, **prompts)


def repeat_first_row(rows: NewRows, count: int) -> NewRows:
    """Appends `count` copies of the first request, to pad the number of rows."""
    if not count:
        return rows
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[:1], count, axis=0)]), rows)
