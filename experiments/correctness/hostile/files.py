"""Cases with a single file: GGUF, a draft vocabulary, or the settings of a training run."""

import base64
import json
import pathlib
import random
import struct
from collections.abc import Callable
from typing import Any

from experiments.correctness.hostile.json_values import ESCAPE, JSON_VALUES, change_json

HUGE = (2**31, 2**40, 2**63, 2**64 - 1)
VOCABULARY = {"format": "mtpjax-vocabulary", "ids": [0, 3, 7], "vocab_size": 64, "source": "x", "sizes": {"3": 0.5}}
SETTINGS = {
    "preset": "tiny",
    "steps": 3,
    "model": {"hidden_size": 32, "num_mtp_modules": 1},
    "objective": {"mix": {"kl": 1.0}, "depth_weights": "mean"},
    "sources": [{"data": "text.txt", "weight": 1.0}],
}
YAML_TEXTS = (
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "steps: !!python/object/apply:os.system ['true']\n",
    "preset: *nothing\n",
    "steps: 3\nsteps: 4\n",
    "[" * 3000,
    "- a\n- b\n",
    "steps: .nan\n",
    "steps: 2026-01-01\n",
    "? [a, b]\n: 1\n",
    "\t- x",
    "\x00",
    "",
    ESCAPE,
)
GGUF_KEYS: tuple[tuple[str, int, Any], ...] = (
    ("general.architecture", 8, "llama"),
    ("llama.block_count", 4, 1),
    ("llama.context_length", 4, 64),
    ("llama.embedding_length", 4, 16),
    ("llama.feed_forward_length", 4, 32),
    ("llama.attention.head_count", 4, 2),
    ("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
    ("llama.rope.freq_base", 6, 10000.0),
    ("llama.vocab_size", 4, 8),
)
GGUF_SHAPES = {
    **{"token_embd": (16, 8), "output": (16, 8), "output_norm": (16,), "blk.0.attn_norm": (16,)},
    **{f"blk.0.attn_{name}": (16, 16) for name in ("q", "k", "v", "output")},
    **{"blk.0.ffn_norm": (16,), "blk.0.ffn_gate": (16, 32), "blk.0.ffn_up": (16, 32), "blk.0.ffn_down": (32, 16)},
}


def _string(text: str, length: int | None = None) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content) if length is None else length) + content


def _value(kind: int, value: Any) -> bytes:
    return _string(value) if kind == 8 else struct.pack({4: "<I", 6: "<f"}[kind], value)


def _gguf(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    keys = [_string(name) + struct.pack("<I", kind) + _value(kind, value) for name, kind, value in GGUF_KEYS]
    place = rng.randrange(len(keys))
    name = GGUF_KEYS[place][0]
    tensor, shapes = rng.choice(sorted(GGUF_SHAPES)), dict(GGUF_SHAPES)
    counts: list[int | None] = [None, None]  # wrong numbers of tensors and of keys; None: the right number
    kind_of_tensor, offset, cut = 0, None, None
    how = rng.choice(["key", "value", "string", "array", "nested", "counts", "shape", "type", "offset", "cut", "name"])
    # Change one thing in a small, valid file.
    if how == "key":
        keys[place] = _string(name) + struct.pack("<I", rng.choice([7, 9, 13, 255, 2**31]))
    elif how == "value":
        number = rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e308, 2.0**40])
        keys[place] = _string(name) + struct.pack("<Id", 12, number)
    elif how == "string":
        keys[place] = _string(name, rng.choice(HUGE)) + struct.pack("<II", 4, 1)
    elif how == "array":
        keys[place] = _string(name) + struct.pack("<IIQ", 9, rng.choice([0, 4, 8, 99]), rng.choice(HUGE))
    elif how == "nested":
        keys[place] = _string(name) + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000
    elif how == "counts":
        counts[rng.randrange(2)] = rng.choice([0, *HUGE])
    elif how == "shape":
        shapes[tensor] = rng.choice([(), (0,), (2**63, 2), (2**32, 2**32), (16, 7), (1,) * 9])
    elif how == "type":
        kind_of_tensor = rng.choice([1, 2, 8, 30, 4, 255, 2**31])
    elif how == "offset":
        offset = rng.choice([1, 31, *HUGE])
    elif how == "name":
        shapes[rng.choice([ESCAPE, "", "x" * 70_000, "../x", "\ud800"])] = shapes.pop(tensor)
    body, end = b"", 0
    for key, shape in shapes.items():
        begin = offset if key == tensor and offset is not None else end
        body += _string(f"{key}.weight") + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        body += struct.pack("<IQ", kind_of_tensor if key == tensor else 0, begin)
        end += 4 * 32 * 16
    head = [len(shapes) if counts[0] is None else counts[0], len(keys) if counts[1] is None else counts[1]]
    content = b"GGUF" + struct.pack("<IQQ", 3, *head) + b"".join(keys) + body
    content += bytes(-len(content) % 32 + end)
    if how == "cut":
        cut = rng.randrange(len(content))
    what = f"GGUF: {how}, {tensor if how in ('shape', 'type', 'offset', 'name') else name}"
    return _case("model.gguf", content[:cut], what)


def _vocabulary(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    text, what = change_json(json.dumps(VOCABULARY), rng)
    return _case("vocabulary.json", text.encode("utf-8", "surrogatepass"), f"vocabulary: {what}")


def _settings(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    # JSON is also YAML, except for tabs and deep nesting.
    if rng.random() < 0.5:
        text = rng.choice(YAML_TEXTS)
        what = repr(text[:40])
    elif rng.random() < 0.3:
        text = f"{rng.choice(['steps', 'data', 'model', 'objective', 'nosuch'])}: {rng.choice(JSON_VALUES)}\n"
        what = ascii(text[:60])
    else:
        text, what = change_json(json.dumps(SETTINGS), rng)
    return _case("settings.yaml", text.encode("utf-8", "surrogatepass"), f"settings: {what}")


def _case(name: str, content: bytes, what: str) -> dict[str, Any]:
    return {"what": what, "action": "read_file", "file": name, "bytes": base64.b64encode(content).decode()}


KINDS: dict[str, Callable[[random.Random, pathlib.Path], dict[str, Any]]] = {
    "gguf": _gguf,
    "vocabulary": _vocabulary,
    "settings": _settings,
}
