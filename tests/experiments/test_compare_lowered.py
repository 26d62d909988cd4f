"""Lowered programs are compared by what they compute, not by their names."""

import jax
import jax.numpy as jnp
import pytest

from experiments.correctness import compare_lowered


def decode(params, state):
    """A loop over two variables, with a branch and a jitted function in it."""

    def body(carry):
        step, x = carry
        x = jax.lax.cond(step > 1, lambda x: x @ params["a"], lambda x: x @ params["b"], x)
        return step + 1, jnp.where(x > 0, x, 0)

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, state)


def renamed(state, weights):
    """The same program: other names, arguments, order of the loop's variables and results."""

    def body(carry):
        x, count = carry
        x = jax.lax.cond(count > 1, lambda x: x @ weights["c"], lambda x: x @ weights["d"], x)
        return jnp.where(x > 0, x, 0), count + 1

    return jax.lax.while_loop(lambda carry: carry[1] < 3, body, (state["x"], state["at"]))


def other(params, state):
    step, x = decode(params, state)
    return step, x + 1


def swapped(params, state):
    return decode({"a": params["b"], "b": params["a"]}, state)


A, X, STEP = jnp.ones((4, 4)), jnp.ones((2, 4)), jnp.int32(0)


@pytest.fixture
def write(tmp_path):
    """`write(folder, functions)` dumps each jitted function as `decode`, as JAX does."""

    def write(folder, *calls):
        (tmp_path / folder).mkdir()
        for i, (function, arguments) in enumerate(calls):
            file = tmp_path / folder / f"jax_ir{i:04d}_jit_decode_compile.mlir"
            file.write_text(jax.jit(function).lower(*arguments).as_text(debug_info=True))
        return str(tmp_path / folder)

    return write


CALL = (decode, ({"a": A, "b": A}, (STEP, X)))


def test_names_and_orders_do_not_count(write, capsys):
    new = (renamed, ({"x": X, "at": STEP}, {"c": A, "d": A}))
    assert compare_lowered.main([write("old", CALL, CALL), write("new", new)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["decode", "2", "1", "1", "0", "0", "0"]


def test_arguments_of_one_type_in_another_order_are_told(write, capsys):
    assert compare_lowered.main([write("old", CALL), write("new", (swapped, CALL[1]))]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["decode", "1", "1", "0", "1", "0", "0"]


def test_another_operation_is_shown(write, capsys):
    assert compare_lowered.main([write("old", CALL), write("new", CALL, (other, CALL[1]))]) == 1
    assert "only new:" in capsys.readouterr().out
    assert compare_lowered.main([write("third", (other, CALL[1])), write("fourth", CALL)]) == 1
    assert "- 1 stablehlo.add" in capsys.readouterr().out


def test_a_folder_without_modules_is_an_error(write, capsys):
    with pytest.raises(SystemExit):
        compare_lowered.main([write("old", CALL), write("new")])
    assert "no module of 'decode|train_step'" in capsys.readouterr().err
