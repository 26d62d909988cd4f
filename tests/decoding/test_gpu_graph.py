"""What calls do with the options for CUDA graphs: `tests/experiments/test_gpu_thunks.py` reads the compiled graph."""

import logging
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, compat, generate, speculative_generate
from mtpjax.decoding import gpu_graph, graph_trial
from mtpjax.decoding.gpu_graph import Graphs, one_graph
from mtpjax.decoding.loop import decode
from tests.helpers.failing_graphs import ERROR, FailingCall

TWO_CPUS = {"data": 2}


@pytest.fixture
def cuda(monkeypatch):
    """A process that takes its CPUs for NVIDIA GPUs, and knows nothing about graphs yet."""
    monkeypatch.setattr(compat, "is_cuda", lambda: True)
    monkeypatch.setattr(gpu_graph, "GRAPHS", Graphs())


def warnings_in(caplog):
    return [record.message for record in caplog.records if record.name == gpu_graph.__name__]


def test_other_platforms_are_not_given_the_options(monkeypatch):
    monkeypatch.setattr(gpu_graph, "GRAPH_OPTIONS", {"xla_gpu_no_such_option": "1"})
    monkeypatch.setattr(graph_trial, "trial_loop", lambda *arguments: pytest.fail("a trial without a GPU"))
    double = one_graph()(lambda x: 2 * x)
    np.testing.assert_array_equal(double(jnp.ones(2)), [2, 2])
    assert double.plain._cache_size() == 1


def test_an_option_that_xla_rejects_is_left_out_with_a_warning(cuda, monkeypatch, caplog):
    monkeypatch.setattr(gpu_graph, "GRAPH_OPTIONS", {"xla_gpu_no_such_option": "1"})
    double, triple = (one_graph(donate_argnames="x")(lambda x, n=n: n * x) for n in (2, 3))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(double(jnp.ones(2)), [2, 2])
            np.testing.assert_array_equal(triple(jnp.ones(2)), [3, 3])
    [message] = warnings_in(caplog)
    assert "xla_gpu_no_such_option" in message


def test_the_options_are_allowed_inside_of_another_trace(cuda):
    double = one_graph()(lambda x: 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda x: double(x) + 1)(jnp.ones(2)), [3, 3])
    np.testing.assert_array_equal(double(jnp.ones(2)), [2, 2])
    assert double._on_one_gpu._cache_size() == 1


@pytest.mark.parametrize("axes", [{}, TWO_CPUS, {"data": 2, "tensor": 2}])
def test_the_trial_computes_what_it_should(axes, cuda, caplog):
    mesh = compat.make_mesh(axes) if axes else jax.sharding.get_mesh()
    assert gpu_graph.GRAPHS.options(mesh) is (gpu_graph.MESH_GRAPH_OPTIONS if axes else gpu_graph.GRAPH_OPTIONS)
    assert not warnings_in(caplog)


def check_texts(model, params, monkeypatch, caplog, cause):
    """Calls of several kinds have the texts of a CPU, and give one warning together."""
    config = DecodeConfig(num_steps=2, max_new_tokens=9, prefill_chunk=8)
    texts = lambda: [
        form(params, [[3, 1, 4], [1, 5]], model=model, config=config).rows()
        for form in (generate, speculative_generate)
    ]
    with monkeypatch.context() as as_cpu:
        as_cpu.setattr(compat, "is_cuda", lambda: False)
        expected = texts()
    with caplog.at_level(logging.WARNING):
        assert texts() == expected
    [message] = warnings_in(caplog)
    assert cause in message and "Results stay the same" in message
    assert gpu_graph.GRAPHS.options(jax.sharding.get_mesh()) is None


@pytest.mark.parametrize("how", ["dispatch", "read", "wrong"])
def test_a_trial_that_fails_gives_one_warning_and_the_same_texts(how, cuda, small, monkeypatch, caplog):
    failing = FailingCall(how, number=2, result=lambda x, turns: x + turns)
    monkeypatch.setattr(graph_trial, "trial_loop", lambda *arguments: failing)
    monkeypatch.setattr(decode, "_on_one_gpu", None)
    check_texts(*small("grouped", "mixed"), monkeypatch, caplog, "a loop computed" if how == "wrong" else ERROR)


@pytest.mark.parametrize("how", ["dispatch", "read"])
def test_a_whole_call_whose_graph_fails_is_repeated_with_a_new_state(how, cuda, small, monkeypatch, caplog):
    if how == "dispatch":
        monkeypatch.setattr(decode, "_on_one_gpu", FailingCall(how, number=1, result=None, donated=2))
    else:
        monkeypatch.setattr(decode, "_on_one_gpu", decode.plain)
        module = sys.modules["mtpjax.inference.generate"]
        collect, calls = module.collect, []

        def fail_on_cuda(*arguments, **settings):
            if compat.is_cuda() and not calls:
                calls.append(arguments)
                raise jax.errors.JaxRuntimeError(ERROR)
            return collect(*arguments, **settings)

        monkeypatch.setattr(module, "collect", fail_on_cuda)
    check_texts(*small("grouped", "mixed"), monkeypatch, caplog, ERROR)


def test_full_memory_is_raised_and_leaves_the_graphs(cuda, caplog):
    def full():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    mesh = jax.sharding.get_mesh()
    assert gpu_graph.GRAPHS.options(mesh)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        gpu_graph.GRAPHS.run_or_repeat(mesh, full)
    assert gpu_graph.GRAPHS.options(mesh) and not warnings_in(caplog)


def test_a_later_failure_is_raised_and_nothing_is_repeated(cuda, caplog):
    add = one_graph(donate_argnames="x")(lambda x: x + 1)
    add._on_one_gpu, add.plain = FailingCall("dispatch", number=3, result=add._on_one_gpu), None
    x = add(add(jnp.ones(2)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="cuGraphInstantiate"):
        add(x)
    assert x.is_deleted() and not warnings_in(caplog)


def test_a_new_program_on_a_mesh_waits_for_the_graphs_before(cuda, monkeypatch):
    waits = []
    monkeypatch.setattr(gpu_graph, "wait_for_devices", waits.append)
    double = one_graph(static_argnames="n")(lambda x, n: n * x)
    mesh = compat.make_mesh(TWO_CPUS)
    with jax.set_mesh(mesh):
        for shape, n in ((2, 2), (2, 2), (4, 2), (2, 3), (4, 2)):
            np.testing.assert_array_equal(double(jnp.ones(shape), n=n), np.full(shape, n))
    assert waits == 3 * [mesh]
    monkeypatch.undo()
    gpu_graph.wait_for_devices(mesh)  # itself


def test_flags_of_the_user_decide_what_graphs_hold(monkeypatch):
    mesh = compat.make_mesh(TWO_CPUS)
    assert gpu_graph.graph_options(mesh) is gpu_graph.MESH_GRAPH_OPTIONS
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_gpu_enable_command_buffer=")
    assert gpu_graph.graph_options(mesh) is gpu_graph.graph_options(jax.sharding.get_mesh()) is None
