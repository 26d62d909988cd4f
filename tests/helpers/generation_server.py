"""A server of the routes that `mtpjax bench-serving` uses, with known timing, tokens and accept length."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

FIRST_SECONDS, STEP_SECONDS = 0.03, 0.01
TOKENS_PER_STEP = 3  # with drafts; 1 without


class GenerationServer:
    """What the server did, and how it should behave.

    Attributes:
        bodies: the generation requests, by arrival.
        peak: most requests that ran at the same time.
        is_failing: says whether a request fails, given its number from 0.
        fails_late: failures come as an event of a stream, not as a status.
        tells_usage: chunks of OpenAI's routes have running counts; else only the last one has the total.
        tells_speculation: answers of /generate and /metrics say how many drafts were accepted.
        obeys: `"speculative": false` turns drafts off.
        num_flushes: requests for an empty prefix cache.
    """

    def __init__(self):
        self.url = ""
        self.writers: list[asyncio.StreamWriter] = []
        self.bodies, self.headers, self.running, self.peak, self.num_flushes = [], [], 0, 0, 0
        self.is_failing = lambda number: False
        self.fails_late, self.tells_usage, self.tells_speculation, self.obeys = False, True, True, True
        self.passes = self.accepted = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of a connection."""
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:])}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                _, path, _ = head[0].split(" ")
                body = json.loads(content) if content else {}
                if path in ("/generate", "/v1/completions", "/v1/chat/completions"):
                    self.headers.append(headers)
                    await self.generate(path, body, writer)
                else:
                    self.answer(path, body, writer)
                await writer.drain()
        writer.close()

    def answer(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        """Answers the short routes."""
        if path == "/v1/models":
            respond(writer, 200, {"data": [{"id": "fake"}]})
        elif path == "/tokenize":
            respond(writer, 200, {"tokens": [len(word) for word in body["prompt"].split()]})
        elif path == "/metrics" and self.tells_speculation:
            lines = ["# TYPE vllm:spec_decode_num_drafts counter"]
            for prefix in ("mtpjax", "vllm"):  # the same counts under two names
                lines.append(f'{prefix}:spec_decode_num_drafts_total{{model_name="fake"}} {self.passes}.0')
                lines.append(f'{prefix}:spec_decode_num_accepted_tokens_total{{model_name="fake"}} {self.accepted}.0')
                lines.append(
                    f'{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {self.accepted}.0'
                )
            respond(writer, 200, "\n".join(lines) + "\n")
        elif path == "/flush_cache":
            self.num_flushes += 1
            respond(writer, 200, "flushed")
        else:
            respond(writer, 404, {"error": {"message": "no such route"}})

    async def generate(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        """Delivers the first token alone, then some tokens per step."""
        number = len(self.bodies)
        self.bodies.append(body)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            if self.is_failing(number) and not self.fails_late:
                respond(writer, 500, {"error": {"message": "out of luck"}})
                return
            step = 1 if self.obeys and body.get("speculative") is False else TOKENS_PER_STEP
            count = body.get("max_tokens") or body.get("max_completion_tokens")
            count = count or body["sampling_params"]["max_new_tokens"]
            prompt = body.get("input_ids") or body.get("prompt") or body.get("text") or "a chat"
            num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
            chunked = body["stream"]
            if chunked:
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
            done = passes = accepted = 0
            while done < count:
                await asyncio.sleep(STEP_SECONDS if done else FIRST_SECONDS)
                if done:
                    passes, accepted = passes + 1, accepted + min(step, count - done) - 1
                done = min(done + (step if done else 1), count)
                event = self.event(path, done, num_prompt, passes, accepted, is_last=done == count)
                if self.is_failing(number) and done > 1:
                    event = {"error": {"message": "out of luck"}}
                if chunked:
                    write_chunk(writer, f"data: {json.dumps(event)}\n\n")
                    await writer.drain()
            self.passes, self.accepted = self.passes + passes, self.accepted + accepted
            if not chunked:
                respond(writer, 200, event)
                return
            if path != "/generate":
                usage = {"prompt_tokens": num_prompt, "completion_tokens": done}
                write_chunk(writer, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
            write_chunk(writer, "data: [DONE]\n\n")
            write_chunk(writer, "")
        finally:
            self.running -= 1

    def event(self, path: str, done: int, num_prompt: int, passes: int, accepted: int, *, is_last: bool) -> dict:
        """Makes the event after a step, with the totals so far."""
        counts = {"prompt_tokens": num_prompt, "completion_tokens": done}
        if path == "/generate":
            told = {"spec_verify_ct": passes, "spec_accept_length": 1 + accepted / passes} if passes else {}
            return {"text": "x" * done, "meta_info": {**counts, **(told if self.tells_speculation else {})}}
        text = {"text": "x"} if path == "/v1/completions" else {"delta": {"content": "x"}}
        return {"choices": [text], "usage": counts if self.tells_usage else None}


def respond(writer: asyncio.StreamWriter, status: int, content: dict | str) -> None:
    """Writes a whole answer."""
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    writer.write(f"HTTP/1.1 {status} -\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text)


def write_chunk(writer: asyncio.StreamWriter, text: str) -> None:
    """Writes a chunk of a chunked answer; an empty one ends it."""
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())


@contextlib.contextmanager
def serve_generation() -> Iterator[GenerationServer]:
    """Runs a server in a thread, on a free port."""
    server, ready, stop = GenerationServer(), threading.Event(), asyncio.Event()

    async def run() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listener.close()
        # A connection that is open when the loop ends is a warning.
        for writer in server.writers:
            writer.close()
        await asyncio.sleep(0.01)

    loop: asyncio.AbstractEventLoop | None = None
    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield server
    finally:
        assert loop is not None
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
