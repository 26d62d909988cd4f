"""Times decoding in processes of their own: thread settings act only before JAX starts.

`Worker` is the parent's side; `python -m mtpjax.timing` the child's, which answers one JSON line per JSON line. Only
one child works at a time, so that interleaved runs see the same machine.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any


class Worker:
    """A child with a loaded model and `threads` threads (0: all). Use as a context manager; it ends with the parent."""

    def __init__(self, checkpoint, *, threads: int):
        command = [sys.executable, "-m", "mtpjax.timing", str(checkpoint), "--threads", str(threads)]
        self.threads = threads
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_):
        self._requests.close()  # ends the child's loop
        self._process.wait()

    def ask(self, request: dict[str, Any]) -> None:
        """Sends a request; `answer` waits for its result. `{"do": "decode" | "costs", …}`, see `_decode`, `_costs`."""
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            pass  # `answer` reports it

    def answer(self) -> dict[str, Any]:
        """The result of the oldest request. Raises `RuntimeError` if the child has ended."""
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the timing process ended with code {self._process.wait()}; its error is above")
        return json.loads(line)

    def call(self, **request) -> dict[str, Any]:
        self.ask(request)
        return self.answer()


def _decode(
    model, params, *, prompts, max_new_tokens: int, num_steps: int, min_rows: int, repeats: int = 1
) -> dict[str, Any]:
    """Decodes the prompts one by one; the seconds of each beyond those of its prefill and first token (medians)."""
    from mtpjax.config import DecodeConfig
    from mtpjax.decode.generate import speculative_generate

    config = DecodeConfig(max_new_tokens=max_new_tokens, num_steps=num_steps, min_rows=min_rows)
    first_only = dataclasses.replace(config, max_new_tokens=1)
    rows, seconds = [], []
    for prompt in prompts:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            speculative_generate(params, [prompt], model=model, config=first_only)
            middle = time.perf_counter()
            result = speculative_generate(params, [prompt], model=model, config=config)
            times.append(time.perf_counter() - middle - (middle - begin))
        stats = result.stats
        stats.check()
        seconds.append(sorted(times)[len(times) // 2])
        rows.append({"tokens": result.rows()[0], "steps": int(stats.steps[0]), "accepted": stats.accepted[0].tolist()})
    return {"rows": rows, "seconds": seconds}


def _costs(model, params, *, num_steps, context: int, capacity: int) -> dict[str, Any]:
    from mtpjax.decode.costs import measure_costs

    return dataclasses.asdict(
        measure_costs(params, model=model, num_steps=tuple(num_steps), context=context, capacity=capacity)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])

    from mtpjax.checkpoint import load

    model, params = load(options.checkpoint)
    for line in sys.stdin:
        request = json.loads(line)
        result = {"decode": _decode, "costs": _costs}[request.pop("do")](model, params, **request)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
