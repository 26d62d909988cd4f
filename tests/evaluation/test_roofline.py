import json
import pathlib
import shutil

import pytest

from mtpjax import ModelConfig
from mtpjax.cli.main import main
from mtpjax.evaluation.roofline import DEVICES, count_launches, predict_round, tokens_per_round
from mtpjax.models.presets import presets

H100 = DEVICES["h100"]


def run(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_a_round_takes_the_longer_of_bytes_and_operations_of_each_part_and_the_launches():
    few, many = (predict_round(presets["small"], H100, batch=batch, context=512, num_steps=1) for batch in (1, 4096))
    weights = few.parts[0]
    assert few.seconds_of_parts[0] == pytest.approx(weights.nbytes / (0.8 * 3.35e12))
    assert many.seconds_of_parts[0] == pytest.approx(many.parts[0].flops / (0.5 * 989e12))
    assert many.parts[0].nbytes == weights.nbytes and many.parts[0].flops == pytest.approx(4096 * weights.flops)
    assert few.seconds == pytest.approx(sum(few.seconds_of_parts) + few.launches * 2e-6)
    assert few.limit == "launches"


def test_experts_are_read_once_however_many_tokens_choose_them():
    config = presets["tiny-moe"]

    def experts(batch):
        found = predict_round(config, H100, batch=batch, context=64, num_steps=0)
        return next(part.nbytes for part in found.parts if part.name == "experts")

    assert experts(1) * 1.5 < experts(2) < 2 * experts(1)
    assert experts(10_000) == pytest.approx(experts(1) * config.n_routed_experts / config.num_experts_per_tok)


def test_launches_follow_the_layers():
    dense, deepseek = presets["small"], presets["deepseek-v3"]
    assert count_launches(dense, 0) == 27 + 9 * dense.num_hidden_layers
    assert count_launches(deepseek, 0) == 27 + 3 * 11 + 58 * 16
    assert count_launches(deepseek, 1) == count_launches(deepseek, 0) + 14 + 16


def test_expected_tokens_per_round():
    assert tokens_per_round(0.5, 3) == 1.875


def test_the_command_takes_a_preset_or_a_bare_configuration(tmp_path, capsys):
    output = tmp_path / "predicted.json"
    flags = ["profile", "--predict", "--num-steps", "1", "--device", "h200"]
    assert run([*flags, "--model", "deepseek-v3", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "H200 x 1: predicted, not measured" in printed and "do not fit" in " ".join(printed.split())
    rows = json.loads(output.read_text())
    assert [row["num_steps"] for row in rows] == [0, 1] and rows[1]["speedup"] > 0
    # A folder that holds nothing but config.json; its fp8 weights have one byte.
    shutil.copy(pathlib.Path(__file__).parents[1] / "golden/deepseek_v3_fp8/config.json", tmp_path)
    assert run([*flags, "--model", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--device", "a100"], "--device must be one of h100, h200, mi300x, got a100"),
        (["--context", "0"], "context must be at least 1, got 0"),
        (["--num-devices", "0"], "num_devices must be at least 1, got 0"),
        (["--weight-bytes", "-1"], "weight_bytes must be above 0, got -1.0"),
        (["--num-steps", "-1"], "--predict needs --num-steps 0 or more and --topk 1, got -1, 1"),
        (["--assumed-acceptance", "2"], "the assumed acceptance rate must be within 0..1, got 2.0"),
    ],
)
def test_wrong_settings_are_one_line(flags, named, capsys):
    assert run(["profile", "--predict", "--model", "small", *flags])
    assert named in capsys.readouterr().err


def test_drafts_need_modules():
    config = ModelConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with pytest.raises(ValueError, match="need at least one MTP module"):
        predict_round(config, H100, batch=1, context=8, num_steps=1)
