"""Settings that cannot train are refused with their limit, before anything runs."""

import math
import re

import numpy as np
import pytest

from mtpjax import ModelConfig, Objective, TrainConfig, train
from mtpjax.data.config import Source
from mtpjax.distributed import connect
from mtpjax.training.yaml_config import read_train_config

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
        (Objective, {"vocab_chunk": 2.0}, "vocab_chunk must be an integer, got 2.0"),
        (Source, {"weight": "1"}, "weight must be a number, got '1'"),
        (ModelConfig, SIZES | {"hidden_size": "64"}, "hidden_size must be an integer, got '64'"),
        (ModelConfig, SIZES | {"rms_norm_eps": math.nan}, "rms_norm_eps must be at least 0, is nan"),
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
