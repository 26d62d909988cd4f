"""Ctrl-C in a command: one line and exit code 130, whatever the process is doing."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

# A module that Ctrl-C hits while it is imported, and a garbage collector's callback like JAX's.
INTERRUPTED_MODULE = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\nis_whole = True\n"
PROGRAM = """
import gc, os, signal, sys, time
from mtpjax.cli.interrupts import defer_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
defer_interrupts()
def work():
    {what}
    time.sleep(20)
    print("not interrupted")
try:
    work()
except KeyboardInterrupt:
    print("interrupted", "module" not in sys.modules or sys.modules["module"].is_whole, flush=True)
"""
IN_CALLBACK = """
    def gc_callback(phase, info):
        gc.callbacks.remove(gc_callback)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    gc.callbacks.append(gc_callback)
    gc.collect()
"""


@pytest.mark.parametrize(
    "what", ["import module", pytest.param(IN_CALLBACK, marks=pytest.mark.slow)], ids=["import", "callback"]
)
def test_an_interrupt_waits_for_an_import_and_is_not_lost_in_a_callback(what, tmp_path):
    (tmp_path / "module.py").write_text(INTERRUPTED_MODULE)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    command = [sys.executable, "-c", PROGRAM.format(what=what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["interrupted True"]
    assert done.stderr == ""


def test_an_ignored_signal_stays_ignored():
    code = (
        "import signal, mtpjax.cli.interrupts as start; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "start.defer_interrupts(); print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 0.5, 0.7, 0.9, 1.2, 1.6, 2.0])
def test_ctrl_c_during_the_start_of_a_command_is_one_line(seconds, checkpoint):
    """The moments lie in the imports of the command line, of NumPy and of JAX; a late one finds the command ended."""
    command = [sys.executable, "-m", "mtpjax.cli.start", "generate", "--model", str(checkpoint), "--prompt", "def "]
    # A shell's background jobs ignore the signal, and what they start inherits that.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **streams, preexec_fn=heed) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) in [
        (130, "mtpjax: interrupted\n"),
        (130, "mtpjax generate: interrupted\n"),
        (0, ""),
    ]
