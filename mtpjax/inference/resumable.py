"""The resumable loop: requests enter and leave the slots of a running state, as in continuous batching.

A server drives these functions:

    state = init_state(params, model=model, config=config, num_slots=8, max_length=2048)
    state = insert(params, state, [0, 3], prompts, model=model, config=config)
    state = run(params, state, 16, model=model, config=config, until="any")
    result = collect(state, [0])

A row's tokens do not depend on the other rows or on the time of its insertion (an adaptive depth under a ratio rule is
the exception, since the batch shares the depth). `insert` compiles once per number of requests, rounded up to a power
of two, and `run` once per value of `until`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mtpjax.compat import library_settings
from mtpjax.decoding.capacity import round_up_capacity, slots_per_round
from mtpjax.decoding.config import DecodeConfig, SamplingParams, check_integer
from mtpjax.decoding.drafter import Drafter
from mtpjax.decoding.gpu_graph import one_graph
from mtpjax.decoding.loop import run_rounds
from mtpjax.decoding.prefill import insert_rows
from mtpjax.decoding.sampling import SamplingFeatures
from mtpjax.decoding.spec import DecodeSpec
from mtpjax.decoding.state import DecodeState, NewRows
from mtpjax.distributed import gather_processes
from mtpjax.inference.generate import device_settings, make_state, resolve_spec
from mtpjax.inference.requests import (
    check_argument_types,
    check_request,
    check_settings,
    explain_param_errors,
    make_drafter,
    make_new_rows,
    make_stop_table,
    params_to_device,
    prompts_to_arrays,
    repeat_first_row,
    with_implementation,
)
from mtpjax.messages import count_of
from mtpjax.models.decoding_layout import fit_to_mesh, run_in_parts
from mtpjax.models.model import MTPModel
from mtpjax.models.pages import NO_PAGE, Pages
from mtpjax.models.parallel import first_row
from mtpjax.models.sharding import mesh_of


@library_settings()
def init_state(
    params: dict,
    *,
    model: MTPModel,
    config: DecodeConfig,
    num_slots: int,
    max_length: int | None = None,
    stops_shape: tuple[int, int] | None = None,
    features: SamplingFeatures | None = None,
    pool: tuple[int, int] | None = None,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Makes a state whose slots are all free.

    Args:
        params: parameters of `model` with unrolled layers.
        model: the model.
        config: settings; the static ones hold for every request. `acceptance="auto"` resolves to the rule for sampled
            rows, which also decodes rows at temperature 0 greedily.
        num_slots: number of rows that decode at the same time, B.
        max_length: minimum capacity of a row in tokens, prompt included (rounded up); None: the model's
            `max_position_embeddings`.
        stops_shape: largest number and length of a request's stop sequences; None: that of `config`, at least (8, 8).
        features: sampling options that requests may use; None: all.
        pool: number of pages and positions per page: attention layers then keep their entries in pages, which
            `insert` assigns to requests (`mtpjax.models.pages`). None: every row has caches for `max_length`.
        mesh: lays the state out over this mesh; None: the mesh of the parameters, if any.

    Returns:
        The state, for `insert`.

    Raises:
        ValueError: for settings that contradict each other or exceed the model, and slots or pages that the mesh's
            `data` does not divide.

    Example:
        >>> import jax
        >>> from mtpjax import DecodeConfig, ModelConfig, MTPModel, init_params, init_state
        >>> model = MTPModel(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                              intermediate_size=32, max_position_embeddings=64, num_mtp_modules=1))
        >>> params = init_params(model, jax.random.key(0))
        >>> config = DecodeConfig(max_new_tokens=8, num_steps=2)
        >>> state = init_state(params, model=model, config=config, num_slots=4)
        >>> state.done.tolist()  # every slot is free
        [True, True, True, True]
    """
    check_argument_types(params, model=model)
    params, num_slots = params_to_device(params), check_integer("num_slots", num_slots)
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}")
    model, params, drafter, spec, mesh = resolve_statics(params, model, config, num_slots, mesh)
    if mesh is not None and num_slots % mesh.shape.get("data", 1):
        raise ValueError(f"num_slots must be a multiple of the mesh's data = {mesh.shape['data']}, got {num_slots}")
    if pool is not None:
        num_pages, page_size = check_integer("the number of pages", pool[0]), check_integer("the page size", pool[1])
        if min(num_pages, page_size) < 1:
            raise ValueError(f"pool must be a number of pages and a page size, both at least 1, got {pool}")
        if mesh is not None and num_pages % mesh.shape.get("data", 1):
            raise ValueError(f"the number of pages must be a multiple of data = {mesh.shape['data']}, got {num_pages}")
        spec = dataclasses.replace(spec, pool=(num_pages, page_size))
    limit = check_settings(model, config, drafter)
    length = limit if max_length is None else check_integer("max_length", max_length)
    if not 2 <= length <= limit:
        raise ValueError(f"max_length must be within 2..{limit}, got {length}")
    # Reserve slots behind the longest sequence: prefill writes whole chunks, and a round writes all of its nodes.
    max_slots = max(slots_per_round(model, drafter, spec), spec.prefill_chunk)
    # Array shapes and features are static, so they must cover every later request.
    if stops_shape is None:
        number, width = make_stop_table(config).shape
        stops_shape = (max(number, 8), max(width, 8))
    return make_state(
        params,
        model=model,
        config=config,
        drafter=drafter,
        spec=spec,
        batch=num_slots,
        capacity=round_up_capacity(length + max_slots + 1),
        stops_shape=stops_shape,
        features=SamplingFeatures.all_enabled() if features is None else features,
        mesh=mesh,
    )


