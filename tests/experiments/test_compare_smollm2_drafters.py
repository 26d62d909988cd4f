"""The parts of `compare_smollm2_drafters` on a small model, and its quick form."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import compare_smollm2_drafters, smollm2_drafters, smollm2_measure
from experiments.smollm2_settings import MissingModelError, find_gguf
from mtpjax import DecodeConfig, MTPModel, TrainConfig, load_drafter, save_drafter, speculative_generate
from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig
from mtpjax.drafters.trained import DraftParams
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import full_view
from mtpjax.training.new_drafter import add_new_drafter, new_drafter

V, D, FULL = 11, 32, 20
IDS = np.array([1, 2, 4, 5, 7, 8, 11, 12, 13, 17, 19])  # token of the full trunk of each token of the reduced one
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5], [9, 8, 7, 9, 8, 7, 9]]


@pytest.fixture(scope="module")
def trunks(small):
    """A trunk whose small vocabulary makes random drafts right now and then, and one with more tokens around it."""
    model, params = small("grouped", "random", vocab_size=V, num_mtp_modules=0)
    # Tokens that only the full trunk has get logits of 0, which are never the highest.
    embedding = jnp.zeros((FULL, D)).at[IDS].set(params["embedding"])
    head = jnp.zeros((D, FULL)).at[:, IDS].set(params["head"])
    full = MTPModel(dataclasses.replace(model.config, vocab_size=FULL))
    return (model, params), (full, params | {"embedding": embedding, "head": head})


def make_drafter(kind, trunk):
    model, params = trunk
    if kind in ("eagle3", "medusa"):
        config = TrainConfig(drafter=kind, init_from="unused", num_depths=3, draft_vocab_size=7)
        drafter, ids = new_drafter(config, model.config), jnp.array([0, 2, 3, 5, 7, 8, 10])
        shape = {"model": model, "method": config.draft_method, "drafter": drafter, "draft_ids": ids}
        return drafter, DraftParams.of(add_new_drafter(params, **shape, key=jax.random.key(0)))
    block = ModelConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, use_qk_norm=True,
    )  # fmt: skip
    sizes = {"block": block, "layer_ids": (0, 1), "num_target_layers": 2, "mask_token_id": 6, "block_size": 4}
    if kind == "dflash":
        network, config, make = DFlash, DFlashConfig(**sizes), DFlashDrafter
    else:
        config = DSparkConfig(**sizes, markov_head="vanilla", markov_rank=4)
        network, make = DSpark, DSparkDrafter
    view, zeros = full_view(block, jnp.ones((1, 2), jnp.int32)), jnp.zeros((1, 2, config.features_size))
    params = jax.jit(network(config).init)(jax.random.key(3), zeros, jnp.zeros((1, 2, D)), view)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    return make(architecture=config), DraftParams(params)


@pytest.mark.parametrize(
    "kind", ["dspark", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("medusa", "eagle3", "dflash"))]
)
def test_a_drafter_drafts_the_same_for_the_full_trunk(kind, trunks, tmp_path):
    """The same rounds accept the same drafts; also from the files that are written."""
    (model, params), (full, full_params) = trunks
    drafter, draft_params = make_drafter(kind, trunks[0])
    config = DecodeConfig(max_new_tokens=40, num_steps=3, drafter=drafter)
    wanted = speculative_generate(params, PROMPTS, model=model, config=config, draft_params=draft_params)
    assert wanted.stats.accepted.sum() > 0
    moved = smollm2_drafters.to_full_vocabulary(drafter, draft_params, IDS, full_params["head"].T)
    save_drafter(tmp_path / "drafter", *moved, format="vllm" if kind == "medusa" else "speculators")
    drafter, draft_params = load_drafter(tmp_path / "drafter", model=full)
    config = dataclasses.replace(config, drafter=drafter)
    prompts = [IDS[row].tolist() for row in PROMPTS]
    found = speculative_generate(full_params, prompts, model=full, config=config, draft_params=draft_params)
    assert found.rows() == [IDS[row].tolist() for row in wanted.rows()]
    np.testing.assert_array_equal(found.stats.accepted, wanted.stats.accepted)


def test_counts_belong_to_their_prompts(small, monkeypatch):
    """In batches of similar lengths."""
    model, params = small("grouped", "mixed")
    monkeypatch.setattr(smollm2_measure, "MAX_BATCH", 2)
    rows = [[1, 2, 3], [4], [6, 7]]
    config = DecodeConfig(max_new_tokens=9, num_steps=2)
    given = {"draft_params": None, "model": model, "config": config}
    found = smollm2_measure.count_accepted(params, rows, **given, temperature=0.0)
    result = speculative_generate(params, rows, model=model, config=config)
    assert found["texts"] == result.rows() == smollm2_measure.plain_texts(params, rows, model=model, config=config)
    assert found["rounds"] == result.stats.rounds.tolist() and found["accepted"] == result.stats.accepted.tolist()


def test_cpu_time_counts_over_interruptions(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(smollm2_drafters.time, "process_time", lambda: now[0])
    event = dataclasses.make_dataclass("Event", ["step"])

    def after(budget, seconds, step):
        now[0] += seconds
        return budget.after_update(event(step))

    budget = smollm2_drafters.CpuBudget(tmp_path / "cpu.json", 10.0)
    assert not after(budget, 4.0, 1)
    now[0] = 3.0  # another process
    again = smollm2_drafters.CpuBudget(tmp_path / "cpu.json", 10.0)
    assert not after(again, 5.0, 2) and after(again, 2.0, 3)
    assert json.loads((tmp_path / "cpu.json").read_text()) == {"cpu_seconds": 11.0, "updates": 3}


def test_figures_by_category_are_those_of_their_prompts():
    counts = {"rounds": [10, 5, 4], "accepted": [[5, 0], [5, 5], [0, 0]]}
    timed = {"plain_step_seconds": 1.0, "verify_steps": 1.25, "round_steps": 1.5, "speed_up": 1.1, "waited": 0.0}
    cell = {"counts": {"0": counts, "1": counts}, "timed": timed, "train_seconds_per_step": 2.0, "equal_texts": 3}
    found = compare_smollm2_drafters.summarise(cell, ["x", "y", "x"])
    values = {name: row["0"]["accept_length"]["value"] for name, row in found["categories"].items()}
    assert values == pytest.approx({"x": 1 + 5 / 14, "y": 3.0})
    assert found["timed"]["ideal"] == pytest.approx((1 + 15 / 19) / 1.25)
    training = {"updates": 7, "tokens": 70, "cpu_seconds": 90.0}
    text = compare_smollm2_drafters.format_tables({"eagle3": found | {"training": training}})
    assert "| eagle3 | 7 | 70 | 1.5 | 3 of 3 |" in text and "| y | 1 | 3.00 | 3.00 |" in text
    assert "Unequal" not in text
    other = found | {"training": training | {"updates": 6}}
    assert "Unequal training" in compare_smollm2_drafters.format_tables(
        {"eagle3": found | {"training": training}, "medusa": other}
    )


@pytest.mark.slow
def test_the_quick_run_writes_its_figures_once(tmp_path, monkeypatch, capsys):
    """A run that ends early is continued, and nothing that is complete is computed again."""
    try:
        find_gguf(None)
    except MissingModelError as error:
        pytest.skip(str(error))
    folder = tmp_path / "run"
    arguments = ["--quick", "--output", str(folder)]

    class Stop(Exception):
        pass

    def stop(*_, **__):
        raise Stop

    # It ends after the states, after the first drafter, and in the middle of decoding.
    for name in ("train_drafter", "save_drafter"):
        with monkeypatch.context() as patched, pytest.raises(Stop):
            patched.setattr(smollm2_drafters, name, stop)
            compare_smollm2_drafters.main(arguments)
    assert sorted(file.name for file in (folder / "drafters").iterdir()) == ["mtp.json", "mtp.safetensors"]
    layers = {file.name.partition(".layer")[2] for file in (folder / "states").glob("*.npy")}
    assert layers == {"", "1.npy", "2.npy", "3.npy"}
    monkeypatch.setattr(smollm2_drafters, "open_hidden_state_cache", stop_unless_complete)
    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(smollm2_measure, "plain_texts", stop)
        compare_smollm2_drafters.main(arguments)
    monkeypatch.setattr(smollm2_drafters, "train", stop)
    assert compare_smollm2_drafters.main(arguments) == 0
    tables = capsys.readouterr().out
    assert all(f"| {name} | 2 |" in tables for name in ("mtp", "eagle3", "medusa"))
    for name in ("plain_texts", "count_accepted"):
        monkeypatch.setattr(smollm2_measure, name, stop)
    assert compare_smollm2_drafters.main(arguments) == 0
    result = json.loads((folder / "results.json").read_text())
    assert all(row["equal_texts"] == row["prompts"] for row in result["methods"].values())
    assert (folder / "results.png").stat().st_size > 10_000
    assert compare_smollm2_drafters.main([*arguments, "--drafters", "mtpp"]) == 2


def stop_unless_complete(folder, params, rows, **settings):
    """A cache whose states are all there computes none."""
    from mtpjax.training import hidden_state_cache

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hidden_state_cache, "_compute_block", None)
        return hidden_state_cache.open_hidden_state_cache(folder, params, rows, **settings)
