"""An update compiled for H100s: what a device needs besides its part of the parameters."""

import pytest

from experiments.training.train_table import CELLS, CONTEXT, collective_bytes, compile_update
from mtpjax.evaluation.compiled_call import h100_mesh

MOST = {"16B-A2.4B": {8: 36e9, 64: 23e9}}
ALL_OF_A_DEVICE = 72e9


@pytest.mark.h100
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[] if cell[2] == "modules" else pytest.mark.slow) for cell in CELLS], ids=str
)
def test_an_update_fits(cell):
    name, config, trains, sizes = cell
    arguments, temp, seconds, _ = compile_update(config, trains, h100_mesh(sizes))
    num_devices = sizes["fsdp"] * sizes.get("expert", 1)
    print(f"{name}, {sizes}: {arguments / 1e9:.2f} + {temp / 1e9:.2f} GB, {seconds:.0f} s")
    assert arguments + temp < ALL_OF_A_DEVICE
    assert temp < MOST.get(name, {}).get(num_devices, ALL_OF_A_DEVICE)


@pytest.mark.h100
def test_four_devices_hold_a_row_of_131072_tokens():
    """Each layer receives three quarters of its keys and values, and the module twice."""
    name, config, trains, sizes, tokens = CONTEXT[0]
    arguments, temp, seconds, text = compile_update(config, trains, h100_mesh(sizes), num_tokens=tokens)
    print(f"{name}, {sizes}: {arguments / 1e9:.2f} + {temp / 1e9:.2f} GB, {seconds:.0f} s")
    assert arguments + temp < 16e9
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim * 2 * tokens
    num_gathers = config.num_hidden_layers + 2
    assert 0.75 * num_gathers * keys_and_values < collective_bytes(text) < 2 * num_gathers * keys_and_values