@library_settings()
def insert(
    params: dict,
    state: DecodeState,
    slots: Sequence[int],
    prompts: Any,
    *,
    model: MTPModel,
    config: DecodeConfig,
    sampling: SamplingParams | None = None,
    key: jax.Array | None = None,
    num_cached: Sequence[int] | None = None,
    pages: Sequence[Sequence[int]] | None = None,
    draft_params: Any = None,
) -> DecodeState:
    """Puts new requests into free slots and prefills them. The other rows do not change.

    Args:
        params: model parameters.
        state: a state; donated, so use only the returned one.
        slots: one free slot per prompt.
        prompts: token lists, or an array `[R, T]`.
        model: the model.
        config: settings of these requests. Limits, stop sequences and thresholds apply only to them; static settings
            must be those of the state.
        sampling: sampling parameters per request; None picks the arg-max.
        key: a `jax.random` key that seeds requests without a seed.
        num_cached: per request, the number of tokens at the start of its prompt that equal the text that the slot
            decoded before, or that its pages hold. Prefill reuses their cache entries. Attention layers only. Pages
            are not written at these positions, so rows with the same beginning can share them.
        pages: per request, the pages that hold its text and what a round writes behind it (`num_pages_for`), for a
            state with a pool. On a mesh, ids count from 0 in each part of `data`.
        draft_params: the drafter's own parameters; None takes the MTP modules' from `params`.

    Returns:
        The state with these rows running, each with its first new token.

    Raises:
        ValueError: for invalid prompts or settings, slots that are taken, repeated or out of range, pages that are
            missing or out of range, and options that the state does not support.

    Example:
        >>> import jax
        >>> from mtpjax import DecodeConfig, ModelConfig, MTPModel, collect, init_params, init_state, insert
        >>> model = MTPModel(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                              intermediate_size=32, max_position_embeddings=64, num_mtp_modules=1))
        >>> params = init_params(model, jax.random.key(0))
        >>> config = DecodeConfig(max_new_tokens=8, num_steps=2)
        >>> state = init_state(params, model=model, config=config, num_slots=4)
        >>> state = insert(params, state, [2, 0], [[1, 2, 3], [4]], model=model, config=config)
        >>> collect(state, [2]).lengths.tolist()  # prefill emits the first new token
        [1]
    """
    # 1. Check everything on the host before the state is donated, so a rejected request leaves the state usable.
    check_argument_types(params, prompts, sampling, key, model=model)
    _check_state(state)
    params, (num_slots, capacity) = params_to_device(params), state.tokens.shape
    model, params, drafter, spec, mesh = resolve_statics(params, model, config, num_slots)
    rows = prompts_to_arrays(prompts)
    limit = check_request(rows, model, config, drafter)
    # The state's capacity bounds every row. Keep room for a whole prefill chunk and for the widest draft behind the
    # text.
    max_slots = max(slots_per_round(model, drafter, spec), spec.prefill_chunk)
    limit = min(limit, capacity - max_slots - 1)
    for number, row in enumerate(rows):
        if row.size >= limit:
            raise ValueError(f"prompt {number} has {count_of(row.size, 'token')}; the state has room for {limit - 1}")
    slot_ids = _check_slots(state, slots, len(rows))
    num_cached_array = _check_num_cached(num_cached, rows, model)
    if (pages is None) != (state.pages is None):
        raise ValueError("pages belong to a state with a pool, and such a state needs them for every request")
    # 2. Pad the number of requests to a power of two, so few programs are compiled. Padding repeats the first request
    #    and goes to slot `num_slots`, which does not exist, so `scatter_rows` drops it.
    num_padded = 1 << (len(rows) - 1).bit_length()
    num_padding = num_padded - len(rows)
    requests = make_new_rows(
        rows,
        model=model,
        config=config,
        limit=limit,
        capacity=capacity,
        sampling=sampling or SamplingParams(),
        key=key,
        num_cached=num_cached_array,
        features=state.settings.sampling.features,
        stops=fit_stops(make_stop_table(config), state.settings.stops.shape[1:]),
    )
    if pages is not None and state.pages is not None:
        limits = requests.settings.limit.tolist()
        num_behind = slots_per_round(model, drafter, spec)
        needed = [state.pages.num_pages_of(length, num_behind) for length in limits]
        parts = 1 if mesh is None else mesh.shape.get("data", 1)
        requests = requests.replace(page_table=_make_page_table(pages, state.pages, needed, parts))
    requests = repeat_first_row(requests, num_padding)
    if num_padding:
        slot_ids = np.concatenate([slot_ids, np.full(num_padding, num_slots, np.int32)])
    # 3. Prefill in one compiled call.
    if draft_params is None:
        draft_params = drafter.default_params(params, config, model=model)
    with device_settings(params, mesh, config), explain_param_errors(params, model):
        return _insert(params, draft_params, state, requests, slot_ids, model=model, drafter=drafter, spec=spec)


