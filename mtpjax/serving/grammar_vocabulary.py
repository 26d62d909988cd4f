"""Converts a tokenizer for llguidance, which needs the special tokens, and the bytes that each token adds to a text.

llguidance can read a `tokenizer.json`, but then treats the text of an added token as that token, even inside a string
in a schema. There, an end token would end the text, and the decoder would skip special tokens.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

MAX_FORCED_BYTES = 256  # maximum bytes of a forced text that are tokenized; later bytes do not change its first token


class Vocabulary:
    """A vocabulary with the interface that `llguidance.TokenizerWrapper` expects.

    Args:
        tokens: bytes that each token adds to a text.
        special_token_ids: tokens that no text may contain; their bytes have no effect.
        eos_token_id: one of the end tokens.
        encode: encodes a text without adding special tokens.

    Attributes:
        encode_longest: splits a text into the longest tokens; used if `encode` does not reproduce the text.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special_token_ids: Iterable[int],
        *,
        eos_token_id: int,
        encode: Callable[[str], list[int]],
    ):
        self.tokens, self.eos_token_id = tokens, eos_token_id
        self.special_token_ids = sorted(special_token_ids)
        self._special, self._encode = frozenset(self.special_token_ids), encode
        self.encode_longest: Callable[[str], list[int]] = lambda text: []

    def __call__(self, forced: bytes) -> list[int]:
        """Encodes a text that the grammar forces."""
        text = forced[:MAX_FORCED_BYTES].decode(errors="ignore")
        tokens = self._encode(text)
        is_same = self._special.isdisjoint(tokens) and b"".join(self.tokens[each] for each in tokens) == text.encode()
        return tokens if is_same else self.encode_longest(text)


def llguidance_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> Any:
    """Makes a `llguidance.LLTokenizer` from a tokenizer with an end token. Raises ValueError if it is unsupported."""
    import llguidance

    ends = list(tokenizer.eos_token_ids)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        vocabulary = _of_huggingface(tokenizer, vocab_size)
    elif isinstance(tokenizer, ByteTokenizer):
        tokens = [bytes([token]) for token in range(tokenizer.vocab_size)]
        special = {*tokenizer.special_token_ids, *ends}
        vocabulary = Vocabulary(tokens, special, eos_token_id=ends[0], encode=lambda text: list(text.encode()))
    else:
        raise ValueError(f"grammars do not support a {type(tokenizer).__name__}")
    made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=ends)
    vocabulary.encode_longest = made.greedy_tokenize
    return made


def _of_huggingface(tokenizer: HuggingFaceTokenizer, vocab_size: int) -> Vocabulary:
    import llguidance
    import tokenizers

    content, ends = tokenizer.to_json(), list(tokenizer.eos_token_ids)
    # llguidance implements the decoders, but treats every added token as special.
    reader = llguidance.LLTokenizer(content, n_vocab=vocab_size, eos_token=ends)
    tokens = [reader.decode_bytes([token]) for token in range(vocab_size)]
    special = {token for token in range(vocab_size) if reader.is_special_token(token)} | set(ends)
    # Other added tokens, such as Qwen3's <think>, are part of the text if the decoder shows them as they are written.
    plain = tokenizers.Tokenizer.from_str(json.dumps(_without_prefix(json.loads(content))))
    plain.encode_special_tokens = True
    for token, added in plain.get_added_tokens_decoder().items():
        if not added.special and token not in ends and plain.decode([token]).encode() == tokens[token]:
            special.discard(token)
    encode = lambda text: plain.encode(text, add_special_tokens=False).ids
    return Vocabulary(tokens, special, eos_token_id=ends[0], encode=encode)


def _without_prefix(part: Any) -> Any:
    """Removes the prefix-space settings from a tokenizer's JSON, because forced text is not at the start of a text."""
    if isinstance(part, list):
        return [_without_prefix(each) for each in part if not _is_prepend(each)]
    if not isinstance(part, dict):
        return part
    # Recurse only into `parts`, because the vocabulary's keys are tokens, not settings.
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    parts = ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers")
    return {
        name: None if _is_prepend(each) else _without_prefix(each) if name in parts else never.get(name, each)
        for name, each in part.items()
    }


def _is_prepend(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"
