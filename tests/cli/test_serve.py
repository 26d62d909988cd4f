"""`mtpjax serve` as a process: the ready line, exit codes, signals, and what it leaves behind.

Numbers in the docstrings are those of the list of server tests.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

import httpx

from mtpjax.cli import flag_checks, serve_flags
from mtpjax.cli import serve as serve_command
from mtpjax.cli.expert_flags import read_expert_counts
from mtpjax.cli.main import main
from mtpjax.cli.serve_settings import engine_sizes
from mtpjax.decoding.config import DecodeConfig
from mtpjax.drafters.methods import save_drafter
from mtpjax.errors import UsageError
from tests.helpers.small_models import constructed_drafter

SIZES = ("--max-running-requests", "2", "--context-length", "128", "--precompile-bs-paddings", "2")
QUICK = (*SIZES, "--skip-server-warmup", "--port", "0")
START_SECONDS = 120
SLOW_CALLS = """
import sys, time
from mtpjax.serving.executor import Executor
call = Executor.{name}
def call_slowly(*arguments):
    time.sleep({seconds})
    return call(*arguments)
Executor.{name} = call_slowly
from mtpjax.cli.main import main
main(sys.argv[1:])
"""


class Server:
    """A process of `mtpjax serve`, and the lines that it printed."""

    def __init__(self, checkpoint, *flags, code=None, environment=(), cwd=None):
        start = ["-m", "mtpjax.cli.start"] if code is None else ["-c", code]
        command = [sys.executable, *start, "serve", "--model-path", str(checkpoint), *flags]
        environment = os.environ | {"PYTHONPATH": os.getcwd()} | dict(environment)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, cwd=cwd, text=True, **pipes)
        self.errors, self.address, self.ready_line = "", "", ""

    def wait_until_ready(self):
        """Waits for the ready line; returns the address."""
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if " is ready at " not in line:
            self.process.kill()
            raise AssertionError(line + self.process.communicate()[1])
        self.ready_line = line
        self.address = line.split(" is ready at ")[1].split(": ")[0]
        return self.address

    def end(self, number=None, seconds=60):
        """Sends a signal, and returns the exit code."""
        if number is not None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=seconds)
        self.errors += errors
        return self.process.returncode


@pytest.fixture
def serve(checkpoint, tmp_path):
    """`serve(*flags)` -> a `Server`, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*flags, **options):
            server = Server(checkpoint, *flags, **options)
            stack.callback(server.process.communicate)
            stack.callback(server.process.kill)
            return server

        yield start


def complete(address, seconds=60, **body):
    body = {"prompt": "Hi", "temperature": 0, "ignore_eos": True, "max_tokens": 100, **body}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=seconds)


