"""Settings that cannot train are refused with their limit, before anything runs."""

import math
import re

import numpy as np
import pytest

from mtpjax import ModelConfig, Objective, TrainConfig, presets, train
from mtpjax.cli.main import main
from mtpjax.data.config import Source
from mtpjax.distributed import connect
from mtpjax.training.initial_model import init_model
from mtpjax.training.yaml_config import read_train_config, to_yaml

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
        ("learning_rate", 1e30),
        ("gradient_clip", 0.0),
        ("gradient_clip", -1.0),
        ("warmup", -0.1),
        ("warmup", 1.5),
        ("final_learning_rate", -1.0),
        ("weight_decay", math.inf),
        ("mtp_loss_scale", -1.0),
        ("mtp_loss_switch", 2.0),
        ("row_length", 10**12),
        ("seed", 2**63),
        ("seed", -1),
        ("num_depths", 10**20),
        ("num_depths", 65),
        ("min_steps", -1),
        ("min_steps", 1001),  # of 1000 steps
        ("objective", None),
        ("objective", 3),
    ],
)
def test_a_number_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        TrainConfig(**{name: value})


def test_a_yaml_cycle_is_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("objective: &a\n  mix: *a\n")
    with pytest.raises(ValueError, match="cannot be read"):
        read_train_config(file)


