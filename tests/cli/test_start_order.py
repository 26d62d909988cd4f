"""What happens before JAX is imported: its threads and its compilation cache are set, for every command that uses it.

JAX reads both once. A command that imports JAX too early would compile everything anew at every start, without a word.
"""

import json
import os
import subprocess
import sys

import pytest

from mtpjax import compilation_cache
from mtpjax.cli.main import COMMANDS

MODEL = ("--model-path", "MODEL")
# Commands that compile. Each ends when it imports JAX.
COMPILING = {
    "quickstart": ("--output", "out"),
    "train": (),
    "generate": (*MODEL, "--prompt", "x"),
    "chat": MODEL,
    "regenerate": (*MODEL, "--data", "MODEL/config.json", "--output", "out"),
    "merge-mtp": ("--input-dir", "MODEL", "--mtp-dir", "MODEL", "--output-dir", "out", "--check", "MODEL/config.json"),
    "profile": MODEL,
    "tune": MODEL,
    "eval": ("acceptance", *MODEL, "--prompts", "MODEL/config.json"),
    "ablate": (*MODEL, "--output", "out"),
    "serve": MODEL,
}
# The others read and write files, talk to servers, or compile for other machines.
OTHERS = {"compare", "inspect", "convert", "export-mtp", "plan", "vocabulary", "serve-router", "bench-serving"}
FLAGS = [*COMPILING.items()]
FLAGS += [("serve", (*MODEL, "--disaggregation-mode", "prefill")), ("serve", (*MODEL, "--mesh", "tensor=2"))]
FLAGS += [("serve", (*MODEL, "--nnodes", "2", "--mesh", "tensor=2")), ("serve", (*MODEL, "--speculative-adaptive"))]
# A process per command line would import the same modules again and again, so one forks.
IMPORT_JAX = """
import json, os, sys
from mtpjax.cli.main import main

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            print(json.dumps({key: os.environ.get(key, "") for key in ("JAX_COMPILATION_CACHE_DIR", "PJRT_NPROC")}))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Watch())
for arguments in json.loads(sys.argv[1]):
    if not os.fork():
        main(arguments)
    os.wait()
"""


def test_every_command_is_listed():
    assert set(COMPILING) | OTHERS == set(COMMANDS) and not set(COMPILING) & OTHERS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_threads_and_cache_are_set_before_jax_is_imported(checkpoint, tmp_path):
    names = (compilation_cache.FOLDER_VARIABLE, compilation_cache.SWITCH_VARIABLE, "PJRT_NPROC", "NPROC")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}
    environment["MTPJAX_DISAGGREGATION_SECRET"] = "a secret of many characters"
    lines = [[name, *(each.replace("MODEL", str(checkpoint)) for each in flags)] for name, flags in FLAGS]
    command = [sys.executable, "-c", IMPORT_JAX, json.dumps(lines)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    for line, printed in zip(lines, result.stdout.splitlines(), strict=True):
        seen = json.loads(printed)
        assert seen["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path)), line
        # A small model has one thread. Training takes all.
        is_trained = line[0] in ("quickstart", "train", "merge-mtp")
        assert seen["PJRT_NPROC"] == ("" if is_trained else "1"), line
