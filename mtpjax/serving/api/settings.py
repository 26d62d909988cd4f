"""Settings of the HTTP API, and the limits of requests."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of the HTTP API.

    Attributes:
        model_name: the name that clients see.
        model_aliases: additional names that requests may use.
        api_keys: requests need one of these keys as a bearer token; if empty, they need no key.
        admin_api_keys: `/flush_cache`, and `/abort_request` with `abort_all`, need one of these keys, which are valid
            for every other route too. If empty, ordinary keys are enough.
        open_paths: paths that need no key. The page itself is open, but its data needs a key.
        max_body_bytes: larger bodies get 413.
        max_prompt_characters: maximum length of a prompt; None means 64 per token of the longest text.
        max_requests: maximum number of texts in one request (prompts times `n`).
        body_timeout: seconds within which a body must arrive.
        write_timeout: seconds after which a client that does not read its stream is disconnected.
        max_buffer_bytes: maximum size of undelivered tokens per stream.
        template_variables: variables of the chat template that requests may set.
        num_readers: processes that parse, check and tokenize bodies, at least 2; 0 uses threads of this process, which
            tokenizers from other packages always use.
        strict_fields: whether to reject unknown fields with 400.
        server_info: settings that `/server_info` shows.
    """

    model_name: str
    model_aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    open_paths: frozenset[str] = frozenset({"/health", "/ready", "/", "/page.css", "/page.js"})
    max_body_bytes: int = 32 << 20
    max_prompt_characters: int | None = None
    max_requests: int = 4096
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    max_buffer_bytes: int = 1 << 20
    template_variables: tuple[str, ...] = ("enable_thinking", "thinking", "reasoning_effort")
    num_readers: int = 2
    strict_fields: bool = False
    server_info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the model and server.

    Attributes:
        max_length: maximum number of tokens in a text, including the prompt.
        max_prompt_characters: longer prompts are rejected before they are tokenized.
        max_total_characters: maximum total characters of all prompts in a request.
        max_requests: maximum number of texts in one request.
        max_queued: maximum number of texts that the server holds at the same time.
        template_variables: variables of the chat template that requests may set.
    """

    max_length: int
    vocab_size: int
    max_prompt_characters: int
    max_total_characters: int
    eos_token_ids: tuple[int, ...] = ()
    max_requests: int = 1
    max_queued: int = 1
    template_variables: tuple[str, ...] = ()
