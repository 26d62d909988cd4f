"""Tokenizers: bytes for our own small models, `tokenizer.json` and its chat template for published ones."""

import codecs
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from mtpjax.data.hidden_text import hide_special_text, split_at_marks
from mtpjax.data.template_worker import WORKER, TemplateFailure
from mtpjax.data.tokenizer_checks import check_expansion, rust_errors
from mtpjax.errors import ConversationError, TokenizerError, printable
from mtpjax.io.huggingface_files import MAX_TOKENIZER_BYTES, has_tokenizer, huggingface_folder, read_small_file
from mtpjax.safe_open import parse_json

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_MESSAGES = 10_000


class Tokenizer(Protocol):
    """The interface that decoding and training use."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def special_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for no text."""
        ...

    @property
    def digest(self) -> str:
        """Hexadecimal sha256 of everything that decides the tokens of a text or a conversation, and the end tokens."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_plain(self, text: str) -> list[int]:
        """Encodes a text without the tokens that `encode` puts around it."""
        ...

    def reads_template_variable(self, name: str) -> bool:
        """Returns whether the chat template names a variable."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def incremental_decoder(self) -> Callable[[int | None], str]:
        """Returns an incremental decoder.

        Returns:
            A function that takes one token at a time and returns the text that it completes; None flushes the rest.
        """
        ...

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_variables: Any) -> list[int]:
        """Encodes a conversation up to the start of the model's answer.

        Args:
            messages: the conversation, in OpenAI's form.
            **template_variables: variables of the template.

        Returns:
            The tokens.

        Raises:
            TokenizerError: the tokenizer has no chat template.
            ConversationError: the template rejects these messages.
        """
        ...


