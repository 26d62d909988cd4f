"""Runs one case and judges its answer, in a separate process."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from experiments.common import ROOT
from experiments.correctness.hostile import chats, cpu_time, rewritten, streams
from experiments.correctness.hostile.cases import TRAIN

EXIT_CODES = (0, 1, 2, 3, 4, 75)
MAX_LINES = 3  # of an error, after any warnings


def fingerprint(folder: pathlib.Path, *, without: str) -> str:
    """Computes a digest of the names and contents of all files under a folder, except for one subfolder.

    Args:
        folder: the folder.
        without: name of the subfolder to leave out.

    Returns:
        A hexadecimal digest.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if without in path.relative_to(folder).parts[:1]:
            continue
        digest.update(str(path.relative_to(folder)).encode())
        if path.is_file() and not path.is_symlink():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def warm_up(sandbox: str) -> None:
    """Imports and compiles what ordinary requests use, so that no case is charged for this time and memory."""
    import mtpjax
    from mtpjax.cli.main import main
    from mtpjax.data.tokenizer import load_tokenizer

    for name in ("own", "hugging_face"):
        model, _ = mtpjax.load(pathlib.Path(sandbox) / name)
        load_tokenizer(pathlib.Path(sandbox) / name, model.config.vocab_size)
    # An ordinary training run, in a folder that is removed. Compiling it takes several hundred MB.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        paths = {"data": f"{sandbox}/text.txt", "output": f"{folder}/run"}
        pairs = [pair.partition("=") for pair in TRAIN[1:]]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main(["train", *(f"{name}={paths.get(name, value)}" for name, _, value in pairs)])


def serve(pipe: Any, sandbox: str) -> None:
    """Answers cases until the pipe ends."""
    warm_up(sandbox)
    pipe.send("ready")
    while True:
        pipe.send(run_case(pipe.recv(), sandbox))


def run_case(case: dict[str, Any], sandbox: str) -> dict[str, Any]:
    """Runs a case.

    Args:
        case: as `hostile_cases.draw` makes it.
        sandbox: the folder of the cases.

    Returns:
        The problem (or None), the seconds, and the number of bytes by which the process grew.
    """
    os.chdir(pathlib.Path(sandbox) / "out")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch = cpu_time.Stopwatch(os.getpid())
    # Warnings and errors of the library go to stderr, which is judged like the message of an exception.
    out, err = io.StringIO(), io.StringIO()
    problem = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            problem = ACTIONS[case["action"]](case, pathlib.Path(sandbox))
        except SystemExit as exit:
            problem = _judge_exit(exit.code, err.getvalue())
        except (ValueError, OSError, TypeError) as error:
            problem = _judge_error(error)
        except BaseException as error:
            problem = f"{type(error).__name__}: {traceback.format_exc()[-700:]}"
    seconds = watch.seconds()
    shown = out.getvalue() + err.getvalue()
    if problem is None and "Traceback (most recent call last)" in shown:
        problem = f"prints a traceback: {shown[-500:]}"
    # `generate` writes the model's text to a pipe unchanged, whatever characters the model chose.
    shown = err.getvalue() if case.get("arguments", [""])[0] == "generate" else shown
    if problem is None and any(not (char.isprintable() or char in "\n\t\r") for char in shown):
        problem = f"prints control characters: {shown[:300]!r}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"problem": problem, "seconds": seconds, "bytes": grown * 1024}


def _judge_exit(code: Any, err: str) -> str | None:
    if code not in EXIT_CODES:
        return f"exit code {code}"
    if code and not err.strip():
        return f"exit code {code} without a word"
    # argparse prints the usage before its message.
    message = err[err.rfind("error:") :] if "error:" in err else err
    if code and len(message.strip().splitlines()) > MAX_LINES:
        return f"an error of {len(message.strip().splitlines())} lines: {message[:300]}"
    return None