@library_settings()
def run(
    params: dict,
    state: DecodeState,
    max_rounds: int,
    *,
    model: MTPModel,
    config: DecodeConfig,
    until: Literal["all", "any"] = "all",
    draft_params: Any = None,
) -> DecodeState:
    """Runs speculative rounds on all running rows.

    Args:
        params: model parameters.
        state: a state; donated, so use only the returned one.
        max_rounds: maximum number of rounds, at least 0.
        model: the model.
        config: the settings that the state was made with.
        until: "all" stops when every row has ended, "any" when a running row ends.
        draft_params: the drafter's own parameters; None takes the MTP modules' from `params`.

    Returns:
        The state after the last round.

    Raises:
        ValueError: for a negative `max_rounds` or an unknown `until`.

    Example:
        >>> import jax
        >>> from mtpjax import DecodeConfig, ModelConfig, MTPModel, collect, init_params, init_state, insert, run
        >>> model = MTPModel(ModelConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                              intermediate_size=32, max_position_embeddings=64, num_mtp_modules=1))
        >>> params = init_params(model, jax.random.key(0))
        >>> config = DecodeConfig(max_new_tokens=8, num_steps=2)
        >>> state = init_state(params, model=model, config=config, num_slots=4)
        >>> state = insert(params, state, [2], [[1, 2, 3]], model=model, config=config)
        >>> state = run(params, state, 100, model=model, config=config)
        >>> collect(state, [2]).finish_reasons
        ('length',)
    """
    check_argument_types(params, model=model)
    _check_state(state)
    params, max_rounds = params_to_device(params), check_integer("max_rounds", max_rounds)
    if max_rounds < 0:
        raise ValueError(f"max_rounds must not be negative, got {max_rounds}")
    if until not in ("all", "any"):
        raise ValueError(f"unknown until '{until}'; supported: all, any")
    model, params, drafter, spec, mesh = resolve_statics(params, model, config, len(state.length))
    if draft_params is None:
        draft_params = drafter.default_params(params, config, model=model)
    # The limit enters as an array, so another value compiles nothing.
    with device_settings(params, mesh, config), explain_param_errors(params, model):
        rounds = np.int32(min(max_rounds, np.iinfo(np.int32).max))
        return _run(params, draft_params, state, rounds, model=model, drafter=drafter, spec=spec, until=until)


