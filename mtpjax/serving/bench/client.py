"""The client of a benchmark, which sends requests and records when their tokens arrive."""

import contextlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

from mtpjax.errors import printable
from mtpjax.serving.bench.backends import Backend, BenchRequest, RequestFailedError, read_event
from mtpjax.serving.bench.connections import Connections
from mtpjax.serving.bench.outcome import AnswerReader, Outcome

if TYPE_CHECKING:
    import httpx

MAX_ERROR_CHARACTERS = 200


class Client:
    """A client of one server, used as an asynchronous context manager."""

    def __init__(
        self,
        url: str,
        backend: Backend,
        *,
        model: str = "",
        headers: dict[str, str] | None = None,
        stream: bool = True,
        ignore_eos: bool = True,
        extra_body: dict[str, Any] | None = None,
    ):
        """Makes a client without sending anything yet.

        Args:
            url: the server, without the route.
            backend: the route for requests.
            model: the model's name; if empty, the first name that the server lists.
            headers: HTTP headers to send with every request.
            stream: whether to request tokens as a stream.
            ignore_eos: whether to request exactly `max_new_tokens` tokens, past any end-of-text token.
            extra_body: merged into every body.

        Raises:
            ValueError: the URL is invalid.
            UsageError: httpx is not installed.
        """
        self._connections = Connections(url, headers)
        self.url, self.model, self._backend = self._connections.url, model, backend
        self._stream, self._ignore_eos, self._extra = stream, ignore_eos, extra_body or {}

    async def __aenter__(self) -> "Client":
        """Requests the model's name. Raises ConnectionError if no server responds."""
        import httpx

        try:
            async with self._connections.use() as connection:
                response = await connection.get("/v1/models")
        except (httpx.HTTPError, OSError) as error:
            await self._connections.close()
            reason = str(error) or type(error).__name__
            raise ConnectionError(f"no server answers at {self.url}: {reason}") from error
        # A server may lack this route.
        with contextlib.suppress(ValueError, LookupError, TypeError):
            self.model = self.model or str(response.json()["data"][0]["id"])
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._connections.close()

    async def open_connections(self, count: int) -> None:
        """Opens connections before many requests are sent at once."""
        await self._connections.open(count)

    async def tokenize(self, text: str) -> list[int] | None:
        """Returns a text's token ids from `POST /tokenize`, or None if the server does not have this route."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        content = await self._ask("POST", "/tokenize", json=body)
        try:
            return None if content is None else [int(token) for token in json.loads(content)["tokens"]]
        except (ValueError, LookupError, TypeError):
            return None

    async def flush_cache(self) -> bool:
        """Empties the server's prefix cache with `POST /flush_cache`. Returns whether that worked."""
        return await self._ask("POST", "/flush_cache") is not None

    async def speculation_counts(self) -> tuple[float, float] | None:
        """Returns the server's verification passes and accepted drafts since its start, or None if not reported."""
        # Match vLLM's names with any prefix, but use only the first, because `mtpjax serve` may use two prefixes.
        pattern = r"^(\w+):spec_decode_num_(drafts|accepted_tokens)(?:_total)?(?:\{[^}]*\})? (\S+)"
        found = re.findall(pattern, await self._ask("GET", "/metrics") or "", re.MULTILINE)
        sums = {"drafts": 0.0, "accepted_tokens": 0.0}
        for prefix, name, value in found:
            if prefix == found[0][0]:
                sums[name] += float(value)
        return (sums["drafts"], sums["accepted_tokens"]) if found else None

    async def _ask(self, method: str, path: str, **settings: Any) -> str | None:
        """Returns the response of an optional route, or None if the request fails."""
        import httpx

        try:
            async with self._connections.use() as connection:
                response = await connection.request(method, path, **settings)
        except httpx.HTTPError:
            return None
        return response.text if response.is_success else None

    async def send(self, request: BenchRequest, extra_body: dict[str, Any] | None = None) -> Outcome:
        """Sends a request, merged with `extra_body`, and waits for its end. The outcome records failures."""
        import httpx

        body = self._backend.write(request, self.model, self._stream, self._ignore_eos)
        content = json.dumps(merge(merge(body, self._extra), extra_body or {})).encode()
        headers = {"Content-Type": "application/json"}
        outcome = Outcome(request, time.perf_counter())
        try:
            async with (
                self._connections.use() as connection,
                connection.stream("POST", self._backend.path, content=content, headers=headers) as response,
            ):
                await self._read(response, outcome)
            if not outcome.num_new_tokens:
                raise RequestFailedError("the answer has no tokens")
        except (httpx.HTTPError, OSError, ValueError, RequestFailedError) as error:
            kind = "" if isinstance(error, RequestFailedError) else f"{type(error).__name__}: "
            outcome.error = printable(f"{kind}{error}", MAX_ERROR_CHARACTERS)
        return outcome

    async def _read(self, response: "httpx.Response", outcome: Outcome) -> None:
        """Reads an answer into the outcome. Raises `RequestFailedError` if the answer is an error."""
        if not response.is_success:
            content = (await response.aread()).decode(errors="replace")
            raise RequestFailedError(f"HTTP {response.status_code}: {_error_message(content)}")
        reader = AnswerReader(outcome, text_is_cumulative=self._backend.text_is_cumulative)
        if self._stream:
            async for line in response.aiter_lines():
                # Read the clock first, because parsing takes time too.
                now = time.perf_counter()
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    reader.add(now, read_event(self._backend, json.loads(data)))
        else:
            content = await response.aread()
            reader.add(time.perf_counter(), read_event(self._backend, json.loads(content)))
        reader.close()


def _error_message(content: str) -> str:
    """Returns the message of an OpenAI error object, or other content unchanged."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return content


def merge(body: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Returns a body with added fields. Nested objects are merged, and all other values are replaced."""
    merged = dict(body)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged
