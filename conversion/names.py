"""Which tensors of a Hugging Face checkpoint hold which parameters, and how: one table, read both ways.

A parameter (a `Leaf`) is made of pieces. A `Piece` is a rectangle that one tensor and one leaf share: some rows of the
tensor, their axes factored, cut and put in another order. Nothing is added or rounded, so going back gives the bytes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from conversion.files import BLOCK
from mtpjax.models.config import LayerKind, ModelConfig

ALL = slice(None)
TILE = 1 << 20  # bytes of what XLA puts in another order at once


class Piece(NamedTuple):
    """`leaf[place] = tensor[begin:end].reshape(split)[cut].transpose(order)`."""

    name: str
    shape: tuple[int, ...]  # of the tensor
    rows: tuple[int, int]  # begin, end along its first axis
    split: tuple[int, ...]  # those rows with their axes factored; the last axis stays
    cut: tuple[int | slice, ...]
    order: tuple[int, ...]
    place: tuple[int | slice, ...]

    @property
    def rows_axis(self) -> int | None:
        """The leaf's axis along which the tensor's rows run, in units of the first factor; None for one unit."""
        if self.cut[0] != ALL or len(self.split) == 1:
            return None
        kept = [factor for factor, cut in enumerate(self.cut) if isinstance(cut, slice)]
        slices = [axis for axis, place in enumerate(self.place) if isinstance(place, slice)]
        return slices[self.order.index(kept.index(0))]

    @property
    def units(self) -> int:
        return 1 if self.rows_axis is None else self.split[0]

    def narrowed(self, begin: int, end: int) -> "Piece":
        """The piece that shares units `begin..end` only."""
        axis = self.rows_axis
        if axis is None:
            return self
        first, each = self.rows[0], (self.rows[1] - self.rows[0]) // self.split[0]
        along = self.place[axis]
        assert isinstance(along, slice)
        start = along.start or 0
        place = (*self.place[:axis], slice(start + begin, start + end), *self.place[axis + 1 :])
        rows = (first + begin * each, first + end * each)
        return self._replace(rows=rows, split=(end - begin, *self.split[1:]), place=place)

    def blocks(self, itemsize: int) -> Iterator["Piece"]:
        """The piece in parts of at most `BLOCK` bytes each, or of one unit."""
        step = even(self.units, BLOCK // max(math.prod(self.split) // self.units * itemsize, 1))
        for begin in range(0, self.units, step):
            yield self.narrowed(begin, min(begin + step, self.units))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """What goes into the leaf, from the tensor's `rows`, or from their scales (which have a shorter last axis)."""
        return rows.reshape(*self.split[:-1], -1)[self.cut].transpose(self.order)

    def write(self, rows: np.ndarray, part: np.ndarray) -> None:
        """The inverse of `read`, into `rows` of the tensor."""
        copy_into(rows.reshape(*self.split[:-1], -1)[self.cut], part.transpose(np.argsort(self.order)))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter. `in_axis` (from the end) is the tensors' last axis: block scales follow it."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    in_axis: int = -1

    def chunks(self, itemsize: int) -> tuple[int, ...]:
        """A shape of parts of at most `BLOCK` bytes, if parts of the tensors are all that they need.

        Cut by experts first, and along the tensors' rows.
        """
        shape = list(self.shape)
        for axis in (0 if not isinstance(self.pieces[0].place[0], slice) else None, self.pieces[0].rows_axis):
            if axis is not None:
                unit = math.prod(shape) // shape[axis] * itemsize
                shape[axis] = even(shape[axis], BLOCK // unit)
        return tuple(shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a family names things."""

    trunk: str = "model."  # prefix of embedding, layers and final norm
    mtp: str = "layers"  # modules are further "layers", or stand under "mtp" (Qwen) or "mimo"
    packed_delta: bool = False  # Qwen3-Next packs the projections of linear attention per key head


def piece(name, shape, place, *, rows=None, split=None, cut=(), order=None) -> Piece:
    begin, end = rows or (0, shape[0])
    split = split or (end - begin, *shape[1:])
    assert math.prod(split) == (end - begin) * math.prod(shape[1:]), (name, shape, split)
    cut = tuple(cut) + (ALL,) * (len(split) - len(cut))
    left = sum(isinstance(index, slice) for index in cut)
    return Piece(name, tuple(shape), (begin, end), tuple(split), cut, tuple(order or range(left)), tuple(place))


def whole(name: str, *shape: int) -> Leaf:
    """A tensor as it is."""
    return Leaf(shape, (piece(name, shape, (ALL,) * len(shape)),))


def matrix(name: str, inputs: int, outputs: int) -> Leaf:
    """A linear layer: `[out, in]` there, `[in, out]` here."""
    return Leaf((inputs, outputs), (piece(name, (outputs, inputs), (ALL, ALL), order=(1, 0)),), in_axis=-2)


def gate_up(prefix: str, D: int, F: int) -> Leaf:
    parts = [
        piece(f"{prefix}{name}_proj.weight", (F, D), (ALL, place, ALL), order=(1, 0))
        for place, name in enumerate(("gate", "up"))
    ]
    return Leaf((D, 2, F), tuple(parts), in_axis=-3)


def table(config: ModelConfig, layout: Layout, has: Callable[[str], bool]) -> dict[str, Leaf]:
    """Every parameter of the model, by path (`trunk/layer_0/attention/qkv`), for a checkpoint that `has` some names."""
    D, V = config.hidden_size, config.vocab_size
    leaves = {"embedding": whole(f"{layout.trunk}embed_tokens.weight", V, D)}
    leaves["norm_final/scale"] = whole(f"{layout.trunk}norm.weight", D)
    if not config.tie_word_embeddings:
        leaves["head"] = matrix("lm_head.weight", D, V)
    for layer, kind in enumerate(config.trunk_kinds):
        leaves |= _under(f"trunk/layer_{layer}/", _block(config, kind, f"{layout.trunk}layers.{layer}.", layout, has))
    for number in range(config.num_mtp_modules):
        prefix, around = mtp_names(config, layout, number)
        module = {
            "project": matrix(around["project"], 2 * D, D),
            **{f"{norm}/scale": whole(around[norm], D) for norm in ("norm_embedding", "norm_hidden", "norm_output")},
            **_under("block/", _block(config, config.mtp_kind, prefix, layout, has)),
        }
        leaves |= _under(f"mtp_{number}/", module)
        if config.mtp_own_embedding:
            leaves[f"mtp_embedding_{number}"] = whole(around["embedding"], V, D)
        if config.mtp_own_head:
            leaves[f"mtp_head_{number}"] = matrix(around["head"], D, V)
    return leaves


def mtp_names(config: ModelConfig, layout: Layout, number: int) -> tuple[str, dict[str, str]]:
    """Of MTP module `number`: the prefix of its decoder layer, and the tensors around that layer."""
    if layout.mtp == "mtp":  # fc and the norms are shared, should there be several
        around = {
            "project": "mtp.fc.weight",
            "norm_embedding": "mtp.pre_fc_norm_embedding.weight",
            "norm_hidden": "mtp.pre_fc_norm_hidden.weight",
            "norm_output": "mtp.norm.weight",
            "embedding": "mtp.embed_tokens.weight",
            "head": "mtp.lm_head.weight",
        }
        return f"mtp.layers.{number}.", around
    if layout.mtp == "mimo":
        prefix = f"{layout.trunk}mtp_layers.{number}."
        around = {
            "project": f"{prefix}input_proj.weight",
            "norm_embedding": f"{prefix}token_layernorm.weight",
            "norm_hidden": f"{prefix}hidden_layernorm.weight",
            "norm_output": f"{prefix}final_layernorm.weight",
        }
        return prefix, around
    prefix = f"{layout.trunk}layers.{config.num_hidden_layers + number}."
    around = {
        "project": f"{prefix}eh_proj.weight",
        "norm_embedding": f"{prefix}enorm.weight",
        "norm_hidden": f"{prefix}hnorm.weight",
        "norm_output": f"{prefix}shared_head.norm.weight",
        "embedding": f"{prefix}embed_tokens.weight",
        "head": f"{prefix}shared_head.head.weight",
    }
    return prefix, around


def tied_copies(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Tensors that may repeat another: (copy, original), for modules that share the trunk's embedding and head."""
    embedding = f"{layout.trunk}embed_tokens.weight"
    head = embedding if config.tie_word_embeddings else "lm_head.weight"
    if config.tie_word_embeddings:
        yield "lm_head.weight", embedding
    for number in range(config.num_mtp_modules):
        _, around = mtp_names(config, layout, number)
        if "embedding" in around and not config.mtp_own_embedding:
            yield around["embedding"], embedding
        if "head" in around and not config.mtp_own_head:
            yield around["head"], head


def _under(prefix: str, leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    return {f"{prefix}{path}": leaf for path, leaf in leaves.items()}


def _block(config: ModelConfig, kind: LayerKind, prefix: str, layout: Layout, has) -> dict[str, Leaf]:
    D = config.hidden_size
    leaves = {
        "norm_attention/scale": whole(f"{prefix}input_layernorm.weight", D),
        "norm_feed_forward/scale": whole(f"{prefix}post_attention_layernorm.weight", D),
    }
    if kind.attention == "delta":
        leaves |= _under("delta/", _delta(config, f"{prefix}linear_attn.", layout))
    elif kind.attention == "latent":
        leaves |= _under("attention/", _latent(config, kind, f"{prefix}self_attn."))
    else:
        leaves |= _under("attention/", _grouped(config, f"{prefix}self_attn."))
    if kind.is_moe:
        return leaves | _under("experts/", _experts(config, f"{prefix}mlp.", has))
    F = config.intermediate_size
    leaves["dense/gate_up"] = gate_up(f"{prefix}mlp.", D, F)
    leaves["dense/down"] = matrix(f"{prefix}mlp.down_proj.weight", F, D)
    return leaves


def _grouped(config: ModelConfig, prefix: str) -> dict[str, Leaf]:
    D, K, H = config.hidden_size, config.num_key_value_heads, config.head_dim
    G = config.num_attention_heads // K
    gates = 2 if config.attn_output_gate else 1  # q_proj holds [query | gate] per head

    def pieces(kind: str, *inputs: int) -> list[Piece]:
        """Of `qkv [D, K, G + 2 (+ G), H]`, or without its first axis of the biases."""
        front = len(inputs)  # 1 for weights
        order = (3, 0, 1, 2) if front else (0, 1, 2)

        def of(name, heads, place, cut=(), split=None) -> Piece:
            rows = K * heads * H * (gates if name == "q" else 1)
            split = split or (K, heads, H)
            where = (ALL,) * front + (ALL, place, ALL)
            full = f"{prefix}{name}_proj.{kind}"
            return piece(full, (rows, *inputs), where, split=(*split, *inputs), cut=cut, order=order)

        if gates == 1:
            queries = [of("q", G, slice(0, G))]
        else:
            split = (K, G, 2, H)
            queries = [
                of("q", G, slice(0, G), (ALL, ALL, 0), split),
                of("q", G, slice(G + 2, None), (ALL, ALL, 1), split),
            ]
        return [*queries, of("k", 1, slice(G, G + 1)), of("v", 1, slice(G + 1, G + 2))]

    heads = G + 2 + (G if gates == 2 else 0)
    leaves = {"qkv": Leaf((D, K, heads, H), tuple(pieces("weight", D)), in_axis=-4)}
    if config.attention_bias:
        leaves["qkv_bias"] = Leaf((K, G + 2, H), tuple(pieces("bias")))
    if config.use_qk_norm:
        leaves["norm_q/scale"] = whole(f"{prefix}q_norm.weight", H)
        leaves["norm_k/scale"] = whole(f"{prefix}k_norm.weight", H)
    leaves["output"] = matrix(f"{prefix}o_proj.weight", K * G * H, D)
    return leaves


def _latent(config: ModelConfig, kind: LayerKind, prefix: str) -> dict[str, Leaf]:
    D, N, R = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    C, P, V, L = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.q_lora_rank
    up = {"name": f"{prefix}kv_b_proj.weight", "shape": (N * (C + V), R), "split": (N, C + V, R), "place": (ALL,) * 3}
    leaves = {
        "latent_down": matrix(f"{prefix}kv_a_proj_with_mqa.weight", D, R + P),
        "norm_latent/scale": whole(f"{prefix}kv_a_layernorm.weight", R),
        "key_up": Leaf((N, C, R), (piece(**up, cut=(ALL, slice(0, C))),)),
        "value_up": Leaf((N, R, V), (piece(**up, cut=(ALL, slice(C, None)), order=(0, 2, 1)),), in_axis=-2),
        "output": matrix(f"{prefix}o_proj.weight", N * V, D),
    }
    if L:
        leaves["query_down"] = matrix(f"{prefix}q_a_proj.weight", D, L)
        leaves["norm_query/scale"] = whole(f"{prefix}q_a_layernorm.weight", L)
        leaves["query_up"] = matrix(f"{prefix}q_b_proj.weight", L, N * (C + P))
    else:
        leaves["query"] = matrix(f"{prefix}q_proj.weight", D, N * (C + P))
    if kind.indexer == "full":
        J, width = config.index_n_heads, config.index_head_dim
        leaves["indexer/query_up"] = matrix(f"{prefix}indexer.wq_b.weight", L, J * width)
        leaves["indexer/key"] = matrix(f"{prefix}indexer.wk.weight", D, width)
        leaves["indexer/norm_scale"] = whole(f"{prefix}indexer.k_norm.weight", width)
        leaves["indexer/norm_bias"] = whole(f"{prefix}indexer.k_norm.bias", width)
        leaves["indexer/head_weights"] = matrix(f"{prefix}indexer.weights_proj.weight", D, J)
    return leaves


def _delta(config: ModelConfig, prefix: str, layout: Layout) -> dict[str, Leaf]:
    D, K, J = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
    P, Q, C = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    G = J // K
    widths = (P, P, G * Q, G * Q)  # of a key head: query, key, values, gates
    ends = np.cumsum((0, *widths)).tolist()

    def rows(name: str, shape: tuple[int, ...], parts: range, **how) -> list[Piece]:
        """The tensor holds these parts one after the other, each for all key heads."""
        made, begin = [], 0
        for part in parts:
            end = begin + K * widths[part]
            place = slice(ends[part], ends[part + 1])
            split = (K, widths[part], *shape[1:])
            made.append(
                piece(name, shape, how["at"](place), rows=(begin, end), split=split, cut=how["cut"], order=how["order"])
            )
            begin = end
        return made

    weights = {"at": lambda place: (ALL, ALL, place), "cut": (), "order": (2, 0, 1)}
    if layout.packed_delta:
        order = {"place": (ALL,) * 3, "order": (2, 0, 1)}
        qkvz = [piece(f"{prefix}in_proj_qkvz.weight", (K * ends[4], D), split=(K, ends[4], D), **order)]
        ba = [piece(f"{prefix}in_proj_ba.weight", (2 * J, D), split=(K, 2 * G, D), **order)]
    else:
        qkvz = rows(f"{prefix}in_proj_qkv.weight", (K * ends[3], D), range(3), **weights)
        z = (ALL, ALL, slice(ends[3], None))
        qkvz.append(piece(f"{prefix}in_proj_z.weight", (J * Q, D), z, split=(K, G * Q, D), order=(2, 0, 1)))
        ba = [
            piece(f"{prefix}in_proj_{name}.weight", (J, D), (ALL, ALL, place), split=(K, G, D), order=(2, 0, 1))
            for name, place in (("b", slice(0, G)), ("a", slice(G, None)))
        ]
    taps = {"at": lambda place: (ALL, place, ALL), "cut": (ALL, ALL, 0), "order": (0, 1, 2)}
    return {
        "qkvz": Leaf((D, K, ends[4]), tuple(qkvz), in_axis=-3),
        "ba": Leaf((D, K, 2 * G), tuple(ba), in_axis=-3),
        "conv": Leaf((K, ends[3], C), tuple(rows(f"{prefix}conv1d.weight", (K * ends[3], 1, C), range(3), **taps))),
        "log_rate": whole(f"{prefix}A_log", J),
        "rate_bias": whole(f"{prefix}dt_bias", J),
        "norm": whole(f"{prefix}norm.weight", Q),
        "output": matrix(f"{prefix}out_proj.weight", J * Q, D),
    }


def _experts(config: ModelConfig, prefix: str, has) -> dict[str, Leaf]:
    D, E, F = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    leaves = {"router": matrix(f"{prefix}gate.weight", D, E)}
    if config.router_correction_bias:
        leaves["correction_bias"] = whole(f"{prefix}gate.e_score_correction_bias", E)
    if has(f"{prefix}experts.gate_up_proj"):  # stacked: [E, 2F, D], gate rows first, and [E, D, F]
        name, shape = f"{prefix}experts.gate_up_proj", (E, 2 * F, D)
        up = [
            piece(name, shape, (e, ALL, ALL, ALL), rows=(e, e + 1), split=(1, 2, F, D), cut=(0,), order=(2, 0, 1))
            for e in range(E)
        ]
        name, shape = f"{prefix}experts.down_proj", (E, D, F)
        down = [piece(name, shape, (e, ALL, ALL), rows=(e, e + 1), cut=(0,), order=(1, 0)) for e in range(E)]
    else:
        up = [
            piece(f"{prefix}experts.{e}.{name}_proj.weight", (F, D), (e, ALL, place, ALL), order=(1, 0))
            for e in range(E)
            for place, name in enumerate(("gate", "up"))
        ]
        down = [piece(f"{prefix}experts.{e}.down_proj.weight", (D, F), (e, ALL, ALL), order=(1, 0)) for e in range(E)]
    leaves["gate_up"] = Leaf((E, D, 2, F), tuple(up), in_axis=-3)
    leaves["down"] = Leaf((E, F, D), tuple(down), in_axis=-2)
    if config.shared_width:
        plural = "" if config.shared_expert_gate else "s"
        leaves["shared/gate_up"] = gate_up(f"{prefix}shared_expert{plural}.", D, config.shared_width)
        leaves["shared/down"] = matrix(f"{prefix}shared_expert{plural}.down_proj.weight", config.shared_width, D)
    if config.shared_expert_gate:
        leaves["shared_gate"] = matrix(f"{prefix}shared_expert_gate.weight", D, 1)
    return leaves


def even(size: int, most: int) -> int:
    """The step that cuts `size` into as few parts as steps of `most` do, but even ones."""
    count = -(-size // max(1, most))
    return -(-size // max(count, 1))


def copy_into(out: np.ndarray, view: np.ndarray) -> None:
    """`out[...] = view`, by XLA where axes change places, tile by tile: several times as fast as NumPy.

    Tiles are small because fresh memory is slow to come by, and freed pieces of their size are not given back.
    """
    if view.flags.c_contiguous or view.nbytes < TILE // 4 or _cpu() is None:
        out[...] = view
        return
    axis = int(np.argmax(view.strides))
    step = max(1, TILE * view.shape[axis] // view.nbytes)
    for begin in range(0, view.shape[axis], step):
        cut = (ALL,) * axis + (slice(begin, begin + step),)
        out[cut] = np.asarray(jax.device_put(view[cut], _cpu()))


@functools.cache
def _cpu():
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None
