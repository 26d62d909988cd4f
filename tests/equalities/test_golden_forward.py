"""Published checkpoint layouts against transformers' own outputs, computed in float64."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  teaches numpy, and so safetensors, the name bfloat16
import numpy as np
import pytest
from safetensors.numpy import load_file

from mtpjax import DecodeConfig, ModelConfig, MTPModel, forward, generate, speculative_generate
from mtpjax.config import Yarn
from mtpjax.decode.draft import propose
from mtpjax.decode.loop import prefill
from mtpjax.decode.state import init_state

GOLDEN = pathlib.Path(__file__).parents[3] / "shared" / "golden"
SETS = ("deepseek_v3", "deepseek_v3_mtp2_bf16", "glm4_moe", "qwen3")
MTP_SETS = SETS[:3]
PROMPTS = ("p0", "p1")

pytestmark = [
    pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"the golden checkpoints are not at {GOLDEN}"),
    pytest.mark.usefixtures("quick_compile"),
]

# Golden's own recommendation for float32: the stored numbers are float64, and float32 torch differs by up to 4e-5.
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-4)

SAME_NAME = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps"),
    *(
        "max_position_embeddings",
        "rope_theta",
        "tie_word_embeddings",
        "attention_bias",
        "num_key_value_heads",
        "head_dim",
    ),
    *("partial_rotary_factor", "use_qk_norm", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
}
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_config(path):
    given = json.loads((path / "config.json").read_text())
    values = {name: given[name] for name in SAME_NAME if given.get(name) is not None}
    values["num_mtp_modules"] = given.get("num_nextn_predict_layers", 0)
    values["router_correction_bias"] = "n_routed_experts" in given
    if "kv_lora_rank" in given:
        values |= {name: given[name] for name in LATENT} | {"attention": "latent", "rope_interleave": True}
        del values["num_key_value_heads"]
    if given["model_type"] == "qwen3":
        values["use_qk_norm"] = True
    if given["rope_scaling"]:
        values["rope_scaling"] = Yarn(**{key: value for key, value in given["rope_scaling"].items() if key != "type"})
    return ModelConfig(**values)


def read_params(path, config):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= {name: array.astype(np.float32) for name, array in load_file(file).items()}
    return {
        "embedding": tensors["model.embed_tokens.weight"],
        "head": tensors["lm_head.weight"].T,
        "norm_final": {"scale": tensors["model.norm.weight"]},
        "trunk": {
            f"layer_{i}": read_block(tensors, f"model.layers.{i}.", config) for i in range(config.num_hidden_layers)
        },
        **{f"mtp_{k}": read_module(tensors, config, k) for k in range(config.num_mtp_modules)},
    }


def read_module(tensors, config, number):
    prefix = f"model.layers.{config.num_hidden_layers + number}."
    names = {"norm_embedding": "enorm", "norm_hidden": "hnorm", "norm_output": "shared_head.norm"}
    return {
        "project": tensors[f"{prefix}eh_proj.weight"].T,
        "block": read_block(tensors, prefix, config),
        **{ours: {"scale": tensors[f"{prefix}{theirs}.weight"]} for ours, theirs in names.items()},
    }


def read_block(tensors, prefix, config):
    def matrix(name):
        return tensors[f"{prefix}{name}.weight"].T

    def scale(name):
        return {"scale": tensors[f"{prefix}{name}.weight"]}

    def gate_up(name):
        return np.stack([matrix(f"{name}.gate_proj"), matrix(f"{name}.up_proj")], axis=1)

    block = {"norm_attention": scale("input_layernorm"), "norm_feed_forward": scale("post_attention_layernorm")}
    attention = {"output": matrix("self_attn.o_proj")}
    N = config.num_attention_heads
    if config.attention == "latent":
        C = config.qk_nope_head_dim
        up = tensors[f"{prefix}self_attn.kv_b_proj.weight"].reshape(N, -1, config.kv_lora_rank)
        attention |= {"key_up": up[:, :C], "value_up": up[:, C:].swapaxes(1, 2)}
        attention |= {"query_down": matrix("self_attn.q_a_proj"), "query_up": matrix("self_attn.q_b_proj")}
        attention |= {"latent_down": matrix("self_attn.kv_a_proj_with_mqa")}
        attention |= {"norm_query": scale("self_attn.q_a_layernorm"), "norm_latent": scale("self_attn.kv_a_layernorm")}
    else:
        K, H = config.num_key_value_heads, config.head_dim

        def grouped(kind):
            q, k, v = (tensors[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv")
            heads = (array.reshape(K, -1, H, *array.shape[1:]) for array in (q, k, v))
            return np.concatenate(list(heads), axis=1)

        attention["qkv"] = np.moveaxis(grouped("weight"), -1, 0)
        if config.attention_bias:
            attention["qkv_bias"] = grouped("bias")
        if config.use_qk_norm:
            attention |= {"norm_q": scale("self_attn.q_norm"), "norm_k": scale("self_attn.k_norm")}
    block["attention"] = attention
    if f"{prefix}mlp.gate.weight" not in tensors:
        return block | {"dense": {"gate_up": gate_up("mlp"), "down": matrix("mlp.down_proj")}}
    each = range(config.n_routed_experts)
    block["experts"] = {
        "router": matrix("mlp.gate"),
        "correction_bias": tensors[f"{prefix}mlp.gate.e_score_correction_bias"],
        "gate_up": np.stack([gate_up(f"mlp.experts.{e}") for e in each]),
        "down": np.stack([matrix(f"mlp.experts.{e}.down_proj") for e in each]),
        "shared": {"gate_up": gate_up("mlp.shared_experts"), "down": matrix("mlp.shared_experts.down_proj")},
    }
    return block


@pytest.fixture(scope="module")
def load():
    @functools.cache
    def load(name):
        config = read_config(GOLDEN / name)
        params = jax.tree.map(jnp.asarray, read_params(GOLDEN / name, config))
        with np.load(GOLDEN / name / "expected.npz") as expected:
            return MTPModel(config), params, dict(expected)

    return load


@pytest.fixture(scope="module")
def run(load):
    """The teacher-forced pass over both prompts, padded to one length."""

    @functools.cache
    def run(name, layout="ttt", num_depths=None):
        model, params, expected = load(name)
        rows = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
        lengths = np.array([len(row) for row in rows])
        tokens = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows])
        return forward(params, tokens, model=model, lengths=lengths, attention_layout=layout, num_depths=num_depths)

    return run


@pytest.mark.parametrize("name", SETS)
def test_parameters_have_the_shapes_that_init_gives(name, load):
    model, params, _ = load(name)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)


@pytest.mark.parametrize("name", SETS)
def test_the_trunk_matches(name, load, run):
    _, _, expected = load(name)
    output = run(name, num_depths=2 if name in MTP_SETS else 0)
    for row, prompt in enumerate(PROMPTS):
        T = len(expected[f"{prompt}_input_ids"])
        assert_close(output.logits[row, :T], expected[f"{prompt}_logits"])
        assert_close(output.hidden[row, :T], expected[f"{prompt}_hidden_postnorm"])
        assert_close(output.hidden_prenorm[row, :T], expected[f"{prompt}_hidden_prenorm"])


@pytest.mark.parametrize("name", SETS)
def test_a_longer_prompt_matches(name, load):
    model, params, expected = load(name)
    output = forward(params, expected["long_input_ids"][None], model=model, num_depths=0)
    assert_close(output.logits[0, expected["long_positions"]], expected["long_logits"])


@pytest.mark.parametrize("name", MTP_SETS)
def test_the_first_depth_matches(name, load, run):
    _, _, expected = load(name)
    output = run(name, num_depths=2)
    for row, prompt in enumerate(PROMPTS):
        T = len(expected[f"{prompt}_input_ids"])
        assert_close(output.mtp_logits[0][row, : T - 1], expected[f"{prompt}_mtp1_logits"])
        assert_close(output.mtp_hidden[0][row, : T - 1], expected[f"{prompt}_mtp1_hidden_postnorm"])


@pytest.mark.parametrize(
    ("name", "layout", "meant"),
    [
        ("deepseek_v3", "ttt", "rec_eagle"),
        ("deepseek_v3", "stream", "rec_fresh"),
        ("glm4_moe", "ttt", "rec_eagle"),
        ("glm4_moe", "stream", "rec_fresh"),
        ("deepseek_v3_mtp2_bf16", "ttt", "layer"),
    ],
)
def test_the_second_depth_matches(name, layout, meant, load, run):
    _, _, expected = load(name)
    output = run(name, layout, num_depths=2)
    for row, prompt in enumerate(PROMPTS):
        T = len(expected[f"{prompt}_input_ids"])
        assert_close(output.mtp_logits[1][row, : T - 2], expected[f"{prompt}_mtp2_{meant}_logits"])


def test_the_first_of_two_modules_can_be_recycled(load):
    """`mtp2_rec_eagle` of the set with two modules: its first module alone, recycled."""
    model, params, expected = load("deepseek_v3_mtp2_bf16")
    model = MTPModel(ModelConfig.from_dict({**model.config.to_dict(), "num_mtp_modules": 1}))
    params = {name: value for name, value in params.items() if name != "mtp_1"}
    output = forward(params, expected["p0_input_ids"][None], model=model, num_depths=2)
    assert_close(output.mtp_logits[1][0, :-2], expected["p0_mtp2_rec_eagle_logits"])


@pytest.mark.parametrize("name", SETS)
def test_greedy_tokens_match(name, load):
    model, params, expected = load(name)
    prompts = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
    config = DecodeConfig(max_new_tokens=24, num_steps=2)
    decoder = speculative_generate if name in MTP_SETS else generate
    wanted = [expected[f"{prompt}_greedy_ids"].tolist() for prompt in PROMPTS]
    assert decoder(params, prompts, model=model, config=config).rows() == wanted


@pytest.mark.parametrize("name", MTP_SETS)
def test_drafted_tokens_match(name, load):
    model, params, expected = load(name)
    num_steps = len(expected["p0_draft_ids"])
    rows = [expected[f"{prompt}_input_ids"] for prompt in PROMPTS]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.stack([np.pad(row, (0, 128 - len(row))) for row in rows])
    arrays = (jnp.asarray(array) for array in (tokens, lengths, lengths + 24, np.full(8, -1, np.int32)))
    state = init_state(*arrays, model=model, num_steps=num_steps, dtype=jnp.float32)

    @jax.jit
    def draft(params, state):
        return propose(
            params, prefill(params, state, model=model, chunk=16), model=model, num_steps=num_steps, min_rows=1
        )

    tokens = np.asarray(draft(params, state).tokens)
    for row, prompt in enumerate(PROMPTS):
        behind = tokens[row, lengths[row] :]
        assert behind[0] == expected[f"{prompt}_greedy_ids"][0]
        assert behind[1 : num_steps + 1].tolist() == expected[f"{prompt}_draft_ids"].tolist()
