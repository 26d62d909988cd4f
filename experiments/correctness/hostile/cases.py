"""The cases. Each is a valid request with one hostile change that a seed determines."""

import base64
import json
import os
import pathlib
import random
import shutil
import signal
import struct
from collections.abc import Callable
from typing import Any

import jax

import mtpjax
from experiments.correctness.hostile import chats, rewritten, streams
from experiments.correctness.hostile import files as hostile_files
from experiments.correctness.hostile.json_values import ESCAPE, change_json
from mtpjax.io.checkpoint import save_model

MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "num_mtp_modules": 1,
}
OUTPUT = "out"  # the only folder of the sandbox that a case may change
FLAG_VALUES = (
    *(
        "",
        "-1",
        "0",
        "1.5",
        "nan",
        "1e400",
        "99999999999999999999",
        "true",
        "null",
        "[1,2",
        "{'a': 1}",
        "x",
        "é" * 3000,
    ),
    *("/dev/zero", "/dev/full", "/nonexistent/deep/path", "../fifo", ESCAPE, "-"),
)
INPUTS = ("../own", "../own/config.json", "../text.txt")  # passed instead of other inputs, but not instead of outputs
TEMPLATES = (
    "{{ 1 / 0 }}",
    "{{ messages[99]['content'] }}",
    "{{ messages.nothing.at.all }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10 ** 10 ** 8 }}",
    "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{{ 'x' | indent(10**9) }}",
    "{{ [1] * 10**9 }}",
    "{{ messages | tojson(indent=10**8) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now(1) }}",
    "{{ undefined_function() }}",
    "{% include '/etc/passwd' %}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if %}",
    "{{ 1 + 'a' }}",
    "{{ '%d' % 'x' }}",
    ESCAPE,
)
COMMANDS = (
    ["inspect", "../own"],
    ["inspect", "../hugging_face", "--json"],
    ["convert", "../own", "converted"],
    ["convert", "--dtype", "bfloat16", "../hugging_face", "converted"],
    ["export-mtp", "--input-dir", "../hugging_face", "--output-dir", "exported"],
    ["merge-mtp", "--input-dir", "../hugging_face", "--mtp-dir", "../hugging_face", "--output-dir", "merged"],
    ["generate", "--model-path", "../own", "--prompt", "a", "--max-new-tokens", "3", "--num-steps", "2"],
    ["generate", "--model-path", "../own", "--prompt", "a", "--max-new-tokens", "3", "--temperature", "0.5"],
    ["vocabulary", "--model-path", "../own", "--data", "../text.txt", "--size", "64", "--output", "vocabulary.json"],
    ["compare", "../own", "../hugging_face"],
    ["regenerate", "--model-path", "../own", "--data", "../text.txt", "--max-new-tokens", "3", "--output", "r.jsonl"],
)
TRAIN = [
    "train",
    "preset=tiny",
    "steps=1",
    "output=run",
    "row_length=32",
    "batch_size=2",
    "data=../text.txt",
    "panel_prompts=1",
]
PYTHON_VALUES = (
    *(
        "None",
        "True",
        "-1",
        "0",
        "1.5",
        "'8'",
        "''",
        "float('nan')",
        "float('inf')",
        "2**31",
        "2**63",
        "2**70",
        "[]",
        "{}",
    ),
    *(
        "object()",
        "iter([1, 2])",
        "[1, 'a']",
        "np.int64(3)",
        "np.float32(0.5)",
        "np.zeros(3)",
        "np.zeros((2, 2))",
        "b'x'",
    ),
)


