"""Tokenizers for small models (bytes) and for published models (`tokenizer.json` and a chat template)."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from mtpjax.data.chat_messages import clean_messages, clean_tools, text_of
from mtpjax.data.chat_template import ChatTemplates
from mtpjax.data.hidden_text import RenderedChat
from mtpjax.data.incremental_decoder import IncrementalDecoder, TokenizerDecoder, Utf8Stage
from mtpjax.data.tokenizer_files import (
    DEFAULT_TEMPLATE,
    check_expansion,
    find_end_tokens,
    read_chat_templates,
    read_json_object,
    rust_errors,
)
from mtpjax.errors import ConversationError, TokenizerError
from mtpjax.io.huggingface_files import (
    MAX_TOKENIZER_BYTES,
    has_tokenizer,
    huggingface_folder,
    read_small_file,
    read_vocab_size,
)

OTHER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt")  # of SentencePiece and older tokenizer classes
_BUILT = ("_tokenizer", "_decoder", "_plain_tokenizer")  # attributes made from `_content`
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")  # variables that a template may use


class Tokenizer(Protocol):
    """The interface that decoding and training use."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """Tokens without text."""
        ...

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of everything that determines the tokens of texts and conversations and the end tokens."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """Encodes a text without the tokens that `encode` adds around it."""
        ...

    def reads_template_variable(self, name: str) -> bool:
        """Returns whether the chat template uses a variable."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def incremental_decoder(self, prompt: Sequence[int] = ()) -> Callable[[int | None], str]:
        """Returns a function that takes one token at a time and returns the text that the token completes.

        Pass None at the end to get the rest. Without a prompt, the concatenated texts equal `decode` of all tokens.
        """
        ...

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_variables: Any) -> list[int]:
        """Encodes a conversation up to the start of the model's answer."""
        ...


