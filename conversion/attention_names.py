"""Maps the tensor names of attention layers, with one function per kind of attention.

Axes in comments and names: D model width, N query heads, K key/value heads, G query heads per key/value head, H head
width.
"""

from collections.abc import Callable

import numpy as np

from conversion.families import Layout
from conversion.tensor_slice import ALL, ParamSpec, TensorSlice, copied, linear, tensor_slice
from mtpjax.models.config import LayerKind, ModelConfig

Specs = dict[str, ParamSpec]  # by parameter name within the layer's attention


def grouped_names(
    config: ModelConfig, kind: LayerKind, prefix: str, layout: Layout, *, input_size: int | None = None
) -> Specs:
    """Maps grouped-query attention, whose q, k and v projections become one array `qkv [D, K, G + 2, H]`.

    The third axis contains the G queries of a key/value head, then its key and its value. With an output gate, G gates
    follow, and `q_proj` stores each head's query and gate next to each other. `input_size` is the input width if it
    differs from the model's.
    """
    prefix, config = f"{prefix}self_attn.", config.of_layer(kind)
    D, K, H, V = input_size or config.hidden_size, config.num_key_value_heads, config.head_dim, config.value_dim
    G = config.num_attention_heads // K
    gates = 2 if config.attn_output_gate else 1

    def slices(kind: str, *inputs: int) -> list[TensorSlice]:
        """Lists the slices of the weights, or of the biases, which have no input axis."""
        front = len(inputs)
        # A weight `[heads * H, D]` is factored into `[K, heads, H, D]`, and its input axis is moved to the front.
        axes = (3, 0, 1, 2) if front else (0, 1, 2)

        def of(name, heads, place, select=(), split=None) -> TensorSlice:
            rows = K * heads * H * (gates if name == "q" else 1)
            split = split or (K, heads, H)
            where = (ALL,) * front + (ALL, place, ALL)
            full = f"{prefix}{name}_proj.{kind}"
            return tensor_slice(full, (rows, *inputs), where, split=(*split, *inputs), select=select, axes=axes)

        if gates == 1:
            # All rows of `q_proj` are queries.
            queries = [of("q", G, slice(0, G))]
        else:
            # The rows of each head contain its query, then its gate.
            split = (K, G, 2, H)
            queries = [
                of("q", G, slice(0, G), (ALL, ALL, 0), split),
                of("q", G, slice(G + 2, None), (ALL, ALL, 1), split),
            ]
        values = [of("v", 1, slice(G + 1, G + 2))] if V == H else []
        return [*queries, of("k", 1, slice(G, G + 1)), *values]

    # The third axis contains the queries, the key, the value (unless its width differs), and the gates, if any.
    heads = G + 1 + (V == H) + (G if gates == 2 else 0)
    specs = {"qkv": ParamSpec((D, K, heads, H), tuple(slices("weight", D)), in_axis=-4)}
    if V != H:
        specs["value"] = _by_heads(f"{prefix}v_proj.weight", K, V, D)
    if config.attention_bias:
        specs["qkv_bias"] = ParamSpec((K, heads, H), tuple(slices("bias")))
    if config.use_qk_norm:
        specs["norm_q/scale"] = copied(f"{prefix}q_norm.weight", H)
        specs["norm_k/scale"] = copied(f"{prefix}k_norm.weight", H)
    if config.has_sinks(kind):
        sinks = tensor_slice(f"{prefix}{layout.sinks}", (K * G,), (ALL, ALL), split=(K, G))
        specs["sinks"] = ParamSpec((K, G), (sinks,))
    if config.attn_head_gate:
        specs["head_gate"] = _by_heads(f"{prefix}g_proj.weight", K, G, D)
    specs["output"] = linear(f"{prefix}o_proj.weight", K * G * V, config.hidden_size)
    if config.attention_output_bias:
        specs["output_bias"] = copied(f"{prefix}o_proj.bias", config.hidden_size)
    return specs


def _by_heads(name: str, heads: int, width: int, inputs: int) -> ParamSpec:
    """Describes a matrix `[heads * width, inputs]` that becomes `[inputs, heads, width]`."""
    whole = tensor_slice(name, (heads * width, inputs), (ALL,) * 3, split=(heads, width, inputs), axes=(2, 0, 1))
    return ParamSpec((inputs, heads, width), (whole,), in_axis=-3)


