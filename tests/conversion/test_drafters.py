"""Published drafters: read and written with the same bytes, and what is refused."""

import dataclasses
import functools
import json
import pickle
import shutil
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mtpjax
from mtpjax import MTPModel, presets
from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.dflash.hf_config import DFLASH_FORMAT, describe_blocks
from mtpjax.drafters.dflash.hf_config import parse_blocks as parse_kind
from mtpjax.drafters.dflash.method import DFLASH
from mtpjax.drafters.dspark.hf_files import DSPARK_FORMAT
from mtpjax.drafters.dspark.method import DSPARK
from mtpjax.drafters.eagle3.hf_config import default_layer_ids, parse_eagle3
from mtpjax.drafters.files.read import StoredDrafter
from mtpjax.drafters.files.read import read_drafter as read_drafter_of
from mtpjax.drafters.files.torch_file import TorchFile
from mtpjax.drafters.files.write import write_drafter
from mtpjax.drafters.methods import METHODS
from mtpjax.errors import CheckpointError, CheckpointFileError, ConfigError
from tests.golden import drafter_path

TRUNK = TrunkSizes(320, 64, 8)
read_drafter = functools.partial(read_drafter_of, methods=METHODS)
EAGLE = ("eagle3", "eagle3_wide", "eagle31", "eagle31_plain")
BLOCKS = ("dflash", "dflash_full", "dspark")


def draft(name):
    return drafter_path(name) / "draft"


def edited(source, target, **changes):
    """A copy of a drafter whose `config.json` differs; None removes a key."""
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return target


def same_drafter(found, expected):
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    np.testing.assert_array_equal(found.draft_ids, expected.draft_ids)


@pytest.mark.parametrize("name", [*EAGLE, "medusa", *BLOCKS])
def test_a_round_trip_keeps_every_byte(name, tmp_path):
    write_drafter(tmp_path / "copy", read_drafter(draft(name), TRUNK), like=draft(name))
    kept = {file.name for file in draft(name).iterdir() if file.suffix != ".pt"}
    assert {file.name for file in (tmp_path / "copy").iterdir()} == kept
    for file in kept:
        assert (tmp_path / "copy" / file).read_bytes() == (draft(name) / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "form", "is_own"),
    [
        ("eagle3", "specforge", True),
        ("eagle3_wide", "speculators", False),
        ("eagle31", "speculators", True),
        ("eagle31_plain", "speculators", True),
        ("medusa", "medusa", True),
        ("medusa", "vllm", False),
        ("dflash", "z-lab", True),
        ("dflash_full", "speculators", True),
        ("dspark", "deepspec", True),
        ("dspark", "speculators", True),
    ],
)
def test_new_files_say_the_same(name, form, is_own, tmp_path):
    """In the drafter's own format also with the same bytes of weights, in the order of the safetensors package."""
    stored = read_drafter(draft(name), TRUNK)
    write_drafter(tmp_path / "new", stored, form=form)
    same_drafter(read_drafter(tmp_path / "new", TRUNK), stored)
    written, original = ((folder / "model.safetensors").read_bytes() for folder in (tmp_path / "new", draft(name)))
    assert (written == original) == is_own


def test_changed_weights_keep_the_configuration(tmp_path):
    stored = read_drafter(draft("eagle31"), TRUNK)
    stored.params["fc"] = stored.params["fc"] + 1
    write_drafter(tmp_path / "new", stored, like=draft("eagle31"))
    same_drafter(read_drafter(tmp_path / "new", TRUNK), stored)
    assert (tmp_path / "new" / "config.json").read_bytes() == (draft("eagle31") / "config.json").read_bytes()
    with pytest.raises(CheckpointFileError, match="different architecture"):
        write_drafter(tmp_path / "other", stored, like=draft("eagle31_plain"))
    with pytest.raises(ConfigError, match="neither norm_before_residual nor several layers"):
        write_drafter(tmp_path / "other", stored, form="specforge")
    with pytest.raises(FileExistsError):
        write_drafter(tmp_path / "new", stored)


