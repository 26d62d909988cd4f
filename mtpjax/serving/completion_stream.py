"""The text of one request, read piece by piece while the engine generates it."""

from collections.abc import AsyncIterator, Iterator

from mtpjax.serving.completion import Choice, Completion
from mtpjax.serving.request import Delta, Finish
from mtpjax.serving.running import RequestStream
from mtpjax.serving.text_stream import Span


class CompletionStream:
    """A text that is being generated. `for` and `async for` yield its pieces, whose join is the whole text.

    A piece ends at a whole character, and never with the start of a stop string. Leaving the loop early ends the
    request, and so does the end of a `with` block. Make it with `LLM.stream`.
    """

    def __init__(self, events: RequestStream, choice: Choice, owner: object):
        # An `LLM` that nobody refers to any more closes its engine, so the stream refers to its owner.
        self._events, self._choice, self._owner = events, choice, owner

    def __iter__(self) -> Iterator[str]:
        for spans in self.spans():
            yield "".join(span.text for span in spans)

    def spans(self) -> Iterator[list[Span]]:
        """Yields the pieces by token, each with the draft level that proposed it.

        Raises:
            RuntimeError: a call of the engine failed.
        """
        try:
            for event in self._events:
                if spans := self._take(event):
                    yield spans
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for event in self._events:
                if spans := self._take(event):
                    yield "".join(span.text for span in spans)
        finally:
            self.close()

    def _take(self, event: Delta | Finish) -> list[Span]:
        choice = self._choice
        if isinstance(event, Finish):
            if event.reason in ("error", "invalid"):
                raise RuntimeError(event.message)
            return choice.end(event).spans
        if choice.stream.is_stopped:
            return []
        spans = choice.push(event).spans
        if choice.stream.is_stopped:
            self._events.close("stop")
        return spans

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far."""
        return self._choice.tokens

    @property
    def completion(self) -> Completion:
        """The whole text and its counts.

        Raises:
            RuntimeError: the text has not ended.
        """
        if self._choice.finish is None:
            raise RuntimeError("the text has not ended: read the stream to its end first")
        return self._choice.completion()

    def close(self) -> None:
        """Ends the request if it still runs."""
        self._events.close()

    def __enter__(self) -> "CompletionStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
