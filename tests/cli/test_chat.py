"""`mtpjax chat`: through pipes, and in a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from mtpjax.cli.main import main
from mtpjax.io.checkpoint import save_model

COMMAND = [sys.executable, "-m", "mtpjax.cli.start", "chat"]


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments):
        self._terminal, own = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
        streams = {"stdin": own, "stdout": own, "stderr": own}
        self.process = subprocess.Popen([*COMMAND, *arguments], env=environment, start_new_session=True, **streams)
        os.close(own)
        self._new = ""

    def type(self, text):
        os.write(self._terminal, text.encode())

    def wait_for(self, pattern, seconds=120):
        """Waits for output that matches, after what was waited for before; returns it up to its end."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self._new)):
            assert time.monotonic() < end, self._new
            if select.select([self._terminal], [], [], 0.1)[0]:
                self._new += os.read(self._terminal, 4096).decode(errors="replace")
        shown, self._new = self._new[: found.end()], self._new[found.end() :]
        return shown

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def chat(checkpoint, text, *arguments):
    """Runs the command with this standard input."""
    command = [*COMMAND, "--model", str(checkpoint), "--max-new-tokens", "6", *arguments]
    return subprocess.run(command, input=text, capture_output=True, timeout=300)


def test_a_dialogue_through_pipes(checkpoint):
    # A line is a message, whatever it says; empty lines are none.
    done = chat(checkpoint, b"Hi\n\n/exit\nno \\\n", "--seed", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 3 and all(re.fullmatch(r"\[\d tokens?(, .*)?\]", line) for line in lines), lines
    assert b"\x1b" not in done.stdout and done.stdout.startswith(chat(checkpoint, b"Hi").stdout)


def test_a_message_that_does_not_fit_ends_a_pipe_with_an_error(checkpoint):
    done = chat(checkpoint, b"x" * 500 + b"\nHi\n")
    assert done.returncode == 2 and done.stdout == b""
    assert b"mtpjax chat: " in done.stderr and b"256" in done.stderr and b"Traceback" not in done.stderr


def test_a_terminal_shows_a_dialogue(checkpoint):
    with Terminal("--model", str(checkpoint), "--max-length", "240", "--system", "Be brief.") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello, \\\n")
        terminal.wait_for(r"\| ")
        terminal.type("you\n")
        first = terminal.wait_for(r"\[\d+ tokens?.*\]")
        assert "compiling" in first
        terminal.wait_for("> ")
        terminal.type("/help\n")
        assert "Ctrl-D" in terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("> ")
        terminal.type("x\n")
        second = terminal.wait_for(r"\[\d+ tokens?.*\]")
        assert "compiling" not in second and re.search(r"\x1b\[3[2-6]m", second)  # accepted drafts in color
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0


def test_an_interrupt_stops_an_answer_and_ends_the_command_at_the_prompt(checkpoint, small, tmp_path):
    # A model whose answers take a while.
    model, params = small("grouped", vocab_size=256, max_position_embeddings=16384)
    save_model(tmp_path / "checkpoint", model, params)
    with Terminal("--model", str(tmp_path / "checkpoint"), "--num-steps", "0") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for(r"compiling\r\n|\x1b\[\?25h")
        terminal.process.send_signal(signal.SIGINT)
        assert "stopped]" in terminal.wait_for(r"\[\d+ tokens?.*\]")
        terminal.wait_for("> ")
        time.sleep(0.5)  # a signal between two steps of readline would wait for the next key
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("mtpjax chat: interrupted")
        assert terminal.process.wait(60) == 130


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs is not JSON"),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object"),
        (["--chat-template-kwargs", '{"messages": 1}'], "chat_template_kwargs must not set messages"),
        (["--mesh", "rows=2"], "--mesh 'rows=2' must be an axis"),
    ],
)
def test_wrong_flags_are_refused(arguments, message, checkpoint, capsys):
    with pytest.raises(SystemExit) as end:
        main(["chat", "--model", str(checkpoint), *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err