def test_listed_layers_of_specforge_have_two_readings(tmp_path):
    ids = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    path = edited(draft("eagle3"), tmp_path / "listed", **ids)
    with pytest.raises(ConfigError, match=r"two readings.*\[2, 4, 5\] \(SGLang\); the second is the usual default"):
        read_drafter(path, TRUNK)
    assert read_drafter(path, TRUNK, aux_layers="entered").config.layer_ids == (1, 3, 4)
    assert read_drafter(path, TRUNK, aux_layers="output").config.layer_ids == (2, 4, 5)
    # speculators' files mean the states that enter the layers.
    assert read_drafter(draft("eagle31"), TRUNK).config.layer_ids == (2, 4, 7)
    # Other layers are written as SGLang reads them.
    stored = read_drafter(path, TRUNK, aux_layers="entered")
    write_drafter(tmp_path / "again", stored, form="specforge")
    same_drafter(read_drafter(tmp_path / "again", TRUNK, aux_layers="output"), stored)
    # Bytes are kept in either reading.
    write_drafter(tmp_path / "like", stored, like=path)
    assert (tmp_path / "like" / "config.json").read_bytes() == (path / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("eagle31", {"norm_before_residual": None}, "speculators then assumes false, and vLLM true"),
        ("eagle31", {"speculators_model_type": "peagle"}, "'peagle' is not supported"),
        ("eagle31", {"fc_norm": False}, "3 unknown tensors: fc_norm.0.weight"),
        ("eagle31", {"norm_before_fc": True}, "lacks 1 tensor: input_norm.weight"),
        ("eagle31", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "within 0..8"),
        ("eagle3", {"num_hidden_layers": 2}, "disagree about the residual"),
        (
            "eagle3",
            {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLMEagle3"]},
            "'gemma3_text' with architectures .'Gemma3ForCausalLMEagle3'. is not supported in a drafter",
        ),
        ("eagle3", {"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2, but"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
        ("eagle3", {"draft_vocab_size": 95}, "lm_head.weight has shape"),
        ("eagle3", {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ("medusa", {"vocab_size": 300}, "not within 1..300"),
        ("dflash", {"dflash_config": {"mask_token_id": 319}}, "lacks target_layer_ids: the default .* is wrong"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1, 3, 5]}},
            "not within the vocabulary",
        ),
        ("dflash", {"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "lacks mask_token_id"),
        ("dflash", {"dflash_config": {"mask_token_id": 319, "target_layer_ids": [1, 3, 8]}}, "within 0..8"),
        ("dflash", {"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias True is not supported"),
        ("dflash", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ("dflash", {"num_target_layers": 9}, "num_target_layers is 9, but the trunk has 8 layers"),
        ("dflash", {"sliding_window": None}, "lacks swa_window_size"),
        ("dflash", {"layer_types": None}, "layer_types, which lists the layers with a window, is missing"),
        ("dflash", {"layer_types": ["full_attention", "linear_attention"]}, "must have 2 entries"),
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, "not a supported drafter"),
        ("dflash", {"markov_rank": 8}, "markov_rank 8 is not supported"),
        ("dspark", {"markov_head_type": "fir"}, "'fir' is not supported; supported: vanilla, gated, rnn"),
        ("dspark", {"markov_head_type": "gated"}, "lacks 2 tensors: markov_head.gate_proj.bias"),
        ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False}, "unknown tensors: markov_head.markov_w1"),
        ("dspark", {"target_layer_ids": None}, "lacks target_layer_ids"),
        ("dspark", {"layer_types": ["sliding_attention"] * 2}, "DeepSpec's format"),
    ],
)
def test_what_would_draft_something_else_is_refused(name, changes, message, tmp_path):
    with pytest.raises((CheckpointError, ValueError), match=message):
        read_drafter(edited(draft(name), tmp_path / "edited", **changes), TRUNK)


def test_a_missing_switch_can_be_chosen(tmp_path):
    path = edited(draft("eagle31"), tmp_path / "edited", norm_before_residual=None)
    for value in (False, True):
        assert read_drafter(path, TRUNK, norm_before_residual=value).config.norm_before_residual is value


def values_of(name, **changes):
    return json.loads((draft(name) / "config.json").read_text()) | changes


def parse_blocks(values, **choices):
    kind = DSPARK_FORMAT if "markov_rank" in values else DFLASH_FORMAT
    return parse_kind(kind, values, {}, TRUNK, choices)[0]


def test_ids_name_outputs_or_entered_layers():
    """z-lab and DeepSpec list outputs, -1 for the embedding; speculators the layers that these states enter."""
    assert parse_blocks(values_of("dflash")).layer_ids == (2, 4, 6)
    assert parse_blocks(values_of("dspark", target_layer_ids=[-1, 3, 5])).layer_ids == (0, 4, 6)
    for name in BLOCKS:
        kind = DSPARK_FORMAT if name == "dspark" else DFLASH_FORMAT
        shapes = {"embed_tokens.weight": (320, 64), "lm_head.weight": (320, 64)}
        config, _ = parse_kind(kind, values_of(name), shapes, TRUNK, {})
        if name != "dflash":  # its windows count from each slot, which speculators' do not
            assert describe_blocks(kind, config, "speculators")["aux_hidden_state_layer_ids"] == [2, 4, 6]


def test_the_anchor_drafts_where_the_format_says_so():
    assert not parse_blocks(values_of("dflash")).sample_from_anchor
    assert parse_blocks(values_of("dflash"), sample_from_anchor=True).sample_from_anchor
    named = {"mask_token_id": 319, "target_layer_ids": [1], "sample_from_anchor": True}
    assert parse_blocks(values_of("dflash", dflash_config=named)).num_drafts == 6
    # DeepSpec's DFlash is the same class without heads, and does not say that its anchor drafts.
    plain = values_of("dspark", markov_rank=0, enable_confidence_head=False)
    assert parse_blocks(plain).num_drafts == 5 and parse_blocks(plain).markov_head == "none"
    assert not parse_blocks(plain | {"sample_from_anchor": False}).sample_from_anchor


def test_causality_follows_the_stated_precedence():
    """is_causal, then dflash_config.causal, then the layer's type."""
    section = values_of("dflash")["dflash_config"]
    assert parse_blocks(values_of("dflash")).is_causal == (True, False)
    assert parse_blocks(values_of("dflash")).windows == (12, 0)
    stated = values_of("dflash", dflash_config=section | {"causal": False})
    assert parse_blocks(stated).is_causal == (False, False)
    assert parse_blocks(stated | {"is_causal": True}).is_causal == (True, True)
    swa = values_of("dflash_full", dflash_config=section | {"use_swa": True, "swa_window_size": 9})
    assert parse_blocks(swa).windows == (9, 9) and parse_blocks(swa).is_causal == (False, False)


def test_sliding_layers_of_speculators_count_from_the_anchor():
    config = dataclasses.replace(parse_blocks(values_of("dflash")), window_from_anchor=True)
    values = describe_blocks(DFLASH_FORMAT, config, "speculators")
    assert parse_blocks(values) == config
    del values["sliding_window_non_causal"]
    with pytest.raises(ConfigError, match="lacks sliding_window_non_causal"):
        parse_blocks(values)
    with pytest.raises(ConfigError, match="cannot express window_from_anchor"):
        describe_blocks(DFLASH_FORMAT, config, "z-lab")
    with pytest.raises(ConfigError, match="format of DFlash must be 'z-lab' or 'speculators', got 'deepspec'"):
        write_drafter("never", StoredDrafter(DFLASH, config, {}, None), form="deepspec")


@pytest.mark.parametrize("markov_head", ["gated", "rnn"])
def test_other_markov_heads_are_written_and_read(markov_head, tmp_path):
    stored = read_drafter(draft("dspark"), TRUNK)
    D, r = 64, 8
    sizes = (D + r, r) if markov_head == "gated" else (2 * r + D, 3 * r)
    step = {"markov_step": np.full(sizes, 0.5, np.float32), "markov_step_bias": np.ones(sizes[1], np.float32)}
    config = dataclasses.replace(stored.config, markov_head=markov_head)
    changed = StoredDrafter(DSPARK, config, stored.params | step, None)
    write_drafter(tmp_path / "new", changed)
    same_drafter(read_drafter(tmp_path / "new", TRUNK), changed)


def test_absolute_ids_in_the_place_of_offsets_are_noticed(tmp_path):
    shutil.copytree(draft("eagle3"), tmp_path / "wrong")
    tensors = load_file(draft("eagle3") / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    save_file(tensors, tmp_path / "wrong" / "model.safetensors")
    with pytest.raises(CheckpointFileError, match=r"d2t holds token ids \(3, 9, \.\.\.\) instead of offsets"):
        read_drafter(tmp_path / "wrong", TRUNK)


def test_a_wrong_number_of_heads_is_overruled_by_the_files(tmp_path, caplog):
    path = edited(draft("medusa"), tmp_path / "edited", medusa_num_heads=2)
    assert read_drafter(path, TRUNK).config.num_heads == 3
    assert "medusa_num_heads is 2, but the files contain 3" in caplog.text


def test_the_default_layers_and_the_trunks_own_head():
    assert default_layer_ids(32) == (2, 16, 29)
    values = json.loads((draft("eagle3") / "config.json").read_text())
    del values["draft_vocab_size"]
    config, _ = parse_eagle3(values, {}, TRUNK, {})
    assert config.draft_vocab_size == 320 and not config.own_head


def test_a_drafter_of_another_trunk_is_refused():
    with pytest.raises(ValueError, match="vocabulary 320 and width 64"):
        mtpjax.load_drafter(draft("medusa"), model=MTPModel(dataclasses.replace(presets["tiny"], vocab_size=300)))
    with pytest.raises(ValueError, match="aux_layers"):
        mtpjax.load_drafter(draft("medusa"), model=MTPModel(presets["tiny"]), aux_layers="both")


def only_torch(target, source=None):
    target.mkdir()
    shutil.copyfile(draft("medusa") / "config.json", target / "config.json")
    shutil.copyfile(source or draft("medusa") / "medusa_lm_head.pt", target / "medusa_lm_head.pt")
    return target


def test_a_torch_file_is_read_without_unpickling(tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(pickle, "Unpickler", None)
    path = only_torch(tmp_path / "heads")
    stored = read_drafter(path, TRUNK, dtype=jnp.float32)
    same_drafter(stored, read_drafter(draft("medusa"), TRUNK))
    write_drafter(tmp_path / "new", stored, like=path)
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == (draft("medusa") / "model.safetensors").read_bytes()


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


def write_torch(path, content, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
        for name, data in entries.items():
            archive.writestr(f"x/data/{name[1:]}", data)
    return path


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"0.0.linear.weight": Evil()}, protocol=2),
        pickle.dumps({"0.0.linear.weight": Evil()}, protocol=4),
        pickle.dumps(np.zeros(2), protocol=2),
        pickle.dumps({"a": 1}, protocol=2),
        pickle.dumps([1, 2], protocol=2),
        b"\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        b"\x80\x02}X\x01\x00\x00\x00ar\xff\xff\xff\x7f.",  # memo number 2^31 - 1
        b"\x80\x02",
        b"not a pickle",
        b"\x80\x02]r.",
        b"\x80\x02}(ctorch._utils\n_rebuild_tensor_v2\n)Ru.",
    ],
)
def test_a_pickle_that_is_more_than_tensors_is_refused(content, tmp_path, capsys):
    with pytest.raises(CheckpointFileError):
        TorchFile(write_torch(tmp_path / "evil.pt", content))
    assert "unpickled" not in capsys.readouterr().out


def test_damaged_archives_are_refused(tmp_path):
    source = draft("medusa") / "medusa_lm_head.pt"
    (tmp_path / "no.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointFileError, match="not a zip archive"):
        TorchFile(tmp_path / "no.pt")
    with zipfile.ZipFile(source) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for change in ("missing", "short", "compressed", "big"):
        changed = dict(parts)
        if change == "missing":
            del changed["medusa_lm_head/data/4"]
        elif change == "short":
            changed["medusa_lm_head/data/4"] = b"1234"
        elif change == "big":
            changed["medusa_lm_head/byteorder"] = b"big"
        kind = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(tmp_path / f"{change}.pt", "w", kind) as archive:
            for name, data in changed.items():
                archive.writestr(name, data)
        with pytest.raises(CheckpointFileError):
            TorchFile(tmp_path / f"{change}.pt")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    path = only_torch(tmp_path / "heads")
    (path / "medusa_lm_head.pt").unlink()
    (path / "medusa_lm_head.pt").symlink_to(draft("medusa") / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="leads out of"):
        read_drafter(path, TRUNK)
