"""The public decoding functions: check the request, size the caches, run the compiled call, and report the result."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.compat import library_settings
from mtpjax.decoding import gpu_graph
from mtpjax.decoding.capacity import (
    MIN_PREFILL_CHUNK,
    cache_capacity,
    choose_prefill_chunk,
    min_rows_per_pass,
    slots_per_round,
)
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.decoding.depth_policy import can_speed_up
from mtpjax.decoding.drafter import Drafter
from mtpjax.decoding.loop import decode
from mtpjax.decoding.result import GenerationResult, collect
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.sampling_params import temperatures
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows, empty_state, start_rows
from mtpjax.inference.requests import (
    check_argument_types,
    check_request,
    explain_param_errors,
    make_drafter,
    make_new_rows,
    params_to_device,
    prompts_to_arrays,
    repeat_first_row,
    with_implementation,
)
from mtpjax.models.decoding_layout import constrain_state, fit_to_mesh, shard_for_decoding
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import mesh_of
from pallas_kernels import batch_invariant


def generate(
    params: dict,
    prompts: Any,
    *,
    model: MTPModel,
    config: DecodeConfig | None = None,
    sampling: SamplingParams | None = None,
    key: jax.Array | None = None,
    lengths: Any = None,
    mesh: Mesh | None = None,
) -> GenerationResult:
    """Decodes without drafts, one token per pass: `speculative_generate` with `num_steps=0`.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: token lists, or an array `[B, T]`.
        model: the model.
        config: settings; those of drafting and acceptance are ignored. None: `DecodeConfig()`.
        sampling: sampling parameters per row; None picks the arg-max.
        key: seeds for rows without one.
        lengths: `[B]` prompt lengths of a right-padded array.
        mesh: lays parameters and caches out over this mesh.

    Returns:
        The new tokens, finish reasons and step counts.

    Raises:
        ValueError: in the same cases as `speculative_generate`.

    Example:
        >>> import jax
        >>> from mtpjax import DecodeConfig, ModelConfig, MTPModel, generate, init_params
        >>> model = MTPModel(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                              intermediate_size=32, max_position_embeddings=64))
        >>> params = init_params(model, jax.random.key(0))
        >>> generate(params, [[1, 2, 3]], model=model, config=DecodeConfig(max_new_tokens=5)).tokens.shape
        (1, 5)
    """
    config = DecodeConfig() if config is None else config
    make_drafter(config)  # checks its type
    plain = without_drafts(config)
    return speculative_generate(
        params, prompts, model=model, config=plain, sampling=sampling, key=key, lengths=lengths, mesh=mesh
    )


def without_drafts(config: DecodeConfig) -> DecodeConfig:
    """Returns the settings of plain decoding.

    Args:
        config: settings with drafts.

    Returns:
        Depth 0 of the same loop: every round verifies only the pending token and appends one token from the trunk.
    """
    return dataclasses.replace(
        config, num_steps=0, topk=1, num_draft_tokens=None, acceptance="auto", depth_policy="fixed"
    )


@library_settings()
def speculative_generate(
    params: dict,
    prompts: Any,
    *,
    model: MTPModel,
    config: DecodeConfig | None = None,
    sampling: SamplingParams | None = None,
    key: jax.Array | None = None,
    lengths: Any = None,
    mesh: Mesh | None = None,
    draft_params: Any = None,
) -> GenerationResult:
    """Continues prompts with speculative decoding: a drafter proposes tokens, one trunk pass per round verifies them.

    At temperature 0 in float32 the tokens equal those of `generate`, whatever the drafter proposes. At higher
    temperatures they follow the same distribution, under every acceptance rule except the lossy ones (`DecodeConfig`).
    The whole call is one jitted function: a prefill and a `lax.while_loop`. A second call compiles nothing if the
    batch, the cache capacity (the longest sequence, rounded up), the static settings and the sampling options in use
    are the same.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: token lists, or an array `[B, T]`.
        model: the model.
        config: settings; None: `DecodeConfig()`.
        sampling: sampling parameters per row; None picks the arg-max.
        key: a `jax.random` key that seeds rows without a seed. A row's random numbers depend on its seed alone, or on
            the key and the row's number.
        lengths: `[B]` prompt lengths of a right-padded array.
        mesh: lays parameters and caches out over this mesh (`mtpjax.models.decoding_layout`); None: that of the
            parameters, if any. `shard_for_decoding` moves them once, for many calls.
        draft_params: the drafter's own parameters; None takes the MTP modules' from `params`.

    Returns:
        The new tokens, finish reasons and acceptance counts.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, a prompt as long as `max_length`, drafts without
            MTP modules, sampling without a seed or key, a mesh that does not divide the model, or settings that
            contradict each other. The message is one line with the value and the limit.

    Example:
        >>> import jax
        >>> from mtpjax import DecodeConfig, ModelConfig, MTPModel, generate, init_params, speculative_generate
        >>> model = MTPModel(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                              intermediate_size=32, max_position_embeddings=64, num_mtp_modules=1))
        >>> params = init_params(model, jax.random.key(0))
        >>> config = DecodeConfig(max_new_tokens=8, num_steps=2)
        >>> result = speculative_generate(params, [[1, 2, 3], [4]], model=model, config=config)
        >>> result.rows() == generate(params, [[1, 2, 3], [4]], model=model, config=config).rows()
        True
    """
    # 1. Check the request on the host, because the compiled call would silently clamp values that are out of range.
    check_argument_types(params, prompts, sampling, key, model=model)
    params = params_to_device(params)
    config = DecodeConfig() if config is None else config
    sampling = sampling or SamplingParams()
    drafter = make_drafter(config)
    model = with_implementation(model, config)
    prompts = prompts_to_arrays(prompts, lengths)
    limit = check_request(prompts, model, config, drafter)
    # 2. Move the parameters to the mesh, and resolve the static settings, which select the compiled program.
    resolved_mesh = mesh or mesh_of(params["embedding"])
    if mesh is not None:
        model, params = shard_for_decoding(model, params, mesh, allow_copies=config.allow_copies)
    elif resolved_mesh is not None:
        model, params = fit_to_mesh(model, params, resolved_mesh.shape, allow_copies=config.allow_copies)
    B = len(prompts)
    longest = max(row.size for row in prompts)
    max_length = min(longest + min(config.max_new_tokens, limit), limit)
    spec = resolve_spec(
        config,
        model,
        resolved_mesh,
        batch=B,
        is_greedy=not temperatures(sampling, B).any(),
        longest_prompt=longest,
        max_length=max_length,
    )
    # 3. Size the caches for the longest possible sequence and for the nodes that the last round writes behind it, and
    #    convert the requests to arrays of that size.
    capacity = cache_capacity(
        longest,
        max_length,
        max_slots_per_round=slots_per_round(model, drafter, spec),
        prefill_chunk=spec.prefill_chunk,
    )
    rows = make_new_rows(
        prompts, model=model, config=config, limit=limit, capacity=capacity, sampling=sampling, key=key
    )
    # Rows are split over `data`. Where it does not divide them, copies of the first row fill the last device.
    num_padding = 0 if resolved_mesh is None else -B % resolved_mesh.shape.get("data", 1)
    rows = repeat_first_row(rows, num_padding)
    if draft_params is None:
        draft_params = drafter.default_params(params, config, model=model)

    # 4. Run the compiled call: prefill, then rounds until every row is done. It donates the state.
    def run() -> GenerationResult:
        state = make_state(
            params,
            model=model,
            config=config,
            drafter=drafter,
            spec=spec,
            batch=B + num_padding,
            capacity=capacity,
            stops_shape=rows.settings.stops.shape[1:],
            features=rows.settings.sampling.features,
            rows=rows,
            mesh=resolved_mesh,
        )
        with device_settings(params, resolved_mesh, config), explain_param_errors(params, model):
            state = decode(params, draft_params, state, model=model, drafter=drafter, spec=spec)
        return collect(state, range(B) if num_padding else None, is_exact=spec.is_exact)

    return gpu_graph.GRAPHS.run_or_repeat(resolved_mesh or jax.sharding.get_mesh(), run)


def resolve_spec(
    config: DecodeConfig,
    model: MTPModel,
    mesh: Mesh | None,
    *,
    batch: int,
    is_greedy: bool,
    longest_prompt: int,
    max_length: int,
) -> DecodeSpec:
    """Resolves the static settings of a call for its platform and batch size.

    Args:
        config: settings.
        model: the model.
        mesh: mesh of the parameters; None: one device.
        batch: number of rows, B.
        is_greedy: True if every row is at temperature 0.
        longest_prompt: tokens of the longest prompt.
        max_length: tokens of the longest sequence, prompt included.

    Returns:
        The spec, which is part of the key of the compiled program.
    """
    platform, min_rows = platform_of(mesh), choose_min_rows(config, model, mesh, batch=batch)
    chunk = choose_prefill_chunk(model, batch, platform, longest_prompt=longest_prompt, max_length=max_length)
    spec = DecodeSpec.from_config(config, is_greedy=is_greedy, min_rows=min_rows, prefill_chunk=chunk)
    # No prompt is longer than the model's positions, and caches hold a whole chunk: a wider one would only cost memory.
    max_chunk = max(model.config.max_position_embeddings, MIN_PREFILL_CHUNK)
    return dataclasses.replace(spec, prefill_chunk=min(spec.prefill_chunk, max_chunk))


def choose_min_rows(config: DecodeConfig, model: MTPModel, mesh: Mesh | None, *, batch: int) -> int:
    """Chooses the fewest token rows of a forward pass: the configured number, or what is fast with `batch` rows."""
    return config.min_rows or min_rows_per_pass(model, batch, platform_of(mesh))


def platform_of(mesh: Mesh | None) -> str:
    """Returns JAX's name of the mesh's platform, or of the default one: "cpu" or "gpu"."""
    return mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()


def make_state(
    params: dict,
    *,
    model: MTPModel,
    config: DecodeConfig,
    drafter: Drafter,
    spec: DecodeSpec,
    batch: int,
    capacity: int,
    stops_shape: tuple[int, ...],
    features: SamplingFeatures,
    rows: NewRows | None = None,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Makes a state of B slots on the device: all free, or with the requests `rows` before their prefill.

    The other arguments are those of `empty_state`. On a mesh each device makes its part.
    """
    # An adaptive call whose costs can never pay disables drafting, so that it does not keep a drafter up to date.
    costs = rates = None
    is_disabled = False
    if spec.is_adaptive and config.depth_costs is not None:
        costs = np.asarray(config.depth_costs, np.float32)
        rates = None if config.depth_rates is None else np.asarray(config.depth_rates, np.float32)
        is_disabled = not can_speed_up(costs)
    return _make_state(
        rows,
        model=model,
        drafter=drafter,
        spec=spec,
        batch=batch,
        capacity=capacity,
        stops_shape=stops_shape,
        features=features,
        dtype=params["embedding"].dtype,
        depth_costs=costs,
        depth_rates=rates,
        drafting_disabled=np.bool_(is_disabled),
        mesh=mesh,
    )


