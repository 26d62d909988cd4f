"""The bench's engines make the same updates, and its arithmetic is that of the shapes."""

import pytest

from experiments.training import train_engines
from experiments.training.train_engines import SHAPES, Mtpjax, Torch, step_flops, write_start

UPDATES = {"num_depths": 2, "first": 0, "steps": 4, "rows": 2, "length": 16}


def test_the_twin_in_pytorch_has_the_same_losses_update_after_update(tmp_path):
    pytest.importorskip("torch")
    write_start(tmp_path, "tiny")
    ours = Mtpjax("tiny", tmp_path).run(**UPDATES)["losses"]
    other = Torch("tiny", tmp_path, 1, is_compiled=False).run(**UPDATES)["losses"]
    assert len(ours) == 4 and len(ours[0]) == 3
    for own_row, row in zip(ours, other, strict=True):
        assert own_row == pytest.approx(row, abs=1e-5)
    assert abs(ours[0][0] - ours[1][0]) > 1e-3  # batches differ, so equal rows would be a bug of the bench


@pytest.mark.slow
def test_a_run_asked_for_in_parts_is_the_same_run(tmp_path):
    write_start(tmp_path, "tiny")
    engine = Mtpjax("tiny", tmp_path)
    whole = engine.run(**{**UPDATES, "num_depths": 0})["losses"]
    engine.running.clear()
    parts = [engine.run(**{**UPDATES, "num_depths": 0, "first": first, "steps": 2})["losses"] for first in (0, 2)]
    assert parts[0] + parts[1] == whole


@pytest.mark.parametrize("depths", [0, 1, 2])
def test_arithmetic_is_that_of_the_shapes(depths):
    config, rows, length = SHAPES["tiny"], 2, 16
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    layer = D * (heads + 2 * kv_heads) * H + heads * H * D + 3 * D * F + (length + 1) * heads * H  # causal pairs
    head, project = D * config.vocab_size, 2 * D * D
    per_token = config.num_hidden_layers * layer + head + depths * (layer + project + head)
    assert step_flops(config, depths, rows, length) == 3 * 2 * rows * length * per_token


@pytest.mark.slow
def test_chunks_of_the_vocabulary_take_less_memory():
    settings = {"num_depths": 2, "rows": 4, "length": 64}
    whole, chunked = (train_engines.loss_memory("tiny", 8192, "cross_entropy", chunk, **settings) for chunk in (0, 512))
    assert chunked < 0.5 * whole
