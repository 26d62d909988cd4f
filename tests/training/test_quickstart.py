"""The quickstart's arguments, and its table."""

import dataclasses
import io

import numpy as np
import pytest
import rich.console

from mtpjax import TrainConfig
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts, chain_shape
from mtpjax.evaluation.timing_worker import TimingWorker
from mtpjax.training import quickstart
from mtpjax.training.decoding_eval import is_looping, repeated_share
from mtpjax.training.quickstart import DecoderSetting, DepthResult


def test_fewer_than_two_rounds_are_rejected_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "train", None)
    with pytest.raises(ValueError, match="rounds must be at least 2, not 1"):
        quickstart.run(TrainConfig(output=str(tmp_path / "run")), rounds=1)
    assert not (tmp_path / "run").exists()


def printed(ratios, problem=None, **changes):
    """The table of chains of 1, 2, ... drafts with these ratios, the last of them with a problem, at 80 columns."""
    rows = [
        DepthResult(depth, DecoderSetting(depth, 0, 1), 1 + 0.8 * depth, [0.8] * depth, 12345.0, ratio, (1.1, 1.2), 1.3)
        for depth, ratio in enumerate(ratios, start=1)
    ]
    rows[-1] = dataclasses.replace(rows[-1], problem=problem)
    file = io.StringIO()
    console = rich.console.Console(file=file, width=80)
    plain = DecoderSetting(0, 1, 2)
    quickstart._print_result(console, plain, np.full((3, 4), 0.01), rows, rows[-1], identical=True, **changes)
    return file.getvalue()


def test_the_table_fits_80_columns_and_marks_what_cannot_be_trusted():
    text = printed([1.2, 1.3, 1.4])
    assert (
        "?" not in text and "that do not loop" in text and "1.40 (1.10-1.20) with 3 drafts; 1.08 of the ideal" in text
    )
    text = printed([1.2, 1.3, 3.5], "disturbed: waited 54% of the time for a core", loops=True)
    table = text.split("identical")[0]
    assert max(map(len, table.splitlines())) <= 80 and "…" not in table
    assert "3.50 ?" in table and "1.20 ?" not in table and "all loop, which" in table
    assert "speculative/plain: 3.50 (1.10-1.20) ? with 3 drafts; disturbed: waited 54% of the time" in text
    assert "of the ideal" not in text


def measured(*, waited=0.0, negative=(), threads=1, factor=1.5):
    """Times of plain decoding and of one draft, 8 tokens of each of 4 prompts in 3 rounds."""
    plain, setting, shape = DecoderSetting(0, threads, 1), DecoderSetting(1, 1, 1), chain_shape(1)
    answer = [{"tokens": [1] * 9, "rounds": 4, "accepted": [3]}] * 4
    return quickstart.Measured(
        seconds={plain: np.full((3, 4), 0.3), setting: np.full((3, 4), 0.3 / factor)},
        answers={plain: answer, setting: answer},
        waited={plain: waited, setting: 0.0},
        negative=set(negative),
        costs=RoundCosts(1, {shape: 1.0}, {PLAIN_STEP: 1.0, shape: 1.4}),
        waited_for_costs=0.01,
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"factor": 1.25}, None),
        ({"factor": 1.8}, "impossible: above the accept length 1.75"),
        ({"factor": 1.5}, "impossible: above the ideal 1.25"),
        # The costs were measured in another process than this setting's: they do not limit its ratio.
        ({"factor": 1.5, "threads": 0}, None),
        ({"factor": 1.25, "waited": 0.54}, "disturbed: waited 54% of the time for a core"),
        (
            {"negative": {DecoderSetting(0, 1, 1)}},
            "impossible: a call for all tokens took no longer than a call for one",
        ),
    ],
)
def test_a_depth_has_a_problem_where_its_times_cannot_be(changes, problem):
    results = measured(**changes)
    plain, setting = results.seconds
    result = quickstart._depth_result(1, plain, [plain, setting], results)
    assert result.problem == problem and result.waited == max(changes.get("waited", 0.0), 0.01)


class FakeWorker(TimingWorker):
    """Writes loops, except for one prompt at a temperature."""

    def __init__(self, lively):
        self.lively = lively

    def __exit__(self, *_):
        pass

    def call(self, **request):
        assert request["num_steps"] == 2 and request["max_new_tokens"] == quickstart.NEW_TOKENS
        found = [(bytes(prompt), request["temperature"]) == self.lively for prompt in request["prompts"]]
        tokens = [range(64) if is_lively else [1, 2] * 32 for is_lively in found]
        return {"rows": [{"tokens": list(row)} for row in tokens]}


def test_the_next_command_writes_a_text_that_does_not_repeat_itself():
    assert quickstart._choose_example(FakeWorker((b"class ", 0.0)), 2) == "--prompt 'class '"
    assert quickstart._choose_example(FakeWorker((b"for ", 0.8)), 2) == "--prompt 'for ' --temperature 0.8"


def test_repeated_share_sees_what_is_no_exact_loop():
    assert repeated_share(list(range(64))) == 0.0 and repeated_share([1, 2]) == 0.0
    text = list(b" the" * 22 + b" is the" * 4)
    assert not is_looping(text) and repeated_share(text) > 0.5
    assert repeated_share(list(b"def read(self, size=-1):\n    return self.buffer.read(size)\n")) < 0.2
