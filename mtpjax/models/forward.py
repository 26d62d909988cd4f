"""The teacher-forced pass, which runs the trunk and the MTP depths over whole rows of true tokens."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mtpjax.compat import library_settings
from mtpjax.messages import require
from mtpjax.models.context import own_tokens
from mtpjax.models.masks import full_view
from mtpjax.models.model import MTPModel, bind
from mtpjax.models.params import detach_trunk
from mtpjax.models.view import Entries, Recycled


class DepthsOutput(flax.struct.PyTreeNode):
    """Output of a teacher-forced pass over `[B, T]` tokens.

    Position i of depth k (index k-1) predicts t[i+k+1]. Positions from T-k on have no input and hold garbage.
    """

    logits: jax.Array  # [B, T, V] float32
    hidden: jax.Array  # [B, T, D] after the final norm
    mtp_logits: tuple[jax.Array, ...]  # [B, T, V] float32 per depth
    mtp_hidden: tuple[jax.Array, ...]  # [B, T, D] per depth, after the module's norm


class ForwardOutput(DepthsOutput):
    """Output of `forward`. Adds the trunk's hidden states before the final norm to `DepthsOutput`."""

    hidden_prenorm: jax.Array  # [B, T, D]


@library_settings()
def forward(
    params: dict,
    tokens: jax.Array | np.ndarray,
    *,
    model: MTPModel,
    segment_ids: jax.Array | np.ndarray | None = None,
    lengths: jax.Array | np.ndarray | None = None,
    num_depths: int | None = None,
    attention_layout: str = "ttt",
    is_detached: bool = False,
) -> ForwardOutput:
    """Runs the trunk and the MTP depths teacher-forced over whole rows.

    Args:
        params: parameters of `model`.
        tokens: `[B, T]` int32 true tokens.
        model: the model.
        segment_ids: `[B, T]` int32 document ids in packed rows; 0 is padding. None: one document per row.
        lengths: `[B]` int32 lengths of right-padded rows, instead of `segment_ids`.
        num_depths: number of MTP depths; None: the number of modules. Depths beyond the modules run the last module
            again on its output (recycled depths).
        attention_layout: entries that a recycled depth attends to. With "ttt", these are the teacher-forced entries of
            the prefix and the entries of the drafts after it, as in decoding (training-time test, EAGLE-3, 2503.01840);
            with "stream", only the entries of that depth.
        is_detached: stop the gradients from the depths to the trunk and to the shared embedding and head.

    Returns:
        Logits and hidden states of the trunk and of each depth.

    Raises:
        ValueError: for shapes that do not match, an unknown layout, depths without modules, or token ids outside the
            vocabulary. Traced tokens, inside `jax.jit`, are not checked.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from mtpjax import MTPModel, forward, init_params, presets
        >>> model = MTPModel(presets["tiny"])
        >>> params = init_params(model, jax.random.key(0))
        >>> output = forward(params, jnp.arange(8)[None], model=model, num_depths=2)
        >>> output.logits.shape, len(output.mtp_logits)
        ((1, 8, 256), 2)
    """
    if isinstance(tokens, (list, tuple)):
        tokens = np.asarray(tokens)
    check_token_ids(tokens, model.config.vocab_size)
    return _forward(params, tokens, lengths, segment_ids, model, num_depths, attention_layout, is_detached)


def check_token_ids(tokens: jax.Array | np.ndarray, vocab_size: int) -> None:
    """Checks concrete token ids on the host, because an embedding lookup silently clamps invalid ids.

    Tracers and arrays that are distributed over several processes are not checked.

    Raises:
        ValueError: an id is outside 0..vocab_size - 1.
    """
    if isinstance(tokens, Tracer) or not getattr(tokens, "is_fully_addressable", True):
        return
    with jax.transfer_guard_device_to_host("allow"):
        ids = np.asarray(tokens)
    if ids.size and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"tokens contain id {wrong}, which is outside 0..{vocab_size - 1}")


@functools.partial(jax.jit, static_argnames=("model", "num_depths", "attention_layout", "is_detached"))
def _forward(params, tokens, lengths, segment_ids, model, num_depths, attention_layout, is_detached):
    _check_rows(tokens, segment_ids, lengths)
    if segment_ids is None:
        segment_ids = jnp.ones(tokens.shape, jnp.int32)
        if lengths is not None:
            segment_ids = (jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]).astype(jnp.int32)
    mtp_hidden, prenorm = _trunk_pass(params, tokens, segment_ids, model)
    settings = {"num_depths": num_depths, "attention_layout": attention_layout, "is_detached": is_detached}
    output = forward_depths(params, mtp_hidden, tokens, segment_ids, model=model, **settings)
    return ForwardOutput(**vars(output), hidden_prenorm=prenorm)


