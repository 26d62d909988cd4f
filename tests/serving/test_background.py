"""Programs that are compiled while requests run: texts stay the same, and no request waits for what another needs."""

import dataclasses
import threading
import time

import jax
import pytest

from mtpjax.serving.background import BackgroundCompiler
from mtpjax.serving.engine import Engine
from mtpjax.serving.program_set import ProgramKey, ProgramSet, split_rows
from mtpjax.serving.programs import Programs
from mtpjax.serving.request import Finish, Request
from tests.helpers.engine_client import Client, check_idle
from tests.serving.test_engine import CONFIG, SETTINGS, random_requests

REQUEST = Request(prompt=(5, 6, 7), max_new_tokens=4)


@pytest.fixture
def compiling_threads():
    """Names of the threads that XLA has compiled in since the test began."""
    names = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_texts_are_the_same_before_and_after_all_programs_are_there(small, compiling_threads):
    model, params = small("grouped")
    config, settings = dataclasses.replace(CONFIG, num_steps=1), dataclasses.replace(SETTINGS, prefill_tokens=8)
    engine = Engine(params, model=model, config=config, settings=settings)
    engine.warm_up(programs="first")
    compiling_threads.clear()
    engine.start()
    requests = list(random_requests(3, 10, new_tokens=(4, 12)))
    runs = []
    for _ in range(2):
        runs.append([(tokens, finish.reason) for tokens, _, finish in Client(engine).run(requests)])
        wait_until(lambda: not engine.status().num_programs_left)
    assert runs[0] == runs[1]
    # Requests without drafts waited for their program; the others began at once, with those of one row.
    assert engine.status().num_compile_waits == sum(not request.speculative for request in requests)
    # `check_idle` also sees that the programs of the plan do not count as compiled by requests.
    check_idle(engine)
    assert set(compiling_threads) == {"mtpjax-compile"}
    assert engine.close(timeout=30)


@pytest.fixture
def stuck(small, monkeypatch):
    """A running engine without programs whose compiler waits for `engine.let_go`, or raises `engine.error`."""
    model, params = small("grouped")
    engine = Engine(params, model=model, config=CONFIG, settings=dataclasses.replace(SETTINGS, max_queue_seconds=1.0))
    engine.let_go, engine.error = threading.Event(), None

    def compile_program(key, run):
        assert engine.let_go.wait(60)
        if engine.error is not None:
            raise engine.error

    monkeypatch.setattr(engine._executor.programs, "compile", compile_program)
    engine.warm_up(programs="none")
    engine.start()
    yield engine
    engine.let_go.set()
    engine.close(timeout=0)


def submit(engine):
    """Returns the request's number, and a list that gets its events."""
    events = []
    return engine.submit(REQUEST, events.append), events


def test_a_request_that_waits_for_a_program_can_be_aborted(stuck):
    number, events = submit(stuck)
    wait_until(lambda: stuck.status().num_compile_waits == 1)
    status = stuck.status()
    assert (status.num_running, status.num_waiting, status.num_programs_left) == (0, 1, 3)
    assert stuck.busy_since is None, "the engine waits, and is not hung"
    stuck.abort(number)
    wait_until(lambda: events)
    assert [event.reason for event in events] == ["abort"]
    assert stuck.close(timeout=5)


def test_a_request_that_waits_too_long_for_a_program_ends(stuck):
    _, events = submit(stuck)
    wait_until(lambda: events)
    assert [event.reason for event in events] == ["timeout"]


def test_a_program_that_does_not_compile_fails_the_requests_that_need_it(stuck):
    stuck.error = MemoryError("no room")
    stuck.let_go.set()
    for _ in range(2):  # the second comes when the error is known
        _, events = submit(stuck)
        wait_until(lambda events=events: events)
        [finish] = events
        assert isinstance(finish, Finish) and finish.reason == "error" and "does not compile: no room" in finish.message
    with pytest.raises(RuntimeError, match="does not compile: no room"):
        stuck.score([1, 2, 3], 1)
    assert not stuck.status().num_waiting and not stuck.failure


def test_a_first_use_is_not_a_hung_call(stuck):
    session, stuck._ticks.began = stuck._executor.session, time.monotonic() - 1000
    try:
        with session.first_use(ProgramKey("clear")):
            assert stuck.busy_since is None
        assert time.monotonic() - stuck.busy_since < 100, "the time of the call begins when it has compiled"
        with session.first_use(ProgramKey("clear")):
            assert stuck.busy_since is not None, "the second use compiles nothing"
    finally:
        stuck._ticks.began = None


def test_what_requests_want_is_compiled_first():
    compiled, begin = [], threading.Event()

    def compile_program(key):
        begin.wait(10)
        compiled.append(key)

    keys = [ProgramKey("advance", size) for size in range(5)]
    compiler = BackgroundCompiler(keys, compile_program, lambda key, error: None)
    wait_until(lambda: len(compiler._queue) == 4)
    for size in (3, 7, 3):
        compiler.want(ProgramKey("advance", size))
    assert compiler.num_left == 6
    begin.set()
    wait_until(lambda: not compiler.num_left)
    assert [key.size for key in compiled] == [0, 3, 7, 1, 2, 4]
    compiler.stop()


def test_a_call_takes_the_smallest_program_that_can_do_its_work():
    missed = []
    programs = ProgramSet(missed.append)
    wanted = ProgramKey("advance", 4, 17, True, 1)
    assert programs.choose(wanted) == wanted, "all are there"
    one, many = ProgramKey("advance", 1, 130, False, 1), ProgramKey("advance", 8, 130, False, 1)
    programs.ready = {one, ProgramKey("advance", 8, 130, False, 0)}
    assert programs.choose(wanted) == one and missed == [wanted], "row by row"
    programs.ready |= {many, ProgramKey("advance", 8, 17, False, 1), ProgramKey("advance", 64, 17, True, 1)}
    assert programs.choose(wanted) == ProgramKey("advance", 8, 17, False, 1)
    assert programs.choose(wanted._replace(width=130)) == many
    assert programs.choose(wanted._replace(plain=False, width=130, size=64)) == many, "as many rows as possible"
    assert not programs.missing([wanted]) and programs.missing([wanted._replace(depth=3)])


def test_the_first_programs_serve_any_request_without_a_grammar(stuck):
    programs, available = Programs(stuck._executor.session, grammars=object()), ProgramSet()
    stuck._executor.session.has_plain = True
    available.ready = set(programs.first())
    left = available.missing(programs.all())
    assert {(key.kind, key.depth) for key in left} == {
        *{("advance", 0), ("masked prefill", 0), ("masked round", 0), ("masked round", CONFIG.num_steps)},
        *{("clear", 0), ("score", 0)},
    }


def test_rows_of_each_part_are_split_in_order():
    rows = [(0, "a"), (1, "b"), (0, "c"), (0, "d"), (1, "e")]
    assert split_rows(rows, 2, lambda row: row[0]) == [[rows[0], rows[1], rows[2], rows[4]], [rows[3]]]
    assert split_rows(rows, 4, lambda row: row[0]) == [rows]