def test_an_output_that_is_no_folder_is_refused_at_once(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a folder"):
        train(TrainConfig(output=str(file), data=str(tmp_path / "missing")))
    assert file.read_text() == "mine"


@pytest.mark.parametrize("address", ["garbage", "host:99999999", ":80", "host:x"])
def test_a_wrong_address_is_refused_at_once(address):
    with pytest.raises(ValueError, match="dist-init-addr must be HOST:PORT"):
        connect(2, 0, address)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (TrainConfig, {"steps": "100"}, "steps must be an integer, got '100'"),
        (TrainConfig, {"steps": 1.5}, "steps must be an integer, got 1.5"),
        (TrainConfig, {"batch_size": True}, "batch_size must be an integer, got True"),
        (TrainConfig, {"learning_rate": "1e-3"}, "learning_rate must be a number, got '1e-3'"),
        (TrainConfig, {"seconds": None}, "seconds must be a number, got None"),
        (TrainConfig, {"output": None}, "output must be a string, got None"),
        (TrainConfig, {"init_from": 3}, "init_from must be a string or None, got 3"),
        (TrainConfig, {"tensorboard": "yes"}, "tensorboard must be True or False, got 'yes'"),
        (TrainConfig, {"sources": ["folder"]}, "sources must be a sequence of Source"),
        (TrainConfig, {"mesh": "data=2"}, "mesh must be a mapping or pairs, got 'data=2'"),
        (TrainConfig, {"mesh": {"data": "2"}}, "mesh axis data must be an integer, got '2'"),
        (Objective, {"mix": "kl"}, "mix must be a mapping or pairs, got 'kl'"),
        (Objective, {"mix": {"kl": "1"}}, "the weight of kl must be a number, got '1'"),
        (Objective, {"vocab_chunk": 2.0}, "vocab_chunk must be an integer or None, got 2.0"),
        (Source, {"weight": "1"}, "weight must be a number, got '1'"),
        (ModelConfig, SIZES | {"hidden_size": "64"}, "hidden_size must be an integer, got '64'"),
        (ModelConfig, SIZES | {"rms_norm_eps": math.nan}, "rms_norm_eps must be at least 0, got nan"),
        (ModelConfig, SIZES | {"max_position_embeddings": 0}, "max_position_embeddings must be positive, not 0"),
    ],
)
def test_a_value_of_another_type_is_refused_when_the_settings_are_made(kind, values, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        kind(**values)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_and_paths_become_those_of_json(tmp_path):
    config = TrainConfig(steps=np.int64(5), learning_rate=np.float32(0.5), output=tmp_path, tensorboard=np.True_)
    assert (type(config.steps), type(config.learning_rate), config.output) == (int, float, str(tmp_path))
    assert config.tensorboard is True and TrainConfig(seconds=5) == TrainConfig(seconds=5.0)


ON_TRUNK = {"init_from": "runs/joint", "trains": "modules"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "small", "init_from": "runs/joint"}, "preset 'small' is unused: it needs new weights"),
        ({"preset": "small", "model": presets["tiny"]}, "preset 'small' is unused: `model` is a complete architecture"),
        ({"model_type": "llama"}, "model_type 'llama' is unused: it needs init_from"),
        (
            {"drafter": "eagle3", "init_from": "x", "draft_reading": {"aux_layers": "output"}},
            "draft_reading .* is unused: it needs draft_init_from",
        ),
        (
            {**ON_TRUNK, "trunk_states_dtype": "bfloat16"},
            "trunk_states_dtype .* is unused: it needs trunk_states",
        ),
        ({"pattern": "*.txt"}, r"pattern '\*.txt' is unused: it needs data"),
        ({"pattern": "*.txt", "sources": (Source(path="a"),)}, r"pattern '\*.txt' is unused: it needs data"),
        ({"held_out_fraction": 0.0, "panel_prompts": 64}, "panel_prompts 64 is unused: it needs held_out_fraction"),
        (
            {"mtp_loss_scale_final": 0.2, "mtp_loss_switch": 1.0},
            "mtp_loss_scale_final 0.2 is unused: it needs mtp",
        ),
        ({"profile_start": 20}, "profile_start 20 is unused: it needs profile_steps above 0"),
        ({"profile_steps": 3, "steps": 5}, "profile_start 10 must be below steps 5, or no update is traced"),
        ({"num_depths": 0, "mtp_loss_scale": 0.1}, "mtp_loss_scale 0.1 is unused: it needs num_depths above 0"),
        ({"num_depths": 0, "attention_layout": "stream"}, "attention_layout 'stream' is unused: it needs num_depths"),
        (
            {"num_depths": 0, "objective": Objective(mix={"kl": 1.0})},
            "objective is unused: it needs num_depths",
        ),
        ({"num_depths": 0, "trains": "detached"}, "trains='detached' needs num_depths of at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_without_effect_is_refused(settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        TrainConfig(**settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lk_decay": 2.0}, "objective.lk_decay 2.0 is unused: it needs the objective 'lk_hybrid'"),
        ({"lk_decay": 2.0, "mix": {"kl": 1.0}}, "objective.lk_decay 2.0 is unused"),
        ({"depth_decay": 0.8}, "objective.depth_decay 0.8 is unused: it needs depth_weights 'decayed'"),
        ({"depth_weights": "decayed", "mix": {"end_to_end_tv": 1.0}}, "objective.depth_weights 'decayed' is unused"),
    ],
)
def test_a_setting_of_the_losses_without_effect_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_depths": 0},
        {**ON_TRUNK, "trunk_states": "states", "trunk_states_dtype": "bfloat16"},
        {"held_out_fraction": 0.0, "panel_prompts": 0},
        {"objective": Objective(mix={"kl": 1.0}, start={"lk_hybrid": 1.0}, warmup=0.1, lk_decay=2.0)},
        {"model": presets["tiny"], "steps": 2},
        {"mesh": {"data": 2, "fsdp": 2}},
        {"sources": (Source(path="a", kind="text"), Source(path="b", pattern="*.md"))},
    ],
    ids=str,
)
def test_printed_settings_are_read_back(settings, tmp_path):
    config = TrainConfig(**settings)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    assert read_train_config(tmp_path / "run.yaml") == config


def test_nested_settings_have_one_spelling():
    config = read_train_config(None, ["objective.mix.kl=1.0", "objective.vocab_chunk=64", "model.num_mtp_modules=2"])
    assert config.objective == Objective(mix={"kl": 1.0}, vocab_chunk=64)
    assert dict(config.model) == {"num_mtp_modules": 2}
    for pair, advice in {
        "objective={mix: {kl: 1.0}}": r"unknown setting objective: did you mean objective\.mix",
        "objective.mix={kl: 1.0}": r"must be given with dots: objective\.mix\.NAME=VALUE",
        "sources=[{path: a}]": "sources can only be set in the --config file; data= takes one folder or file",
        "mesh.data=2": "must be given as a flag: --mesh data=2,fsdp=4",
        "mesh={data: 2}": "must be given as a flag: --mesh data=2,fsdp=4",
        "model_type=llama": "must be given as a flag: --model-type FAMILY",
        "data=": "'data=' has no value",
    }.items():
        with pytest.raises(ValueError, match=advice):
            read_train_config(None, [pair])