def _judge_error(error: Exception) -> str | None:
    """Judges an exception from the Python API: it must be one line, raised by our code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "mtpjax/" in frame.filename or "conversion/" in frame.filename]
    if len(str(error).strip().splitlines()) > MAX_LINES:
        return f"{type(error).__name__} of several lines: {str(error)[:300]}"
    # A setting with a wrong type may raise a TypeError if our code raises it, not a library that it calls.
    has_own_class = type(error).__module__.startswith("mtpjax")
    if not (has_own_class or isinstance(error, OSError) or (ours and frames[-1] is ours[-1])):
        return f"{type(error).__name__} from {frames[-1].name} in {frames[-1].filename.split('/')[-1]}: {error}"[:400]
    return None


def load(case: dict[str, Any], sandbox: pathlib.Path) -> None:
    """Loads the changed checkpoint and encodes a conversation with its tokenizer."""
    import mtpjax
    from mtpjax.data.tokenizer import load_tokenizer

    folder = write_changed(case, sandbox)
    model, _ = mtpjax.load(folder)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    tokenizer.decode(tokenizer.encode("a b"))
    if case["kind"] == "template":
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


def write_changed(case: dict[str, Any], sandbox: pathlib.Path) -> pathlib.Path:
    """Copies a checkpoint into the output folder, with one file replaced.

    Args:
        case: "base", a folder of the sandbox; "file" and "content" (text, or base64 of bytes under "bytes").
        sandbox: the folder of the cases.

    Returns:
        The copy.
    """
    import base64

    folder = pathlib.Path(tempfile.mkdtemp(dir=sandbox / "out")) / "checkpoint"
    shutil.copytree(sandbox / case["base"], folder)
    content = base64.b64decode(case["bytes"]) if "bytes" in case else case["content"].encode("utf-8", "surrogatepass")
    (folder / case["file"]).write_bytes(content)
    # Our own format records a digest of each file, which an attacker would update.
    digests = folder / "digests.json"
    if digests.exists() and case["file"] != "digests.json":
        record = json.loads(digests.read_text())
        record["files"][case["file"]] = hashlib.sha256(content).hexdigest()
        digests.write_text(json.dumps(record))
    return folder


def read_file(case: dict[str, Any], sandbox: pathlib.Path) -> None:
    """Reads one file by its suffix: a GGUF model, a draft vocabulary, or the settings of a training run."""
    import base64

    import mtpjax
    from mtpjax.data.draft_vocabulary import load_vocabulary
    from mtpjax.training.yaml_config import read_train_config

    file = pathlib.Path(tempfile.mkdtemp(dir=sandbox / "out")) / case["file"]
    file.write_bytes(base64.b64decode(case["bytes"]))
    readers: dict[str, Callable[[], Any]] = {
        ".gguf": lambda: mtpjax.load(file),
        ".json": lambda: load_vocabulary(file),
        ".yaml": lambda: read_train_config(str(file), []),
    }
    readers[file.suffix]()


def command(case: dict[str, Any], sandbox: pathlib.Path) -> str | None:
    """Runs a command line in this process."""
    from mtpjax.cli.main import main

    if "content" in case:
        (sandbox / "out" / case["file"]).write_bytes(case["content"].encode("utf-8", "surrogatepass"))
    main(case["arguments"])
    return "the command does not exit"


def python(case: dict[str, Any], sandbox: pathlib.Path) -> None:
    """Makes a settings object with a changed argument, and decodes with it."""
    import mtpjax

    values = {name: _value(text) for name, text in case["values"].items()}
    if case["class"] == "TrainConfig":
        from mtpjax.training.config import TrainConfig

        TrainConfig(**values)
        return
    if case["class"] == "ModelConfig":
        mtpjax.ModelConfig(**{**case["base"], **values})
        return
    model, params = mtpjax.load(sandbox / "own")
    config, sampling = mtpjax.DecodeConfig(max_new_tokens=3), None
    if case["class"] == "DecodeConfig":
        config = mtpjax.DecodeConfig(**{"max_new_tokens": 3, **values})
    else:
        sampling = mtpjax.SamplingParams(**values)
    mtpjax.speculative_generate(params, [[1, 2, 3]], model=model, config=config, sampling=sampling)


def _value(text: str) -> Any:
    """Evaluates one of the cases' expressions, such as `np.int64(3)`."""
    import numpy as np

    return eval(text, {"np": np, "object": object, "iter": iter})


