"""A loaded model that drafts otherwise than its trainer measured is told; one that only rounds otherwise is not.

No comparison of texts can tell.
"""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conversion.load import load as load_hugging_face
from mtpjax import (
    DecodeConfig,
    MTPModel,
    SamplingParams,
    TrainConfig,
    generate,
    init_params,
    load,
    presets,
    speculative_generate,
    train,
)
from mtpjax.compat import make_mesh
from mtpjax.data import packing
from mtpjax.evaluation.self_check import _read_record as read_record
from mtpjax.evaluation.self_check import check_acceptance
from mtpjax.io import convert
from mtpjax.io.checkpoint import save_model
from mtpjax.io.huggingface_files import SELF_CHECK_FILE
from mtpjax.training.panel import acceptance_panel
from tests.helpers.documents import file_documents

CONVENTIONS = [{"mtp_hidden_post_norm": False}, {"mtp_chain_post_norm": False}, {"mtp_input": "hidden_embedding"}]
HELD_OUT = 0.2
GROUPS = 8


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of made-up sources."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
    for number in range(60):
        lines = (f"def {words[(number + line) % 12]}_{line}({words[number % 12]}):" for line in range(40))
        (folder / f"{number}.py").write_text("\n    return\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """Two runs of a narrow model with two modules, on the same texts, that differ in their seed.

    The scales of two norms start spread out, as those of large checkpoints are after long training: at one, where they
    start by default, they would hardly move in so few steps, and the norm after them hides the rest.
    """
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8, "num_mtp_modules": 2}
    model = MTPModel(dataclasses.replace(presets["tiny"], **narrow))
    settings = {"data": str(texts), "held_out_fraction": HELD_OUT, "panel_prompts": 0}
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
        *CONVENTIONS,
        {"mtp_chaining": "trunk"},
        {"rope_interleave": True},
    ],
)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_wrong_convention_is_told(change, dtype, trained, caplog):
    model, params = load(trained[0], dtype=dtype)
    wrong = MTPModel(dataclasses.replace(model.config, **change))
    assert differences(trained[0], wrong, params, caplog)


@pytest.fixture(scope="module")
def decoded(texts, trained):
    """Decodes held-out prompts with some settings of the first run's model changed; greedy texts stay the plain ones.

    Gives the accept length at temperature 1, and those that groups of held-out rows promise at temperature 0.
    """
    _, held_out = packing.split_held_out(file_documents(sorted(texts.iterdir())), HELD_OUT)
    prompts = packing.held_out_prompts(held_out, count=64, prompt_length=64, continuation_length=0, seed=0)
    rows = next(packing.shuffled_batches(packing.pack(held_out, 64, seed=0), 64, seed=0))
    groups = [jax.tree.map(lambda array, first=first: array[first::GROUPS], rows) for first in range(GROUPS)]
    model, params = load(trained[0])
    config = DecodeConfig(max_new_tokens=24, num_steps=2)
    plain = generate(params, prompts, model=model, config=config)

    def decode(**changes):
        changed = MTPModel(dataclasses.replace(model.config, **changes))
        text = speculative_generate(params, prompts, model=changed, config=config).rows()
        assert text == plain.rows()
        sampling = SamplingParams(temperature=1.0, seed=list(range(len(prompts))))
        sampled = speculative_generate(params, prompts, model=changed, config=config, sampling=sampling)
        panels = [acceptance_panel(params, group, model=changed, num_depths=2) for group in groups]
        return sampled.stats.accept_length, np.array([panel.accept_length for panel in panels])

    return decode


@pytest.fixture(scope="module")
def sound(decoded):
    return decoded()


@pytest.mark.slow
@pytest.mark.parametrize("change", CONVENTIONS)
def test_a_wrong_convention_costs_acceptance_and_no_text_shows_it(change, decoded, sound):
    (accept_length, promised), (wrong_accept_length, wrong_promised) = sound, decoded(**change)
    lost = promised - wrong_promised
    error = lost.std(ddof=1) / np.sqrt(GROUPS)
    print(f"{change}: accept length {accept_length:.2f} -> {wrong_accept_length:.2f}", end=", ")
    print(f"over all positions {promised.mean():.2f} -> {wrong_promised.mean():.2f}: {lost.mean():.3f} +- {error:.3f}")
    assert wrong_accept_length < accept_length
    assert lost.mean() > 3 * error, (lost, error)


def test_modules_of_another_checkpoint_are_told(trained, tmp_path, caplog):
    (model, params), (_, other) = load(trained[0]), load(trained[1])
    merged = {name: (other if name.startswith("mtp_") else params)[name] for name in params}
    found = differences(trained[0], model, merged, caplog)
    assert len(found) == 4 and found[0].startswith("agreement of draft level 1 with the trunk is ")
    bare = MTPModel(dataclasses.replace(model.config, num_mtp_modules=0))
    assert differences(trained[0], bare, params, caplog) == [
        "the model has no MTP modules, but training measured 2 draft levels"
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
    (tmp_path / "there" / SELF_CHECK_FILE).write_text('{"tokens": [[1]], "agreement": [0.5]}')
    with pytest.raises(ValueError, match=f"{SELF_CHECK_FILE} is damaged: KeyError: 'overlap'"):
        check_acceptance(tmp_path / "there", model, params)
    assert load_hugging_face(tmp_path / "there")[0] == load(trained[0])[0]


@pytest.mark.parametrize(
    "content",
    [
        '{"tokens": ' + "[" * 10_000 + "]" * 10_000 + ', "agreement": [0.5], "overlap": [0.5]}',
        '{"tokens": [[' + "1," * 100_000 + '1]], "agreement": [0.5], "overlap": [0.5]}',
        '{"tokens": ' + str([[1] * 8] * 5) + ', "agreement": [0.5], "overlap": [0.5]}',
        '{"tokens": [[1, 2, 3]], "agreement": [0.5, 0.5], "overlap": [0.5, 0.5]}',
        '{"tokens": 3, "agreement": [0.5], "overlap": [0.5]}',
        "[]",
        " " * (1 << 20) + "{}",
    ],
)
def test_a_record_of_another_size_or_form_is_damaged(content, tmp_path):
    (tmp_path / SELF_CHECK_FILE).write_text(content)
    with pytest.raises(ValueError, match="is damaged: ") as raised:
        read_record(tmp_path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 600
