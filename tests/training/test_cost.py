"""The cost of training, read from the files of a run."""

import json

from mtpjax.training.cost import TrainingCost, read_training_cost


def test_the_cost_of_training_is_read_from_the_run(tmp_path):
    settings = {"trains": "modules", "batch_size": 4, "row_length": 8}

    def write(settings, history):
        (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
        return read_training_cost(tmp_path)

    steps = [{"step": step, "seconds": 20 + 0.5 * step, "bits": [1.0]} for step in (10, 20, 30)]
    history = [*steps, {"step": 32, "seconds": 40.0, "eval": {}}]
    cost = TrainingCost(updates=32, tokens=32 * 4 * 8, seconds=40.0, seconds_per_update=0.5)
    assert write(settings, history) == cost
    (tmp_path / "drafter").mkdir()
    assert read_training_cost(tmp_path / "drafter") == cost
    assert write(settings, history[:1]) is None
    assert write(settings | {"trains": "all"}, history) is None
    assert write({}, history) is None
    assert read_training_cost(tmp_path / "missing") is None and read_training_cost("org/name") is None