# Jitted, so that one dispatch transfers the requests and allocates all buffers of a state.
@functools.partial(
    jax.jit,
    static_argnames=("model", "drafter", "spec", "batch", "capacity", "stops_shape", "features", "dtype", "mesh"),
)
def _make_state(rows: NewRows | None, *, model: MTPModel, mesh: Mesh | None, **arguments: Any) -> DecodeState:
    state = empty_state(model=model, **arguments)
    state = state if rows is None else start_rows(state, rows, vocab_size=model.config.vocab_size)
    return state if mesh is None else constrain_state(state, model.config, mesh)


@contextlib.contextmanager
def device_settings(params: dict, mesh: Mesh | None, config: DecodeConfig) -> Iterator[None]:
    """Sets the mesh, `deterministic`, and full float32 matmul precision on accelerators, for a call with these weights.

    Raises:
        ValueError: for deterministic settings with several devices.
    """
    if config.deterministic and mesh is not None and mesh.size > 1:
        raise ValueError(f"deterministic decoding runs on one device, not on a mesh of {mesh.size}")
    platform = platform_of(mesh)
    with contextlib.ExitStack() as settings:
        settings.enter_context(batch_invariant(config.deterministic))
        if mesh is not None:
            settings.enter_context(jax.set_mesh(mesh))
        if platform != "cpu" and params["embedding"].dtype == jnp.float32:
            # By default XLA rounds float32 matmul inputs to TF32 on a GPU, but the Pallas kernels do not. The error of
            # TF32 can flip near-tied logits, so that plain and speculative decoding differ.
            settings.enter_context(jax.default_matmul_precision("highest"))
        yield
