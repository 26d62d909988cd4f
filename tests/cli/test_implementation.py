"""`--implementation` on every command that runs a model."""

import pytest

from mtpjax.cli.main import main, make_parser
from mtpjax.models.config import IMPLEMENTATIONS
from tests.golden import path

COMMANDS = (["generate"], ["regenerate"], ["profile"], ["eval", "acceptance"], ["ablate"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_runs_a_model_has_the_flag(command, capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args([*command, "--help"])
    text = capsys.readouterr().out
    assert "--implementation NAME" in text and all(name in text for name in IMPLEMENTATIONS)


def test_the_flag_reaches_the_model(tmp_path, capsys):
    """On a CPU the GPU kernels cannot run, so naming them must fail, in one line."""
    arguments = ["profile", "--model", str(path("glm4_moe")), "--num-steps", "1", "--context", "16"]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--output", str(tmp_path / "profile.json"), "--implementation", "triton"])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert "interpret" in error and error.count("\n") == 1