def test_pairs_of_a_mapping_replace_the_files(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("objective: {mix: {end_to_end_tv: 1.0}, vocab_chunk: 64}\n")
    both = read_train_config(file, ["objective.mix.kl=1.0", "objective.mix.cross_entropy=0.5"]).objective
    assert both == Objective(mix={"kl": 1.0, "cross_entropy": 0.5}, vocab_chunk=64)
    file.write_text(to_yaml(TrainConfig()))
    assert dict(read_train_config(file, ["objective.mix.kl=1.0"]).objective.mix) == {"kl": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: [{path: a, knd: chat}]", "sources: unknown setting knd"),
        ("sources: [{path: a, kind: chats}]", "sources: kind 'chats' is not one of auto, text, jsonl, chat, formatted"),
        ("data: [a]", "data has a value of the wrong type: \"\\['a'\\]\""),
        ("mesh: {data: two}", "mesh has a value of the wrong type: .*two.*"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_in_plain_words(text, message, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_train_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("steps=abc", "steps must be an integer, not 'abc'"),
        ("learning_rate=fast", "learning_rate must be a number, not 'fast'"),
        ("tensorboard=maybe", "tensorboard must be true or false, not 'maybe'"),
        ("dtype=bf16", "dtype 'bf16' is not one of float32, bfloat16"),
        ("plot_formats=png", r"plot_formats must be a list, such as \[A, B\], not 'png'"),
        ("model.hidden_size=wide", r"model\.hidden_size must be an integer, not 'wide'"),
    ],
)
def test_a_value_of_another_type_is_refused_in_plain_words(pair, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_train_config(None, [pair])


def test_a_file_and_a_flag_set_the_mesh(tmp_path):
    (tmp_path / "run.yaml").write_text("mesh: {data: 2}\n")
    assert read_train_config(tmp_path / "run.yaml").mesh == (("data", 2),)
    assert read_train_config(tmp_path / "run.yaml", flags={"mesh": {"fsdp": 4}}).mesh == (("fsdp", 4),)


@pytest.mark.parametrize(
    ("pair", "guess"),
    [
        ("data_path=a", "data"),
        ("learning_rat=1", "learning_rate"),
        ("objective.mixx.kl=1", "objective.mix"),
        ("draft-layers=[1]", "draft_layers"),
        ("lr=1", "learning_rate"),
        ("epochs=3", "steps"),
    ],
)
def test_a_misspelt_setting_names_the_nearest(pair, guess):
    with pytest.raises(ValueError, match=f"unknown setting .*{guess}"):
        read_train_config(None, [pair])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "my-texts"], "train: unknown flag --data: settings are written without dashes: data=VALUE"),
        (["--batch-size=4"], "train: unknown flag --batch-size: settings are written without dashes: batch_size=VALUE"),
        (["--mesh", "data2"], "--mesh 'data2' must be an axis"),
        (["--mesh", "tensor=2"], "mesh axis 'tensor' is not one of data, fsdp, expert, context"),
        (["--node-rank", "1"], "--node-rank and --dist-init-addr need --nnodes"),
        (["--allow-config-change", "steps"], "--allow-config-change needs --resume"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_of_the_command_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", *arguments])
    [line] = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2 and message in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"attention_layout": "stream", "num_depths": 1},
            "attention_layout 'stream' is unused: it needs a recy",
        ),
        ({"model": {"num_mtp_modules": 0}, "num_depths": 3}, "num_depths 3 is unused: the model has 0 MTP modules"),
    ],
    ids=["no recycled depth", "no modules"],
)
def test_a_setting_without_effect_on_the_model_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        init_model(TrainConfig(**settings))
    init_model(TrainConfig(attention_layout="stream", num_depths=2))
