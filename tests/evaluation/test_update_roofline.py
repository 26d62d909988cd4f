"""Predicted updates: each term of the model by hand, and the commands that print them."""

import dataclasses
import json
import math

import jax
import pytest

from mtpjax import ModelConfig
from mtpjax.cli.main import main
from mtpjax.evaluation.compiled_call import stored_shapes
from mtpjax.evaluation.roofline import DEVICES
from mtpjax.evaluation.update_flops import Trained, total_flops, update_flops
from mtpjax.evaluation.update_report import mfu_of, predict_profile
from mtpjax.evaluation.update_roofline import UpdateSetting, predict_update
from mtpjax.models.flops import RowCounts
from mtpjax.models.presets import presets

H100 = DEVICES["h100"]
D, F, N, K, H, V, LAYERS = 256, 512, 4, 2, 64, 1024, 3
DENSE = ModelConfig(
    vocab_size=V,
    hidden_size=D,
    num_hidden_layers=LAYERS,
    num_attention_heads=N,
    num_key_value_heads=K,
    intermediate_size=F,
    num_mtp_modules=1,
)
# One of the limits alone: the others cost nothing.
FAST = {"bandwidth": math.inf, "flops": math.inf, "seconds_per_launch": 0.0, "link": math.inf, "network": math.inf}
COMPUTE = dataclasses.replace(H100, **{**FAST, "flops": H100.flops})
MEMORY = dataclasses.replace(H100, **{**FAST, "bandwidth": H100.bandwidth})
LINKS = dataclasses.replace(H100, **{**FAST, "link": H100.link, "network": H100.network})
BYTES = H100.bandwidth * H100.bandwidth_share
ROWS = RowCounts.full(2, 128)


def predict(device, *, config=DENSE, sizes=None, trained=None, **more):
    setting = UpdateSetting(sizes or {"fsdp": 1}, ROWS, trained or Trained("all", 1), **more)
    parts = predict_update(config, stored_shapes(config, has_fp8=False), device, setting)
    return {part["name"]: part["seconds"] for part in parts}


@pytest.mark.parametrize("recomputes", [True, False])
def test_operations_take_their_share_of_the_peak(recomputes):
    found = predict(COMPUTE, recomputes_layers=recomputes)
    counted = update_flops(DENSE, stored_shapes(DENSE, has_fp8=False), ROWS, Trained("all", 1))
    assert counted is not None
    products, attention = (H100.flops * share for share in (0.7, 0.35))
    for name in ("trunk", "modules"):
        part = counted[name]
        assert found[name] == pytest.approx(part.products / products + part.attention / attention)
    layers = [counted["trunk"], counted["modules"]]
    # The losses, which are computed in chunks, and with `remat` also the layers, run forward again.
    backward = (counted["losses"].backward + counted["losses"].forward) / products
    backward += sum((2 + recomputes) * part.products / products + 3.5 * part.attention / attention for part in layers)
    assert found["backward"] == pytest.approx(backward)
    assert found["optimizer"] == 0 and "links" not in found


def test_bytes_of_activations_weights_logits_and_optimizer():
    found = predict(MEMORY)
    tokens = ROWS.tokens
    moved = (D + (N + 2 * K) * H) + (N * H + D) + (D + 2 * F) + (F + D)  # each product's input and output
    weights = D * (N + 2 * K) * H + N * H * D + 3 * D * F
    # Products read bfloat16; float32 weights are converted first; elementwise operations move 1.7 times as much.
    layer = 2 * (moved * tokens + weights) + 2 * 1.7 * moved * tokens + (4 + 2) * weights
    assert found["trunk"] == pytest.approx(LAYERS * layer / BYTES)
    assert found["losses"] == pytest.approx(2 * 8 * V * tokens / BYTES)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(stored_shapes(DENSE, has_fp8=False)))
    assert found["optimizer"] == pytest.approx(32 * size / BYTES)
    # A frozen bfloat16 trunk is not converted.
    frozen = predict(MEMORY, trained=Trained("modules", 1))
    assert frozen["trunk"] == pytest.approx(LAYERS * (layer - (4 + 2) * weights) / BYTES)
    assert predict(MEMORY, trained=Trained("modules", 1, runs_trunk=False))["trunk"] == 0


