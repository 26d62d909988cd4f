"""Calls as bytes, and two executors in one process: the follower's state stays equal to the leader's."""

import socket
import threading

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams
from mtpjax.decoding import session
from mtpjax.decoding.session import Batch
from mtpjax.decoding.state import Draft
from mtpjax.serving.disaggregation.protocol import Signer
from mtpjax.serving.engine import Engine
from mtpjax.serving.multihost import connection, plan
from mtpjax.serving.multihost.connection import Followers, Leader
from mtpjax.serving.multihost.follower import FollowerExecutor, follow
from mtpjax.serving.program_set import PendingCall, ProgramKey
from mtpjax.serving.request import Finish, Request
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.engine_client import Client

CONFIG = DecodeConfig(num_steps=1, prefill_chunk=8)
SETTINGS = EngineSettings(num_slots=2, max_length=64, page_size=8, batch_sizes=(2,), prefill_tokens=16)
KEY = ProgramKey("advance", 2, 64, True, 3)


def decoded(call):
    return plan.decode_call(*plan.decode(plan.encode_call(call)))


def test_a_call_arrives_as_it_was_sent():
    batch = Batch(slots=np.array([[0, 2]], np.int32), table=np.full((1, 2, 64), 7), num_shared=np.zeros((1, 2), bool))
    call = decoded(PendingCall(session.advance, (batch, np.int32(4), None, np.float32([-np.inf, 1])), KEY))
    assert call.program is session.advance and call.key == KEY
    found, *rest = call.arrays
    for name in ("slots", "table", "num_shared"):
        np.testing.assert_array_equal(getattr(found, name), getattr(batch, name), strict=True)
    np.testing.assert_array_equal(rest[0], np.array(4, np.int32), strict=True)
    assert rest[1] is None and rest[2].tolist() == [-np.inf, 1]


def test_a_draft_and_arrays_of_one_value_do_not_travel():
    draft = Draft(tokens=jax.numpy.zeros((2, 3), int))
    call = PendingCall(session.verify_round, (draft, np.zeros((1, 100_000), np.float32)), KEY)
    assert len(plan.encode_call(call)) < 300
    found, zeros = decoded(call).arrays
    assert found is Draft
    np.testing.assert_array_equal(zeros, call.arrays[1], strict=True)


@pytest.mark.parametrize("name", ["no_such_program", "OneGraph", "dataclasses"])
def test_a_call_of_another_version_is_an_error(name):
    with pytest.raises(ValueError, match="same version"):
        plan.decode_call(*plan.decode(plan.encode(name, key=KEY)))


def test_only_who_knows_the_secret_becomes_a_follower(monkeypatch):
    """A stranger, and a process that comes twice, are turned away; the right one gets in afterwards."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(connection, "HELLO_SECONDS", 2.0)
    right, wrong = Signer(b"x" * 16), Signer(b"y" * 16)
    with connection._listen() as listener:
        found = {}
        thread = threading.Thread(target=lambda: found.update(connection._accept(listener, 1, right)))
        thread.start()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with pytest.raises(connection.LostProcess, match="cannot reach process 0"):
                connection._join(["127.0.0.1"], port, wrong)
        with connection._join(["127.0.0.1"], port, right) as joined:
            thread.join(timeout=10)
            assert [*found] == [1]
            connection._send(found[1], b"hello")
            assert connection._receive(joined, 5) == b"hello"
            found[1].close()


@pytest.mark.parametrize("attention", ["grouped", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_follower_has_the_leaders_state_and_its_loss_ends_requests(attention, small, monkeypatch):
    exits = []
    monkeypatch.setattr(connection.distributed, "exit_without_shutdown", exits.append)
    model, params = small(attention, "mixed")
    here, there = socket.socketpair()
    followers, leader = Followers({1: here}), Leader(there)
    engine = Engine(params, model=model, config=CONFIG, settings=SETTINGS, followers=followers)
    followers.before_exit = engine.fail
    executor = FollowerExecutor(params, model=model, config=CONFIG, settings=SETTINGS)
    thread = threading.Thread(target=follow, args=(executor, leader), daemon=True)
    thread.start()
    engine.start()
    # 1. Requests, and a start anew in between.
    prompt = tuple(range(1, 35))  # long enough to be shared, and for snapshots of recurrent states
    requests = [Request(prompt=prompt, max_new_tokens=12, sampling=SamplingParams(temperature=1.0, seed=1))] * 3
    before = Client(engine).run(requests)
    engine._ask(engine._executor.reset)
    engine.flush_cache()  # the pages hold nothing now
    assert [tokens for tokens, _, _ in Client(engine).run(requests)] == [tokens for tokens, _, _ in before]
    engine._ask(lambda: None)
    # 2. A tick is complete when the next action runs, but the follower may still be behind.
    leaves = jax.tree.leaves((engine._executor.state, engine._executor.snapshots))
    connection._send(here, connection.STOP)
    thread.join(timeout=20)
    assert not thread.is_alive() and len(leaves) > 10
    for own, other in zip(leaves, jax.tree.leaves((executor.state, executor.snapshots)), strict=True):
        np.testing.assert_array_equal(own, other)
    # 3. The follower is lost while a request waits.
    gate = threading.Event()
    engine._post(gate.wait)
    submitted = Client(engine).submit(Request(prompt=(1,), max_new_tokens=50))
    leader.close()
    finish = submitted[1].get(timeout=10)
    assert isinstance(finish, Finish) and (finish.reason, finish.is_retryable) == ("error", True)
    assert "process 1" in finish.message
    gate.set()
    engine._thread.join(timeout=10)
    assert exits == [75]
    here.close()
