"""A loaded model that drafts otherwise than its trainer measured is told; one that only rounds otherwise is not."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from conversion import convert
from conversion.load import load as load_hugging_face
from mtpjax import MTPModel, TrainConfig, init_params, load, presets, train
from mtpjax.checkpoint import save_model
from mtpjax.compat import make_mesh
from mtpjax.decode.self_check import FILE, check_acceptance


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs of a narrow model with two modules, on the same made-up sources, that differ in their seed.

    The scales of two norms start spread out, as those of large checkpoints are (`test_conventions.py`).
    """
    folder = tmp_path_factory.mktemp("texts")
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
    for number in range(60):
        lines = (f"def {words[(number + line) % 12]}_{line}({words[number % 12]}):" for line in range(40))
        (folder / f"{number}.py").write_text("\n    return\n".join(lines))
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8, "num_mtp_modules": 2}
    model = MTPModel(dataclasses.replace(presets["tiny"], **narrow))
    settings = {"data": str(folder), "held_out_fraction": 0.2, "panel_prompts": 0}
    settings |= {"steps": 150, "batch_size": 4, "row_length": 64}
    paths = []
    for seed in (0, 1):
        place, key = tmp_path_factory.mktemp("run"), jax.random.key(seed)
        params = init_params(model, key)
        for name, norm in (("norm_final", params), ("norm_output", params["mtp_0"])):
            scale = norm[name]["scale"]
            norm[name] = {"scale": jnp.exp(2.0 * jax.random.normal(jax.random.fold_in(key, len(paths)), scale.shape))}
        save_model(place / "first", model, params)
        config = TrainConfig(init_from=str(place / "first"), output=str(place / "out"), seed=seed, **settings)
        paths.append(train(config, evaluations=1).path)
    return paths


def differences(path, model, params, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mtpjax.decode"):
        found = check_acceptance(path, model, params)
    assert ("does not draft as it did" in caplog.text) == bool(found)
    return found


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_what_was_saved_is_as_measured(dtype, trained, caplog):
    assert not differences(trained[0], *load(trained[0], dtype=dtype), caplog)
    assert not differences(trained[0].parent, *load(trained[0].parent, dtype=dtype), caplog)


def test_a_sharded_model_is_as_measured(trained, caplog):
    mesh = make_mesh({"data": 2, "tensor": 2})
    with jax.set_mesh(mesh):
        assert not differences(trained[0], *load(trained[0], mesh=mesh), caplog)


@pytest.mark.parametrize(
    "change",
    [
        {"mtp_hidden_post_norm": False},
        {"mtp_chain_post_norm": False},
        {"mtp_input": "hidden_embedding"},
        {"mtp_chaining": "trunk"},
        {"rope_interleave": True},
    ],
)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_wrong_convention_is_told(change, dtype, trained, caplog):
    model, params = load(trained[0], dtype=dtype)
    wrong = MTPModel(dataclasses.replace(model.config, **change))
    assert differences(trained[0], wrong, params, caplog)


def test_modules_of_another_checkpoint_are_told(trained, tmp_path, caplog):
    (model, params), (_, other) = load(trained[0]), load(trained[1])
    merged = {name: (other if name.startswith("mtp_") else params)[name] for name in params}
    found = differences(trained[0], model, merged, caplog)
    assert len(found) == 4 and found[0].startswith("agreement of draft level 1 with the trunk is ")
    bare = MTPModel(dataclasses.replace(model.config, num_mtp_modules=0))
    assert differences(trained[0], bare, params, caplog) == [
        "the model has no MTP modules; 2 draft levels were measured"
    ]
    save_model(tmp_path / "plain", model, merged)
    assert not differences(tmp_path / "plain", model, merged, caplog)  # nothing was measured


def test_the_record_goes_with_a_conversion_and_back(trained, tmp_path, caplog):
    convert.to_hugging_face(trained[0], tmp_path / "there")
    convert.to_mtpjax(tmp_path / "there", tmp_path / "back")
    for path in (tmp_path / "there", tmp_path / "back"):
        model, params = load(path)
        assert not differences(path, model, params, caplog)
        wrong = MTPModel(dataclasses.replace(model.config, mtp_input="hidden_embedding"))
        assert differences(path, wrong, params, caplog)
    (tmp_path / "there" / FILE).write_text('{"tokens": [[1]], "agreement": [0.5]}')
    with pytest.raises(ValueError, match=f"{FILE} is damaged: KeyError: 'overlap'"):
        check_acceptance(tmp_path / "there", model, params)
    assert load_hugging_face(tmp_path / "there")[0] == load(trained[0])[0]
