"""Parts of a batch, and devices, change neither losses nor gradients; nor does running layers again."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mtpjax import MTPModel, Objective, TrainConfig, compat, init_params, presets
from mtpjax.data.packing import Batch
from mtpjax.training.data_parallel import shard_batch, shard_train_state
from mtpjax.training.gradients import TrainSpec, sum_over_parts
from mtpjax.training.objective import OBJECTIVES
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state

NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 0, "num_key_value_heads": 0}
CONFIG = dataclasses.replace(presets["tiny"], **NARROW)
MOVES = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
RATES = (0.0, 0.3, 0.25)  # learning rate, lambda, progress


@pytest.fixture(scope="module")
def batch():
    """Eight packed rows with very different numbers of targets; one has none, another none beyond depth 1."""
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (8, 16), 0, CONFIG.vocab_size))
    segment_ids = np.array([[1] * 6 + [2] * 7 + [0] * 3, [1] * 6 + [2] * 7 + [3] * 3] * 4)
    segment_ids[5] = np.arange(16) // 3 + 1
    mask = tokens % 7 > 0
    mask[3], mask[6, :12] = False, False
    return Batch(tokens, segment_ids, mask)


def compiled(batch, objective, *, optimizer=None, accumulation=1, axes=None, trains="all", config=CONFIG, **form):
    """One update, whose optimiser keeps the gradient unless another is given, and what it takes."""
    model = MTPModel(config, scan_layers=True, **form)
    optimizer = optimizer or optax.trace(0.0)
    params, mesh = init_params(model, jax.random.key(0)), None
    state = init_train_state(params, optimizer, trains)
    if axes:
        mesh = compat.make_mesh(axes)
        state, batch = shard_train_state(state, mesh, optimizer=optimizer, trains=trains), shard_batch(batch, mesh)
    shape = {"model": model, "num_depths": 2, "trains": trains, "mesh": mesh}
    spec = TrainSpec(**shape, objective=objective, accumulation=accumulation)
    step = functools.partial(train_step, spec=spec, optimizer=optimizer)
    return jax.jit(step).lower(state, batch, *RATES).compile(), (state, batch, *RATES)


def gradients(*args, **options):
    step, given = compiled(*args, **options)
    state, metrics = step(*given)
    return metrics["losses"], state.optimizer.trace


@pytest.fixture(scope="module")
def whole(batch):
    """Losses and gradients of an objective from the whole batch at once, on one device."""
    return functools.cache(functools.partial(gradients, batch))


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for got, wanted in zip(*(jax.tree.leaves(jax.device_get(tree[1])) for tree in (found, expected)), strict=True):
        assert np.linalg.norm(wanted) > 0
        assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)


MIXED = Objective(mix=dict.fromkeys(OBJECTIVES, 1.0), start={"lk_hybrid": 1.0}, warmup=0.5, vocab_chunk=100)
EACH = {name: Objective(mix={name: 1.0}) for name in OBJECTIVES} | {"mixed by chunks": MIXED}
FOUR, TWO = {"data": 2, "fsdp": 2}, {"data": 2}
CASES = [("mixed by chunks", FOUR, 2), ("mixed by chunks", None, 8)]  # the parts' losses: also in test_losses.py
REST = [(name, axes, parts) for axes, parts in ((None, 8), (TWO, 1), (FOUR, 1), (FOUR, 2)) for name in EACH]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in REST if case not in CASES]


@pytest.mark.parametrize(("name", "axes", "parts"), CASES)
def test_parts_and_devices_give_the_gradients_of_the_whole(name, axes, parts, batch, whole):
    """T16. Some parts have no target, and each depth has another number of them in each."""
    assert_same(gradients(batch, EACH[name], axes=axes, accumulation=parts), whole(EACH[name]))


MOE = dataclasses.replace(presets["tiny-moe"], num_hidden_layers=2, router_correction_bias=False)  # it has no gradient


@pytest.mark.parametrize(
    ("axes", "remat"),
    [
        ({"fsdp": 2, "expert": 2}, "layers"),
        pytest.param({"fsdp": 2, "expert": 2}, "none", marks=pytest.mark.slow),
        pytest.param({"data": 2}, "none", marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 4}, "layers", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_experts_of_other_devices_give_the_same_gradients(axes, remat, batch):
    expected = gradients(batch, EACH["kl"], config=MOE)
    assert_same(gradients(batch, EACH["kl"], config=MOE, axes=axes, remat=remat), expected)


def test_adding_up_is_a_loop(key):
    parts = jax.random.normal(key, (5, 3, 2))
    function = lambda part: {"sum": part.sum(), "square": part @ part.T}
    expected = jax.tree.map(lambda *leaves: sum(leaves), *map(function, parts))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), sum_over_parts(function, parts), expected)


def collectives(text):
    """Of compiled text: `{computation: [name, …]}` of what moves arrays between devices."""
    found, name = {}, ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")):
            name = line.split()[0] if not line.startswith("ENTRY") else "ENTRY"
        if moved := MOVES.search(line):
            found.setdefault(name, []).append(moved[1])
    return found


@pytest.mark.parametrize("axes", [pytest.param({"data": 4}, marks=pytest.mark.slow), FOUR], ids=str)
def test_only_layers_move_in_loops(axes, batch):
    """Gradients are added up where their rows are, and summed over devices once an update; `fsdp` gathers layers."""
    optimizer = make_optimizer(TrainConfig())
    step, _ = compiled(batch, EACH["cross_entropy"], axes=axes, accumulation=2, optimizer=optimizer)
    found = collectives(step.as_text())
    kinds = set(found.pop("ENTRY"))
    assert kinds == ({"all-reduce"} if "fsdp" not in axes else {"all-reduce", "all-gather", "reduce-scatter"})
    in_loops = {kind for moved in found.values() for kind in moved}
    assert in_loops == ({"all-gather", "reduce-scatter"} if "fsdp" in axes else set())


@pytest.mark.parametrize(
    ("optimizer", "trains"), [("adamw", "modules"), pytest.param("muon", "all", marks=pytest.mark.slow)]
)
def test_parameters_and_what_the_optimiser_keeps_are_split(optimizer, trains, batch):
    """A device holds half of every matrix, of what the optimiser keeps of it, and of the update."""
    settings = {"optimizer": make_optimizer(TrainConfig(optimizer=optimizer)), "trains": trains}
    step, given = compiled(batch, EACH["cross_entropy"], axes={"fsdp": 2}, **settings)
    after, _ = step(*given)
    matrices = {leaf.shape for leaf in jax.tree.leaves(after.params) if leaf.size > 1000}
    for state in (given[0], after):
        large = [leaf for leaf in jax.tree.leaves(state) if leaf.shape in matrices]
        assert len(large) > len(matrices)
        assert all(2 * leaf.addressable_shards[0].data.size == leaf.size for leaf in large)


def test_layers_run_again_give_the_same(batch, whole):
    assert_same(gradients(batch, MIXED, remat="layers"), whole(MIXED))


@pytest.mark.parametrize(("axes", "parts"), [(None, 1), pytest.param(TWO, 2, marks=pytest.mark.slow)])
def test_kernels_give_the_same(axes, parts, batch, whole):
    found = gradients(batch, MIXED, implementation="interpreted", axes=axes, accumulation=parts)
    assert_same(found, whole(MIXED))


@pytest.mark.slow
def test_layers_run_again_take_less_memory(batch):
    deep, long = dataclasses.replace(CONFIG, num_hidden_layers=8), Batch(*(np.tile(rows, (1, 8)) for rows in batch))
    kept, again = (
        compiled(long, EACH["cross_entropy"], config=deep, remat=remat)[0].memory_analysis()
        for remat in ("none", "layers")
    )
    print(f"temporary bytes: {kept.temp_size_in_bytes:,}, running layers again {again.temp_size_in_bytes:,}")
    assert again.temp_size_in_bytes < 0.9 * kept.temp_size_in_bytes  # which keeps products with weights alone


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_bfloat16_layers_have_float32_gradients_near_the_true_ones(accumulation, batch, whole):
    objective = MIXED
    losses, found = gradients(batch, objective, dtype="bfloat16", accumulation=accumulation)
    expected_losses, expected = whole(objective)
    difference = abs(losses - expected_losses).max()
    print(f"largest difference of a loss: {difference:.1e} nats of {expected_losses.max():.2f}")
    assert 0 < difference < 2e-2  # eight bits of mantissa
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.float32.dtype}
    norm = optax.tree.norm
    assert 0 < norm(optax.tree.sub(found, expected)) < 0.05 * norm(expected)


@pytest.mark.slow
def test_master_weights_keep_updates_that_bfloat16_would_lose(batch):
    """A learning rate of 1e-5 moves weights of 1 and more by far less than half of bfloat16's step there, 2^-8."""
    optimizer = make_optimizer(TrainConfig(weight_decay=0.0))
    step, given = compiled(batch, EACH["cross_entropy"], optimizer=optimizer, dtype="bfloat16")
    before, after = given[0], given[0]
    for _ in range(3):
        after, _ = step(after, given[1], 1e-5, *RATES[1:])
    assert {leaf.dtype for leaf in jax.tree.leaves(after) if leaf.ndim} == {jnp.float32.dtype}
    large = np.abs(before.params["embedding"]) > 1
    moved = (after.params["embedding"] != before.params["embedding"]) & large
    assert moved.sum() > 100
    stays = after.params["embedding"].astype(jnp.bfloat16) == before.params["embedding"].astype(jnp.bfloat16)
    assert stays[moved].mean() > 0.9
