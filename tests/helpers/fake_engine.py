"""An engine without a model: its tokens are scripted, and a thread delivers them in small deltas."""

import itertools
import threading
import time

from mtpjax.serving.request import Delta, Finish, QueueFull, Scores
from mtpjax.serving.status import EngineStatus

REPLY = "Prüfung: the naïve café 🙂 costs 5 € — ok?"


class FakeEngine:
    """Makes the same tokens for the same prompt.

    Args:
        reply: the text of every answer, after the prompt's last token; the end token 0 follows it.
        max_length: most tokens of a text.
        delay: seconds between two deltas of a request.
        max_requests: more that run at the same time are refused.
        fail_after: tokens after which each request fails.
        grammars: compiles the grammars of requests, which have no effect.
    """

    def __init__(self, reply=REPLY, *, max_length=200, delay=0.0, max_requests=10_000, fail_after=None, grammars=None):
        self.reply, self.max_length, self.vocab_size, self.delay = reply, max_length, 256, delay
        self.max_requests, self.fail_after = max_requests, fail_after
        self.sizes, self.progress_at = (1, 3, 2), time.monotonic()  # tokens per delta; read at each request
        self.logprob, self.grammars, self.failure = -0.5, grammars, ""
        self.requests, self.reasons, self.num_aborted = [], [], 0
        self._ids, self._running, self._aborted = itertools.count(), {}, {}
        self._changed, self._is_open = threading.Condition(), True
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def check(self, request):
        pass

    def submit(self, request, deliver):
        with self._changed:
            if len(self._running) >= self.max_requests:
                raise QueueFull("full")
            request_id = next(self._ids)
            self.requests.append(request)
            self._running[request_id] = (request, deliver, self._deltas(request))
            self._changed.notify()
            return request_id

    def abort(self, request_id, reason="abort"):
        with self._changed:
            if request_id in self._running:
                self._aborted[request_id] = reason

    def score(self, tokens, num_top):
        tops = [[] if i == 0 else [token, *range(1, num_top)][:num_top] for i, token in enumerate(tokens)]
        values = [[self.logprob - rank for rank in range(len(row))] for row in tops]
        return Scores([None, *[self.logprob] * (len(tokens) - 1)], tops, values)

    def status(self):
        return EngineStatus(num_running=len(self._running), num_steps=10, proposed=(10,), accepted=(5,))

    def flush_cache(self):
        return 3

    def close(self):
        self._is_open = False
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def wait_until_idle(self, seconds=5.0):
        """Returns whether nothing runs any more."""
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            time.sleep(0.005)
        return not self._running

    def _tokens(self, request):
        """Yields the new tokens of a request."""
        for number, token in enumerate(itertools.cycle([request.prompt[-1], *self.reply.encode(), 0])):
            if number == request.max_new_tokens:
                return
            yield token
            if number and token in request.stop_token_ids:
                return

    def _deltas(self, request):
        tokens, sizes, num_steps, num_new = self._tokens(request), itertools.cycle(self.sizes), 0, 0
        while part := list(itertools.islice(tokens, next(sizes))):
            num_steps, num_new = num_steps + 1, num_new + len(part)
            if self.fail_after is not None and num_new > self.fail_after:
                yield Finish("error", len(request.prompt), message="injected")
                return
            # Each delta is a pass: the accepted drafts, then the bonus token.
            origins = [*range(1, len(part)), 0]
            yield Delta(part, origins, [self.logprob] * len(part) if request.logprobs else None)
        reason = "length" if num_new == request.max_new_tokens else "stop"
        accepted = num_new - num_steps
        yield Finish(reason, len(request.prompt), 1, num_new, num_steps, (num_steps,), (accepted,))

    def _work(self):
        while self._is_open:
            with self._changed:
                while self._is_open and not self._running:
                    self._changed.wait()
                running = list(self._running.items())
            for request_id, (request, deliver, deltas) in running:
                is_aborted = request_id in self._aborted
                event = Finish(self._aborted[request_id], len(request.prompt), 1) if is_aborted else next(deltas)
                if isinstance(event, Finish):
                    with self._changed:
                        del self._running[request_id]
                        self.num_aborted += is_aborted
                        self.reasons.append(event.reason)
                deliver(event)
            time.sleep(self.delay)
