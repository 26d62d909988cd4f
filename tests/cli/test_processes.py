"""Two processes with four devices each load a model together, and decode the texts of one."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from conversion.files import CheckpointFiles
from mtpjax import DecodeConfig, load, save, speculative_generate
from mtpjax.io.inspect import inspect
from tests.golden import path
from tests.helpers import process


@pytest.fixture
def start():
    """`start(command, **environment)` -> a process with four devices, which ends with the test."""
    running = []

    def begin(command, **environment):
        environment = os.environ | {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "4", **environment}
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen([sys.executable, "-m", *command], env=environment, text=True, **pipes))
        return running[-1]

    yield begin
    for each in running:
        each.kill()
        each.communicate()


def bytes_to_compare(folder):
    """A module's copies of embedding and head, and the originals: every process reads them, to see that they agree."""
    with CheckpointFiles(folder) as files:
        return sum(2 * (files.tensors[name].end - files.tensors[name].begin) for name in inspect(folder)["tied"])


@pytest.mark.parametrize(
    "names", [("deepseek_v3",), pytest.param(("qwen3_5_moe", "deepseek_v3"), marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_processes_of_slurm_load_save_and_decode_as_one_does(names, start, tmp_path):
    golden = [path(name) for name in names]
    loaded = [load(folder) for folder in golden]
    checkpoints = [*map(str, golden)]
    # A checkpoint of ours that one process wrote, of which each process reads whole arrays.
    if len(names) > 1:
        save(tmp_path / "ours", *loaded[0])
        checkpoints.append(str(tmp_path / "ours"))
    output = tmp_path / "theirs"  # what both processes save of the first one
    # One task on each of two nodes, of which both are this machine; Slurm would give each task one GPU.
    slurm = {"SLURM_JOB_ID": str(random.randrange(1, 4096)), "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    command = ["tests.helpers.process", str(output), *checkpoints]
    both = [start(command, **slurm, SLURM_PROCID=str(rank)) for rank in range(2)]
    expected = [
        speculative_generate(params, process.PROMPTS, model=model, config=DecodeConfig(**process.SETTINGS)).rows()
        for model, params in [*loaded, *loaded[:1] * (len(checkpoints) - len(golden) + 1)]
    ]
    for each in both:
        printed, error = each.communicate(timeout=300)
        assert each.returncode == 0, error[-3000:]
        found = json.loads(printed.splitlines()[-1])
        assert [result["rows"] for result in found["results"]] == expected
        assert found["visible"] == "all"
        for folder, result in zip(golden, found["results"], strict=False):
            compared = bytes_to_compare(folder)
            print(f"{folder.name}: read {result['read']} bytes, {compared} of them to compare; holds {result['held']}")
            assert result["read"] - compared <= 1.1 * result["held"]
        # The digests of the files are checked besides, each by one of the processes.
        print(f"saved by both: read {found['results'][-1]['read']} bytes; holds {found['results'][-1]['held']}")
        assert found["results"][-1]["read"] <= 1.1 * found["results"][-1]["held"]
    alone = load(output)[1]
    assert jax.tree.structure(alone) == jax.tree.structure(loaded[0][1])
    for saved, original in zip(jax.tree.leaves(alone), jax.tree.leaves(loaded[0][1]), strict=True):
        np.testing.assert_array_equal(saved, original)


@pytest.mark.slow  # .ci/run has it beside other commands
@pytest.mark.parametrize("killed", [0, 1])  # process 0 coordinates the others
def test_a_process_that_is_killed_ends_the_other_with_one_line(start, checkpoint, tmp_path, killed):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{number}"}) + "\n" for number in range(4000)))
    output = tmp_path / "answers.jsonl"
    command = ["mtpjax.cli.start", "regenerate", "--model", str(checkpoint), "--data", str(prompts)]
    command += ["--output", str(output), "--max-new-tokens", "16", "--mesh", "data=4,tensor=2", "--nnodes", "2"]
    both = [start([*command, "--node-rank", str(rank), "--dist-init-addr", address]) for rank in range(2)]
    deadline = time.monotonic() + 120
    while not (output.is_file() and output.stat().st_size):
        assert time.monotonic() < deadline and both[0].poll() is None, both[0].communicate()[1][-3000:]
        time.sleep(0.05)
    both[killed].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    other = both[1 - killed]
    error = other.communicate(timeout=60)[1]
    print(f"the other ended after {time.monotonic() - begin:.1f} s")
    assert other.returncode == 75, error[-3000:]
    said = [line for line in error.splitlines() if line.startswith("mtpjax")]
    assert len(said) == 1 and "another process of this run has ended or cannot be reached" in said[0]
    assert "Traceback" not in error
