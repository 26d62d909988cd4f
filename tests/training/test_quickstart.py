"""The quickstart's arguments."""

import pytest

from mtpjax import TrainConfig
from mtpjax.training import quickstart


def test_fewer_than_two_rounds_are_rejected_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "train", None)
    with pytest.raises(ValueError, match="rounds must be at least 2, not 1"):
        quickstart.run(TrainConfig(output=str(tmp_path / "run")), rounds=1)
    assert not (tmp_path / "run").exists()
