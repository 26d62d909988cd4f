"""What calls do with the options for CUDA graphs: `tests/experiments/test_gpu_thunks.py` reads the compiled graph."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax import compat
from mtpjax.decoding import gpu_graph
from mtpjax.decoding.gpu_graph import one_graph


def test_other_platforms_are_not_given_the_options(monkeypatch):
    monkeypatch.setattr(gpu_graph, "GRAPH_OPTIONS", {"xla_gpu_no_such_option": "1"})
    double = one_graph()(lambda x: 2 * x)
    np.testing.assert_array_equal(double(jnp.ones(2)), [2, 2])
    assert double.plain._cache_size() == 1


def test_an_option_that_xla_rejects_is_left_out_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(compat, "is_cuda", lambda: True)
    monkeypatch.setattr(gpu_graph, "GRAPH_OPTIONS", {"xla_gpu_no_such_option": "1"})
    double = one_graph(donate_argnames="x")(lambda x: 2 * x)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(double(jnp.ones(2)), [2, 2])
    [message] = [record.message for record in caplog.records if record.name == gpu_graph.__name__]
    assert "xla_gpu_no_such_option" in message


def test_the_options_are_allowed_inside_of_another_trace(monkeypatch):
    monkeypatch.setattr(compat, "is_cuda", lambda: True)
    double = one_graph()(lambda x: 2 * x)
    np.testing.assert_array_equal(jax.jit(lambda x: double(x) + 1)(jnp.ones(2)), [3, 3])
    np.testing.assert_array_equal(double(jnp.ones(2)), [2, 2])
