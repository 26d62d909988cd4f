"""The public decoding functions: check, bucket, place, call the loop, report."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.decode.config import DecodeConfig
from mtpjax.decode.loop import decode, least_rows
from mtpjax.decode.result import DecodeStats, GenerationResult
from mtpjax.decode.state import DecodeState, hidden_rows, init_state
from mtpjax.model import MTPModel
from mtpjax.sharding import shard_params, shard_state


def generate(
    params: dict,
    prompts,
    *,
    model: MTPModel,
    config: DecodeConfig,
    lengths=None,
    mesh: Mesh | None = None,
) -> GenerationResult:
    """Plain greedy decoding: `speculative_generate` without drafts, whatever `config.num_steps` says."""
    plain = dataclasses.replace(config, num_steps=0)
    return speculative_generate(params, prompts, model=model, config=plain, lengths=lengths, mesh=mesh)


def speculative_generate(
    params: dict,
    prompts,
    *,
    model: MTPModel,
    config: DecodeConfig,
    lengths=None,
    mesh: Mesh | None = None,
) -> GenerationResult:
    """Continues each prompt greedily; the MTP modules draft `config.num_steps` tokens that one trunk pass verifies.

    In float32 the tokens are those of `generate`, whatever the modules draft. The whole call is one jitted function: a
    prefill and a `lax.while_loop`. Another call in the same bucket compiles nothing: shapes are the batch, the longest
    sequence rounded up, and `num_steps`.

    Args:
        params: parameters of `model` (unrolled layers).
        prompts: token lists, or an array `[B, T]`, right-padded where `lengths [B]` is given.
        mesh: parameters and caches are laid out over it (`mtpjax.sharding`); None: where they are.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, a prompt longer than `max_length` leaves room for,
            drafts without modules, or shapes that do not fit. One line, naming the value and the limit.
    """
    rows = _rows(prompts, lengths)
    limit = _check(rows, model, config)
    state = _prepare(params, rows, limit, model, config)
    platform = jax.default_backend()
    if mesh is not None:
        platform = mesh.devices.flat[0].platform
        params, state = shard_params(params, mesh), shard_state(state, mesh)
    min_rows = config.min_rows or least_rows(len(rows), platform)
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        state = decode(
            params, state, model=model, num_steps=config.num_steps, min_rows=min_rows, chunk=config.prefill_chunk
        )
    return _report(state, np.array([len(row) for row in rows]))


def _rows(prompts, lengths) -> list[np.ndarray]:
    """The prompts as a list of id arrays."""
    if isinstance(prompts, (np.ndarray, jax.Array)):
        prompts = np.asarray(prompts)
        if prompts.ndim != 2:
            raise ValueError(f"prompts must be [B, T] or a list of token lists, not of shape {prompts.shape}")
        if lengths is None:
            return list(prompts)
        lengths = np.asarray(lengths)
        if lengths.shape != prompts.shape[:1]:
            raise ValueError(f"lengths {lengths.shape} do not match the batch of {prompts.shape[0]}")
        if (lengths > prompts.shape[1]).any():
            raise ValueError(f"length {lengths.max()} is beyond the {prompts.shape[1]} columns of the prompts")
        return [row[: max(length, 0)] for row, length in zip(prompts, lengths, strict=True)]
    if lengths is not None:
        raise ValueError("lengths go with an array of prompts, not with a list")
    if any(not np.iterable(row) or isinstance(row, str) for row in prompts):
        raise ValueError("prompts must be [B, T] or a list of token lists; encode text first")
    return [np.asarray(row) for row in prompts]


def _check(rows: list[np.ndarray], model: MTPModel, config: DecodeConfig) -> int:
    """Raises for what the compiled call would silently clamp; returns the longest sequence allowed."""
    if not rows:
        raise ValueError("there are no prompts: the batch is empty")
    most = model.config.max_position_embeddings
    limit = most if config.max_length is None else config.max_length
    if limit > most:
        raise ValueError(f"max_length {limit} is beyond the model's {most} positions")
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size:
            raise ValueError(f"prompt {number} is empty" if not row.size else f"prompt {number} has shape {row.shape}")
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompt {number} holds {row.dtype}, not token ids")
        for token in (int(row.min()), int(row.max())):
            if not 0 <= token < model.config.vocab_size:
                raise ValueError(f"prompt {number} holds token id {token}, outside 0..{model.config.vocab_size - 1}")
        if row.size >= limit:
            raise ValueError(f"prompt {number} has {row.size} tokens; max_length {limit} leaves room for {limit - 1}")
    for token in config.stop_token_ids:
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(f"stop token id {token} is outside 0..{model.config.vocab_size - 1}")
    if config.num_steps and not model.config.num_mtp_modules:
        raise ValueError(f"num_steps {config.num_steps} needs an MTP module, and the model has none")
    if model.scan_layers:
        raise ValueError("decoding takes unrolled layers: unstack_layers(params, config) and MTPModel(config)")
    return limit


def bucket(size: int) -> int:
    """`size` rounded up so that at most a quarter is waste: multiples of 128, from 1024 on of ever larger steps."""
    step = max(128, 2 ** (size.bit_length() - 3))
    return -(-size // step) * step


def _prepare(params, rows, limit: int, model: MTPModel, config: DecodeConfig) -> DecodeState:
    """The state before prefill, with room for the longest sequence and the widest write behind it."""
    lengths = np.array([row.size for row in rows], np.int32)
    limits = np.minimum(lengths + config.max_new_tokens, limit).astype(np.int32)
    widest = max(config.num_steps + 2, config.min_rows or 0, hidden_rows(model, config.num_steps), config.prefill_chunk)
    capacity = bucket(int(limits.max()) + widest)
    tokens = np.zeros((len(rows), capacity), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: row.size] = row
    stops = list(config.stop_token_ids)
    stops += [-1] * (-len(stops) % 8 if stops else 8)
    arrays = (jnp.asarray(array) for array in (tokens, lengths, limits, np.array(stops, np.int32)))
    return init_state(*arrays, model=model, num_steps=config.num_steps, dtype=params["embedding"].dtype)


def _report(state: DecodeState, prompt_lengths: np.ndarray) -> GenerationResult:
    """Brings the final state to the host."""
    names = ("tokens", "origin", "length", "stopped", "steps", "proposed", "accepted", "discarded")
    host = jax.device_get({name: getattr(state, name) for name in names})
    lengths = host["length"] - prompt_lengths
    column = np.arange(lengths.max())[None, :]
    place = np.minimum(prompt_lengths[:, None] + column, host["tokens"].shape[1] - 1)
    is_new = column < lengths[:, None]

    def new(name: str) -> np.ndarray:
        return np.where(is_new, np.take_along_axis(host[name], place, axis=1), 0)

    counts = {name: host[name] for name in ("steps", "proposed", "accepted", "discarded")}
    stats = DecodeStats(**counts, emitted=lengths)
    return GenerationResult(
        tokens=new("tokens"),
        lengths=lengths,
        origins=new("origin"),
        finish_reasons=tuple("stop" if stopped else "length" for stopped in host["stopped"]),
        stats=stats,
    )
