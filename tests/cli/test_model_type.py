"""`--model-type` on every command that reads a checkpoint, and the setting of the same name of `train`."""

import json

import jax
import pytest

from mtpjax import ModelConfig, MTPModel, init_params
from mtpjax.cli.main import main, make_parser
from mtpjax.errors import ConfigError
from mtpjax.io.checkpoint import save_model
from mtpjax.io.checkpoint_format import read_config
from mtpjax.io.convert import to_hugging_face
from mtpjax.training.config import TrainConfig
from mtpjax.training.run_sizes import compute_run_sizes
from mtpjax.training.trainer import train
from tests.helpers.chatml import save_tokenizer

READERS = ("generate", "regenerate", "profile", "vocabulary", "ablate", "inspect", "convert", "export-mtp", "merge-mtp")


@pytest.fixture(scope="module")
def renamed(tmp_path_factory):
    """A tiny Qwen3 whose `config.json` names a family that nobody knows, as forks of a family do."""
    folder = tmp_path_factory.mktemp("renamed") / "model"
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    model = MTPModel(ModelConfig(**sizes, num_attention_heads=2, num_mtp_modules=1, use_qk_norm=True))
    save_model(folder.parent / "ours", model, init_params(model, jax.random.key(0)))
    to_hugging_face(folder.parent / "ours", folder, model_type="qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_fork"}))
    save_tokenizer(folder)
    (folder.parent / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    (folder.parent / "text.txt").write_text("Some text to train on, line after line.\n" * 400)
    return folder


def run(arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


@pytest.mark.parametrize("command", [*([name] for name in READERS), ["eval", "acceptance"]])
def test_every_command_that_reads_a_checkpoint_has_the_flag(command, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args([*command, "--help"])
    assert "--model-type" in capsys.readouterr().out


def command_lines(folder, out):
    """Short runs of the commands that load a model."""
    model, prompts, text = ("--model-path", folder), folder.parent / "prompts.jsonl", folder.parent / "text.txt"
    short = ("--max-new-tokens", 4)
    return {
        "generate": ["generate", *model, "--prompt", "hello", *short, "--num-steps", 1],
        "eval": ["eval", "acceptance", *model, "--prompts", prompts, *short, "--num-steps", 1],
        "profile": ["profile", *model, "--num-steps", 1, "--context", 16, "--repeats", 2, "--output", out / "p.json"],
        "vocabulary": ["vocabulary", *model, "--data", text, "--size", 64, "--output", out / "v.json"],
        "regenerate": ["regenerate", *model, "--data", prompts, *short, "--num-steps", 0, "--output", out / "r.jsonl"],
        "ablate": [
            *("ablate", *model, "--prompts", prompts, *short, "--output", out / "ablate", "--num-prompts", 1),
            *("--num-steps", 1, "--topk", 1, "--temperature", 0, "--batch-size", 1, "--repeats", 1),
        ],
    }


def stop(*_, **__):
    raise ValueError("the checkpoint is loaded")


@pytest.mark.parametrize("name", ["generate", "eval", "profile", "vocabulary", "regenerate", "ablate"])
def test_the_flag_reads_a_checkpoint_of_an_unknown_family(name, renamed, tmp_path, capsys, monkeypatch):
    arguments = command_lines(renamed, tmp_path)[name]
    # The two that measure times would take long, and end here after loading.
    monkeypatch.setattr("mtpjax.evaluation.profile.measure", stop)
    monkeypatch.setattr("mtpjax.ablation.run.find_workload", stop)
    is_stopped = name in ("profile", "ablate")
    assert run(arguments) == 3
    assert "unsupported model_type 'qwen3_fork'" in capsys.readouterr().err
    assert run([*arguments, "--model-type", "qwen3"]) == (2 if is_stopped else 0)
    assert ("the checkpoint is loaded" in capsys.readouterr().err) == is_stopped
    assert run([*arguments, "--model-type", "no_family"]) == 3
    assert "unsupported model_type 'no_family'" in capsys.readouterr().err


@pytest.mark.slow
def test_training_takes_the_family_and_its_checkpoint_is_exported_as_it(renamed, tmp_path):
    settings = {"init_from": str(renamed), "data": str(renamed.parent / "text.txt"), "output": str(tmp_path / "run")}
    settings |= {"row_length": 32, "batch_size": 1, "steps": 1, "panel_prompts": 0, "num_depths": 1}
    with pytest.raises(ConfigError, match="qwen3_fork"):
        compute_run_sizes(TrainConfig(**settings))
    train(TrainConfig(**settings, model_type="qwen3"))
    assert read_config(tmp_path / "run" / "checkpoint") is not None
    assert run(["convert", tmp_path / "run", tmp_path / "out"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_family_without_a_checkpoint_is_an_error():
    with pytest.raises(ValueError, match="model_type 'llama' is unused: it needs init_from"):
        TrainConfig(model_type="llama")
