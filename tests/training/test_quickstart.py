"""The quickstart's arguments, and its table."""

import io

import numpy as np
import pytest
import rich.console

from mtpjax import TrainConfig
from mtpjax.training import quickstart
from mtpjax.training.quickstart import DecoderSetting, DepthResult


def test_fewer_than_two_rounds_are_rejected_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "train", None)
    with pytest.raises(ValueError, match="rounds must be at least 2, not 1"):
        quickstart.run(TrainConfig(output=str(tmp_path / "run")), rounds=1)
    assert not (tmp_path / "run").exists()


def printed(ratios):
    """The table of chains of 1, 2, ... drafts with these ratios, at 80 columns."""
    rows = [
        DepthResult(depth, DecoderSetting(depth, 0, 1), 1 + 0.8 * depth, [0.8] * depth, 12345.0, ratio, (1.1, 1.2), 1.3)
        for depth, ratio in enumerate(ratios, start=1)
    ]
    file = io.StringIO()
    console = rich.console.Console(file=file, width=80)
    plain = DecoderSetting(0, 1, 2)
    quickstart._print_result(console, plain, np.full((3, 4), 0.01), rows, rows[-1], identical=True)
    return file.getvalue()


def test_the_table_fits_80_columns_and_marks_impossible_ratios():
    text = printed([1.2, 1.3, 1.4])
    assert "?" not in text
    text = printed([1.2, 1.3, 3.5])
    table = text.split("identical")[0]
    assert max(map(len, table.splitlines())) <= 80 and "…" not in table
    assert "3.50 ?" in table and "1.20 ?" not in table and "? impossible" in table