def test_a_server_starts_drains_and_leaves_nothing_behind(serve, tmp_path):
    """49: a stream that runs at SIGTERM ends as it should; --port 0; the name of the model and the address."""
    server = serve(*QUICK, cwd=tmp_path)
    address = server.wait_until_ready()
    expected = complete(address).json()["choices"][0]["text"]
    body = {"prompt": "Hi", "temperature": 0, "ignore_eos": True, "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        lines = [first, *lines]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected
    assert server.end() == 0, server.errors
    assert "Traceback" not in server.errors
    # The port is free, and no file was written.
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as again:
        again.bind((host, int(port)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--made-up"], 2, "unknown flag --made-up"),
        (["--prot", "1"], 2, "did you mean --port?"),
        (["--enable-lora"], 2, "is a flag of SGLang that mtpjax does not support"),
        (["--port", "http"], 2, "--port"),
        (["--context-length", "1"], 2, "max_length must be at least 2"),
        (["--context-length", "0"], 2, "max_length must be at least 2, got 0"),
        (["--hicache-size", "8"], 2, "--hicache-size has no effect without --enable-hierarchical-cache"),
        (["--enable-hierarchical-cache", "--disable-radix-cache"], 2, "no effect with --disable-radix-cache"),
        (
            ["--speculative-algorithm", "none", "--num-steps", "2", "--topk", "2"],
            2,
            "--num-steps has no effect with --speculative-algorithm NONE; --topk has no effect with",
        ),
        (["--speculative-algorithm", "EAGLE4"], 2, "got EAGLE4: did you mean EAGLE?"),
        (["--speculative-algorithm", "medusa"], 2, "MEDUSA needs --speculative-draft-model-path"),
        (
            ["--speculative-algorithm", "NGRAM", "--speculative-draft-model-path", "x"],
            2,
            "NGRAM uses no drafter files",
        ),
        (["--nnodes", "2", "--speculative-draft-model-path", "x"], 2, "needs a single-process server"),
        (["--tp-size", "8", "--ep-size", "3"], 2, "--ep-size (3) must divide --tp-size (8)"),
        (["--enable-eplb"], 2, "--enable-eplb needs experts sharded over several devices"),
        (["--enable-eplb", "--mesh", "expert=2"], 2, "the model has no routed experts"),
        (["--eplb-rebalance-num-iterations", "0"], 2, "--eplb-rebalance-num-iterations must be at least 1, got 0"),
        (["--eplb-algorithm", "x"], 2, "is a flag of SGLang that mtpjax does not support"),
        (["--ep-num-redundant-experts", "2"], 2, "the model has no routed experts"),
        (["--acceptance", "threshold"], 2, "use --allow-lossy"),
        (["--wait-for-warm-up"], 2, "--wait-for-warm-up and --skip-server-warmup cannot be combined"),
        (["--tokenizer-path", "/no/such/folder"], 3, "/no/such/folder"),
        (["--chat-template", "/no/such/file"], 2, "/no/such/file"),
        (["--chat-template", "README.md"], 3, "has no tokenizer.json, which a chat template needs"),
    ],
)
def test_wrong_flags_are_one_line_and_an_exit_code(checkpoint, capsys, flags, code, message):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model-path", str(checkpoint), "--skip-server-warmup", *flags])
    assert ended.value.code == code
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "--enable-lora --max_model_len=4096 --trust-remote-code --made-up x",
            (
                "--enable-lora is a flag of SGLang that mtpjax does not support: merge the adapter into the weights",
                "--max-model-len is a flag of vLLM that mtpjax does not support: use --context-length",
                "--trust-remote-code is a flag of SGLang that mtpjax does not support: remove it",
                "unknown flag --made-up",
            ),
        ),
        (
            "--disable-cuda-graph --enable-torch-compile --disable-cuda-graph",
            ("--disable-cuda-graph, --enable-torch-compile are flags of SGLang that mtpjax does not support: ",),
        ),
        ("--tensor-parallel-size 8 -tp 8", ("of SGLang", "-tp is a flag of vLLM that mtpjax does not support: use")),
        (
            "--port http --page-size=x --log-level loud --hicache-size 1,5 --gpu-memory-utilization 0.9",
            (
                "--port must be an integer, got http",
                "--page-size must be an integer, got x",
                "--log-level must be one of debug, info, warning, error, got loud",
                "--hicache-size must be a number, got 1,5",
                "use --mem-fraction-static",
            ),
        ),
    ],
)
def test_all_wrong_flags_are_named_at_once(line, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model-path", "no/model", *line.split()])
    assert ended.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    for each in told:
        assert message.count(each) == 1


def test_advice_names_flags_that_there_are():
    known = serve_flags.make_parser()._option_string_actions
    for name, advice in (flag_checks.SGLANG_ADVICE | flag_checks.VLLM_ADVICE).items():
        assert name not in known and all(flag in known for flag in re.findall(r"--[a-z-]+", advice)), name
    assert flag_checks.SGLANG_ADVICE.keys() <= flag_checks.sglang_flags()
    assert not flag_checks.VLLM_ADVICE.keys() & flag_checks.sglang_flags()


def test_right_flags_pass_the_check():
    line = ["--max_running_requests", "8", "--dp-size=-1", "--precompile-bs-paddings", "1", "4", "--enable-metrics"]
    expected = ["--max-running-requests", *line[1:]]
    own = ["--model-path", "m", "--api-key", "a=b"]
    assert flag_checks.check_flags([*line, *own], serve_flags.make_parser()) == [*expected, *own]


@pytest.mark.parametrize(
    ("flags", "mesh"),
    [
        ([], ""),
        (["--mesh", "expert=2"], "expert=2"),
        (["--tp-size", "8"], "data=1,tensor=8"),
        (["--tp-size", "8", "--dp-size", "4", "--enable-dp-attention"], "data=4,tensor=2"),
        (["--tp-size", "8", "--ep-size", "4"], "data=1,expert=4,tensor=2"),
        (["--tp-size", "8", "--ep-size", "8"], "data=1,expert=8,tensor=1"),
        (["--tp-size", "8", "--ep-size", "4", "--dp-size", "2", "--enable-dp-attention"], "data=2,expert=2,tensor=2"),
    ],
)
def test_sizes_with_sglang_s_names_are_a_mesh(flags, mesh):
    options = serve_flags.make_parser().parse_args(["--model-path", "model", *flags])
    assert serve_command._mesh_text(options) == mesh


@pytest.mark.parametrize("length", [None, 100, 256, 257, 100_000])
def test_a_context_beyond_the_model_is_told_with_both_numbers(length, small, caplog):
    model, params = small("grouped", "mixed", vocab_size=256)
    assert model.config.max_position_embeddings == 256
    line = ["--model-path", "model", "--max-total-tokens", "512"]
    line += [] if length is None else ["--context-length", str(length)]
    options = serve_flags.make_parser().parse_args(line)
    settings = engine_sizes(options, params, model=model, config=DecodeConfig(), uses_host=False)
    assert settings.max_length == length
    messages = [record.getMessage() for record in caplog.records]
    if length is None or length <= 256:
        assert not messages
    else:
        assert f"--context-length {length} exceeds the model's maximum length of 256 tokens" in messages[0]
        assert "a text has at most 256 tokens" in messages[0]


def test_counts_of_experts_are_read_from_a_file(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": [[0, 0], [3, 1.5]]}))
    assert read_expert_counts(str(path)) == {"layer_0": [0, 0], "layer_1": [3, 1.5]}
    assert read_expert_counts("trivial") is None
    for wrong in ([], {}, {"logical_count": [1]}, {"logical_count": [["a"]]}, {"logical_count": [[-1]]}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match="must have a list of numbers for each layer"):
            read_expert_counts(str(path))


def test_a_missing_model_is_one_line_and_exit_code_3(tmp_path, capsys):
    """51."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model-path", str(tmp_path / "missing")])
    assert ended.value.code == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_port_in_use_is_one_line_and_exit_code_2(checkpoint, capsys):
    """51."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as ended:
            flags = [*SIZES, "--skip-server-warmup", "--port", str(taken.getsockname()[1])]
            main(["serve", "--model-path", str(checkpoint), *flags])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "cannot listen on 127.0.0.1" in last and "in use" in last


def test_a_pool_beyond_memory_ends_with_exit_code_5_and_advice(checkpoint, capsys):
    """45: at the start."""
    with pytest.raises(SystemExit) as ended:
        flags = [*SIZES, "--skip-server-warmup", "--max-total-tokens", str(2**41)]
        main(["serve", "--model-path", str(checkpoint), *flags])
    assert ended.value.code == 5
    [line] = capsys.readouterr().err.splitlines()
    assert "lower --max-total-tokens" in line


@pytest.mark.slow
def test_the_key_comes_from_the_environment(serve):
    address = serve(*QUICK, environment={"MTPJAX_API_KEY": "secret, other"}).wait_until_ready()
    assert httpx.get(f"{address}/health").status_code == 200
    for key, status in (("wrong", 401), ("secret", 200), ("other", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{address}/v1/models", headers=headers).status_code == status


@pytest.fixture(scope="module")
def drafters(small, tmp_path_factory):
    """Folders of a drafter of each kind for `checkpoint`."""
    folder = tmp_path_factory.mktemp("drafters")
    for kind, form in (
        ("eagle3", "speculators"),
        ("medusa", "vllm"),
        ("dflash", "z-lab"),
        ("dspark", "speculators"),
    ):
        drafter, draft_params = constructed_drafter(kind, *small("grouped", "mixed", vocab_size=256))
        save_drafter(folder / kind, drafter, draft_params, format=form)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "kind", "name"),
    [
        (["--speculative-algorithm", "EAGLE"], "eagle3", "EAGLE3"),
        ([], "medusa", "MEDUSA"),
        (["--speculative-algorithm", "dflash", "--speculative-disable-by-batch-size", "4"], "dflash", "DFLASH"),
        (["--speculative-dspark-confidence-threshold", "0.4"], "dspark", "DSPARK"),
    ],
)
def test_a_drafter_in_files_of_its_own(serve, drafters, flags, kind, name):
    server = serve(*QUICK, *flags, "--speculative-draft-model-path", str(drafters / kind))
    address = server.wait_until_ready()
    assert server.ready_line.rstrip().endswith(f"drafts by {name}")
    # Programs are compiled at their first use.
    text = complete(address, seconds=300).json()["choices"][0]["text"]
    assert complete(address, seconds=300, speculative=False).json()["choices"][0]["text"] == text
    info = httpx.get(f"{address}/server_info").json()
    assert (info["speculative_algorithm"], info["speculative_num_steps"]) == (name, 3)
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1
    assert server.end(signal.SIGTERM) == 0, server.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags", "code", "message"),
    [
        ("medusa", ["--speculative-algorithm", "EAGLE"], 2, "--speculative-algorithm is EAGLE, but"),
        ("medusa", ["--num-steps", "4"], 2, "exceeds the 3 Medusa heads"),
        ("dflash", ["--num-steps", "4"], 2, "exceeds the 3 drafts of a DFlash block"),
        ("dflash", ["--topk", "2"], 2, "DFlash drafts chains only"),
        ("dspark", ["--speculative-dspark-confidence-threshold", "2"], 2, "must be within 0..1"),
        (
            "dspark",
            ["--speculative-dspark-confidence-threshold", "0.4", "--speculative-adaptive"],
            2,
            "both choose the depth",
        ),
    ],
)
def test_a_drafter_that_does_not_fit_is_one_line(checkpoint, drafters, capsys, kind, flags, code, message):
    with pytest.raises(SystemExit) as ended:
        path = ["--speculative-draft-model-path", str(drafters / kind)]
        main(["serve", "--model-path", str(checkpoint), "--skip-server-warmup", *path, *flags])
    assert ended.value.code == code
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_sigkill_closes_all_connections_and_frees_the_port(serve, tmp_path):
    """48: nobody waits for an answer that never comes."""
    server = serve(*QUICK, code=SLOW_CALLS.format(name="advance", seconds=0.2), cwd=tmp_path)
    address = server.wait_until_ready()
    ended = []

    def wait():
        try:
            ended.append(complete(address))
        except httpx.TransportError as error:
            ended.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for_load(address, 4)
    begin = time.monotonic()
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    for thread in threads:
        thread.join(timeout=5)
    assert len(ended) == 4 and all(isinstance(each, httpx.TransportError) for each in ended)
    assert time.monotonic() - begin < 5
    assert not list(tmp_path.iterdir())
    port = address.rpartition(":")[2]
    assert serve(*QUICK[:-1], port).wait_until_ready() == address


def wait_for_load(address, count, seconds=60):
    """Waits until the server has this many requests."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = httpx.get(f"{address}/server_info").json()["internal_states"][0]
        if state["num_running_reqs"] + state["num_queue_reqs"] >= count:
            return
        time.sleep(0.05)
    raise AssertionError("the requests do not arrive")


@pytest.mark.slow
def test_at_sigterm_each_of_twenty_streams_gets_an_end(serve):
    """49: two run and 18 wait; those that do not end in time get what they have so far. New ones get 503."""
    server = serve(*QUICK, "--drain-timeout", "2", code=SLOW_CALLS.format(name="advance", seconds=0.1))
    address = server.wait_until_ready()
    complete(address, max_tokens=2)
    ends = []

    def read():
        body = {"prompt": "Hi", "temperature": 0, "ignore_eos": True, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
            lines = [line for line in response.iter_lines() if line]
        ends.append(lines[-1])

    threads = [threading.Thread(target=read) for _ in range(20)]
    for thread in threads:
        thread.start()
    wait_for_load(address, 20)
    with httpx.Client(base_url=address) as client:
        assert client.get("/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        # A connection that is open goes on; it hears that the server ends.
        statuses = [client.get("/ready").status_code, client.get("/health").status_code]
    for thread in threads:
        thread.join(timeout=60)
    assert server.end() == 0, server.errors
    assert ends == ["data: [DONE]"] * 20
    assert statuses == [503, 200]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_warm_up_ends_the_server_quickly(serve, number):
    """50."""
    server = serve("--port", "0", "--max-running-requests", "64", "--context-length", "200")
    time.sleep(12)  # it compiles
    begin = time.monotonic()
    code = server.end(number)
    assert time.monotonic() - begin < 20
    assert code in (-signal.SIGTERM, 130, 0), server.errors
    assert "Traceback" not in server.errors


@pytest.mark.slow
def test_a_server_that_compiles_while_requests_run_ends_in_order(serve):
    """The thread that compiles cannot be interrupted, and must not crash the process."""
    server = serve("--port", "0", "--max-running-requests", "64", "--context-length", "200")
    assert complete(server.wait_until_ready(), max_tokens=3).status_code == 200
    begin = time.monotonic()
    assert server.end(signal.SIGTERM) == 0, server.errors
    assert time.monotonic() - begin < 10
    assert "compiling 1/" in server.errors and "Traceback" not in server.errors


@pytest.mark.slow
def test_a_second_start_compiles_nothing(serve, tmp_path):
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "true", "XDG_CACHE_HOME": str(tmp_path)}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    kept, texts = [], []
    for _ in range(2):
        server = serve(*SIZES, "--wait-for-warm-up", "--port", "0", environment=environment)
        texts.append(complete(server.wait_until_ready()).json()["choices"][0]["text"])
        assert server.end(signal.SIGTERM) == 0, server.errors
        files = (tmp_path / "mtpjax" / "compiled").glob("*/*-cache")
        kept.append({path.name: path.stat().st_mtime_ns for path in files})
    assert texts[0] == texts[1] and kept[0] == kept[1]
    assert len(kept[0]) > 10


@pytest.mark.slow
def test_a_second_interrupt_ends_running_requests(serve):
    """50: the first one lets them end."""
    server = serve(*QUICK, code=SLOW_CALLS.format(name="advance", seconds=0.5))
    address = server.wait_until_ready()
    complete(address, max_tokens=2)
    body = {"prompt": "Hi", "temperature": 0, "ignore_eos": True, "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        with contextlib.suppress(httpx.TransportError):
            list(lines)
    assert server.end() in (0, 130), server.errors
    assert time.monotonic() - begin < 10  # all tokens would take 25 s


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,), (signal.SIGINT,) * 2])
def test_signals_end_an_idle_server_quickly(serve, numbers):
    """50."""
    server = serve(*QUICK)
    server.wait_until_ready()
    begin = time.monotonic()
    for number in numbers:
        server.process.send_signal(number)
        time.sleep(0.05)
    code = server.end()
    assert time.monotonic() - begin < 10
    assert code == (0 if signal.SIGTERM in numbers else 130), server.errors
    assert "Traceback" not in server.errors


@pytest.mark.slow
def test_a_hang_makes_the_server_unhealthy_shows_the_stacks_and_ends_it(serve):
    """47."""
    server = serve(*QUICK, "--watchdog-timeout", "6", code=SLOW_CALLS.format(name="admit", seconds=1000))
    address = server.wait_until_ready()
    assert httpx.get(f"{address}/health").status_code == 200

    def ask():
        with contextlib.suppress(httpx.TransportError):
            complete(address, seconds=120)

    # It enters when its programs are compiled, and hangs.
    threading.Thread(target=ask).start()
    statuses = set()
    with contextlib.suppress(httpx.TransportError):
        while True:
            statuses.add(httpx.get(f"{address}/health").status_code)
            time.sleep(0.1)
    assert server.end() == 1
    assert statuses == {200, 503}
    assert "call_slowly" in server.errors and "the server ends" in server.errors


@pytest.mark.slow
def test_standard_output_on_a_full_disk_does_not_stop_the_server(checkpoint):
    """51: the ready line and the log are lost, and requests are answered."""
    if not pathlib.Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mtpjax.cli.start", "serve", "--model-path", str(checkpoint), *QUICK[:-1]]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*command, str(port)], stdout=full, stderr=full)
    try:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                    break
            time.sleep(0.2)
        assert complete(f"http://127.0.0.1:{port}", max_tokens=3).status_code == 200
    finally:
        process.terminate()
        process.wait(timeout=60)
