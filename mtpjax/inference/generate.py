"""The public decoding functions. They check the request, run the compiled call, and return the result."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from mtpjax.compat import library_settings
from mtpjax.decoding import gpu_graph
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.device import device_settings, fit_params, with_implementation
from mtpjax.decoding.loop import decode
from mtpjax.decoding.result import GenerationResult, collect
from mtpjax.decoding.sampling_params import temperatures
from mtpjax.decoding.state import DecodeState, NewRows
from mtpjax.inference.requests import (
    check_argument_types,
    check_request,
    explain_param_errors,
    make_drafter,
    make_new_rows,
    params_to_device,
    prompts_to_arrays,
    repeat_first_row,
)
from mtpjax.models.model import MTPModel
from mtpjax.models.sharding import data_size


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
    """Decodes one token per pass without drafts, like `speculative_generate` with `num_steps=0`.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: token lists, or an array `[B, T]`.
        model: the model.
        config: settings; draft and acceptance settings are ignored. None: `DecodeConfig()`.
        sampling: sampling parameters per row; None picks the arg-max.
        key: a `jax.random` key that seeds the rows if `sampling` sets no seed.
        lengths: `[B]` prompt lengths of a right-padded array.
        mesh: mesh to shard parameters and caches over; None: the parameters' mesh, if any.

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
    """Returns settings for plain decoding, in which a round verifies only the pending token and appends one token."""
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
    """Continues prompts with speculative decoding, in which one trunk pass per round verifies a drafter's tokens.

    At temperature 0 in float32, the tokens are the same as those of `generate`, regardless of the drafts. At higher
    temperatures they have the same distribution, unless the acceptance rule is lossy (`DecodeConfig`). The whole call
    is one jitted function, which runs a prefill and a `lax.while_loop`. A second call does not recompile if the batch,
    the cache capacity (the longest sequence, rounded up), the static settings and the sampling options in use are the
    same.

    Args:
        params: parameters of `model` with unrolled layers.
        prompts: token lists, or an array `[B, T]`.
        model: the model.
        config: settings; None: `DecodeConfig()`.
        sampling: sampling parameters per row; None picks the arg-max.
        key: a `jax.random` key that seeds the rows if `sampling` sets no seed. A row's random numbers depend only on
            its seed, or on the key and the row's index.
        lengths: `[B]` prompt lengths of a right-padded array.
        mesh: mesh to shard parameters and caches over (`mtpjax.models.decoding_layout`); None: the parameters' mesh, if
            any. `shard_for_decoding` moves parameters once for many calls.
        draft_params: the drafter's parameters; None: the MTP modules in `params`.

    Returns:
        The new tokens, finish reasons and acceptance counts.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, a prompt as long as `max_length`, drafts without
            MTP modules, sampling without a seed or key, a mesh that cannot shard the model, or settings that
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
    # 1. Check the request on the host, because the compiled call would silently clamp out-of-range values.
    check_argument_types(params, prompts, sampling, key, model=model)
    config, sampling = DecodeConfig() if config is None else config, sampling or SamplingParams()
    prompts = prompts_to_arrays(prompts, lengths)
    B = len(prompts)
    # 2. Resolve the static settings, which select the compiled program, and convert the requests to arrays.
    call = make_call(
        params, prompts, model=model, config=config, sampling=sampling, batch=B, draft_params=draft_params, mesh=mesh
    )
    rows = call.make_rows(prompts, sampling, key)

    # 3. Run the compiled call, which runs prefill and then rounds until every row is done. It donates the state.
    def run() -> GenerationResult:
        return call.collect(decode_batch(call, call.start(rows)), B)

    return gpu_graph.GRAPHS.run_or_repeat(call.mesh or jax.sharding.get_mesh(), run)


def make_call(
    params: dict,
    prompts: list[np.ndarray],
    *,
    model: MTPModel,
    config: DecodeConfig,
    sampling: SamplingParams,
    batch: int,
    draft_params: Any = None,
    mesh: Mesh | None = None,
) -> "BatchCall":
    """Checks prompts and settings, moves the parameters to the mesh, and sizes the caches for the longest prompt.

    Args:
        batch: number of rows that are decoded at the same time.
        draft_params: the drafter's parameters; None: the MTP modules in `params`.
        mesh: mesh to move the parameters to; None leaves them where they are.

    Raises:
        ValueError: in the same cases as `speculative_generate`.
    """
    drafter, model, params = make_drafter(config), with_implementation(model, config), params_to_device(params)
    limit = check_request(prompts, model, config, drafter)
    params, model, mesh = fit_params(params, model, config, mesh)
    longest = max(row.size for row in prompts)
    max_length = min(longest + min(config.max_new_tokens, limit), limit)
    decoder = Decoder.make(
        config, drafter, model, mesh, batch=batch, max_length=max_length, longest_prompt=longest,
        is_greedy=not temperatures(sampling, batch).any(),
    )  # fmt: skip
    if draft_params is None:
        draft_params = drafter.default_params(params, config, model=model)
    return BatchCall(params, draft_params, decoder, config, mesh, limit, decoder.capacity(max_length, longest))


class BatchCall(NamedTuple):
    """Decodes batches with the same decoder and parameters."""

    params: dict
    draft_params: Any
    decoder: Decoder
    config: DecodeConfig
    mesh: Mesh | None
    limit: int  # maximum tokens of a text, prompt included
    capacity: int  # cache slots per row

    def make_rows(self, prompts: list[np.ndarray], sampling: SamplingParams, key: jax.Array | None = None) -> NewRows:
        """Converts checked requests to arrays that match the size of the caches."""
        return make_new_rows(
            prompts, model=self.decoder.model, config=self.config, limit=self.limit, capacity=self.capacity,
            sampling=sampling, key=key,
        )  # fmt: skip

    def num_rows(self, batch: int) -> int:
        """Returns the number of rows for `batch` requests, rounded up to a multiple of the mesh's `data` size."""
        return -(-batch // data_size(self.mesh)) * data_size(self.mesh)

    @library_settings()
    def start(self, rows: NewRows) -> DecodeState:
        """Makes the state of new requests before their prefill. Copies of the first row pad the batch on a mesh."""
        rows = repeat_first_row(rows, self.num_rows(len(rows.length)) - len(rows.length))
        return self.decoder.make_state(self.params, self.config, self.mesh, rows=rows)

    def collect(self, state: DecodeState, batch: int) -> GenerationResult:
        """Copies the first `batch` rows of a state to the host."""
        slots = range(batch) if batch < len(state.length) else None
        return collect(state, slots, is_exact=self.decoder.spec.rule.is_exact)


def decode_batch(
    call: BatchCall, state: DecodeState, max_rounds: Any = None, *, is_started: bool = False
) -> DecodeState:
    """Runs the compiled call; see `mtpjax.decoding.loop.decode`."""
    settings = device_settings(call.params, call.mesh, call.config)
    with settings, explain_param_errors(call.params, call.decoder.model):
        return decode(call.params, call.draft_params, state, max_rounds, decoder=call.decoder, is_started=is_started)
