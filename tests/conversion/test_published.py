"""The published configurations: parameter counts, and every tensor's name and shape."""

import math

import jax
import pytest

from conversion.describe_config import describe_config
from conversion.families import FAMILIES
from conversion.hf_config import parse_config
from conversion.names import param_specs, tied_copies
from mtpjax import presets
from mtpjax.io.inspect import count_parameters
from mtpjax.models.params import param_shapes

FAMILY = {
    "deepseek-v3": "deepseek_v3",
    "deepseek-v3.2": "deepseek_v32",
    "glm-4.5": "glm4_moe",
    "glm-4.5-air": "glm4_moe",
    "glm-5": "glm_moe_dsa",
    "qwen3-next": "qwen3_next",
    "qwen3.5-9b": "qwen3_5",
    "qwen3.5-27b": "qwen3_5",
    "qwen3.5-35b-a3b": "qwen3_5_moe",
}


def tensors(name: str, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a release; DeepSeek's and GLM's copies of embedding and head included."""
    config, layout = presets[name], FAMILIES[FAMILY[name]].layout
    specs = param_specs(config, layout, lambda tensor: stacked)
    shapes = {piece.name: piece.shape for spec in specs.values() for piece in spec.slices}
    copies = tied_copies(config, layout) if layout.mtp == "layers" else ()
    return shapes | {copy: shapes[original] for copy, original in copies}


@pytest.mark.parametrize("name", FAMILY)
def test_the_model_has_the_parameters_of_the_table(name):
    """Shapes only: nothing is allocated."""
    config = presets[name]
    shapes = param_shapes(config, scan_layers=True)
    counts = count_parameters(config)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == counts["trunk"] + counts["mtp"]
    modules = {name: value for name, value in shapes.items() if name.startswith("mtp_")}
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(modules)) == counts["mtp"]


# What the releases say, in billions. "tables": how many of the two vocabulary tables their figure for active parameters
# counts; GLM-4.5's total counts the MTP layer and neither table, as its report says.
@pytest.mark.parametrize(
    ("name", "total", "active", "tables"),
    [
        ("deepseek-v3", 671, 37, 1),
        ("deepseek-v3.2", 672, 37, 1),
        ("glm-4.5", 355, 32, 0),
        ("glm-4.5-air", 106, 12, 0),
        ("glm-5", 744, 40, 0),
        ("qwen3-next", 80, 3, 0),
        ("qwen3.5-9b", 9, 9, 2),
        ("qwen3.5-27b", 27, 27, 2),
        ("qwen3.5-35b-a3b", 35, 3, 1),
    ],
)
def test_parameters_are_as_many_as_published(name, total, active, tables):
    config = presets[name]
    counts = count_parameters(config)
    each = config.vocab_size * config.hidden_size
    found = {"glm-4.5": counts["trunk"] + counts["mtp"] - 2 * each, "glm-4.5-air": counts["trunk"] - 2 * each}
    assert round(found.get(name, counts["trunk"]) / 1e9) == total
    assert round((counts["active"] + (tables - 1) * each) / 1e9) == active


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # of the files as released, in elements: copies included; DeepSeek-V3's 128 x 128 scales apart
        ("deepseek-v3", 684_489_845_504),
        ("glm-4.5", 358_337_791_296),
        ("glm-4.5-air", 110_468_824_832),
        ("qwen3-next", 81_324_862_720),
    ],
)
def test_releases_have_as_many_elements(name, elements):
    assert sum(math.prod(shape) for shape in tensors(name, stacked=False).values()) == elements


def test_deepseek_v3_has_91991_tensors():
    """With a tensor of scales for every matrix but embedding, head, router and `eh_proj`."""
    shapes = tensors("deepseek-v3", stacked=False)
    plain = ("embed_tokens.weight", "lm_head.weight", "head.weight", "mlp.gate.weight", "eh_proj.weight")
    scaled = [tensor for tensor, shape in shapes.items() if len(shape) == 2 and not tensor.endswith(plain)]
    assert len(shapes) + len(scaled) == 91_991


D3, G5, G4, GA, Q27, Q35, QN = 7168, 6144, 5120, 4096, 5120, 2048, 2048
LATENT = {  # of DeepSeek-V3, every layer
    "input_layernorm.weight": (D3,),
    "post_attention_layernorm.weight": (D3,),
    "self_attn.q_a_proj.weight": (1536, D3),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (24576, 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (576, D3),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (32768, 512),
    "self_attn.o_proj.weight": (D3, 16384),
}
DENSE = {
    "mlp.gate_proj.weight": (18432, D3),
    "mlp.up_proj.weight": (18432, D3),
    "mlp.down_proj.weight": (D3, 18432),
}
EXPERTS = {
    "mlp.gate.weight": (256, D3),
    "mlp.gate.e_score_correction_bias": (256,),
    **{f"mlp.experts.{e}.{part}_proj.weight": (2048, D3) for e in range(256) for part in ("gate", "up")},
    **{f"mlp.experts.{e}.down_proj.weight": (D3, 2048) for e in range(256)},
    "mlp.shared_experts.gate_proj.weight": (2048, D3),
    "mlp.shared_experts.up_proj.weight": (2048, D3),
    "mlp.shared_experts.down_proj.weight": (D3, 2048),
}
AROUND = {
    "eh_proj.weight": (D3, 2 * D3),
    "enorm.weight": (D3,),
    "hnorm.weight": (D3,),
    "shared_head.norm.weight": (D3,),
    "shared_head.head.weight": (129280, D3),
    "embed_tokens.weight": (129280, D3),
}
INDEXER = {
    "self_attn.indexer.wq_b.weight": (64 * 128, 1536),
    "self_attn.indexer.wk.weight": (128, D3),
    "self_attn.indexer.k_norm.weight": (128,),
    "self_attn.indexer.k_norm.bias": (128,),
    "self_attn.indexer.weights_proj.weight": (64, D3),
}


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_every_tensor_of_deepseek(name):
    expected = {"model.embed_tokens.weight": (129280, D3), "lm_head.weight": (129280, D3), "model.norm.weight": (D3,)}
    for layer in range(62):
        parts = LATENT | (DENSE if layer < 3 else EXPERTS) | (AROUND if layer == 61 else {})
        parts |= INDEXER if name == "deepseek-v3.2" else {}
        expected |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    assert tensors(name, stacked=False) == expected


# Of the others, one layer of each kind: prefix -> what stands under it, all of it.
def grouped(width, heads, kv_heads, head, *, bias=False, norm=True, gate=1):
    shapes = {
        "self_attn.q_proj.weight": (gate * heads * head, width),
        "self_attn.k_proj.weight": (kv_heads * head, width),
        "self_attn.v_proj.weight": (kv_heads * head, width),
        "self_attn.o_proj.weight": (width, heads * head),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if bias:
        shapes["self_attn.q_proj.bias"] = (heads * head,)
        shapes |= {f"self_attn.{part}_proj.bias": (kv_heads * head,) for part in "kv"}
    return shapes


def feed_forward(width, inner, prefix="mlp."):
    shapes = {f"{prefix}{part}_proj.weight": (inner, width) for part in ("gate", "up")}
    return shapes | {f"{prefix}down_proj.weight": (width, inner)}


def experts(width, inner, count, *, bias=True, shared="shared_experts"):
    shapes = {"mlp.gate.weight": (count, width)} | ({"mlp.gate.e_score_correction_bias": (count,)} if bias else {})
    for expert in range(count):
        shapes |= feed_forward(width, inner, f"mlp.experts.{expert}.")
    shapes |= feed_forward(width, inner, f"mlp.{shared}.")
    return shapes | ({"mlp.shared_expert_gate.weight": (1, width)} if shared == "shared_expert" else {})


def stacked(width, inner, count):
    kept = experts(width, inner, 0, bias=False, shared="shared_expert")
    kept |= {"mlp.experts.gate_up_proj": (count, 2 * inner, width), "mlp.experts.down_proj": (count, width, inner)}
    return kept | {"mlp.gate.weight": (count, width)}


def delta(width, keys, values, *, packed=False):
    shapes = {
        "linear_attn.conv1d.weight": ((2 * keys + values) * 128, 1, 4),
        "linear_attn.A_log": (values,),
        "linear_attn.dt_bias": (values,),
        "linear_attn.norm.weight": (128,),
        "linear_attn.out_proj.weight": (width, values * 128),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if packed:
        shapes["linear_attn.in_proj_qkvz.weight"] = ((2 * keys + 2 * values) * 128, width)
        return shapes | {"linear_attn.in_proj_ba.weight": (2 * values, width)}
    shapes["linear_attn.in_proj_qkv.weight"] = ((2 * keys + values) * 128, width)
    shapes["linear_attn.in_proj_z.weight"] = (values * 128, width)
    return shapes | {f"linear_attn.in_proj_{part}.weight": (values, width) for part in "ab"}


def around(width, vocabulary):
    norms = {f"{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head.norm")}
    tables = {f"{name}.weight": (vocabulary, width) for name in ("embed_tokens", "shared_head.head")}
    return norms | tables | {"eh_proj.weight": (width, 2 * width)}


GLM45 = grouped(G4, 96, 8, 128, bias=True)
AIR = grouped(GA, 96, 8, 128, bias=True, norm=False)
FULL27, FULL35, NEXT = (grouped(w, n, k, 256, gate=2) for w, n, k in ((Q27, 24, 4), (Q35, 16, 2), (QN, 16, 2)))
SPARSE = {
    "self_attn.q_a_proj.weight": (2048, G5),
    "self_attn.q_a_layernorm.weight": (2048,),
    "self_attn.q_b_proj.weight": (64 * 256, 2048),
    "self_attn.kv_a_proj_with_mqa.weight": (576, G5),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (64 * (192 + 256), 512),
    "self_attn.o_proj.weight": (G5, 64 * 256),
    "self_attn.indexer.wq_b.weight": (32 * 128, 2048),
    "self_attn.indexer.wk.weight": (128, G5),
    "self_attn.indexer.k_norm.weight": (128,),
    "self_attn.indexer.k_norm.bias": (128,),
    "self_attn.indexer.weights_proj.weight": (32, G5),
    "input_layernorm.weight": (G5,),
    "post_attention_layernorm.weight": (G5,),
}
QWEN = "model.language_model."


def fc(width):
    norms = {f"mtp.{name}.weight": (width,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return norms | {"mtp.fc.weight": (width, 2 * width)}


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("glm-4.5", "model.layers.2.", GLM45 | feed_forward(G4, 12288)),
        ("glm-4.5", "model.layers.91.", GLM45 | experts(G4, 1536, 160)),
        ("glm-4.5", "model.layers.92.", GLM45 | experts(G4, 1536, 160) | around(G4, 151552)),
        ("glm-4.5-air", "model.layers.0.", AIR | feed_forward(GA, 10944)),
        ("glm-4.5-air", "model.layers.45.", AIR | experts(GA, 1408, 128)),
        ("glm-4.5-air", "model.layers.46.", AIR | experts(GA, 1408, 128) | around(GA, 151552)),
        ("glm-5", "model.layers.2.", SPARSE | feed_forward(G5, 12288)),
        ("glm-5", "model.layers.77.", SPARSE | experts(G5, 2048, 256)),
        ("glm-5", "model.layers.78.", SPARSE | experts(G5, 2048, 256) | around(G5, 154880)),
        ("qwen3.5-27b", f"{QWEN}layers.0.", delta(Q27, 16, 48) | feed_forward(Q27, 17408)),
        ("qwen3.5-27b", f"{QWEN}layers.63.", FULL27 | feed_forward(Q27, 17408)),
        ("qwen3.5-27b", "mtp.layers.0.", FULL27 | feed_forward(Q27, 17408)),
        ("qwen3.5-35b-a3b", f"{QWEN}layers.38.", delta(Q35, 16, 32) | stacked(Q35, 512, 256)),
        ("qwen3.5-35b-a3b", f"{QWEN}layers.39.", FULL35 | stacked(Q35, 512, 256)),
        ("qwen3.5-35b-a3b", "mtp.layers.0.", FULL35 | stacked(Q35, 512, 256)),
        (
            "qwen3-next",
            "model.layers.0.",
            delta(QN, 16, 32, packed=True) | experts(QN, 512, 512, bias=False, shared="shared_expert"),
        ),
        ("qwen3-next", "model.layers.47.", NEXT | experts(QN, 512, 512, bias=False, shared="shared_expert")),
        ("qwen3-next", "mtp.layers.0.", NEXT | experts(QN, 512, 512, bias=False, shared="shared_expert")),
    ],
)
def test_every_tensor_of_a_layer(name, prefix, expected):
    found = tensors(name, stacked=name == "qwen3.5-35b-a3b")
    assert {tensor.removeprefix(prefix): found[tensor] for tensor in found if tensor.startswith(prefix)} == expected


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_what_stands_around_qwens_layers(name):
    config, found = presets[name], tensors(name, stacked=True)
    width, vocabulary = config.hidden_size, config.vocab_size
    trunk = "model." if name == "qwen3-next" else QWEN
    tables = {f"{trunk}embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    rest = {tensor: shape for tensor, shape in found.items() if ".layers." not in tensor}
    assert rest == tables | {f"{trunk}norm.weight": (width,)} | fc(width)


@pytest.mark.parametrize("name", FAMILY)
def test_the_preset_is_what_its_config_json_says(name):
    """`describe` and `parse` are each other's inverse on the published configurations."""
    flat = FAMILY[name].replace("qwen3_5", "qwen3_5_text").replace("_text_moe", "_moe_text")
    family, values = describe_config(presets[name], flat)
    assert parse_config(values).model == presets[name] and family == flat
