"""The public decoding functions: check, bucket, place, call the loop, report."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.decoding.config import LOSSY_RULES, DecodeConfig, SamplingParams
from mtpjax.decoding.loop import decode, least_rows
from mtpjax.decoding.result import DecodeStats, GenerationResult
from mtpjax.decoding.sampling_params import sampling_arrays, temperatures
from mtpjax.decoding.state import WIDE, DecodeState, Plan, hidden_rows, init_state
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import mesh_of, shard_params, shard_state


def generate(
    params: dict,
    prompts,
    *,
    model: MTPModel,
    config: DecodeConfig,
    sampling: SamplingParams | None = None,
    key: jax.Array | None = None,
    lengths=None,
    mesh: Mesh | None = None,
) -> GenerationResult:
    """Plain decoding: `speculative_generate` without drafts, whatever `config` says of them."""
    plain = dataclasses.replace(
        config, num_steps=0, topk=1, num_draft_tokens=None, acceptance="auto", depth_policy="fixed"
    )
    return speculative_generate(
        params, prompts, model=model, config=plain, sampling=sampling, key=key, lengths=lengths, mesh=mesh
    )


def speculative_generate(
    params: dict,
    prompts,
    *,
    model: MTPModel,
    config: DecodeConfig,
    sampling: SamplingParams | None = None,
    key: jax.Array | None = None,
    lengths=None,
    mesh: Mesh | None = None,
) -> GenerationResult:
    """Continues each prompt; the MTP modules draft tokens, and one trunk pass per round verifies them.

    At temperature 0 the tokens are those of `generate` in float32, whatever the modules draft; above, they follow the
    same distribution, under every rule but those that `DecodeConfig` calls lossy. The whole call is one jitted
    function: a prefill and a `lax.while_loop`. Another call in the same bucket compiles nothing: shapes are the batch,
    the longest sequence rounded up, what `DecodeConfig` compiles in, and which of the sampling parameters are in use.

    Args:
        params: parameters of `model` (unrolled layers).
        prompts: token lists, or an array `[B, T]`, right-padded where `lengths [B]` is given.
        sampling: what rows ask for; None: the arg-max.
        key: a `jax.random` key that the rows take seeds from where `sampling` has none. A row's noise depends on its
            seed alone, or on the key and its number.
        mesh: parameters and caches are laid out over it (`mtpjax.models.sharding`); None: where they are.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, a prompt longer than `max_length` leaves room for,
            drafts without modules, sampling without a seed or key, settings that cannot be, or shapes that do not fit.
            One line, naming the value and the limit.
    """
    sampling = sampling or SamplingParams()
    rows = _rows(prompts, lengths)
    limit = _check(rows, model, config)
    layout = mesh or mesh_of(params["embedding"])
    platform = layout.devices.flat[0].platform if layout is not None else jax.default_backend()
    min_rows = config.min_rows or least_rows(len(rows), platform, model.implementation)
    plan = Plan.of(config, is_greedy=not temperatures(sampling, len(rows)).any(), min_rows=min_rows)
    state = _prepare(params, rows, limit, model, config, plan, sampling, key)
    if mesh is not None:
        params, state = shard_params(params, mesh), shard_state(state, mesh)
    ids = None
    if config.draft_vocabulary is not None and config.num_steps:
        ids = jnp.asarray(_draft_ids(config.draft_vocabulary, model))
    with contextlib.ExitStack() as settings:
        if layout is not None:
            settings.enter_context(jax.set_mesh(layout))
        if platform != "cpu" and state.hidden.dtype == jnp.float32:  # a GPU would round factors, but not in kernels
            settings.enter_context(jax.default_matmul_precision("highest"))
        state = decode(params, state, ids, model=model, plan=plan)
    return _report(state, np.array([len(row) for row in rows]), is_exact=plan.rule not in LOSSY_RULES)


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
    for token in (*config.stop_token_ids, *(token for sequence in config.stop_sequences for token in sequence)):
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(f"stop token id {token} is outside 0..{model.config.vocab_size - 1}")
    if config.num_steps and config.topk > 1:
        check_tree(model, config)
    if config.num_steps and not model.config.num_mtp_modules:
        raise ValueError(f"num_steps {config.num_steps} needs an MTP module, and the model has none")
    if model.scan_layers:
        raise ValueError("decoding takes unrolled layers: unstack_layers(params, config) and MTPModel(config)")
    return limit


def check_tree(model: MTPModel, config: DecodeConfig) -> None:
    """Raises `ValueError` where the model cannot draft the tree, or the rule cannot verify it."""
    modules, vocabulary = model.config.num_mtp_modules, model.config.num_tokens or model.config.vocab_size
    if modules > 1:
        raise ValueError(f"topk {config.topk} drafts trees, which take one MTP module; the model has {modules}")
    if "linear_attention" in model.config.layer_types:
        raise ValueError(f"topk {config.topk} drafts trees; a model with linear attention verifies chains: topk 1")
    if config.draft_vocabulary is not None:
        vocabulary = len(_draft_ids(config.draft_vocabulary, model))
    if config.topk > vocabulary:
        raise ValueError(f"topk {config.topk} is more than the {vocabulary} tokens that can be drafted")


def _draft_ids(ids: tuple[int, ...], model: MTPModel) -> np.ndarray:
    """The reduced vocabulary in rising order, without ids that only pad the tables: those never come."""
    unique = np.unique(np.asarray(ids, np.int32))
    num_tokens = model.config.num_tokens or model.config.vocab_size
    if not unique.size or unique[0] < 0 or unique[-1] >= model.config.vocab_size:
        raise ValueError(f"draft_vocabulary is empty or has ids outside 0..{model.config.vocab_size - 1}")
    if num_tokens <= unique[0]:
        raise ValueError(f"draft_vocabulary has no token: ids from {num_tokens} on only pad the tables")
    return unique[unique < num_tokens]


def bucket(size: int) -> int:
    """`size` rounded up: to 256, then to multiples of 128, from 1024 on to steps with a quarter of waste at most."""
    step = max(128, 2 ** (size.bit_length() - 3))
    return max(256, -(-size // step) * step)


def slots(prompt: int, length: int, *, widest: int, chunk: int) -> int:
    """Slots per row of a call with prompts of up to `prompt` tokens, which end at `length` or before.

    `widest`: what a round writes behind the text at most; of `chunk` tokens prefill writes whole ones. Attention reads
    all slots, so none is kept that nothing writes to.
    """
    return bucket(max(-(-prompt // chunk) * chunk, length) + widest + 1)


def _prepare(
    params, rows, limit: int, model: MTPModel, config: DecodeConfig, plan: Plan, sampling: SamplingParams, key
) -> DecodeState:
    """The state before prefill, with room for the longest sequence and the widest write behind it."""
    lengths = np.array([row.size for row in rows], np.int32)
    limits = np.minimum(lengths + min(config.max_new_tokens, limit), limit).astype(np.int32)
    taken_in = max(hidden_rows(model, plan.num_steps), WIDE if plan.is_adaptive else 0)
    widest = max(plan.num_nodes, plan.draft_slots + plan.min_rows, taken_in)
    capacity = slots(int(lengths.max()), int(limits.max()), widest=widest, chunk=plan.chunk)
    tokens = np.zeros((len(rows), capacity), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: row.size] = row
    singles = (*config.stop_token_ids, *(sequence[0] for sequence in config.stop_sequences if len(sequence) == 1))
    return init_state(  # all in one call to the device
        tokens,
        lengths,
        limits,
        _stops(config),
        model=model,
        plan=plan,
        dtype=params["embedding"].dtype,
        sampling=sampling_arrays(sampling, len(rows), model.config, key, singles),
        depth_costs=np.asarray(config.depth_costs, np.float32) if plan.is_adaptive else None,
        depth_change=np.float32(config.depth_change),
        depth_rates=None if config.depth_rates is None else np.asarray(config.depth_rates, np.float32),
        depth_lengths=None if config.depth_lengths is None else np.asarray(config.depth_lengths, np.float32),
        logprobs=config.logprobs,
    )


def _stops(config: DecodeConfig) -> np.ndarray:
    """Stop sequences `[N, Z]`, -1 before shorter ones and in unused rows; N and Z in buckets."""
    sequences = [(token,) for token in config.stop_token_ids] + list(config.stop_sequences)
    longest = max(map(len, sequences), default=1)
    width = 1 if longest == 1 else -(-longest // 8) * 8
    stops = np.full((max(-(-len(sequences) // 8), 1) * 8, width), -1, np.int32)
    for place, sequence in zip(stops, sequences, strict=False):
        place[-len(sequence) :] = sequence
    return stops


def _report(state: DecodeState, prompt_lengths: np.ndarray, *, is_exact: bool) -> GenerationResult:
    """Brings the final state to the host."""
    names = ("tokens", "origin", "length", "stopped", "steps", "proposed", "accepted", "discarded", "logprobs")
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
        logprobs=None if host["logprobs"] is None else new("logprobs"),
        is_exact=is_exact,
        finish_reasons=tuple("stop" if stopped else "length" for stopped in host["stopped"]),
        stats=stats,
    )
