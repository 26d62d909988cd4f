"""`mtpjax serve` in two processes with two devices each: texts, the end, and a process that is lost."""

import concurrent.futures
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from mtpjax import DecodeConfig, SamplingParams, load, speculative_generate

pytestmark = pytest.mark.slow
SIZES = ["--page-size", "8", "--max-running-requests", "4", "--context-length", "96", "--chunked-prefill-size", "32"]
LONG = {"prompt": "def f", "max_tokens": 88, "temperature": 0, "ignore_eos": True, "stream": True}


class Server:
    """Both processes; `lines[rank]` are what each printed."""

    def __init__(self, checkpoint, *flags, of_follower=()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        devices = {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        environment = os.environ | devices | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        command = [sys.executable, "-m", "mtpjax.cli.start", "serve", "--model", str(checkpoint), "--port", "0"]
        command += ["--enable-metrics", "--nnodes", "2", "--dist-init-addr", address, *SIZES, *flags]
        self.processes, self.lines, self._ready = [], ([], []), queue.Queue()
        for rank in range(2):
            own = [*command, "--node-rank", str(rank), *(of_follower if rank else ())]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.processes.append(subprocess.Popen(own, env=environment, **pipes))
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()

    def _read(self, rank):
        for line in self.processes[rank].stdout:
            self.lines[rank].append(line.strip())
            if "is ready at" in line:
                self._ready.put(next(word for word in line.replace(": ", " ").split() if word.startswith("http")))

    def wait_until_ready(self, seconds=400):
        self.url = self._ready.get(timeout=seconds)
        return self

    def post(self, path, **body):
        response = httpx.post(self.url + path, json=body, timeout=300)
        assert response.status_code == 200, response.text
        return response.json()

    def texts(self, lines):
        """Yields the text of each event of a stream; fails at an error."""
        for line in lines:
            if line and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    def num_compilations(self):
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        [line] = [line for line in lines if line.startswith("mtpjax:compile_total")]
        return float(line.split()[-1])

    def wait(self, seconds):
        """Returns both exit codes, once both processes have ended."""
        end = time.monotonic() + seconds
        return [process.wait(timeout=max(end - time.monotonic(), 0.01)) for process in self.processes]

    def said(self, rank):
        return [line for line in self.lines[rank] if line.startswith("mtpjax serve:")]


@pytest.fixture
def start():
    """`start(checkpoint, *flags)` -> `Server`, which ends with the test."""
    servers = []

    def begin(*arguments, **changes):
        servers.append(Server(*arguments, **changes))
        return servers[-1]

    yield begin
    for process in (process for server in servers for process in server.processes):
        process.kill()
        process.wait()
        process.stdout.close()


def test_two_processes_give_the_texts_of_one_device_and_end_after_their_requests(start, checkpoint):
    server = start(checkpoint, "--mesh", "data=2,tensor=2", "--precompile-bs-paddings", "2").wait_until_ready()
    model, params = load(checkpoint)
    # 1. Requests of all kinds at once, against each alone.
    options = [{"temperature": 0}, {"temperature": 0.8}, {"temperature": 0.7, "top_k": 9, "frequency_penalty": 0.5}]
    requests = [([1 + number, 7, 9] * (1 + 3 * number), options[number % 3], number) for number in range(6)]

    def generate(request):
        prompt, sampling, seed = request
        sampling = {**sampling, "sampling_seed": seed, "max_new_tokens": 30, "ignore_eos": True}
        return server.post("/generate", input_ids=prompt, sampling_params=sampling)["output_ids"]

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as threads:
        found = list(threads.map(generate, requests))
    for (prompt, sampling, seed), tokens in zip(requests, found, strict=True):
        acceptance = "auto" if sampling["temperature"] else "greedy"
        config = DecodeConfig(num_steps=2, max_new_tokens=30, acceptance=acceptance)
        sampling = SamplingParams(**sampling, seed=seed)
        assert tokens == speculative_generate(params, [prompt], model=model, config=config, sampling=sampling).rows()[0]
    # 2. A grammar, log-probabilities of a given text, and a stream.
    pytest.importorskip("llguidance")
    sampling = {"max_new_tokens": 10, "temperature": 0, "regex": "[0-9]+"}
    assert server.post("/generate", text="x", sampling_params=sampling)["text"].isdecimal()
    echo = {"prompt": "def f", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    assert len(server.post("/v1/completions", **echo)["choices"][0]["logprobs"]["tokens"]) == 6
    whole = server.post("/v1/completions", **{**LONG, "stream": False})["choices"][0]["text"]
    assert server.num_compilations() == 0
    # 3. SIGTERM in the middle of a stream, which goes on.
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
        texts = server.texts(response.iter_lines())
        first = next(texts)
        server.processes[0].send_signal(signal.SIGTERM)
        assert first + "".join(texts) == whole
    assert server.wait(30) == [0, 0], server.lines


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_other_with_one_line(start, checkpoint, rank):
    server = start(checkpoint, "--mesh", "tensor=4", "--skip-server-warmup").wait_until_ready()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=120) as response:
        lines = response.iter_lines()
        next(lines)
        server.processes[rank].kill()
        begin = time.monotonic()
        if rank:
            events = [line.removeprefix("data: ") for line in lines if line]
            assert json.loads(events[-1])["error"]["code"] == "engine_restarted"
        code = server.processes[1 - rank].wait(timeout=10)
    print(f"the other ended after {time.monotonic() - begin:.1f} s")
    assert code == 75, server.lines
    assert any("process" in line and "ended" in line for line in server.said(1 - rank)), server.lines


def test_a_process_that_is_told_to_end_drains_all(start, checkpoint):
    server = start(checkpoint, "--mesh", "tensor=4", "--skip-server-warmup").wait_until_ready()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=120) as response:
        texts = server.texts(response.iter_lines())
        next(texts)
        server.processes[1].send_signal(signal.SIGTERM)
        assert len("".join(texts)) > 40
    assert server.wait(30) == [0, 0], server.lines


def test_processes_with_other_flags_or_another_checkpoint_do_not_start(start, checkpoint, small, tmp_path):
    from mtpjax.io.checkpoint import save_model

    server = start(checkpoint, "--mesh", "tensor=4", of_follower=["--page-size", "16"])
    assert server.wait(120) == [2, 2]
    assert any("another --page-size (16; process 0 has 8)" in line for line in server.said(0)), server.lines
    save_model(tmp_path / "other", *small("grouped", "random", vocab_size=256))
    server = start(checkpoint, "--mesh", "tensor=4", of_follower=["--model", str(tmp_path / "other")])
    assert server.wait(120) == [2, 2]
    assert any("another checkpoint" in line for line in server.said(1)), server.lines


def test_experts_move_in_all_processes(start, small, tmp_path):
    from mtpjax.io.checkpoint import save_model

    save_model(tmp_path / "model", *small("latent", "mixed", vocab_size=256))
    flags = ["--mesh", "data=2,expert=2", "--precompile-bs-paddings", "2"]
    flags += ["--enable-eplb", "--eplb-rebalance-num-iterations", "3", "--ep-num-redundant-experts", "4"]
    server = start(tmp_path / "model", *flags).wait_until_ready()
    model, params = load(tmp_path / "model")
    config = DecodeConfig(num_steps=1, max_new_tokens=60, acceptance="greedy")
    for number in range(4):
        prompt = [1 + number, 7, 9] * (1 + number)
        sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
        tokens = server.post("/generate", input_ids=prompt, sampling_params=sampling)["output_ids"]
        assert tokens == speculative_generate(params, [prompt], model=model, config=config).rows()[0]
    info = httpx.get(f"{server.url}/server_info").json()["internal_states"][0]
    assert info["num_rebalancings"] >= 1, info
    assert server.num_compilations() == 0
    server.processes[0].send_signal(signal.SIGTERM)
    assert server.wait(30) == [0, 0], server.lines