def test_links_gather_parameters_and_scatter_gradients():
    size = {"trunk": 0, "other": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(stored_shapes(DENSE, has_fp8=False)):
        if leaf.ndim > 1:  # norms are not split over fsdp
            size["trunk" if path[0].key == "trunk" else "other"] += math.prod(leaf.shape)
    found = predict(LINKS, sizes={"fsdp": 8})["links"]
    # Trunk layers are gathered in float32 for both passes, the rest once, and all gradients are scattered.
    split = 4 * (3 * size["trunk"] + 2 * size["other"]) * 7 / 8
    norms = 2 * 4 * D * (2 * LAYERS + 1 + 5) * 7 / 8  # their gradients are summed
    assert found == pytest.approx((split + norms) / H100.link)
    # Replicas sum all gradients, and more than 8 GPUs use the network.
    replicas = predict(LINKS, sizes={"data": 16})["links"]
    total = sum(size.values()) + D * (2 * LAYERS + 1 + 5)
    assert replicas == pytest.approx(2 * 4 * total * 15 / 16 / H100.network)


def test_profile_adds_up_and_long_rows_spend_more_on_attention():
    config = presets["small"]
    params = stored_shapes(config, has_fp8=False)
    for length in (1024, 32768):
        rows, trained = RowCounts.full(1, length), Trained("all", config.num_mtp_modules)
        profile = predict_profile(config, params, H100, UpdateSetting({"fsdp": 1}, rows, trained))
        counted = update_flops(config, params, rows, trained)
        assert counted is not None
        seconds = sum(part["seconds"] for part in profile["parts"])
        assert profile["mfu"] == mfu_of(profile) == pytest.approx(total_flops(counted) / (seconds * 989e12))
        assert profile["tokens_per_second"] == pytest.approx(length / seconds)
        assert 0 < profile["mfu"] < 0.7


def run(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_profile_predicts_an_update(tmp_path, capsys):
    output = tmp_path / "update.json"
    settings = ["preset=small", "dtype=bfloat16", "row_length=4096", "remat=layers"]
    flags = ["--predict", "--device", "h100", "mi300x", "--num-devices", "4", "--output", str(output)]
    assert run(["profile", *flags, "--train", *settings]) == 0
    printed = capsys.readouterr().out
    assert "8 rows of 4,096 tokens" in printed and "predicted, not" in printed
    assert max(map(len, printed.splitlines())) <= 80
    first, second = json.loads(output.read_text())
    assert [part["name"] for part in first["parts"]] == [
        "trunk", "modules", "losses", "backward", "optimizer", "links"
    ]  # fmt: skip
    assert first["mesh"] == {"fsdp": 4} and second["device_kind"] == "MI300X"
    assert (tmp_path / "update.png").stat().st_size
    assert run(["profile", "--predict", "--train", "preset=small"]) != 0
    assert "dtype=bfloat16" in capsys.readouterr().err
    assert run(["profile"]) == 2
    assert "--model-path is missing" in capsys.readouterr().err


def test_a_training_plan_shows_time_and_utilisation(tmp_path, capsys):
    output = tmp_path / "plan.json"
    flags = ["--count", "16", "--batch-size", "20", "--context", "2048", "--output", str(output)]
    assert run(["plan", "tiny-moe", "--train", *flags]) == 0
    printed = capsys.readouterr().out
    assert "s and MFU" in printed and "MFU" in printed and max(map(len, printed.splitlines())) <= 80
    rows = json.loads(output.read_text())
    assert len(rows) > 1
    for row in rows:
        # 20 rows do not divide evenly over 16 GPUs, so each has two.
        assert row["update"]["batch_size"] == 32 and row["update"]["mesh"] == row["mesh"]
        assert row["update"]["tokens_per_second"] * row["update"]["update_seconds"] == pytest.approx(32 * 2048)