def _encode_utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}: encode several texts one by one")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"text contains a lone surrogate at character {error.start}, which has no UTF-8 encoding"
        raise ValueError(problem) from error


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One token per UTF-8 byte. Text never contains byte 0, so byte 0 ends a document."""

    vocab_size = 256
    eos_token_id = 0
    eos_token_ids = (0,)
    special_token_ids = (0,)
    digest = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`, without an end token."""
        encoded = _encode_utf8(text)
        position = text.find("\0")
        if position >= 0:
            raise ValueError(f"text contains NUL at character {position}, but byte 0 is the end token")
        return list(encoded)

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids. Skips end tokens, and replaces bytes that are not UTF-8 with U+FFFD."""
        stream = self.incremental_decoder()
        return "".join(stream(int(index)) for index in ids) + stream(None)

    def incremental_decoder(self, prompt: Sequence[int] = ()) -> Callable[[int | None], str]:
        return IncrementalDecoder(self._byte_of, [Utf8Stage()], prompt)

    def _byte_of(self, token: int) -> bytes | None:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return bytes([token]) if token != self.eos_token_id else None

    encode_plain = encode

    def reads_template_variable(self, name: str) -> bool:
        return name == "add_generation_prompt"

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_variables: Any) -> list[int]:
        """Encodes a conversation as text, with a line `role: content` per message and the end token after each answer.

        Byte-level models have no chat template.

        Args:
            **template_variables: `add_generation_prompt` and `tools`; others are ignored.
        """
        tokens: list[int] = []
        if clean_tools(template_variables.get("tools")):
            raise ConversationError("byte-level models do not support tools")
        for number, message in enumerate(clean_messages(messages), start=1):
            if "tool_calls" in message:
                raise ConversationError(f"message {number}: byte-level models do not support tool calls")
            role, content = message["role"], text_of(message.get("content"))
            is_answer = role == "assistant"
            try:
                tokens += self.encode(f"{role}: {content}" if is_answer else f"{role}: {content}\n")
            except ValueError as error:
                raise ConversationError(f"message {number}: {error}") from error
            tokens += [self.eos_token_id] if is_answer else []
        return tokens + (self.encode("assistant: ") if template_variables.get("add_generation_prompt", True) else [])


class HuggingFaceTokenizer:
    """The `tokenizer.json` of a Hugging Face directory or GGUF file, read by the tokenizers package.

    `eos_token_ids` come from `generation_config.json`, `config.json`, its `text_config`, and the `eos_token` in
    `tokenizer_config.json`, in this order. Each of them ends a text, and the first one ends documents. The text of a
    special token in a prompt becomes that token, as in transformers; in a message from a user or a tool, it remains
    plain text, so that a message cannot end its own turn. The decoder in `tokenizer.json` decodes tokens, as in vLLM,
    and `clean_up_tokenization_spaces` is ignored.

    Args:
        folder: the directory, or the GGUF file.
        vocab_size: the model's vocabulary size V.
        chat_template: jinja2 template that replaces the ones in the files.

    Raises:
        TokenizerError: a file is damaged, or a token is outside `vocab_size`.
    """

    def __init__(self, folder: pathlib.Path, vocab_size: int, *, chat_template: str | None = None):
        content = read_small_file(folder, "tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
        if content is None:
            raise TokenizerError(f"{folder} has no tokenizer.json")
        check_expansion(content, folder / "tokenizer.json")
        with rust_errors(f"{folder / 'tokenizer.json'} cannot be read"):
            self._build(content)
        # With a token outside the model's vocabulary, the embedding lookup would be out of range but raise no error.
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise TokenizerError(f"{folder / 'tokenizer.json'} has token {largest}; the model has {vocab_size} tokens")
        self.num_tokens = largest + 1
        # Read the special tokens, the end tokens and the chat template from the other files in the folder.
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = tuple(sorted(index for index, token in added.items() if token.special))
        self._special_names = [token.content for token in added.values() if token.special]
        older = read_json_object(folder, "special_tokens_map.json")
        self._settings = {name: older[name] for name in SPECIAL_NAMES if name in older}
        self._settings |= read_json_object(folder, "tokenizer_config.json")
        files = {
            "generation": read_json_object(folder, "generation_config.json"),
            "config": read_json_object(folder, "config.json"),
        }
        eos_token = self._special_tokens().get("eos_token")
        self.eos_token_ids = find_end_tokens(folder, self._tokenizer, eos_token, vocab_size=vocab_size, **files)
        templates = (
            read_chat_templates(folder, self._settings) if chat_template is None else {DEFAULT_TEMPLATE: chat_template}
        )
        self.chat_templates = ChatTemplates(templates, self._special_tokens(), self._special_names)
        # The digest covers everything that decides the tokens, so that a resumed run notices a changed template.
        chat_setting = self.chat_templates.setting
        digest_parts = [hashlib.sha256(content).hexdigest(), chat_setting, self._special_tokens(), self.eos_token_ids]
        self.digest = hashlib.sha256(json.dumps(digest_parts, sort_keys=True).encode()).hexdigest()

    def _build(self, content: bytes) -> None:
        """Makes the objects of the tokenizers package."""
        import tokenizers

        self._content, self._tokenizer = content, tokenizers.Tokenizer.from_buffer(content)
        # Files may enable padding or truncation, which would change the tokens of short or long texts.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._decoder = TokenizerDecoder(self._tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle, which has the content of the file but not the objects made from it."""
        return {name: each for name, each in vars(self).items() if name not in _BUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._build(self._content)

    def encode(self, text: str) -> list[int]:
        """Encodes a text. Raises ValueError for lone surrogates."""
        _encode_utf8(text)
        with rust_errors("the tokenizer cannot encode this text"):
            return self._tokenizer.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids. Skips special tokens, and replaces bytes that are not UTF-8 with U+FFFD."""
        tokens = [int(index) for index in ids]
        if not self._decoder.is_total:
            stream = self.incremental_decoder()
            return "".join(map(stream, tokens)) + stream(None)
        with rust_errors("the tokenizer cannot decode these ids"):
            return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def incremental_decoder(self, prompt: Sequence[int] = ()) -> Callable[[int | None], str]:
        return self._decoder.start(prompt)

    def encode_plain(self, text: str) -> list[int]:
        _encode_utf8(text)
        return self.encode_with_starts(text)[0]

    def reads_template_variable(self, name: str) -> bool:
        return self.chat_templates.reads(name)

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_variables: Any) -> list[int]:
        """Encodes a conversation. `template_variables` are variables for the template, such as `enable_thinking`."""
        return self.encode_rendered(self.chat_templates.render(messages, **template_variables))[0]

    def encode_rendered(self, rendered: RenderedChat, start: int = 0) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes a rendered conversation, from character `start` on.

        Returns the tokens, and the start and end of each token's characters.
        """
        tokens: list[int] = []
        offsets: list[tuple[int, int]] = []
        encoded: dict[tuple[str, bool], Any] = {}  # few hidden pieces are distinct, but a message may repeat them often
        with rust_errors("the tokenizer cannot encode this conversation"):
            for place, piece, is_hidden in rendered.pieces(start):
                # Special tokens from the template take effect. Those in users' messages are plain text.
                key = (piece, bool(place))
                found = encoded.get(key) if is_hidden else None
                if found is None:
                    tokenizer = self._plain_tokenizer if is_hidden else self._tokenizer
                    found = self._encode_piece(tokenizer, piece, is_first=not place)
                if is_hidden:
                    encoded[key] = found
                ids, spans = found
                tokens += ids
                offsets += [(place + begin, place + end) for begin, end in spans]
        return tokens, offsets

    def _encode_piece(self, tokenizer: Any, piece: str, *, is_first: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of a piece of text, and each token's character span."""
        if is_first or not self._adds_space:
            encoding = tokenizer.encode(piece, add_special_tokens=False)
            return encoding.ids, encoding.offsets
        # A piece inside a text must not get a leading space, so encode it after a newline and drop the newline.
        encoding = tokenizer.encode("\n" + piece, add_special_tokens=False)
        num_before = len(tokenizer.encode("\n", add_special_tokens=False).ids)
        spans = [(max(0, begin - 1), end - 1) for begin, end in encoding.offsets[num_before:]]
        return encoding.ids[num_before:], spans

    @functools.cached_property
    def _adds_space(self) -> bool:
        """True if the tokenizer adds a space before a text, as SentencePiece tokenizers do."""
        after, newline, letter = (
            self._tokenizer.encode(each, add_special_tokens=False).ids for each in ("\na", "\n", "a")
        )
        return after != newline + letter and after[: len(newline)] == newline

    @functools.cached_property
    def _plain_tokenizer(self) -> Any:
        """A copy of the tokenizer that treats special tokens in a text as plain text."""
        import tokenizers

        plain = tokenizers.Tokenizer.from_buffer(self._content)
        plain.encode_special_tokens = True
        return plain

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Encodes a text that already contains its special tokens.

        Returns the tokens, and the index of each token's first character, ascending.
        """
        with rust_errors("the tokenizer cannot encode this text"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def save(self, folder: pathlib.Path) -> None:
        """Writes the files from which a `HuggingFaceTokenizer` with the same digest can be loaded."""
        (folder / "tokenizer.json").write_bytes(self._content)
        (folder / "tokenizer_config.json").write_text(
            json.dumps(self._settings | {"chat_template": self.chat_templates.setting})
        )
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.eos_token_ids)}))

    def to_json(self) -> str:
        """Returns the content of a `tokenizer.json` without padding or truncation."""
        return self._tokenizer.to_str()

    def _special_tokens(self) -> dict[str, str | None]:
        """Returns the text of the special tokens that a template may use, by variable."""
        settings = self._settings
        return {name: _token_text(settings[name]) for name in SPECIAL_NAMES if settings.get(name) is not None}


def load_tokenizer(path, vocab_size: int | None = None, *, chat_template: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
        path: anything that `mtpjax.load` accepts: a checkpoint, a run folder, a Hugging Face directory, a GGUF file, or
            `org/name` on the Hugging Face Hub. A checkpoint that was converted from a Hugging Face directory keeps the
            tokenizer of that directory.
        vocab_size: the model's vocabulary size V; by default from the checkpoint's `config.json`.
        chat_template: jinja2 template that replaces the checkpoint's.

    Returns:
        A tokenizer with `encode(text)`, `decode(ids)`, `apply_chat_template(messages)` and `eos_token_ids`: a
        `HuggingFaceTokenizer` if there is a `tokenizer.json` or a `tiktoken.model`, else a `ByteTokenizer`.

    Raises:
        CheckpointError: the path does not exist.
        TokenizerError: there is no tokenizer file and the vocabulary is not the 256 bytes, or `chat_template` is given
            without a tokenizer file.

    Example:
        >>> import tempfile
        >>> import jax, mtpjax
        >>> model = mtpjax.MTPModel(mtpjax.presets["tiny"])  # a model of bytes
        >>> folder = tempfile.mkdtemp() + "/checkpoint"
        >>> mtpjax.save(folder, model, mtpjax.init_params(model, jax.random.key(0)))
        >>> tokenizer = mtpjax.load_tokenizer(folder)
        >>> tokenizer.encode("def ")
        [100, 101, 102, 32]
        >>> tokenizer.decode([100, 101, 102, 32])
        'def '
    """
    if vocab_size is not None and type(vocab_size) is not int:
        kind = type(vocab_size).__name__
        raise ValueError(f"vocab_size must be an integer, such as model.config.vocab_size, got {kind}")
    vocab_size = read_vocab_size(path) if vocab_size is None else vocab_size
    if vocab_size is None:
        raise TokenizerError(f"{path} has no config.json with a vocab_size: pass the model's vocab_size")
    folder = huggingface_folder(path)
    if has_tokenizer(folder):
        return HuggingFaceTokenizer(folder, vocab_size, chat_template=chat_template)
    if chat_template is not None:
        raise TokenizerError(f"{folder} has no tokenizer.json, which a chat template needs")
    if vocab_size == ByteTokenizer.vocab_size:
        return ByteTokenizer()
    other = [name for name in OTHER_FORMATS if (folder / name).exists()]
    problem = f"{folder} has no tokenizer.json, and the model has {vocab_size} tokens, not the 256 bytes"
    if other:
        advice = "load it with transformers.AutoTokenizer and write a tokenizer.json with save_pretrained"
        problem += f". Its {other[0]} has an unsupported format: {advice}"
    raise TokenizerError(problem)


def _token_text(token: Any) -> str | None:
    """Returns the text of a special token, which is a string or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