def in_new_folder(
    action: Callable[[dict[str, Any], pathlib.Path], str | None],
) -> Callable[[dict[str, Any], pathlib.Path], str | None]:
    """Wraps an action so that it writes its files to an empty folder."""

    def run(case: dict[str, Any], sandbox: pathlib.Path) -> str | None:
        with tempfile.TemporaryDirectory(dir=sandbox / "out") as folder:
            return action(case, pathlib.Path(folder))

    return run


def full_disk(case: dict[str, Any], sandbox: pathlib.Path) -> str | None:
    """Replaces a checkpoint on a disk without enough space. The old checkpoint must stay complete."""
    disk = sandbox / "out" / "disk"
    disk.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={case['kilobytes']}k", "tmpfs", str(disk)])
    if mounted.returncode:
        return None  # no permission to mount here
    try:
        target = disk / "target"
        # The old checkpoint takes most of the disk.
        shutil.copytree(sandbox / "own", target)
        before = fingerprint(target, without="")
        with contextlib.suppress(OSError):
            (disk / "ballast").write_bytes(bytes(case["ballast"] * 1024))
        arguments = [str(target) if one == "TARGET" else one for one in case["arguments"]]
        done = _run(arguments, sandbox, seconds=50)
        if done is None:
            return "hangs"
        if "Traceback" in done.stderr or "Exception" in done.stderr:
            return f"prints a traceback: {done.stderr[-600:]}"
        if done.returncode and fingerprint(target, without="") != before:
            return f"exit code {done.returncode}, and what was there is damaged: {done.stderr[-300:]}"
        left = [path.name for path in disk.iterdir() if path.name not in ("target", "ballast")]
        return f"leaves {left} behind" if done.returncode and left else None
    finally:
        for _ in range(50):  # a killed process may still use the disk for a moment
            if not subprocess.run(["umount", str(disk)], stderr=subprocess.DEVNULL).returncode:
                break
            time.sleep(0.1)


def signalled(case: dict[str, Any], sandbox: pathlib.Path) -> str | None:
    """Ends a conversion over an existing checkpoint at a random moment. The old or new one must be complete."""
    import mtpjax

    folder = pathlib.Path(tempfile.mkdtemp(dir=sandbox / "out"))
    target = folder / "target"
    shutil.copytree(sandbox / "own", target)
    arguments = [str(target) if one == "TARGET" else one for one in case["arguments"]]
    done = _run(arguments, sandbox, seconds=50, signal_at=case["moment"], number=case["signal"])
    if done is None:
        return "hangs"
    if "Traceback" in done.stderr:
        return f"prints a traceback: {done.stderr[-600:]}"
    mtpjax.load(target)  # raises if it is damaged
    left = [path.name for path in folder.iterdir() if path != target]
    return f"leaves {left} behind" if left and case["signal"] != signal.SIGKILL else None


def _run(
    arguments: list[str], sandbox: pathlib.Path, *, seconds: float, signal_at: float | None = None, number: int = 0
) -> subprocess.CompletedProcess[str] | None:
    """Runs `mtpjax` in a separate process; returns None if it does not end."""
    command = [sys.executable, "-c", "from mtpjax.cli.main import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, cwd=sandbox / "out", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watch = cpu_time.Stopwatch(process.pid)
    if signal_at is not None:
        # The moment is measured in the command's own time, so that a seed hits the same stage on every machine.
        while process.poll() is None and watch.seconds() < signal_at:
            time.sleep(0.01)
        process.send_signal(number)
    while True:
        try:
            out, err = process.communicate(timeout=1)
            break
        except subprocess.TimeoutExpired:
            if watch.seconds() > seconds:
                process.kill()
                process.communicate()
                return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


ACTIONS: dict[str, Callable[[dict[str, Any], pathlib.Path], str | None]] = {
    "load": load,
    "read_file": read_file,
    "command": command,
    "python": python,
    "full_disk": full_disk,
    "signalled": signalled,
    "rewritten": in_new_folder(rewritten.rewritten),
    "streamed": in_new_folder(streams.streamed),
    "rendered": in_new_folder(chats.rendered),
}
