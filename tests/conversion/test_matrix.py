"""Families x {full, fine-tuned, modules only, modules dropped}: what loads, and the greedy tokens that it gives."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from conversion.export_mtp import export_mtp
from conversion.files import CheckpointFiles
from mtpjax import DecodeConfig, generate, speculative_generate
from mtpjax.cli.main import main
from mtpjax.errors import CheckpointFileError
from mtpjax.io.checkpoint import save_model
from mtpjax.io.convert import to_hugging_face
from mtpjax.io.merge import merge_mtp
from tests.golden import MTP_SETS, RENAMED, SETS, WINDOWS, path
from tests.helpers.checkpoints import drop_modules, rewrite, tune

NEW_TOKENS = 24  # as many as the golden sets have
# Sets that differ from a fast one in a detail, and compile as long: run with `-m slow`.
SLOW = {
    ("deepseek_v3", "full"),
    ("deepseek_v3", "tuned"),
    ("glm4_moe", "full"),
    ("glm4_moe", "modules only"),
    ("glm4_moe", "tuned"),
    ("qwen3_next", "dropped"),
    ("qwen3_next", "full"),
    ("qwen3_next", "modules only"),
    ("qwen3_next", "tuned"),
}  # `tests/equalities/test_golden_forward.py` has their tokens
SIMILAR = (
    "qwen3_5",
    "deepseek_v32",
    "deepseek_v3_fp8",
    "deepseek_v3_mtp2_bf16",
    "glm_moe_dsa",
    "qwen3_5_moe",
    "qwen3_5_tied_bf16",
    *RENAMED,
    *WINDOWS,
)


def greedy(folder, prompts, *, drafts: bool = False):
    model, params = mtpjax.load(folder, dtype=jnp.float32)
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, num_steps=2 if drafts else 0)
    decode = speculative_generate if drafts else generate
    return decode(params, prompts, model=model, config=config).rows()


def golden_prompts(name):
    with np.load(path(name) / "expected.npz") as expected:
        found = [
            (expected[f"{each}_input_ids"].tolist(), expected[f"{each}_greedy_ids"].tolist()) for each in ("p0", "p1")
        ]
    return [prompt for prompt, _ in found], [tokens for _, tokens in found]


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    """`dropped(name)`: a golden checkpoint without its modules' tensors, whose configuration still names them."""
    folder = tmp_path_factory.mktemp("dropped")

    def make(name):
        return folder / name if (folder / name).exists() else drop_modules(path(name), folder / name)

    return make


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[pytest.mark.slow] * (name in SIMILAR or (name, form) in SLOW))
        for name in SETS
        for form in ("full", "tuned", "modules only", "dropped")
    ],
)
def test_every_form_of_a_checkpoint_gives_its_greedy_tokens(name, form, dropped, tmp_path):
    prompts, wanted = golden_prompts(name)
    if form != "full" and name not in MTP_SETS:
        pytest.skip("the golden set has no MTP modules to drop or to put back")
    if form == "full":
        folder = path(name)
    elif form == "dropped":
        folder = dropped(name)
        assert mtpjax.load(folder)[0].config.num_mtp_modules == 0
    elif form == "modules only":
        export_mtp(path(name), tmp_path / "modules")
        folder = tmp_path / "merged"
        assert merge_mtp(dropped(name), tmp_path / "modules", folder).added
    else:
        tuned = drop_modules(path(name), tmp_path / "tuned", tune)
        wanted = greedy(tuned, prompts)
        assert wanted != golden_prompts(name)[1]  # the change is not too small to be seen
        folder = tmp_path / "merged"
        assert merge_mtp(tuned, path(name), folder).added
    assert greedy(folder, prompts) == wanted
    if form != "dropped" and name in MTP_SETS:
        assert greedy(folder, prompts, drafts=True) == wanted


@pytest.mark.parametrize("name", MTP_SETS)
def test_the_originals_modules_come_back_bit_for_bit_and_the_tuned_trunk_stays(name, tmp_path):
    tuned = drop_modules(path(name), tmp_path / "tuned", tune)
    merge_mtp(tuned, path(name), tmp_path / "merged")
    (model, found), (original, wanted), (_, trunk) = (
        mtpjax.load(folder) for folder in (tmp_path / "merged", path(name), tuned)
    )
    assert model.config == original.config
    modules = [f"mtp_{number}" for number in range(model.config.num_mtp_modules)]
    jax.tree.map(
        np.testing.assert_array_equal, {key: found[key] for key in modules}, {key: wanted[key] for key in modules}
    )
    jax.tree.map(np.testing.assert_array_equal, {key: found[key] for key in trunk}, trunk)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_5"])
def test_missing_modules_are_a_warning_with_count_and_remedy(name, dropped, caplog):
    with caplog.at_level(logging.WARNING):
        model, params = mtpjax.load(dropped(name))
    assert "states 1 MTP module, but the files have none of their tensors" in caplog.text
    assert "without modules" in caplog.text and "mtpjax merge-mtp --input-dir" in caplog.text
    assert model.config.num_mtp_modules == 0 and not any(key.startswith("mtp_") for key in params)


