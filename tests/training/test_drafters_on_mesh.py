"""Drafters and MTP modules on a mesh: losses, parameters and runs of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, use_abstract_mesh

from mtpjax import ModelConfig, MTPModel, TrainConfig, compat, load_drafter, train
from mtpjax.data.packing import Batch
from mtpjax.evaluation.compiled_call import h100_mesh
from mtpjax.io.checkpoint import save_model
from mtpjax.models.params import is_of_modules, param_shapes
from mtpjax.models.sharding import param_shardings
from mtpjax.models.trunk import stack_layers
from mtpjax.training import Callback
from mtpjax.training.data_parallel import row_spec, shard_batch, shard_train_state, sharded_trunk_states
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state
from tests.helpers import training_runs
from tests.helpers.new_drafters import KIND_SETTINGS, LEVELS, V, new_drafter

UPDATES, ROWS, LENGTH = 50, 8, 12
FOUR, EIGHT, EXPERTS = {"data": 2, "fsdp": 2}, {"fsdp": 8}, {"expert": 2, "fsdp": 2}
METHODS = (*KIND_SETTINGS, "modules")


@pytest.fixture(scope="module")
def batches():
    """Packed rows with different numbers of targets."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(V, size=(UPDATES, ROWS, LENGTH)).astype(np.int32)
    segment_ids = np.ones_like(tokens)
    segment_ids[:, ::2, 7:], segment_ids[:, 1::2, 10:] = 2, 0
    mask = rng.random(tokens.shape) < 0.8
    mask[:, 3] = False
    return [Batch(*arrays) for arrays in zip(tokens, segment_ids, mask, strict=True)]


def make_step(small, method, axes=None, attention="grouped"):
    """A jitted update, its initial state and its mesh."""
    if method == "modules":
        model, params = small(attention, num_mtp_modules=1)
        params, model, drafter = stack_layers(params, model.config), model.clone(scan_layers=True), None
    else:
        model, params, drafter = new_drafter(small, method, attention=attention)
    optimizer = make_optimizer(TrainConfig())
    state, mesh = init_train_state(jax.tree.map(jnp.copy, params), optimizer, "modules"), None
    if axes:
        mesh = compat.make_mesh(axes)
        state = shard_train_state(state, mesh, optimizer=optimizer, trains="modules")
    settings = {"num_depths": LEVELS, "trains": "modules", "drafter": drafter, "mesh": mesh, "num_anchors": 4}
    spec = TrainSpec(model=model, **settings)
    return jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer)), state, mesh


def trained(small, batches, method, axes=None, attention="grouped"):
    """Losses of every update, and the trained parameters and what the optimiser keeps, on the devices."""
    step, state, mesh = make_step(small, method, axes, attention)
    losses = []
    # The learning rate rises as in a run. Adam's first update of an element is as large as the learning rate, even if
    # the element's gradient is only rounding.
    for number, batch in enumerate(batches, 1):
        batch = batch if mesh is None else shard_batch(batch, mesh)
        state, metrics = step(state, batch, 1e-3 * number / UPDATES, 1.0)
        losses.append(np.asarray(metrics["losses"]))
    params = {name: leaf for name, leaf in state.params.items() if is_of_modules(name)}
    return np.array(losses), params, state.optimizer


@pytest.fixture(scope="module")
def on_one_device(small, batches):
    return functools.cache(functools.partial(trained, small, batches))


FAST = [("eagle3", FOUR), ("dspark", EIGHT), ("medusa", EXPERTS)]
CASES = FAST + [
    pytest.param(method, axes, marks=pytest.mark.slow)
    for method in METHODS
    for axes in (FOUR, EIGHT, EXPERTS)
    if (method, axes) not in FAST
]


@pytest.mark.parametrize(("method", "axes"), CASES, ids=str)
def test_updates_on_a_mesh_are_those_of_one_device(method, axes, small, batches, on_one_device):
    """Losses of fifty updates, and the parameters after them; and a device holds its share of each matrix."""
    attention = "latent" if "expert" in axes else "grouped"  # latent: has experts
    losses, params, optimizer = trained(small, batches, method, axes, attention)
    wanted_losses, wanted, _ = on_one_device(method, attention=attention)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for found, expected in zip(*map(jax.tree.leaves, (jax.device_get(params), wanted)), strict=True):
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    assert int(optax.tree_utils.tree_get(optimizer, "count")) == UPDATES  # none was skipped
    parts = axes["fsdp"]
    matrices = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.size >= 32 * 32}
    large = [leaf for leaf in jax.tree.leaves((params, optimizer)) if leaf.shape in matrices]
    assert len(large) >= 3 * len(matrices)
    assert all(parts * leaf.addressable_shards[0].data.size <= leaf.size for leaf in large)


# Runs: a small trunk of bytes.