@functools.partial(jax.jit, static_argnames=("model", "layer_ids"))
def trunk_states(
    params: dict, tokens: jax.Array, segment_ids: jax.Array, *, model: MTPModel, layer_ids: tuple[int, ...] = ()
) -> jax.Array:
    """Runs only the trunk over whole rows, as in `forward`.

    Args:
        layer_ids: n layers whose input states are also returned; needs unrolled layers. For a trunk of L layers, id L
            means the last layer's output before the final norm, and L + 1 the output of that norm.

    Returns:
        `[B, T, (n + 1) * D]`: the input states of the layers `layer_ids`, concatenated, followed by the states that the
        MTP modules read. `forward_depths` continues from the latter, `forward_drafter` from all of them.
    """
    if not layer_ids:
        return _trunk_pass(params, tokens, segment_ids, model)[0]
    num_layers = model.config.num_hidden_layers
    inside = tuple(sorted({layer for layer in layer_ids if layer < num_layers}))
    view = full_view(model.config, segment_ids)
    output = bind(model, params)(own_tokens(tokens), view, method="run_trunk", layer_ids=inside)
    states = dict(zip(inside, output.states, strict=True))
    states |= {num_layers: output.prenorm, num_layers + 1: output.hidden}
    return jnp.concatenate([*(states[layer] for layer in layer_ids), model.mtp_input_hidden(output)], axis=-1)


def _trunk_pass(params, tokens, segment_ids, model) -> tuple[jax.Array, jax.Array]:
    """Returns the states that the modules read and the states before the final norm, each `[B, T, D]`."""
    output = bind(model, params)(own_tokens(tokens), full_view(model.config, segment_ids), method="run_trunk")
    return model.mtp_input_hidden(output), output.prenorm


def forward_depths(
    params: dict,
    mtp_hidden: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    *,
    model: MTPModel,
    num_depths: int | None = None,
    attention_layout: str = "ttt",
    is_detached: bool = False,
) -> DepthsOutput:
    """Runs the head and the MTP depths like `forward`, but over hidden states `[B, T, D]` from `trunk_states`.

    If the mesh splits rows by tokens, tokens and segment ids are whole rows, and all states are of the device's own
    tokens (`mtpjax.models.context`).

    Raises:
        ValueError: for an unknown layout, or depths without modules.
    """
    config = model.config
    modules = config.num_mtp_modules
    num_depths = modules if num_depths is None else num_depths
    is_possible = num_depths == 0 or (num_depths > 0 and modules > 0)
    require(is_possible, f"num_depths {num_depths} is not possible with {modules} MTP modules")
    is_known = attention_layout in ("ttt", "stream")
    require(is_known, f"attention_layout '{attention_layout}' is not one of ttt, stream")
    apply = bind(model, params)
    view = full_view(config, segment_ids)
    hidden = apply(mtp_hidden, method="head_input_hidden")
    logits, mtp_logits, mtp_outputs = apply(hidden, method="logits"), [], []
    if is_detached:
        mtp_hidden = jax.lax.stop_gradient(mtp_hidden)
        apply = bind(model, detach_trunk(params))
    chained_hidden = mtp_hidden
    base: Entries = {}
    levels: tuple[Entries, ...] = ()
    for depth in range(1, num_depths + 1):
        # Depth k reads the embedding of the token k positions ahead, within the same document.
        index = min(depth, modules) - 1
        shifted, is_valid = shift_left(tokens, depth), segment_ids == shift_left(segment_ids, depth)
        recycled = None
        if depth <= modules:
            # A module reads the trunk's states or the previous module's output.
            source = mtp_hidden if config.mtp_chaining == "trunk" else chained_hidden
        else:
            # A recycled depth reads the previous depth's output. Each level moves the draft one position further.
            source = chained_hidden
            if attention_layout == "ttt":
                view = full_view(config, segment_ids, shift=depth - modules)
                recycled = Recycled(base, levels)
        shifted, is_valid = own_tokens(shifted), own_tokens(is_valid)
        output, chained_hidden, entries = apply(
            source, shifted, view, recycled, index=index, is_valid=is_valid, method="run_module"
        )
        # Later levels attend to the last module's teacher-forced entries and to the entries of earlier recycled levels.
        if depth == modules:
            base = entries
        elif recycled is not None:
            levels = (*levels, entries)
        mtp_logits.append(apply(output, index=index, method="logits"))
        mtp_outputs.append(output)
    return DepthsOutput(logits, hidden, tuple(mtp_logits), tuple(mtp_outputs))


def shift_left(rows: jax.Array, count: int) -> jax.Array:
    """Shifts `rows [B, T, ...]` left by `count` positions and pads with zeros."""
    return jnp.pad(rows, ((0, 0), (0, count), *((0, 0),) * (rows.ndim - 2)))[:, count:]


def _check_rows(tokens, segment_ids, lengths):
    require(tokens.ndim == 2, f"tokens must be [B, T], not of shape {tokens.shape}")
    if segment_ids is not None:
        require(
            segment_ids.shape == tokens.shape, f"segment_ids {segment_ids.shape} do not match tokens {tokens.shape}"
        )
    if lengths is not None:
        fits = lengths.shape == tokens.shape[:1]
        require(fits, f"lengths {lengths.shape} do not match the batch of {tokens.shape[0]}")