@one_graph(static_argnames=("model", "drafter", "spec"), donate_argnames=("state",))
def _insert(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    rows: NewRows,
    slots: jax.Array,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
) -> DecodeState:
    def insert_part(
        params: dict, draft_params: Any, state: DecodeState, rows: NewRows, slots: jax.Array
    ) -> DecodeState:
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        # A device holds the slots of its rows; to others the requests go to a slot that does not exist.
        first, own = first_row(len(state.length)), len(state.length)
        slots = jnp.where((slots >= first) & (slots < first + own), slots - first, own)
        return insert_rows(params, prepared, state, rows, slots, model=model, drafter=drafter, spec=spec)

    return run_in_parts(insert_part, model.config, params, draft_params, state, rows, slots)


@one_graph(static_argnames=("model", "drafter", "spec", "until"), donate_argnames=("state",))
def _run(
    params: dict,
    draft_params: Any,
    state: DecodeState,
    max_rounds: jax.Array,
    *,
    model: MTPModel,
    drafter: Drafter,
    spec: DecodeSpec,
    until: Literal["all", "any"],
) -> DecodeState:
    def run_part(params: dict, draft_params: Any, state: DecodeState, max_rounds: jax.Array) -> DecodeState:
        prepared = drafter.prepare(params, draft_params, model=model, dtype=params["embedding"].dtype)
        return run_rounds(params, prepared, state, max_rounds, model=model, drafter=drafter, spec=spec, until=until)

    return run_in_parts(run_part, model.config, params, draft_params, state, max_rounds)


def resolve_statics(
    params: dict, model: MTPModel, config: DecodeConfig, num_slots: int, mesh: Mesh | None = None
) -> tuple[MTPModel, dict, Drafter, DecodeSpec, Mesh | None]:
    """Resolves the model and parameters to decode with, the drafter, the spec and the mesh of a state."""
    # Later requests may have any temperature, so only an explicit rule "greedy" makes the state greedy.
    drafter, mesh = make_drafter(config), mesh or mesh_of(params["embedding"])
    if mesh is not None:
        model, params = fit_to_mesh(model, params, mesh.shape, allow_copies=config.allow_copies)
    # A later prompt may be as long as the model allows.
    longest = config.max_length or model.config.max_position_embeddings
    spec = resolve_spec(
        config,
        model,
        mesh,
        batch=num_slots,
        is_greedy=config.acceptance == "greedy",
        longest_prompt=longest,
        max_length=longest,
    )
    return with_implementation(model, config), params, drafter, spec, mesh


def _check_state(state: Any) -> None:
    if not isinstance(state, DecodeState):
        raise ValueError(f"state must be a DecodeState, got {type(state).__name__}: use init_state")


def _to_integers(name: str, values: Any) -> np.ndarray:
    """Returns a sequence of integers as `[N]` int32; raises `ValueError` for anything else."""
    if isinstance(values, str) or not np.iterable(values):
        raise ValueError(f"{name} must be a sequence of integers, got {values!r}")
    return np.array([check_integer(name, value) for value in values], np.int32)