@pytest.fixture(scope="module")
def origin(small, tmp_path_factory):
    """A folder with a dense trunk and one with experts, and text."""
    folder = tmp_path_factory.mktemp("origin")
    for attention in ("grouped", "latent"):
        save_model(folder / attention, *small(attention, vocab_size=256, num_mtp_modules=0))
    training_runs.write_corpus(folder / "text")
    return folder


def configured(origin, output, method, **changes):
    own = {"drafter": method, **KIND_SETTINGS[method]}
    settings = {
        "init_from": str(origin / "grouped"), "data": str(origin / "text"), "output": str(output), "steps": 6,
        "batch_size": 8, "num_depths": LEVELS, "draft_vocab_size": 40, "plot_formats": (), "save_every": 3,
    }  # fmt: skip
    return TrainConfig(**training_runs.SETTINGS | settings | own | changes)


class Stop(Exception):
    """Ends a run as a kill would, after its state is saved."""


class Interrupt(Callback):
    def after_update(self, event):
        if event.step == 4:
            raise Stop


RESUMED = [("medusa", FOUR, {}), ("dspark", EIGHT, {}), ("eagle3", FOUR, {"trunk_states_dtype": "fp8_e4m3"})]


@pytest.mark.parametrize(
    ("method", "axes", "changes"),
    [RESUMED[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in RESUMED[1:])],
    ids=str,
)
def test_a_run_on_a_mesh_resumes_and_is_saved_as_on_one_device(method, axes, changes, origin, tmp_path):
    """The bits of an unbroken run, the losses and texts of one device, and the drafter in the usual files."""
    if changes:
        changes = changes | {"trunk_states": str(tmp_path / "states")}

    def run(name, axes, prompts=0, **more):
        config = configured(origin, tmp_path / name, method, mesh=axes, panel_prompts=prompts, **changes)
        return train(config, evaluations=1, **more)

    whole = run("whole", axes, prompts=2)
    assert whole.panel.decoded["overall"]["greedy"].accept_length >= 1
    with pytest.raises(Stop):
        run("broken", axes, callbacks=[Interrupt()])
    resumed = run("broken", axes, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.draft_params, resumed.draft_params)
    files = [sorted((tmp_path / name / "drafter").iterdir()) for name in ("whole", "broken")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
    # One device has the same losses, and its drafter's files have the same numbers.
    single = run("single", {})
    found, wanted = (training_runs.losses(result.history) for result in (whole, single))
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)
    drafter, draft_params = load_drafter(tmp_path / "whole", model=whole.model)
    assert drafter.architecture == single.drafter.architecture
    jax.tree.map(np.testing.assert_array_equal, draft_params, jax.device_get(whole.draft_params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), draft_params, single.draft_params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "axes", "trunk"), [("eagle3", EXPERTS, "latent"), ("dflash", EIGHT, "grouped")], ids=str
)
def test_the_panel_of_a_mesh_is_that_of_one_device(method, axes, trunk, origin, tmp_path):
    """Its prompts are decoded with the whole trunk on every device."""
    settings = {"steps": 1, "panel_prompts": 4, "init_from": str(origin / trunk)}
    results = [
        train(configured(origin, tmp_path / name, method, mesh=mesh, **settings), evaluations=1)
        for name, mesh in (("mesh", axes), ("single", {}))
    ]
    mesh, single = (result.panel.to_json() for result in results)
    assert mesh["decoded"]["overall"].keys() == {"greedy", "sampled"}
    found, wanted = (jax.tree.leaves(panel) for panel in (mesh, single))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_experts_that_a_mesh_does_not_divide_are_refused(origin, tmp_path):
    with pytest.raises(ValueError, match="mesh axis expert = 2 does not divide the model's n_routed_experts 0"):
        train(configured(origin, tmp_path, "medusa", mesh={"expert": 2}))


@pytest.mark.h100
def test_an_unrolled_trunk_is_gathered_layer_by_layer():
    """Compiled for H100s: a device holds about two layers of sixteen, besides the embedding and the states."""
    config = ModelConfig(
        vocab_size=256, hidden_size=1024, num_hidden_layers=16, num_attention_heads=8, intermediate_size=4096
    )
    mesh, shapes = h100_mesh({"fsdp": 8}), param_shapes(config)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=sharding),
        shapes,
        param_shardings(shapes, mesh),
    )
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=NamedSharding(mesh, row_spec(mesh)))
    settings = {"model": MTPModel(config, implementation="xla"), "mesh": mesh, "layer_ids": (2, 8, 13)}
    with use_abstract_mesh(mesh.abstract_mesh):
        compiled = sharded_trunk_states.lower(params, tokens, tokens, **settings).compile()
    layer = 2 * sum(leaf.size for leaf in jax.tree.leaves(shapes["trunk"]["layer_0"]))
    print(f"temporary memory: {(temp := compiled.memory_analysis().temp_size_in_bytes) / layer:.1f} layers")
    assert temp < 3 * layer
