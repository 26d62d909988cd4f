"""The mailbox hands calls from other threads to an event loop: all of them, in order, with few wake-ups."""

import asyncio
import threading

import pytest
from mtpjax.serving.api.engine_client import Mailbox


class CountingLoop:
    """Passes on to a loop, and counts the wake-ups."""

    def __init__(self, loop):
        self._loop, self.num_wakeups = loop, 0
        self.call_soon = loop.call_soon

    def call_soon_threadsafe(self, *arguments):
        self.num_wakeups += 1
        return self._loop.call_soon_threadsafe(*arguments)


def test_calls_that_come_together_wake_the_loop_once():
    async def run():
        loop, got = CountingLoop(asyncio.get_running_loop()), []
        mailbox = Mailbox(loop)
        # The loop is busy until it awaits, so all calls come together.
        for value in range(100):
            mailbox.post(got.append, value)
        await asyncio.sleep(0.01)
        assert got == list(range(100)) and loop.num_wakeups == 1
        mailbox.post(got.append, 100)
        await asyncio.sleep(0.01)
        assert got == list(range(101)) and loop.num_wakeups == 2

    asyncio.run(run())


def test_no_call_is_lost_between_threads():
    async def run():
        mailbox, got = Mailbox(asyncio.get_running_loop()), {thread: [] for thread in range(4)}

        def post(thread):
            for value in range(2000):
                mailbox.post(got[thread].append, value)

        threads = [threading.Thread(target=post, args=(thread,)) for thread in got]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert all(values == list(range(2000)) for values in got.values())

    asyncio.run(run())


def test_a_call_that_fails_does_not_keep_the_others_back():
    async def run():
        loop = asyncio.get_running_loop()
        errors, got = [], []
        loop.set_exception_handler(lambda loop, context: errors.append(context["exception"]))
        mailbox = Mailbox(loop)
        for function, value in ((got.append, 1), (int, "no number"), (got.append, 2)):
            mailbox.post(function, value)
        await asyncio.sleep(0.01)
        assert got == [1, 2] and [type(error) for error in errors] == [ValueError]

    asyncio.run(run())


def test_a_loop_that_has_ended_takes_nothing():
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    mailbox.post(pytest.fail, "called")
