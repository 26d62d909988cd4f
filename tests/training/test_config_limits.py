"""Settings that cannot train are refused with their limit, before anything runs."""

import math

import pytest

from mtpjax import TrainConfig, train
from mtpjax.distributed import connect
from mtpjax.training.yaml_config import read_train_config


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