@pytest.mark.parametrize(
    ("name", "lost"),
    [("deepseek_v3", "layers.4.enorm.weight"), ("qwen3_5", "mtp.fc.weight"), ("deepseek_v3_mtp2_bf16", "layers.5.")],
)
def test_some_of_the_modules_tensors_are_an_error(name, lost, tmp_path):
    folder = rewrite(path(name), tmp_path / "part", lambda key, array: None if lost in key else array)
    with pytest.raises(CheckpointFileError, match=r"lacks \d+ tensors?; "):
        mtpjax.load(folder)


@pytest.mark.parametrize("lost", ["layers.4.input_layernorm.weight"])
def test_a_module_without_its_first_norm_is_an_error_too(lost, tmp_path):
    folder = rewrite(path("deepseek_v3"), tmp_path / "part", lambda key, array: None if lost in key else array)
    with pytest.raises(CheckpointFileError, match=r"lacks 1 tensor.*input_layernorm"):
        mtpjax.load(folder)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_5_tied_bf16"])
def test_both_prefixes_of_qwen3_5_are_read(name, tmp_path):
    """transformers saves the text model under `model.`; merging goes across the two."""
    folder = tmp_path / "text"

    def rename(key, array):
        return None if key.startswith("model.visual.") else (key.replace("model.language_model.", "model."), array)

    rewrite(path(name), folder, rename)
    (model, found), (original, wanted) = mtpjax.load(folder), mtpjax.load(path(name))
    assert model.config == original.config
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    # The other way: a text-only configuration over the published prefix.
    nested = shutil.copytree(path(name), tmp_path / "nested")
    values = json.loads((nested / "config.json").read_text())
    (nested / "config.json").write_text(json.dumps({**values["text_config"]}))
    jax.tree.map(np.testing.assert_array_equal, mtpjax.load(nested)[1], wanted)
    # Modules of the published files go onto a text-only trunk, from the files and from an export.
    bare = drop_modules(folder, tmp_path / "bare")
    export_mtp(path(name), tmp_path / "export")
    for number, modules in enumerate((path(name), tmp_path / "export")):
        merge_mtp(bare, modules, tmp_path / f"merged{number}")
        jax.tree.map(np.testing.assert_array_equal, mtpjax.load(tmp_path / f"merged{number}")[1], wanted)


def test_modules_of_another_model_are_refused(tmp_path):
    bare = drop_modules(path("deepseek_v3"), tmp_path / "bare")
    with pytest.raises(CheckpointFileError, match=r"lacks|has unknown|has shape"):
        merge_mtp(bare, path("glm4_moe"), tmp_path / "merged")
    with pytest.raises(CheckpointFileError, match="has no MTP modules"):
        merge_mtp(path("deepseek_v3"), bare, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with CheckpointFiles(bare) as files:
        assert not any(".layers.4." in key for key in files.tensors)


def test_a_run_folder_exports_its_modules_and_the_command_says_what_a_merge_did(tmp_path, capsys):
    """`merge-mtp --check` prints both accept lengths; `export-mtp` reads our checkpoints."""
    config = mtpjax.ModelConfig(
        vocab_size=256,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_mtp_modules=1,
    )
    model = mtpjax.MTPModel(config)
    params = mtpjax.init_params(model, jax.random.key(0))
    save_model(tmp_path / "run" / "checkpoint", model, params, metadata={"tokenizer": "bytes"})
    to_hugging_face(tmp_path / "run", tmp_path / "full")
    bare = drop_modules(tmp_path / "full", tmp_path / "bare")
    (tmp_path / "prompts.txt").write_text("one line of text\nanother line\n")

    def run(*arguments):
        with pytest.raises(SystemExit) as done:
            main([str(argument) for argument in arguments])
        assert done.value.code == 0
        return capsys.readouterr().out

    run("export-mtp", "--input-dir", tmp_path / "run", "--output-dir", tmp_path / "modules")
    merge = ("merge-mtp", "--input-dir", bare, "--mtp-dir", tmp_path / "modules", "--output-dir", tmp_path / "out")
    said = run(*merge, "--check", tmp_path / "prompts.txt", "--max-new-tokens", 8)
    assert "accept length with 3 draft levels: 1.00 (no MTP modules) before, " in said
    found, again = mtpjax.load(tmp_path / "out")
    assert found.config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".tmp")]


@pytest.mark.parametrize("modules", [1, 2])
def test_modules_of_a_dense_model_have_the_names_of_qwen3_5(modules, tmp_path):
    config = mtpjax.ModelConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_mtp_modules=modules,
    )
    model = mtpjax.MTPModel(config)
    params = mtpjax.init_params(model, jax.random.key(0))
    save_model(tmp_path / "ours", model, params)
    to_hugging_face(tmp_path / "ours", tmp_path / "there")
    values = json.loads((tmp_path / "there" / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert values["num_nextn_predict_layers"] == modules
    with CheckpointFiles(tmp_path / "there") as files:
        assert {"mtp.fc.weight", "mtp.norm.weight"} <= files.tensors.keys() or modules == 2
        assert {f"mtp.layers.{modules - 1}.input_layernorm.weight"} <= files.tensors.keys()
        assert "mtp.layers.1.fc.weight" in files.tensors or modules == 1
    found, again = mtpjax.load(tmp_path / "there")
    assert found.config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
