"""Times decoding in processes of their own: thread settings act only before JAX starts.

`Worker` is the parent's side; `python -m mtpjax.evaluation.timing` the child's, which answers one JSON line per JSON
line. Only one child works at a time, so that interleaved runs see the same machine.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from typing import Any

from mtpjax.host import limit_threads


class Worker:
    """A child with a loaded model and `threads` threads (0: all). Use as a context manager; it ends with the parent."""

    def __init__(self, checkpoint, *, threads: int):
        command = [sys.executable, "-m", "mtpjax.evaluation.timing", str(checkpoint), "--threads", str(threads)]
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
        """Sends a request; `answer` waits for its result. `{"do": "decode" | "costs", …}`, see `_Child`."""
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


class _Child:
    """Answers requests about one model."""

    def __init__(self, model, params):
        self.model, self.params, self.meter = model, params, None

    def decode(
        self, *, prompts, max_new_tokens: int, num_steps: int, min_rows: int, repeats: int = 1
    ) -> dict[str, Any]:
        """Decodes the prompts one by one; the seconds of each beyond those of its prefill and first token (medians)."""
        from mtpjax.decoding.config import DecodeConfig
        from mtpjax.decoding.generate import speculative_generate

        config = DecodeConfig(max_new_tokens=max_new_tokens, num_steps=num_steps, min_rows=min_rows)
        first_only = dataclasses.replace(config, max_new_tokens=1)
        decode = functools.partial(speculative_generate, self.params, model=self.model)
        rows, seconds = [], []
        for prompt in prompts:
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                decode([prompt], config=first_only)
                middle = time.perf_counter()
                result = decode([prompt], config=config)
                times.append(time.perf_counter() - middle - (middle - begin))
            stats = result.stats
            stats.check()
            seconds.append(sorted(times)[len(times) // 2])
            tokens, accepted = result.rows()[0], stats.accepted[0].tolist()
            rows.append({"tokens": tokens, "steps": int(stats.steps[0]), "accepted": accepted})
        return {"rows": rows, "seconds": seconds}

    def costs(self, *, num_steps, context: int, capacity: int) -> dict[str, Any]:
        """Times each part of chains some times more; returns the medians so far as JSON (`Costs.to_json`)."""
        from mtpjax.evaluation.round_costs import CostMeter, chain

        if self.meter is None:
            shapes = tuple(chain(depth) for depth in num_steps)
            self.meter = CostMeter(self.params, model=self.model, shapes=shapes, context=context, capacity=capacity)
        self.meter.measure()
        return self.meter.costs().to_json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    limit_threads(options.threads)

    from mtpjax.io.checkpoint import load

    child = _Child(*load(options.checkpoint))
    answers = {"decode": child.decode, "costs": child.costs}
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answers[request.pop("do")](**request)), flush=True)


if __name__ == "__main__":
    main()
