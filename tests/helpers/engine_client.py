"""A client of an engine in the same process."""

import queue

from mtpjax.serving.request import Delta, Finish


class Client:
    """Submits requests to an engine and collects what comes back."""

    def __init__(self, engine):
        self.engine = engine

    def submit(self, request):
        events = queue.Queue()
        return self.engine.submit(request, events.put), events

    def finish(self, submitted):
        """Waits for the end; returns tokens, log-probabilities and the `Finish`."""
        tokens, logprobs = [], []
        while True:
            event = submitted[1].get(timeout=120)
            if isinstance(event, Finish):
                return tokens, logprobs, event
            assert isinstance(event, Delta) and event.tokens
            tokens += event.tokens
            logprobs += event.logprobs or []

    def run(self, requests):
        return [self.finish(submitted) for submitted in [self.submit(request) for request in requests]]


def check_idle(engine):
    status = engine.status()
    assert (status.num_running, status.num_waiting, status.num_used_pages, status.num_compilations) == (0, 0, 0, 0)
