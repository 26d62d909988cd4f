"""Folders that are given as a model and are something else: every command says what they are."""

import json

import pytest

import mtpjax
from mtpjax.cli.main import main
from mtpjax.errors import CheckpointError
from mtpjax.folder_kinds import reject_other_folder
from tests.golden import drafter_path, path

ADAPTER = {"base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 8}


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "FOLDER"],
        ["convert", "FOLDER", "OUT"],
        ["generate", "--model", "FOLDER", "--prompt", "a"],
        ["serve", "--model", "FOLDER"],
        ["export-mtp", "--input-dir", "FOLDER", "--output-dir", "OUT"],
        ["merge-mtp", "--input-dir", "FOLDER", "--mtp-dir", "FOLDER", "--output-dir", "OUT"],
        ["merge-mtp", "--input-dir", "GOLDEN", "--mtp-dir", "FOLDER", "--output-dir", "OUT"],
        ["train", "init_from=FOLDER", "output=OUT", "data=DATA"],
    ],
)
def test_an_adapter_names_its_base_in_every_command(command, adapter, tmp_path, capsys):
    places = {"FOLDER": str(adapter), "OUT": str(tmp_path / "out"), "GOLDEN": str(path("qwen3"))}
    (tmp_path / "text.txt").write_text("a text\n\n" * 20)
    places["DATA"] = str(tmp_path / "text.txt")
    for name, place in places.items():
        command = [argument.replace(name, place) for argument in command]
    with pytest.raises(SystemExit) as stop:
        main(command)
    said = capsys.readouterr().err
    assert stop.value.code == 3 and "is an adapter for org/base" in said and "merge_and_unload" in said


def test_python_callers_are_told_too(adapter):
    with pytest.raises(CheckpointError, match="adapter for org/base"):
        mtpjax.load(adapter)
    (adapter / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter for org/base"):
        mtpjax.load(adapter)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model_index.json", "unet/config.json"], "a diffusers pipeline"),
        (["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata"], "accelerate merge-weights"),
        (["zero_to_fp32.py", "global_step10/x.pt"], "zero_to_fp32.py"),
        (["optimizer.pt", "scheduler.pt"], "optimizer state"),
        (["checkpoint-10/config.json", "checkpoint-20/config.json"], "checkpoint-20"),
        (["model.Q4_K_M.gguf", "model.Q8_0.gguf"], "give one of these files, such as model.Q4_K_M.gguf"),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin, an unsupported weight format"),
    ],
)
def test_other_folders_say_what_they_are(files, words, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=words):
        mtpjax.load(tmp_path)


def test_drafters_are_no_models_and_models_no_drafters():
    for name in ("eagle3", "medusa", "dflash", "dspark"):
        with pytest.raises(CheckpointError, match=r"is a drafter .*--speculative-draft-model-path"):
            reject_other_folder(drafter_path(name) / "draft")
    for name in ("qwen3", "deepseek_v3_fp8", "kimi_k25"):
        reject_other_folder(path(name))
