"""The command line: help that answers, one line and the right exit code for what is wrong."""

import subprocess
import sys

import jax
import pytest

from mtpjax import MTPModel, init_params, presets
from mtpjax.checkpoint import save_model
from mtpjax.cli import main


def exit_code(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return exit_.value.code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import dataclasses

    path = tmp_path_factory.mktemp("model") / "checkpoint"
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8}
    model = MTPModel(dataclasses.replace(presets["tiny"], **narrow, max_position_embeddings=128))
    save_model(path, model, init_params(model, jax.random.key(0)))
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["quickstart", "--help"], ["generate", "--help"], ["--version"]])
def test_help_answers(arguments, capsys):
    assert exit_code(arguments) == 0
    assert capsys.readouterr().out


def test_help_does_not_wait_for_jax():
    code = "import sys, mtpjax.cli; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_generate_prints_the_text_and_checks_it(checkpoint, capsys):
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "8", "--check"]
    assert exit_code(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("def ")
    assert "accept length" in captured.err
    assert "identical to plain decoding: yes" in captured.err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--prompt", ""], "prompt 0 is empty"),
        (["--prompt", "x" * 200], "max_length 128 leaves room for 127"),
        (["--prompt", "x", "--speculative-num-steps", "-1"], "num_steps must be at least 0, not -1"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, not 0"),
        (["--prompt", "x", "--max-length", "1000"], "max_length 1000 is beyond the model's 128 positions"),
        (["--prompt", "a\0b"], "NUL at character 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(checkpoint, extra, said, capsys):
    assert exit_code(["generate", "--model", str(checkpoint), *extra]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_wrong_usage_is_exit_code_2(capsys):
    assert exit_code(["generate"]) == 2
    assert exit_code(["no-such-command"]) == 2
    assert exit_code(["quickstart", "--preset", "huge"]) == 2
    assert "unknown preset 'huge'; there are tiny" in capsys.readouterr().err


def test_a_bad_checkpoint_is_exit_code_3(tmp_path, capsys):
    assert exit_code(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 3
    assert "no mtpjax checkpoint" in capsys.readouterr().err