def latent_names(config: ModelConfig, kind: LayerKind, prefix: str, layout: Layout) -> Specs:
    """Maps multi-head latent attention (DeepSeek-V2), and the indexer (DeepSeek-V3.2) if the layer has one.

    `kv_b_proj` contains the up-projections of keys and values, head by head. They become `key_up [N, C, R]` and
    `value_up [N, R, V]`, so that decoding can absorb them into queries and outputs.
    """
    prefix = f"{prefix}self_attn."
    D, N, R = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    C, P, V, L = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.q_lora_rank
    # Both slices read `kv_b_proj [N * (C + V), R]`. The first C rows of each head are keys, and the others are values.
    up = {"name": f"{prefix}kv_b_proj.weight", "shape": (N * (C + V), R), "split": (N, C + V, R), "target": (ALL,) * 3}
    specs = {
        "latent_down": linear(f"{prefix}kv_a_proj_with_mqa.weight", D, R + P),
        "norm_latent/scale": copied(f"{prefix}kv_a_layernorm.weight", R),
        "key_up": ParamSpec((N, C, R), (tensor_slice(**up, select=(ALL, slice(0, C))),)),
        "value_up": ParamSpec(
            (N, R, V), (tensor_slice(**up, select=(ALL, slice(C, None)), axes=(0, 2, 1)),), in_axis=-2
        ),
        "output": linear(f"{prefix}o_proj.weight", N * V, D),
    }
    # Queries either have a separate latent vector or are projected directly.
    if L:
        specs["query_down"] = linear(f"{prefix}q_a_proj.weight", D, L)
        specs["norm_query/scale"] = copied(f"{prefix}q_a_layernorm.weight", L)
        specs["query_up"] = linear(f"{prefix}q_b_proj.weight", L, N * (C + P))
    else:
        specs["query"] = linear(f"{prefix}q_proj.weight", D, N * (C + P))
    if config.attention_bias:
        specs["latent_down_bias"] = copied(f"{prefix}kv_a_proj_with_mqa.bias", R + P)
        specs |= {"query_down_bias": copied(f"{prefix}q_a_proj.bias", L)} if L else {}
    if config.attention_output_bias:
        specs["output_bias"] = copied(f"{prefix}o_proj.bias", D)
    # Layers whose indexer is "shared" reuse the selection of an earlier layer, and have no tensors for it.
    if kind.indexer == "full":
        J, width = config.index_n_heads, config.index_head_dim
        specs["indexer/query_up"] = linear(f"{prefix}indexer.wq_b.weight", L, J * width)
        specs["indexer/key"] = linear(f"{prefix}indexer.wk.weight", D, width)
        specs["indexer/norm_scale"] = copied(f"{prefix}indexer.k_norm.weight", width)
        specs["indexer/norm_bias"] = copied(f"{prefix}indexer.k_norm.bias", width)
        specs["indexer/head_weights"] = linear(f"{prefix}indexer.weights_proj.weight", D, J)
    return specs


def delta_names(config: ModelConfig, kind: LayerKind, prefix: str, layout: Layout) -> Specs:
    """Maps the projections and the convolution of gated delta rule attention (Qwen3-Next, Qwen3.5), by key head.

    For each key head, `qkvz [D, K, ...]` contains the query, the key, the values and the output gates, and
    `ba [D, K, 2 G]` contains the write strengths and decay inputs of the G value heads.
    """
    prefix = f"{prefix}linear_attn."
    D, K, J = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
    P, Q, C = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    G = J // K
    widths = (P, P, G * Q, G * Q)  # per key head: query, key, values, gates
    ends = np.cumsum((0, *widths)).tolist()

    def rows(name: str, shape: tuple[int, ...], at: Callable[[slice], tuple], **how) -> list[TensorSlice]:
        """Slices a tensor that contains the queries of all key heads, then all keys, and then all values."""
        made, begin = [], 0
        for width, first, last in zip(widths, ends[:3], ends[1:], strict=False):
            cut, split = (begin, begin + K * width), (K, width, *shape[1:])
            made.append(tensor_slice(name, shape, at(slice(first, last)), rows=cut, split=split, **how))
            begin = cut[1]
        return made

    # Qwen3-Next packs the projections per key head, as mtpjax does. Qwen3.5 stores them as separate tensors.
    if layout.packed_delta:
        arrange = {"target": (ALL,) * 3, "axes": (2, 0, 1)}
        qkvz = [tensor_slice(f"{prefix}in_proj_qkvz.weight", (K * ends[4], D), split=(K, ends[4], D), **arrange)]
        ba = [tensor_slice(f"{prefix}in_proj_ba.weight", (2 * J, D), split=(K, 2 * G, D), **arrange)]
    else:
        qkvz = rows(f"{prefix}in_proj_qkv.weight", (K * ends[3], D), lambda place: (ALL, ALL, place), axes=(2, 0, 1))
        z = (ALL, ALL, slice(ends[3], None))
        qkvz.append(tensor_slice(f"{prefix}in_proj_z.weight", (J * Q, D), z, split=(K, G * Q, D), axes=(2, 0, 1)))
        ba = [
            tensor_slice(f"{prefix}in_proj_{name}.weight", (J, D), (ALL, ALL, place), split=(K, G, D), axes=(2, 0, 1))
            for name, place in (("b", slice(0, G)), ("a", slice(G, None)))
        ]
    # The convolution processes queries, keys and values, with one filter of C taps per channel.
    taps = rows(f"{prefix}conv1d.weight", (K * ends[3], 1, C), lambda place: (ALL, place, ALL), select=(ALL, ALL, 0))
    return {
        "qkvz": ParamSpec((D, K, ends[4]), tuple(qkvz), in_axis=-3),
        "ba": ParamSpec((D, K, 2 * G), tuple(ba), in_axis=-3),
        "conv": ParamSpec((K, ends[3], C), tuple(taps)),
        "log_rate": copied(f"{prefix}A_log", J),
        "rate_bias": copied(f"{prefix}dt_bias", J),
        "norm": copied(f"{prefix}norm.weight", Q),
        "output": linear(f"{prefix}out_proj.weight", J * Q, D),
    }


# The keys are `LayerKind.attention`, as in `mtpjax.models.attention_kinds`. The arguments are the config, the kind, the
# prefix of the layer's tensor names (such as "model.layers.0.") and the family's layout.
ATTENTION_NAMES: dict[str, Callable[[ModelConfig, LayerKind, str, Layout], Specs]] = {
    "grouped": grouped_names,
    "latent": latent_names,
    "delta": delta_names,
}
