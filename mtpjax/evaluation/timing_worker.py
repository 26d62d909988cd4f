"""Times decoding in child processes, since thread settings take effect only before JAX starts.

The parent uses `TimingWorker`; the child runs `python -m mtpjax.evaluation.timing_worker`, which reads one JSON request
per line and writes one JSON result per line. During measurements, the parent must let only one child work at a time,
since children compete for cores.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from typing import Any

import numpy as np

from mtpjax import compilation_cache
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.trust import seconds_beyond, time_calls
from mtpjax.host import limit_threads


class TimingWorker:
    """A child process with a loaded model. Use it as a context manager, which ends the child.

    The child also ends when the parent exits, since its standard input closes.
    """

    def __init__(self, checkpoint, *, threads: int):
        """Starts the child.

        Args:
            checkpoint: path of the model to load.
            threads: number of threads in the child; 0: JAX's default, one per core.
        """
        command = [sys.executable, "-m", "mtpjax.evaluation.timing_worker", str(checkpoint), "--threads", str(threads)]
        self.threads = threads
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin and self._process.stdout
        self._requests, self._results = self._process.stdin, self._process.stdout

    def __enter__(self) -> "TimingWorker":
        return self

    def __exit__(self, *_):
        self._requests.close()  # ends the child's loop
        self._process.wait()

    def send(self, request: dict[str, Any]) -> None:
        """Sends a request without waiting; `receive` returns its result.

        Args:
            request: `{"method": "decode" | "costs", …}`, with the arguments of that `_RequestHandler` method.
        """
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            pass  # `receive` reports it

    def receive(self) -> dict[str, Any]:
        """Waits for the result of the oldest unanswered request; raises `RuntimeError` if the child has ended."""
        line = self._results.readline()
        if not line:
            raise RuntimeError(f"the timing process ended with code {self._process.wait()}; its error is above")
        return json.loads(line)

    def call(self, **request) -> dict[str, Any]:
        """Sends a request and waits for its result."""
        self.send(request)
        return self.receive()


class _RequestHandler:
    """Serves the parent's requests with one loaded model."""

    def __init__(self, model, params):
        self.model, self.params, self.meter = model, params, None

    def decode(
        self, *, prompts, max_new_tokens: int, num_steps: int, min_rows: int | None, temperature: float = 0.0
    ) -> dict[str, Any]:
        """Decodes the prompts one by one.

        Returns:
            "rows", the tokens and counts of each prompt; "seconds", the decoding time of each prompt, excluding prefill
            and the first token; "waited", the share of the time that threads waited for a core; and "is_negative",
            whether any call took no longer than its one-token call. `mtpjax.evaluation.trust` uses the last two.
        """
        from mtpjax.decoding.config import DecodeConfig
        from mtpjax.decoding.sampling_params import SamplingParams
        from mtpjax.inference.generate import speculative_generate

        # A call for one token measures prefill. Subtracting it leaves the time of the rounds.
        config = DecodeConfig(max_new_tokens=max_new_tokens, num_steps=num_steps, min_rows=min_rows)
        first_only = dataclasses.replace(config, max_new_tokens=1)
        sampling = SamplingParams(temperature=temperature, seed=0)
        decode = functools.partial(speculative_generate, self.params, model=self.model, sampling=sampling)
        rows, times, stopwatch = [], [], Stopwatch()
        for prompt in prompts:
            first_call = functools.partial(decode, [prompt], config=first_only)
            short, long, result = time_calls(first_call, functools.partial(decode, [prompt], config=config))
            times.append((short, long))
            # Check the counts, and keep the tokens so that the parent can compare the texts of different settings.
            stats = result.stats
            stats.check()
            tokens, accepted = result.rows()[0], stats.accepted[0].tolist()
            rows.append({"tokens": tokens, "rounds": int(stats.rounds[0]), "accepted": accepted})
        short, long = np.array(times).T
        return {
            "rows": rows,
            "seconds": seconds_beyond(short, long).tolist(),
            "waited": stopwatch.waited_share(),
            "is_negative": bool((long <= short).any()),
        }

    def costs(self, *, num_steps, context: int, capacity: int) -> dict[str, Any]:
        """Times chains, and adds the results to earlier measurements of their costs.

        Returns:
            The medians so far (`RoundCosts.to_json`), and "waited" for the new measurements, as in `decode`.
        """
        from mtpjax.evaluation.round_costs import CostMeter
        from mtpjax.evaluation.round_loops import TimingConditions
        from mtpjax.evaluation.round_shapes import chain_shape

        # The first request compiles the timing loops. Later requests repeat these loops, regardless of their arguments.
        if self.meter is None:
            shapes = tuple(chain_shape(depth) for depth in num_steps)
            conditions = TimingConditions(1, context, capacity)
            self.meter = CostMeter(self.params, model=self.model, shapes=shapes, conditions=conditions)
        self.meter.compile()
        stopwatch = Stopwatch()
        self.meter.measure()
        return {**self.meter.costs().to_json(), "waited": stopwatch.waited_share()}


def main() -> None:
    """Runs the child: loads the model, then serves requests until standard input closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    # Set the threads before anything imports JAX.
    limit_threads(options.threads)
    compilation_cache.follow_threads()

    from mtpjax.io.checkpoint import load

    # Serve requests until the parent closes standard input.
    handler = _RequestHandler(*load(options.checkpoint))
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(handler, request.pop("method"))
        print(json.dumps(answer(**request)), flush=True)


if __name__ == "__main__":
    main()
