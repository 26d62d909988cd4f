"""Within `batch_invariant` a row has the same bits alone and beside others: interpreted kernels, bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.batch_invariance import batch_invariant, is_batch_invariant, map_row_blocks
from pallas_kernels.block_scaled_matmul import partial_matmul
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.head_top_k import head_top_k
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.router import Routing, route_tokens
from pallas_kernels.verify_attention import verify_attention
from tests.helpers.lowering import lower_for, triton_kernels

NUM_ROWS = (1, 5, 17, 70)  # one row, less than a block, more than one, and more than the kernels take otherwise
FORM = {"implementation": "interpreted"}


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, MATRIX = random(0, max(NUM_ROWS), 300), random(1, 300, 200)
FP8 = MATRIX.astype(jnp.float8_e4m3fn), jnp.exp(random(2, 3, 200))
GATE_UP, DOWN, SHARES = random(3, 4, 300, 2, 32), random(4, 4, 32, 300), jax.nn.sigmoid(random(5, max(NUM_ROWS), 2))
IDS = jax.random.randint(jax.random.key(6), SHARES.shape, 0, len(DOWN))

OPS = {
    "partial_matmul": lambda x, **form: partial_matmul(x, MATRIX, **form).parts.swapaxes(0, 1),
    "partial_matmul, fp8": lambda x, **form: partial_matmul(x, *FP8, **form).parts.swapaxes(0, 1),
    "gated_matmul": lambda x, **form: gated_matmul(x, MATRIX, **form),
    "gated_matmul, fp8": lambda x, **form: gated_matmul(x, *FP8, **form),
    "head_top_k": lambda x, **form: head_top_k(x, MATRIX, k=2, **form),
    "route_tokens": lambda x, **form: route_tokens(x, MATRIX[:, :32], None, Routing(k=4), **form),
    "add_rms_norm": lambda x, **form: add_rms_norm(x, PartialSums(x[None] / 3, x.dtype), MATRIX[:, 0], **form),
    "rms_norm": lambda x, **form: rms_norm(x, MATRIX[:, 0], **form),
    "grouped_matmul": lambda x, **form: grouped_matmul(
        x, IDS[: len(x)], SHARES[: len(x)], GATE_UP, DOWN, inference=True, **form
    ),
    "a product by XLA": lambda x, **_: map_row_blocks(lambda rows: rows @ MATRIX, x),
}


def first_row(function, *arguments):
    """The first row of every result; jitted anew, because the shapes and the setting decide what is traced."""
    return [np.asarray(leaf)[0] for leaf in jax.tree.leaves(jax.jit(function)(*arguments))]


@pytest.mark.parametrize("op", OPS)
def test_a_row_has_the_same_bits_beside_any_number_of_others(op):
    with batch_invariant():
        alone, *beside = (first_row(functools.partial(OPS[op], **FORM), X[:n]) for n in NUM_ROWS)
    for found in beside:
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op", [op for op in OPS if "XLA" not in op])
def test_the_kernels_lower_for_both_platforms(op):
    with batch_invariant():
        for lowered in lower_for(functools.partial(OPS[op], implementation="triton"), X).values():
            assert triton_kernels(lowered)


def attend(batch, capacity, *, window=False, latent=False, tokens=3):
    """`verify_attention` of rows of which the first is always the same, in a cache of some capacity."""
    G, H, width = 4, 40, 32
    q = random(7, batch, 1, 3, G, H)[:, :, :tokens].at[0].set(random(8, 1, 3, G, H)[:, :tokens])
    caches = [random(seed, batch, 1, capacity, H).at[0, :, :1500].set(random(9, 1, 1500, H)) for seed in (10, 11)]
    num_committed = jnp.full(batch, capacity - 3, jnp.int32).at[0].set(1400)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens, 3), bool)), (batch, tokens, 3))
    begin = jnp.broadcast_to(jnp.arange(300, 300 + tokens), (batch, tokens)) if window else None
    up = random(12, G, width, 20) if latent else None
    return verify_attention(
        q,
        caches[0],
        None if latent else caches[1],
        num_committed,
        mask,
        begin,
        scale=0.2,
        sinks=3,
        value_width=width if latent else None,
        value_up=up,
        **FORM,
    )[:, :, 0]  # the first token


@pytest.mark.parametrize("kind", [{}, {"window": True}, {"latent": True}], ids=str)
def test_attention_depends_neither_on_batch_nor_on_capacity_nor_on_other_drafts(kind):
    one_row = {"batch": 1, "capacity": 1500}
    cases = (one_row, {"batch": 5, "capacity": 2600}, one_row | {"tokens": 1})
    with batch_invariant():
        alone, *others = (first_row(lambda case=case: attend(**case, **kind)) for case in cases)
    for found in others:
        np.testing.assert_array_equal(alone, found)


def test_attention_of_prefill_depends_neither_on_batch_nor_on_the_chunk():
    keys, values = (random(seed, 3, 2, 200, 32) for seed in (13, 14))

    def attend(batch, tokens):
        start = jnp.array([40, 0, 60], jnp.int32)[:batch]
        q = jnp.broadcast_to(random(15, 1, 2, 80, 2, 32), (batch, 2, 80, 2, 32))[:, :, :tokens]
        return prefill_attention(q, keys[:batch], values[:batch], start, scale=0.2, **FORM)[:, :, :20]

    with batch_invariant():
        alone, *others = (first_row(lambda case=case: attend(*case)) for case in ((1, 20), (3, 20), (2, 80)))
    for found in others:
        np.testing.assert_array_equal(alone, found)


def test_by_default_the_batch_and_the_capacity_decide_the_last_bits():
    """So the tests above compare numbers that can differ."""
    cases = ({"batch": 1, "capacity": 1500}, {"batch": 5, "capacity": 2600})
    alone, beside = (first_row(lambda case=case: attend(**case)) for case in cases)
    np.testing.assert_allclose(alone, beside, rtol=1e-5, atol=1e-5)
    assert not np.array_equal(alone, beside)


def test_a_jitted_function_is_traced_for_each_value_of_the_setting():
    function = jax.jit(lambda: is_batch_invariant())
    with batch_invariant():
        assert function()
        with batch_invariant(False):
            assert not function()
    assert not function()