def _check_slots(state: DecodeState, slots: Sequence[int], num_rows: int) -> np.ndarray:
    """Returns the slots as an array; raises `ValueError` if they do not fit the requests or are taken."""
    slot_ids = _to_integers("slots", slots)
    num_slots = len(state.length)
    if len(slot_ids) != num_rows:
        raise ValueError(f"got {len(slot_ids)} slots for {num_rows} prompts")
    if len(set(slot_ids.tolist())) != len(slot_ids):
        raise ValueError(f"slots must be distinct, got {slot_ids.tolist()}")
    if (slot_ids < 0).any() or (slot_ids >= num_slots).any():
        raise ValueError(f"slots must be within 0..{num_slots - 1}, got {slot_ids.tolist()}")
    # A slot is free if its row is done. Reading this waits for the device.
    is_done = np.asarray(jax.device_get(gather_processes(state.done)))
    running_slots = [slot for slot in slot_ids.tolist() if not is_done[slot]]
    if running_slots:
        raise ValueError(f"slots {running_slots} still hold running rows; run these until they end first")
    return slot_ids


def _check_num_cached(num_cached: Sequence[int] | None, rows: list[np.ndarray], model: MTPModel) -> np.ndarray:
    """Returns `[R]` int32 cached tokens per request; raises `ValueError` if prefill cannot reuse them."""
    cached = np.zeros(len(rows), np.int32) if num_cached is None else _to_integers("num_cached", num_cached)
    if cached.shape != (len(rows),):
        raise ValueError(f"num_cached has shape {cached.shape}, but there are {len(rows)} prompts")
    if any(not 0 <= count <= row.size for count, row in zip(cached.tolist(), rows, strict=True)):
        raise ValueError(f"num_cached must be within 0..prompt length, got {cached.tolist()}")
    # Attention entries can be reused up to any position. A recurrent layer keeps only its newest state.
    if cached.any() and "linear_attention" in model.config.layer_types:
        raise ValueError("num_cached must be 0 for a model with linear attention: its state cannot be rolled back")
    return cached


def num_pages_for(params: dict, state: DecodeState, length: int, *, model: MTPModel, config: DecodeConfig) -> int:
    """Counts the pages that a request needs.

    Args:
        params: model parameters.
        state: a state with a pool.
        length: the most tokens that its text can have, prompt included.
        model: the model.
        config: the settings that the state was made with.

    Returns:
        Pages for the text and for what rounds write behind it.

    Raises:
        ValueError: for a state without a pool.
    """
    _check_state(state)
    if state.pages is None:
        raise ValueError("the state has no pages: make it with init_state(..., pool=...)")
    model, _, drafter, spec, _ = resolve_statics(params_to_device(params), model, config, len(state.length))
    return state.pages.num_pages_of(length, slots_per_round(model, drafter, spec))


def _make_page_table(
    pages: Sequence[Sequence[int]], state_pages: Pages, num_needed: list[int], parts: int
) -> np.ndarray:
    """Returns the requests' rows of the page table; raises `ValueError` if pages are missing or out of range."""
    if len(pages) != len(num_needed):
        raise ValueError(f"got pages for {len(pages)} requests, but there are {len(num_needed)} prompts")
    num_pages = state_pages.num_pages // parts
    table = np.full((len(pages), state_pages.table.shape[1]), NO_PAGE, np.int32)
    for number, (own, needed) in enumerate(zip(pages, num_needed, strict=True)):
        ids = _to_integers("pages", own)
        if ((ids < 0) | (ids >= num_pages)).any():
            raise ValueError(f"pages must be within 0..{num_pages - 1}, got {ids.tolist()} for prompt {number}")
        if len(ids) < needed:
            raise ValueError(f"prompt {number} and its new tokens need {needed} pages, got {len(ids)}")
        ids = ids[: table.shape[1]]
        table[number, : len(ids)] = ids
    return table


def fit_stops(stops: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Copies a stop table into one of the state's `shape`; raises `ValueError` if it is too large."""
    # Sequences fill the table's first rows and last columns, so the used part is a corner of it.
    is_used = stops != -1
    number, width = int(is_used.any(axis=1).sum()), int(is_used.any(axis=0).sum())
    if number > shape[0] or width > shape[1]:
        raise ValueError(
            f"{number} stop sequences of up to {width} tokens exceed the state's {shape[0]} of {shape[1]}; "
            "make the state with a larger stops_shape"
        )
    table = np.full(shape, -1, np.int32)
    used = stops[:number, stops.shape[1] - width :]
    table[:number, shape[1] - width :] = used
    return table
