"""Many requests from one thread, and streams of one request, on an engine without a device."""

import asyncio
import gc
import os
import signal
import threading
import time

import pytest

from mtpjax.serving.request import Delta, EngineClosed, Finish, QueueFull, Request
from mtpjax.serving.running import RequestStream, collect_outputs, run_requests
from tests.helpers.fake_engine import FakeEngine


@pytest.fixture
def engine():
    """`engine(**settings)` -> an engine that answers with the last token of the prompt and a fixed text."""
    made = []

    def make(**settings):
        made.append(FakeEngine(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def requests(count, *, new_tokens=8, **options):
    return [Request(prompt=(7, number % 200), max_new_tokens=new_tokens, **options) for number in range(count)]


def test_more_requests_than_the_queue_holds_come_back_in_order(engine):
    few, counts = engine(max_requests=6), []
    outputs = collect_outputs(few, requests(50, logprobs=True), lambda *progress: counts.append(progress))
    assert [output.tokens[0] for output in outputs] == list(range(50))
    assert all(len(output.tokens) == len(output.origins) == len(output.logprobs) == 8 for output in outputs)
    assert {output.finish.reason for output in outputs} == {"length"}
    assert counts == [(number, 50) for number in range(1, 51)]


def test_requests_wait_while_others_fill_the_queue(engine):
    full, submit, failures = engine(), None, [QueueFull("full")] * 3
    submit = full.submit

    def sometimes(request, deliver):
        if failures:
            raise failures.pop()
        return submit(request, deliver)

    full.submit = sometimes
    assert len(collect_outputs(full, requests(2), lambda *_: None)) == 2


def test_an_engine_that_shuts_down_ends_the_call(engine):
    closed = engine()
    closed.submit = lambda *_: (_ for _ in ()).throw(EngineClosed("the engine shuts down"))
    with pytest.raises(EngineClosed):
        collect_outputs(closed, requests(2), lambda *_: None)


def test_an_invalid_request_is_found_before_any_runs(engine):
    picky, submitted = engine(), []

    def check(request):
        if request.prompt[-1] == 3:
            raise ValueError("three")

    picky.check, picky.submit = check, lambda *call: submitted.append(call)
    with pytest.raises(ValueError, match="request 3: three"):
        collect_outputs(picky, requests(5), lambda *_: None)
    assert not submitted


def test_a_receiver_can_end_a_request(engine):
    slow, reasons = engine(delay=0.01), {}

    def receive(index, event):
        if isinstance(event, Finish):
            reasons[index] = event.reason
        return index == 0

    run_requests(slow, requests(2, new_tokens=20), receive)
    assert reasons == {0: "stop", 1: "length"}


def test_a_failing_receiver_leaves_nothing_running(engine):
    slow = engine(delay=0.01)
    with pytest.raises(ZeroDivisionError):
        run_requests(slow, requests(4, new_tokens=100), lambda index, event: 1 // 0)
    assert slow.wait_until_idle()


def test_an_interrupt_ends_what_runs_and_returns_what_is_done(engine):
    slow, handler = engine(delay=0.01, max_requests=8), signal.getsignal(signal.SIGINT)
    asked = requests(3, new_tokens=2) + requests(6, new_tokens=190)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    outputs = collect_outputs(slow, asked, lambda *_: None)
    assert [output.finish.reason for output in outputs] == ["length"] * 3 + ["abort"] * 6
    assert outputs[3].tokens and not outputs[-1].tokens  # one was running, and one waiting
    assert signal.getsignal(signal.SIGINT) is handler and slow.wait_until_idle()


def test_a_second_interrupt_raises(engine):
    stuck, asked = engine(delay=0.01), requests(2, new_tokens=190)
    stuck.abort = lambda *_: None
    for seconds in (0.2, 0.4):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        collect_outputs(stuck, asked, lambda *_: None)


def test_other_threads_need_no_signals(engine):
    found = []
    thread = threading.Thread(target=lambda: found.extend(collect_outputs(engine(), requests(3), lambda *_: None)))
    thread.start()
    thread.join(10)
    assert len(found) == 3


def test_a_stream_yields_deltas_and_the_end(engine):
    *deltas, finish = RequestStream(engine(), requests(1)[0])
    assert all(isinstance(each, Delta) for each in deltas) and finish.reason == "length"
    assert sum(len(each.tokens) for each in deltas) == 8


def test_streams_can_be_read_at_the_same_time_in_a_loop(engine):
    one = engine(delay=0.002)

    async def read(stream):
        return [event async for event in stream]

    async def main():
        return await asyncio.gather(*(read(RequestStream(one, each)) for each in requests(5)))

    events = asyncio.run(main())
    assert [each[0].tokens[0] for each in events] == list(range(5))
    assert {each[-1].reason for each in events} == {"length"}


@pytest.mark.parametrize("is_async", [False, True])
def test_leaving_a_stream_ends_its_request(is_async, engine):
    slow = engine(delay=0.01)
    stream = RequestStream(slow, requests(1, new_tokens=199)[0])

    async def read_one():
        events = aiter(stream)
        await anext(events)
        await events.aclose()

    if is_async:
        asyncio.run(read_one())
    else:
        for _ in stream:
            break
    assert slow.wait_until_idle() and slow.reasons == ["abort"]


def test_a_stream_that_nobody_reads_ends_its_request(engine):
    slow = engine(delay=0.01)
    stream = RequestStream(slow, requests(1, new_tokens=199)[0])
    del stream
    gc.collect()
    assert slow.wait_until_idle() and slow.reasons == ["abort"]


def test_a_stream_outlives_its_event_loop(engine):
    slow = engine(delay=0.01)
    stream = RequestStream(slow, requests(1, new_tokens=40)[0])

    async def read_one():
        return await anext(aiter(stream))

    async def leave_without_closing():
        task = asyncio.ensure_future(read_one())
        await task

    asyncio.run(leave_without_closing())
    time.sleep(0.05)
    assert slow.wait_until_idle()
