"""A command of several processes runs in a child, whose aborts become an exit code."""

import signal
import subprocess
import sys

import pytest

PARENT = "import os, signal, sys, time\nfrom mtpjax.cli.supervisor import LOST_PROCESS, continue_in_child\n"
PARENT += "continue_in_child('mtpjax train', 75, LOST_PROCESS + '; continue with --resume')\n"


@pytest.fixture
def start():
    """`start(code)` -> a process that continues with the code in a child, and whose output is read as text."""
    running = []

    def begin(code):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen([sys.executable, "-c", PARENT + code], text=True, **pipes))
        return running[-1]

    yield begin
    for each in running:
        each.kill()
        each.communicate()


@pytest.mark.parametrize(
    ("code", "expected"),
    [("print('done')", 0), ("sys.exit(4)", 4), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_parent_ends_as_its_child_ends(start, code, expected):
    process = start(code)
    _, error = process.communicate(timeout=60)
    assert process.returncode == expected and error == ""


def test_abort_becomes_one_line_and_the_exit_code(start):
    process = start("os.abort()")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert error.startswith("mtpjax train: another process of this run has ended or cannot be reached")
    assert error.endswith("; continue with --resume\n") and error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_child_once(start, number):
    code = f"signal.signal({number:d}, lambda *_: print('told', flush=True))\n"
    process = start(f"{code}print('ready', flush=True)\nfor _ in range(20): time.sleep(0.05)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "told\n"
    assert process.returncode == 0


def test_child_ends_with_a_killed_parent(start):
    process = start("print(os.getpid(), flush=True)\ntime.sleep(60)")
    child = int(process.stdout.readline())
    assert child != process.pid
    process.kill()
    process.communicate(timeout=30)  # the output is open until the child has ended too


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
@pytest.mark.parametrize("mebibytes", [200, 512, 1024])
def test_a_limit_of_address_space_is_one_line_and_exit_code_5(checkpoint, mebibytes):
    """Imports, threads and reads fail in Python, and native threads abort; which of them, depends on the limit."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({mebibytes} << 20,) * 2)\n"
    code = f"{limit}from mtpjax.cli.start import main\nmain()"
    command = [sys.executable, "-c", code, "serve", "--model-path", str(checkpoint), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 5, result.stderr
    assert last.startswith("mtpjax serve: memory is too small") and f"allows {mebibytes} MiB of address space" in last
