"""MTP modules out of a checkpoint, in xLLM's layout, and back into it."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mtpjax
from conversion.export_mtp import export_mtp
from conversion.files import CheckpointFiles
from conversion.fp8_blocks import quantized_blocks
from conversion.load_plan import make_plan
from conversion.merge_mtp import MergeReport
from conversion.names import EXPORT_FILE
from mtpjax import ModelConfig, MTPModel, add_mtp_modules, init_params
from mtpjax.errors import CheckpointFileError
from mtpjax.io import checkpoint, convert
from mtpjax.io.merge import merge_mtp
from tests.golden import MTP_SETS, path

AROUND = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")

    def make(name):
        if not (folder / name).exists():
            export_mtp(path(name), folder / name)
        return folder / name

    return make


def test_an_export_holds_only_files_of_a_checkpoint(tmp_path):
    source = pathlib.Path(shutil.copytree(path("qwen3_next"), tmp_path / "source"))
    kept = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"}
    kept |= {"modeling_own.py", "vocab.json", "merges.txt"}
    left_out = {"notes.txt", "results.json", "figure.png", "profile.json", "mtpjax_self_check.json", "README.md"}
    for name in kept | left_out:
        (source / name).write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    export_mtp(source, tmp_path / "export")
    names = {file.name for file in (tmp_path / "export").iterdir()}
    assert names == kept | {
        "config.json",
        "model.safetensors.index.json",
        EXPORT_FILE,
        "additional_chat_templates",
    }
    assert (tmp_path / "export" / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"


@pytest.mark.parametrize("name", MTP_SETS)
def test_export_then_merge_gives_the_original_bytes(name, exported, tmp_path):
    report = merge_mtp(path(name), exported(name), tmp_path / "merged")
    assert report.equal and report == MergeReport(equal=report.equal)
    assert content(tmp_path / "merged") == content(path(name))


@pytest.mark.parametrize(
    ("name", "model_type", "architecture"),
    [
        ("deepseek_v3", "deepseek_v3_mtp", "DeepseekMTPForCausalLM"),
        ("deepseek_v3_fp8", "deepseek_v3_mtp", "DeepseekMTPForCausalLM"),
        ("deepseek_v32", "deepseek_v32_mtp", "DeepseekV32MtpForCausalLM"),
        ("glm4_moe", "glm4_moe_mtp", "Glm4MoeMtpForCausalLM"),
        ("glm_moe_dsa", "glm_moe_dsa_mtp", "GlmMoeDsaMtpForCausalLM"),
        ("glm4_moe_lite", "glm4_moe_lite_mtp", "MtpForCausalLM"),
        ("qwen3_next", "qwen3_next_mtp", "MtpForCausalLM"),
        ("qwen3_5", "qwen3_5_mtp", "Qwen3_5MtpForCausalLM"),
        ("qwen3_5_moe", "qwen3_5_moe_mtp", "Qwen3_5MtpForCausalLM"),
        ("qwen3_5_tied_bf16", "qwen3_5_mtp", "Qwen3_5MtpForCausalLM"),
    ],
)
def test_files_names_and_configuration_are_those_of_xllm(name, model_type, architecture, exported):
    folder, source = exported(name), path(name)
    with CheckpointFiles(folder) as files, CheckpointFiles(source) as original:
        found, before = set(files.tensors), set(original.tensors)
        assert {tensor.file for tensor in files.tensors.values()} == {EXPORT_FILE}
        total = sum(tensor.end - tensor.begin for tensor in files.tensors.values())
        assert files.index == {
            "metadata": {"total_size": total},
            "weight_map": dict.fromkeys(sorted(found), EXPORT_FILE),
        }
    old, new = config_of(source), config_of(folder)
    if name.startswith("qwen"):
        trunk = "model.language_model." if "qwen3_5" in name else "model."
        shared = {f"{trunk}embed_tokens.weight"} | ({"lm_head.weight"} & before)
        assert found == {tensor for tensor in before if tensor.startswith("mtp.")} | shared
        text = new.get("text_config", new)
        assert text["layer_types"] == ["full_attention"]
        assert text["num_hidden_layers"] == text["mtp_num_hidden_layers"] == new["mtp_num_hidden_layers"] == 1
    else:
        prefix = f"model.layers.{old['num_hidden_layers']}."
        module = {tensor.removeprefix(prefix) for tensor in before if tensor.startswith(prefix)}
        around = {f"model.{tensor}" for tensor in module & {*AROUND, *COPIES}}
        layer = {f"model.layers.0.{tensor}" for tensor in module - {*AROUND, *COPIES} if "_scale_inv" not in tensor}
        assert found == around | layer and len(around) >= 4
    assert (new["model_type"], new["architectures"]) == (model_type, [architecture])
    assert new["num_hidden_layers"] == new["num_nextn_predict_layers"] == 1
    assert new["first_k_dense_replace"] == 0 and new["quantization_config"] == ""
    if name == "glm_moe_dsa" and old.get("index_share_for_mtp_iteration"):
        assert new["indexer_types"] == ["full"]
    others = {file.name for file in source.iterdir() if file.suffix not in (".safetensors", ".npz")}
    assert {file.name for file in folder.iterdir()} == others | {EXPORT_FILE}


@pytest.mark.parametrize("name", ["deepseek_v3_mtp2_bf16"])
def test_several_modules_keep_their_layers(name, exported):
    with CheckpointFiles(exported(name)) as files:
        assert all(name.startswith(("model.layers.0.", "model.layers.1.")) for name in files.tensors)
        assert "model.layers.1.eh_proj.weight" in files.tensors
    assert config_of(exported(name))["num_nextn_predict_layers"] == 2


def test_fp8_becomes_the_loaders_bfloat16(exported):
    source = path("deepseek_v3_fp8")
    _, params = mtpjax.load(source, dtype=jnp.bfloat16)
    with CheckpointFiles(exported("deepseek_v3_fp8")) as files, CheckpointFiles(source) as original:
        assert not any("scale" in name for name in files.tensors)
        for name, spec in make_plan(original).specs.items():
            if not name.startswith("mtp_0/block/experts/down"):
                continue
            values = [files.read(piece.name.replace("layers.4.", "layers.0.")) for piece in spec.slices]
            wanted = np.asarray(params["mtp_0"]["block"]["experts"]["down"])
            np.testing.assert_array_equal(np.stack(values).transpose(0, 2, 1), wanted)


@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "qwen3_5_tied_bf16", "qwen3_5_moe", "glm4_moe"])
@pytest.mark.parametrize("form", ["export", "ours"])
def test_a_trained_module_is_put_back_and_nothing_else_changes(name, form, exported, tmp_path):
    source = path(name)
    if form == "ours":
        model, params = mtpjax.load(source, dtype=jnp.float32)
        params["mtp_0"]["project"] = params["mtp_0"]["project"] + 1
        scale = params["mtp_0"]["block"]["attention"]["output"]
        params["mtp_0"]["block"]["attention"]["output"] = scale * 1.25
        checkpoint.save_model(tmp_path / "modules", model, params)
    else:
        shutil.copytree(exported(name), tmp_path / "modules")
        tensors = load_file(tmp_path / "modules" / EXPORT_FILE)
        for key, tensor in tensors.items():
            if key.endswith(("eh_proj.weight", "mtp.fc.weight")):
                tensors[key] = tensor + tensor.dtype.type(1)
            if key.endswith("self_attn.o_proj.weight"):
                tensors[key] = (tensor.astype(np.float32) * 1.25).astype(tensor.dtype)
        save_file(tensors, tmp_path / "modules" / EXPORT_FILE)
    report = merge_mtp(source, tmp_path / "modules", tmp_path / "merged")
    assert report.replaced == 2 and not report.added
    with CheckpointFiles(source) as before, CheckpointFiles(tmp_path / "merged") as after:
        assert before.headers == after.headers
        changed = {key for key in before.tensors if before.read(key).tobytes() != after.read(key).tobytes()}
    assert (
        all("eh_proj" in key or "mtp.fc" in key or "self_attn.o_proj" in key for key in changed) and len(changed) >= 2
    )
    assert (tmp_path / "merged" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    _, base = mtpjax.load(source, dtype=jnp.float32)
    _, found = mtpjax.load(tmp_path / "merged", dtype=jnp.float32)
    np.testing.assert_allclose(found["mtp_0"]["project"], base["mtp_0"]["project"] + 1, atol=0.02)  # bf16's rounding
    output = [params["mtp_0"]["block"]["attention"]["output"] for params in (found, base)]
    np.testing.assert_allclose(output[0], output[1] * 1.25, rtol=0.07, atol=0.01)  # that of e4m3, where it is fp8


def test_new_modules_are_added_to_a_plain_checkpoint(tmp_path, key):
    config = ModelConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        use_qk_norm=True,
    )
    model = MTPModel(config)
    checkpoint.save_model(tmp_path / "ours", model, init_params(model, key))
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "plain", model_type="qwen3")
    model, params = add_mtp_modules(*mtpjax.load(tmp_path / "plain"), 2, key)
    checkpoint.save_model(tmp_path / "trained", model, params)
    report = merge_mtp(tmp_path / "plain", tmp_path / "trained", tmp_path / "merged")
    assert report == MergeReport(added=2 * 15)
    found, again = mtpjax.load(tmp_path / "merged")
    assert found.config == model.config and found.config.num_mtp_modules == 2
    jax.tree.map(np.testing.assert_array_equal, again, params)
    plain, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "merged"))
    assert all(plain[name].tobytes() == merged[name].tobytes() for name in plain)
    export_mtp(tmp_path / "merged", tmp_path / "exported")
    assert merge_mtp(tmp_path / "plain", tmp_path / "exported", tmp_path / "again") == report


def test_what_does_not_fit_is_refused(exported, tmp_path, key):
    source = path("deepseek_v3_fp8")
    with pytest.raises(CheckpointFileError, match="neither an MTP export"):
        merge_mtp(source, tmp_path, tmp_path / "merged")
    shutil.copytree(exported("deepseek_v3_fp8"), tmp_path / "modules")
    tensors = load_file(tmp_path / "modules" / EXPORT_FILE)
    del tensors["model.eh_proj.weight"]
    save_file(tensors, tmp_path / "modules" / EXPORT_FILE)
    index = {"weight_map": dict.fromkeys(tensors, EXPORT_FILE)}
    (tmp_path / "modules" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointFileError, match=r"lacks 1 tensor: model.layers.4.eh_proj.weight"):
        merge_mtp(source, tmp_path / "modules", tmp_path / "merged")
    model, params = mtpjax.load(path("qwen3_5_tied_bf16"))
    checkpoint.save_model(tmp_path / "other", model, params)
    with pytest.raises(CheckpointFileError, match=r"is a different model from .*: it differs in"):
        merge_mtp(source, tmp_path / "other", tmp_path / "merged")
    config = dataclasses.replace(model.config, num_mtp_modules=0)
    params = {name: value for name, value in params.items() if not name.startswith("mtp")}
    checkpoint.save_model(tmp_path / "plain", MTPModel(config), params)
    with pytest.raises(CheckpointFileError, match="has no MTP modules"):
        merge_mtp(path("qwen3_5_tied_bf16"), tmp_path / "plain", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_checkpoint_without_modules_has_none_to_export(tmp_path, key):
    model = MTPModel(
        ModelConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    )
    checkpoint.save_model(tmp_path / "ours", model, init_params(model, key))
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "plain")
    with pytest.raises(CheckpointFileError, match="has no MTP modules"):
        export_mtp(tmp_path / "plain", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_quantisation_is_exact_where_values_are_representable():
    """Blocks whose largest magnitude is 448 come back as they are, at partial edges too."""
    rng = np.random.default_rng(0)
    exact = rng.integers(-448, 449, (300, 200)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact[::50, ::50] = 448
    parts = [exact[:100], exact[100:130], exact[130:]]
    values, scales = zip(*quantized_blocks(iter(parts), (128, 128)), strict=True)
    values, scales = np.concatenate(values), np.concatenate(scales)
    assert scales.shape == (3, 2)
    spread = np.kron(scales, np.ones((128, 128), np.float32))[:300, :200]
    np.testing.assert_array_equal(values.astype(np.float32) * spread, exact)


def test_the_module_is_a_drop_in_script(tmp_path):
    source, target = str(path("deepseek_v3_fp8")), str(tmp_path / "exported")
    command = [sys.executable, "-m", "conversion.export_mtp", "--input-dir", source, "--output-dir", target]
    subprocess.run(command, check=True)
    assert (tmp_path / "exported" / EXPORT_FILE).is_file()
    assert subprocess.run([*command, "--model-type", "gpt2"], capture_output=True).returncode == 3
