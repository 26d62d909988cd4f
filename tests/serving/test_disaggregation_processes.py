"""A prefill server, a decode server and a router as processes of their own, and what clients see when one is killed."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

pytestmark = pytest.mark.slow
PROMPT = "the quick brown fox jumps over the lazy dog again and again"
NUM_CACHED = (len(PROMPT) - 1) // 8 * 8
KEY = {"Authorization": "Bearer a-key"}
SIZES = ["--page-size", "8", "--max-running-requests", "2", "--skip-server-warmup", "--enable-metrics"]


class Process:
    """A command that prints where it listens."""

    def __init__(self, *arguments, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mtpjax.cli.main", *arguments, "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        lines = queue.Queue()
        threading.Thread(target=lambda: lines.put(self.process.stdout.readline()), daemon=True).start()
        line = lines.get(timeout=120)
        self.url = next(word for word in line.replace(": ", " ").split() if word.startswith("http"))

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def complete(self, prompt=PROMPT, **fields):
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
        response = httpx.post(f"{self.url}/v1/completions", json=body, headers=KEY, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    def counter(self, name):
        [line] = [
            each
            for each in httpx.get(f"{self.url}/metrics", headers=KEY).text.splitlines()
            if each.startswith(name + "{")
        ]
        return float(line.split()[-1])


@pytest.mark.parametrize("backend", ["jax", "http"])
def test_servers_in_processes_and_their_deaths(checkpoint, backend):
    if backend == "jax":
        transfer = pytest.importorskip("jax.experimental.transfer")
        if not hasattr(transfer, "start_transfer_server"):
            pytest.skip("this jax has no transfer server")
    secret = {"MTPJAX_DISAGGREGATION_SECRET": "0123456789abcdef", "MTPJAX_API_KEY": "a-key"}
    serve = ["serve", "--model", str(checkpoint), *SIZES, "--disaggregation-transfer-backend", backend]
    with contextlib.ExitStack() as stack:

        def start(*arguments, **environment):
            process = Process(*arguments, **environment)
            stack.callback(process.kill)
            return process

        prefill = start(*serve, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0", **secret)
        by_name = prefill.url.replace("127.0.0.1", "localhost")
        as_decode = ["--disaggregation-mode", "decode", "--disaggregation-prefill-url", by_name]
        decode = start(*serve, *as_decode, **secret)
        router = start("serve-router", "--decode-urls", decode.url)
        # 1. The prefill server alone is a single server: text and acceptance are equal.
        single, answer = prefill.complete(cache_salt="its own pages"), router.complete()
        assert answer["choices"][0]["text"] == single["choices"][0]["text"] != ""
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_CACHED
        assert single["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["metrics"]["speculative_decoding"] == single["metrics"]["speculative_decoding"]
        assert sum(answer["metrics"]["speculative_decoding"]["accepted_per_level"]) > 0
        assert decode.counter("mtpjax:remote_prefills_total") == 1
        assert decode.counter("mtpjax:received_pages_total") == NUM_CACHED / 8
        # The router passes keys on, and a key is not the secret for pages.
        assert httpx.post(f"{router.url}/v1/completions", json={}).status_code == 401
        assert httpx.post(f"{prefill.url}/disaggregation/prefill", content=b"x", headers=KEY).status_code == 403
        # 2. The prefill server dies while it has a request.
        other = PROMPT[::-1]
        expected = prefill.complete(other)["choices"][0]["text"]
        prefill.stop()
        answers = queue.Queue()
        threading.Thread(target=lambda: answers.put(router.complete(other)), daemon=True).start()
        time.sleep(0.5)
        assert answers.empty()
        prefill.kill()
        assert answers.get(timeout=5)["choices"][0]["text"] == expected
        assert decode.counter("mtpjax:prefill_fallbacks_total") == 1
        # 3. The decode server dies while it streams.
        body = {"prompt": "x", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body, headers=KEY, timeout=5) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            decode.stop()
            decode.kill()
            begin = time.monotonic()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert time.monotonic() - begin < 5
        assert json.loads(events[-1])["error"]["code"] == "server_lost"
        assert httpx.post(f"{router.url}/v1/completions", json=body, headers=KEY).status_code == 503