def _encode_utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text holds a lone surrogate at character {error.start}: it has no UTF-8 encoding") from error


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One token per UTF-8 byte. Text never contains byte 0, so byte 0 ends a document."""

    vocab_size = 256
    eos_token_id = 0
    eos_token_ids = (0,)
    special_token_ids = (0,)
    digest = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`, without an end token.

        Raises:
            ValueError: the text contains NUL or lone surrogates.
        """
        position = text.find("\0")
        if position >= 0:
            raise ValueError(f"text holds NUL at character {position}: byte 0 is the end token")
        return list(_encode_utf8(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Decodes ids, ints or a 1-D integer array; skips end tokens, and replaces bytes that are not UTF-8 by U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        stream = self.incremental_decoder()
        return "".join(stream(int(index)) for index in ids) + stream(None)

    def incremental_decoder(self) -> Callable[[int | None], str]:
        # A character may span several tokens, so the decoder keeps incomplete bytes.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def step(token: int | None) -> str:
            if token is None:
                return decoder.decode(b"", final=True)
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
            return decoder.decode(bytes([token]) if token != self.eos_token_id else b"")

        return step

    encode_plain = encode

    def reads_template_variable(self, name: str) -> bool:
        return name == "add_generation_prompt"

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_variables: Any) -> list[int]:
        """Encodes a conversation as plain text: a line `role: content` per message; an answer ends with the end token.

        Small models of bytes have no chat template.

        Args:
            messages: the conversation.
            **template_variables: `add_generation_prompt`; others are ignored.

        Returns:
            The tokens.

        Raises:
            ConversationError: a message has no text, or text without an encoding.
        """
        tokens: list[int] = []
        for number, message in enumerate(messages, start=1):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise ConversationError(f"message {number}: a model of bytes needs a role and a content that are texts")
            is_answer = role == "assistant"
            try:
                tokens += self.encode(f"{role}: {content}" if is_answer else f"{role}: {content}\n")
            except ValueError as error:
                raise ConversationError(f"message {number}: {error}") from error
            tokens += [self.eos_token_id] if is_answer else []
        return tokens + (self.encode("assistant: ") if template_variables.get("add_generation_prompt", True) else [])


class HuggingFaceTokenizer:
    """The `tokenizer.json` of a Hugging Face directory or GGUF file, read by the tokenizers package.

    `eos_token_ids` come from `generation_config.json`, else `config.json`, else the `eos_token` of
    `tokenizer_config.json`. Special tokens written in a prompt's text become those tokens, as in transformers; those
    that a user or a tool writes in a message stay text, so that a message cannot end its own turn.

    Args:
        folder: the directory, or the GGUF file.
        vocab_size: V of the model.

    Raises:
        TokenizerError: a file is damaged, or a token is outside `vocab_size`.
    """

    def __init__(self, folder: pathlib.Path, vocab_size: int):
        import tokenizers

        content = read_small_file(folder, "tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
        if content is None:
            raise TokenizerError(f"{folder} has no tokenizer.json")
        check_expansion(content, folder / "tokenizer.json")
        with rust_errors(f"{folder / 'tokenizer.json'} cannot be read"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # Files may ask for padding or truncation, which would change the tokens of a text by its length.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A token outside the model's vocabulary would index its embedding outside its rows without an error.
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise TokenizerError(f"{folder / 'tokenizer.json'} has token {largest}; the model has {vocab_size} tokens")
        self.num_tokens = largest + 1
        # Special and end tokens, and the chat template, come from the files beside it.
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = tuple(sorted(index for index, token in added.items() if token.special))
        self._special_names = [token.content for token in added.values() if token.special]
        self._settings = _read_json(folder, "tokenizer_config.json")
        self.eos_token_ids = _eos_token_ids(folder, vocab_size) or self._named_token_ids("eos_token")
        self._template = _read_chat_template(folder, self._settings)
        self._content = content
        # The digest covers everything that decides the tokens, so that a resumed run notices a changed template.
        digest_parts = [hashlib.sha256(content).hexdigest(), self._template, self._special_tokens(), self.eos_token_ids]
        self.digest = hashlib.sha256(json.dumps(digest_parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Encodes a text. Raises ValueError for lone surrogates."""
        _encode_utf8(text)
        with rust_errors("the tokenizer cannot encode this text"):
            return self._tokenizer.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        with rust_errors("the tokenizer cannot decode these ids"):
            return self._tokenizer.decode([int(index) for index in ids], skip_special_tokens=True)

    def incremental_decoder(self) -> Callable[[int | None], str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)

        def step(token: int | None) -> str:
            with rust_errors("the tokenizer cannot decode this id"):
                return "" if token is None else stream.step(self._tokenizer, int(token)) or ""

        return step

    def encode_plain(self, text: str) -> list[int]:
        _encode_utf8(text)
        return self.encode_with_starts(text)[0]

    def reads_template_variable(self, name: str) -> bool:
        return self._template is not None and re.search(rf"\b{name}\b", self._template) is not None

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_variables: Any) -> list[int]:
        """Encodes a conversation; `template_variables` are variables of the template, such as `enable_thinking`."""
        if self._template is None:
            raise TokenizerError("the checkpoint has no chat template")
        # The template writes the special tokens itself. Those in messages of users are hidden from the tokenizer.
        messages, hidden = hide_special_text(messages, self._special_names, self._template)
        text = render_chat(self._template, messages, **{**self._special_tokens(), **template_variables})
        tokens: list[int] = []
        with rust_errors("the tokenizer cannot encode this conversation"):
            for part, is_hidden in split_at_marks(text, hidden):
                tokenizer = self._plain_tokenizer if is_hidden else self._tokenizer
                tokens += tokenizer.encode(part, add_special_tokens=False).ids
        return tokens

    @functools.cached_property
    def _plain_tokenizer(self) -> Any:
        """The tokenizer that reads special tokens in a text as characters."""
        import tokenizers

        plain = tokenizers.Tokenizer.from_buffer(self._content)
        plain.encode_special_tokens = True
        return plain

    @functools.cached_property
    def generation_prompt(self) -> str:
        """The text that the chat template writes before an answer; "" if none."""
        if self._template is None:
            raise TokenizerError("the checkpoint has no chat template")
        render = functools.partial(render_chat, self._template, [{"role": "user", "content": "a"}])
        before = render(**{**self._special_tokens(), "add_generation_prompt": False})
        prompt = render(**{**self._special_tokens(), "add_generation_prompt": True})
        return prompt.removeprefix(before) if prompt.startswith(before) else ""

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Encodes a text that has its special tokens already.

        Args:
            text: the text.

        Returns:
            The tokens, and the character at which each begins, ascending.

        Raises:
            TokenizerError: the tokenizer fails.
        """
        with rust_errors("the tokenizer cannot encode this text"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def save(self, folder: pathlib.Path) -> None:
        """Writes the files from which a `HuggingFaceTokenizer` of the same digest can be read.

        Args:
            folder: an existing folder.
        """
        (folder / "tokenizer.json").write_bytes(self._content)
        (folder / "tokenizer_config.json").write_text(json.dumps(self._settings | {"chat_template": self._template}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(self.eos_token_ids)}))

    def to_json(self) -> str:
        """Returns the content of a `tokenizer.json`, without padding and truncation."""
        return self._tokenizer.to_str()

    def _special_tokens(self) -> dict[str, str | None]:
        """Returns the special tokens that a template may name, as text."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: _token_text(self._settings[name]) for name in names if self._settings.get(name) is not None}

    def _named_token_ids(self, name: str) -> tuple[int, ...]:
        index = self._tokenizer.token_to_id(self._special_tokens().get(name) or "")
        return () if index is None else (index,)


def load_tokenizer(path, vocab_size: int) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
        path: a Hugging Face directory, a GGUF file, or a checkpoint, whose Hugging Face directory is used if it came
            from one.
        vocab_size: V of the model.

    Returns:
        A `HuggingFaceTokenizer` if there is a `tokenizer.json`, else a `ByteTokenizer`.

    Raises:
        TokenizerError: there is no `tokenizer.json`, and the vocabulary is not the 256 bytes.
    """
    folder = huggingface_folder(path)
    if has_tokenizer(folder):
        return HuggingFaceTokenizer(folder, vocab_size)
    if vocab_size == ByteTokenizer.vocab_size:
        return ByteTokenizer()
    raise TokenizerError(f"{folder} has no tokenizer.json, and the model has {vocab_size} tokens, not the 256 bytes")


def render_chat(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Renders a conversation with a jinja2 template.

    The template runs in a sandbox, in a process with limits of time, memory and output (`template_worker`).

    Args:
        template: jinja2 source.
        messages: the conversation.
        **variables: variables of the template, which must have a JSON form; `strftime_now` may be a date, which the
            template's function of that name then takes for today.

    Returns:
        The text.

    Raises:
        TokenizerError: the template does not compile.
        ConversationError: the template fails or rejects these messages, exceeds a limit, or they are too large.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS or len(messages) > MAX_MESSAGES:
        raise ConversationError(
            f"a chat template of {len(template)} characters, or {len(messages)} messages: too large"
        )
    variables = {"messages": messages, "add_generation_prompt": True, **variables}
    date = variables.pop("strftime_now", None)
    try:
        return WORKER.render(template, variables, date=date)
    except TemplateFailure as error:
        # A template that does not compile is the tokenizer's error; one that fails on these messages is theirs.
        kind = TokenizerError if error.is_template else ConversationError
        raise kind(f"the chat template failed: {error}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConversationError(f"the chat template failed: a variable has no JSON form: {error}") from error


def _read_chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
    content = read_small_file(folder, "chat_template.jinja", max_bytes=MAX_TEMPLATE_CHARACTERS)
    if content is not None:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{folder / 'chat_template.jinja'} is not UTF-8 text") from error
    template = settings.get("chat_template")
    # A checkpoint may have several templates by name.
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(folder: pathlib.Path, vocab_size: int) -> tuple[int, ...]:
    # Generation settings override the model's; a multimodal config nests the text model's settings.
    config = _read_json(folder, "config.json")
    for values in (_read_json(folder, "generation_config.json"), config, config.get("text_config")):
        token_ids = values.get("eos_token_id") if isinstance(values, dict) else None
        if token_ids is None:
            continue
        ids = token_ids if isinstance(token_ids, list) else [token_ids]
        # A truth value is an int in Python, but not a token.
        if not all(type(index) is int and 0 <= index < vocab_size for index in ids):
            raise TokenizerError(
                f"{folder}: eos_token_id is {printable(repr(token_ids), 100)}, not an id below {vocab_size} or a list"
                " of such ids"
            )
        return tuple(ids)
    return ()


def _read_json(folder: pathlib.Path, name: str) -> dict[str, Any]:
    content = read_small_file(folder, name, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        values = parse_json(content) if content is not None else {}
    except ValueError as error:
        raise TokenizerError(f"{folder / name} is not JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def _token_text(token: Any) -> str | None:
    """Returns the text of a special token, which is a string or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
