"""Converts a GGUF file's tokenizer to `tokenizer.json` and `tokenizer_config.json`."""

from typing import Any

import numpy as np

from mtpjax.errors import TokenizerError
from mtpjax.messages import count_of

CONTROL, USER_DEFINED = 3, 4  # token types: special tokens, and other tokens that are matched before splitting
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")
_GLM_NAMES = ("glm4", "chatglm-bpe")  # these split like Llama 3, but do not ignore merges
_DEEPSEEK_NAMES = ("deepseek-v3", "joyai-llm")
_DEEPSEEK = (  # applied in order: digits, Chinese and Japanese, the rest
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The patterns that split a text, in order, by `tokenizer.ggml.pre`.
_SPLITS: dict[str, tuple[str, ...]] = {
    "qwen2": (_QWEN2,),
    **dict.fromkeys((*_LLAMA3_NAMES, *_GLM_NAMES), (_LLAMA3,)),
    **dict.fromkeys(_DEEPSEEK_NAMES, _DEEPSEEK),
}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_files(metadata: dict[str, Any]) -> dict[str, Any]:
    """Converts a file's tokenizer and chat template.

    Returns:
        The contents of "tokenizer.json", "tokenizer_config.json" and "generation_config.json" by name. The dict is
        empty if the file has no tokenizer.

    Raises:
        TokenizerError: the tokenizer is damaged or not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return {}
    if not isinstance(kind, str) or kind != "gpt2":
        raise TokenizerError(f"unsupported GGUF tokenizer {kind!r}; supported: 'gpt2' (byte-level BPE)")
    # Strings that are not UTF-8 cannot be written as JSON, and duplicate tokens would lose an id.
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise TokenizerError(f"the GGUF tokenizer has {count_of(len(tokens) - len(vocabulary), 'duplicate token')}")
    types = metadata.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type must have {len(tokens)} entries, one per token")
    added = [_added_token(int(i), tokens[i], types[i] == CONTROL) for i in np.flatnonzero((types == 3) | (types == 4))]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str):
        raise TokenizerError("tokenizer.ggml.pre is not a string")
    normalizer, pre_tokenizer = _pre_tokenizer(pre)
    pairs = [_split_merge(merge) for merge in merges]
    model = {"type": "BPE", "vocab": vocabulary, "merges": pairs, "ignore_merges": pre in _LLAMA3_NAMES}
    ids = {name: _token_id(metadata, key, tokens) for name, key in _SPECIAL.items()}
    names = {name: None if index is None else tokens[index] for name, index in ids.items()}
    bos = names["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_NAMES) else None
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _BYTE_LEVEL if bos is None else _bos_processor(bos, vocabulary[bos]),
        "decoder": _BYTE_LEVEL,
        "model": model,
    }
    settings = {name: token for name, token in names.items() if token is not None}
    settings |= _chat_templates(metadata)
    # Instruction-tuned models may have different tokens for the end of a turn (`eot`) and of a document.
    ends = [_token_id(metadata, key, tokens) for key in ("eos", "eot")]
    generation = {"eos_token_id": [index for index in dict.fromkeys(ends) if index is not None]}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "generation_config.json": generation}


def _chat_templates(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the `chat_template` setting, which is the default template or a list of named templates (`tool_use`)."""
    prefix = "tokenizer.chat_template"
    texts = {key: each for key, each in metadata.items() if key.startswith(prefix) and isinstance(each, str)}
    named = {key.removeprefix(prefix).removeprefix(".") or "default": each for key, each in texts.items()}
    if list(named) in ([], ["default"]):
        return {"chat_template": named["default"]} if named else {}
    return {"chat_template": [{"name": name, "template": each} for name, each in named.items()]}


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _strings(metadata: dict[str, Any], name: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise TokenizerError(f"the GGUF tokenizer lacks tokenizer.ggml.{name}, a list of strings")
    for index, value in enumerate(values):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise TokenizerError(f"tokenizer.ggml.{name}: entry {index} is not UTF-8 text")
    return values


def _added_token(index: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": bool(special), **flags}


def _split_merge(merge: str) -> list[str]:
    """Splits "a b" into two tokens, at the first space that is not the first character."""
    place = merge.find(" ", 1)
    if place < 0:
        raise TokenizerError(f"tokenizer.ggml.merges has {merge[:40]!r}, not two tokens separated by a space")
    return [merge[:place], merge[place + 1 :]]


def _pre_tokenizer(kind: str) -> tuple[dict | None, dict]:
    """Returns the normalizer and the pre-tokenizer for a value of `tokenizer.ggml.pre`."""
    if kind in ("gpt-2", "gpt2"):
        return None, _BYTE_LEVEL
    if kind == "smollm":
        # Each digit is a separate token.
        steps = [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]
    elif kind in _SPLITS:
        how = {"behavior": "Isolated", "invert": False}
        splits = [{"type": "Split", "pattern": {"Regex": pattern}, **how} for pattern in _SPLITS[kind]]
        steps = [*splits, {**_BYTE_LEVEL, "use_regex": False}]
    else:
        supported = ", ".join(("gpt-2", "smollm", *_SPLITS))
        raise TokenizerError(f"unsupported tokenizer.ggml.pre {kind!r}; supported: {supported}")
    return {"type": "NFC"} if kind == "qwen2" else None, {"type": "Sequence", "pretokenizers": steps}


def _bos_processor(token: str, index: int) -> dict[str, Any]:
    """Returns the post-processor that prepends the BOS token."""
    bos, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    special = {token: {"id": token, "ids": [index], "tokens": [token]}}
    parts = {"single": [bos, text], "pair": [bos, text, second], "special_tokens": special}
    return {"type": "TemplateProcessing", **parts}


def _token_id(metadata: dict[str, Any], name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise TokenizerError(f"{key} is {index!r}; the tokenizer has {len(tokens)} tokens")
    return index