def make_sandbox(folder: pathlib.Path) -> pathlib.Path:
    """Makes the folder that all cases share, with two valid checkpoints, a text, a named pipe and an output folder.

    Args:
        folder: an empty folder.

    Returns:
        The sandbox.
    """
    sandbox = folder / "sandbox"
    (sandbox / OUTPUT).mkdir(parents=True)
    config = mtpjax.ModelConfig(**MODEL)
    model = mtpjax.MTPModel(config)
    save_model(sandbox / "own", model, mtpjax.init_params(model, jax.random.key(0)), metadata={"tokenizer": "bytes"})
    golden, ignored = rewritten.GOLDEN / "qwen3", shutil.ignore_patterns("expected*")
    shutil.copytree(golden, sandbox / "hugging_face", ignore=ignored)
    words = {f"{index:c}": index - 32 for index in range(33, 127)} | {"[UNK]": 0}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [],
    }
    (sandbox / "hugging_face/tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "!", "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    (sandbox / "hugging_face/tokenizer_config.json").write_text(json.dumps(settings))
    (sandbox / "hugging_face/generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    (sandbox / "text.txt").write_text("A text of several words.\n\n" * 40)
    os.mkfifo(sandbox / "fifo")
    return sandbox


def draw(kind: str, rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    """Draws a case.

    Args:
        kind: one of `KINDS`.
        rng: the source of randomness.
        sandbox: from `make_sandbox`.

    Returns:
        The case as JSON values: "kind", "what" (for people), "action", and what the action needs.
    """
    return {"kind": kind, **KINDS[kind](rng, sandbox)}


def _file_case(base: str, file: str, rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    content, what = change_json((sandbox / base / file).read_text(), rng)
    return {"what": f"{base}/{file}: {what}", "action": "load", "base": base, "file": file, "content": content}


def _config(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    base, files = rng.choice(
        [("own", ["config.json", "digests.json"]), ("hugging_face", ["config.json", "model.safetensors.index.json"])]
    )
    return _file_case(base, rng.choice([files[0], *files]), rng, sandbox)


def _tokenizer(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    file = rng.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    return _file_case("hugging_face", file, rng, sandbox)


def _template(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    template = rng.choice(TEMPLATES)
    case = {"what": f"template {template[:50]!a}", "action": "load", "base": "hugging_face"}
    return {**case, "file": "chat_template.jinja", "content": template}


def _header(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    files = sorted((sandbox / "hugging_face").glob("*.safetensors"))
    file = rng.choice(files)
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, what = change_json(content[8 : 8 + length].decode(), rng)
    changed = header.encode("utf-8", "surrogatepass")
    # Sometimes the length is wrong too, or the file ends early.
    wrong = rng.choice([None] * 6 + [0, 2**40, 2**63, len(changed) // 2])
    whole = struct.pack("<Q", len(changed) if wrong is None else wrong) + changed + content[8 + length :]
    if rng.random() < 0.1:
        whole, what = whole[: rng.randrange(len(whole))], what + ", cut"
    what = f"{file.name}: {what}" + ("" if wrong is None else f", length {wrong}")
    case = {"what": what, "action": "load", "base": "hugging_face", "file": file.name}
    return {**case, "bytes": base64.b64encode(whole).decode()}


def _command(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    arguments = list(rng.choice(COMMANDS))
    place = rng.randrange(1, len(arguments))
    # The last argument is an output or harmless.
    arguments[place] = rng.choice(FLAG_VALUES if place == len(arguments) - 1 else (*FLAG_VALUES, *INPUTS))
    # A command line can contain everything except null bytes.
    return {
        "what": f"mtpjax {' '.join(arguments)[:100]!a}",
        "action": "command",
        "arguments": arguments,
        "is_slow": True,
    }


def _train(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    arguments = list(TRAIN)
    names = ("steps", "seconds", "row_length", "batch_size", "seed", "learning_rate", "num_depths", "data", "output")
    name, value = rng.choice([*names, "preset", "save_every", "nosuch", "clip_norm"]), rng.choice(FLAG_VALUES)
    arguments = [one for one in arguments if not one.startswith(f"{name}=")] + [f"{name}={value}"]
    what = f"mtpjax train {name}={value[:40]!a}"
    return {"what": what, "action": "command", "arguments": arguments, "is_slow": True}


def _record(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    record = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "id": 1}
    texts = [json.dumps(record), '{"text": "plain"}', '{"conversations": [{"from": "human", "value": "a"}]}']
    changed, what = change_json(rng.choice(texts), rng)
    content = "\n".join([*texts, changed, rng.choice(["", "\x00", "\ud800", "not json", "[1]", "5"])])
    arguments = [
        "vocabulary",
        "--model-path",
        "own",
        "--data",
        "out/data.jsonl",
        "--size",
        "64",
        "--output",
        "out/v.json",
    ]
    case = {"what": f"a record: {what}", "action": "command", "arguments": arguments, "is_slow": True}
    return {**case, "file": "data.jsonl", "content": content}


def _python(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    import dataclasses

    from mtpjax.training.config import TrainConfig

    classes = (mtpjax.DecodeConfig, mtpjax.SamplingParams, mtpjax.ModelConfig, TrainConfig)
    chosen = rng.choice(classes)
    field = rng.choice([field.name for field in dataclasses.fields(chosen)])
    value = rng.choice(PYTHON_VALUES)
    what = f"{chosen.__name__}({field}={value})"
    case = {"what": what, "action": "python", "class": chosen.__name__, "values": {field: value}}
    return {**case, "base": MODEL, "is_slow": True}


def _full_disk(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    arguments = ["convert", f"../{rng.choice(['hugging_face', 'own'])}", "TARGET"]
    size, ballast = 2048, rng.randrange(0, 1900)
    what = f"{' '.join(arguments)} with {ballast} of {size} KiB taken"
    return {
        "what": what,
        "action": "full_disk",
        "arguments": arguments,
        "kilobytes": size,
        "ballast": ballast,
        "is_slow": True,
    }


def _signal(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
    moment = round(rng.uniform(0.05, 6), 2)
    case = {"what": f"convert, {number.name} after {moment} s", "action": "signalled", "signal": int(number)}
    return {**case, "moment": moment, "arguments": ["convert", "../hugging_face", "TARGET"], "is_slow": True}


KINDS: dict[str, Callable[[random.Random, pathlib.Path], dict[str, Any]]] = {
    "config": _config,
    "header": _header,
    "tokenizer": _tokenizer,
    "template": _template,
    "record": _record,
    "command": _command,
    "train": _train,
    "python": _python,
    "full_disk": _full_disk,
    "signal": _signal,
    **hostile_files.KINDS,
    "rewritten": rewritten.draw,
    "streamed": streams.draw,
    "rendered": chats.draw,
}
