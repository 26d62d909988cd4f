"""`attention_bias` of each family, against logits that transformers computed from the same weights."""

import json
import zlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mtpjax
from conversion.describe_config import describe_config
from conversion.hf_config import parse_config
from mtpjax.io import checkpoint, convert
from tests.golden import HERE

RECORDED = json.loads((HERE / "attention_bias.json").read_text())
MODELS = RECORDED["models"]
BIASES = {"glm4_moe": False}  # families whose output has no bias


def write(model_type, folder):
    """Writes the checkpoint whose weights `tests/golden/README.md` describes."""

    def draw(name, shape):
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        # Qwen3-Next's norms multiply by 1 + w.
        centre = 0 if model_type == "qwen3_next" and "linear_attn" not in name else 1
        return (centre + 0.1 * noise if "norm" in name else 0.5 * noise).astype(np.float32)

    folder.mkdir()
    model = MODELS[model_type]
    (folder / "config.json").write_text(json.dumps(model["config"]))
    tensors = {name: draw(name, shape) for name, shape in model["shapes"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# The others differ in experts, which other tests cover: they run with the slow tests.
@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "qwen3_next", "deepseek_v3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "qwen3_moe", "hy_v3", "glm4_moe")),
    ],
)
def test_logits_are_those_of_transformers(model_type, tmp_path):
    model, params = mtpjax.load(write(model_type, tmp_path / "model"))
    logits = mtpjax.forward(params, np.array([RECORDED["ids"]]), model=model).logits[0]
    # Both compute in float32; leaving out the bias of the output moves logits by 0.5 and more.
    np.testing.assert_allclose(logits, MODELS[model_type]["logits"], atol=2e-5)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_bias_has_a_place_and_comes_back(model_type, tmp_path):
    source = write(model_type, tmp_path / "model")
    convert.to_mtpjax(source, tmp_path / "ours")
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    config = parse_config(MODELS[model_type]["config"]).model
    assert config.attention_bias and config.attention_output_bias == BIASES.get(model_type, True)
    _, values = describe_config(config, model_type)
    assert parse_config(values).model == config


def test_modules_have_the_same_biases(tmp_path, small):
    model, params = small("grouped", attention_bias=True, attention_output_bias=True, use_qk_norm=True)
    checkpoint.save_model(tmp_path / "ours", model, params)
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "there")
    assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "qwen3"
    names = [name for name in load_file(tmp_path / "there" / "model.safetensors") if name.endswith("o_proj.bias")]
    assert sorted(name.split(".")[0] for name in names) == ["model", "model", "mtp"]
    found, again = mtpjax.load(tmp_path / "there")
    assert found.config == model.config
    block = params["mtp_0"]["block"]["attention"]
    for name in ("qkv_bias", "output_bias"):
        np.testing.assert_array_equal(again["mtp_0"]["block"]["attention"][name], block[name])
