"""`mtpjax.save` and `mtpjax.load` are each other's inverse, the tokenizer included."""

import dataclasses

import jax
import numpy as np
import pytest
import tokenizers

from mtpjax import MTPModel, init_params, load, presets, save
from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.models.trunk import stack_layers

NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8}
CONFIG = dataclasses.replace(presets["tiny"], **NARROW)


@pytest.fixture(scope="module")
def params():
    return init_params(MTPModel(CONFIG), jax.random.key(0))


@pytest.fixture
def tokenizer_folder(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(256)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 30}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}w1 {{ m.content }} {% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("w2")
    return folder


def assert_same(params, loaded):
    assert jax.tree.structure(params) == jax.tree.structure(loaded)
    for saved, read in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(saved, read)


def test_a_model_of_bytes_comes_back(params, tmp_path):
    model = MTPModel(CONFIG)
    save(tmp_path / "mine", model, params, metadata={"steps": 7})
    loaded_model, loaded = load(tmp_path / "mine")
    assert loaded_model == model
    assert_same(params, loaded)
    assert isinstance(load_tokenizer(tmp_path / "mine", 256), ByteTokenizer)
    assert CheckpointReader(tmp_path / "mine").metadata == {"tokenizer": "bytes", "steps": 7}


def test_stacked_layers_of_training_are_saved_for_decoding(params, tmp_path):
    save(tmp_path / "mine", MTPModel(CONFIG, scan_layers=True), stack_layers(params, CONFIG))
    model, loaded = load(tmp_path / "mine")
    assert model == MTPModel(CONFIG)
    assert_same(params, loaded)


@pytest.mark.parametrize("kind", ["folder", "object", "library"])
def test_the_tokenizer_comes_back_with_its_template_and_end_tokens(kind, params, tokenizer_folder, tmp_path):
    ours = HuggingFaceTokenizer(tokenizer_folder, 256)
    library = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    save(
        tmp_path / "mine",
        MTPModel(CONFIG),
        params,
        tokenizer={"folder": str(tokenizer_folder), "object": ours, "library": library}[kind],
    )
    loaded = load_tokenizer(tmp_path / "mine", 256)
    assert loaded.encode("w3 w255") == [3, 255]
    if kind != "library":  # that one has a vocabulary and nothing else
        assert loaded.digest == ours.digest and loaded.eos_token_ids == (30,)
        assert (
            loaded.chat_templates.templates == ours.chat_templates.templates and len(ours.chat_templates.templates) == 2
        )
        assert loaded.apply_chat_template([{"role": "user", "content": "w9"}]) == [1, 9]
    assert load(tmp_path / "mine")[0].config == CONFIG


def test_a_tokenizer_of_transformers_is_saved(params, tokenizer_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder / "tokenizer.json"))
    save(tmp_path / "mine", MTPModel(CONFIG), params, tokenizer=made)
    assert load_tokenizer(tmp_path / "mine", 256).encode("w3 w255") == [3, 255]


def test_the_parameters_of_another_model_are_refused(params, tmp_path):
    def refuse(said, model, params):
        with pytest.raises(ValueError, match=said):
            save(tmp_path / "mine", model, params)
        assert not (tmp_path / "mine").exists()

    model = MTPModel(CONFIG)
    refuse(r"embedding has shape \(256, 32\) instead of shape \(256, 64\)", MTPModel(presets["tiny"]), params)
    refuse(r"mtp_1/.* has nothing instead of shape", MTPModel(dataclasses.replace(CONFIG, num_mtp_modules=2)), params)
    refuse(r"more has shape \(2,\) instead of nothing", model, {**params, "more": np.ones(2)})
    refuse(r"expects unrolled layers \(scan_layers=False\)", model, stack_layers(params, CONFIG))


def test_a_tokenizer_that_does_not_fit_is_refused_and_nothing_is_written(params, tokenizer_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    small = dataclasses.replace(CONFIG, vocab_size=100)
    for said, model, tokenizer in (
        ("has no tokenizer.json", CONFIG, tmp_path / "empty"),
        ("tokenizer must be a folder or a tokenizer", CONFIG, 3),
        ("the tokenizer has 256 tokens, but the model's vocab_size is 100", small, tokenizer_folder),
    ):
        values = params if model is CONFIG else init_params(MTPModel(small), jax.random.key(0))
        with pytest.raises(ValueError, match=said):
            save(tmp_path / "mine", MTPModel(model), values, tokenizer=tokenizer)
        assert not (tmp_path / "mine").exists()
