"""A whole run on a handful of files, and what it leaves behind."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import tokenizers

from mtpjax import DecodeConfig, Objective, TrainConfig, generate, load, presets, speculative_generate, train
from mtpjax.data.config import Source
from mtpjax.data.sources import fingerprint, read_source
from mtpjax.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from mtpjax.evaluation.self_check import check_acceptance
from mtpjax.io import checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.training.decoding_eval import is_looping
from mtpjax.training.run_sizes import compute_run_sizes
from mtpjax.training.step import train_step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A few steps of a narrow model on forty small files."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"file{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}\n" * 30)
    narrow = dataclasses.replace(presets["tiny"], hidden_size=32, num_hidden_layers=2, intermediate_size=48, head_dim=8)
    presets["narrow"] = narrow
    config = TrainConfig(
        preset="narrow",
        output=str(tmp_path_factory.mktemp("run") / "out"),
        data=str(folder),
        held_out_fraction=0.2,
        steps=12,
        batch_size=4,
        row_length=32,
        log_every=4,
        panel_prompts=4,
        objective=Objective(mix={"end_to_end_tv": 1.0}, start={"kl": 1.0}, warmup=0.5, vocab_chunk=100),
    )
    yield config, train(config, panel_depths=3, evaluations=2)
    del presets["narrow"]


@pytest.mark.slow
def test_metrics_hold_losses_and_panels(run):
    config, result = run
    rows = [json.loads(line) for line in pathlib.Path(config.output, "metrics.jsonl").read_text().splitlines()]
    assert rows == result.history
    assert [row["step"] for row in rows if "bits" in row] == [4, 8, 12]
    panels = [row["eval"] for row in rows if "eval" in row]
    assert len(panels) == 2
    assert [len(panels[-1][name]) for name in ("bits_per_token", "agreement", "survival")] == [4, 3, 3]
    assert panels[0]["decoded"] == {}  # it would have taken more than its share of the run
    (name,) = panels[-1]["decoded"]
    greedy, sampled = (panels[-1]["decoded"][name][kind] for kind in ("greedy", "sampled"))
    assert name == "overall" and greedy["prompts"] == sampled["prompts"] == 4 and len(sampled["survival"]) == 3
    assert greedy["real"] == greedy["predicted"]
    assert min(greedy["speed_up"], sampled["speed_up"]) > 0
    assert pathlib.Path(config.output, "panel.png").read_bytes()[1:4] == b"PNG"
    survival = panels[-1]["survival"]
    assert survival[0] == panels[-1]["agreement"][0]
    assert survival == sorted(survival, reverse=True)


def test_checkpoint_says_what_it_was_trained_for(run):
    config, result = run
    _, _, metadata = checkpoint.restore(result.path)
    assert Objective(**metadata["train"]["objective"]) == config.objective


def test_checkpoint_decodes_like_the_trained_model(run):
    config, result = run
    model, params = load(config.output)
    assert model == result.model
    for saved, trained in zip(jax.tree.leaves(params), jax.tree.leaves(result.params), strict=True):
        np.testing.assert_array_equal(saved, trained)
    prompts = [list(b"def "), list(b"return x")]
    decode = DecodeConfig(max_new_tokens=12, num_steps=2)
    speculative = speculative_generate(params, prompts, model=model, config=decode)
    assert speculative.rows() == generate(result.params, prompts, model=model, config=decode).rows()


def test_the_same_settings_give_the_same_losses(run, tmp_path, monkeypatch):
    """And every step gets the objective, and how far the run is."""
    config, result = run
    traced = []

    def spy(state, batch, learning_rate, mtp_scale, progress, *, spec, **settings):
        traced.append((spec.objective, isinstance(progress, jax.core.Tracer)))
        return train_step(state, batch, learning_rate, mtp_scale, progress, spec=spec, **settings)

    monkeypatch.setattr("mtpjax.training.run.train_step", spy)
    again = train(dataclasses.replace(config, output=str(tmp_path), panel_prompts=0), panel_depths=3, evaluations=2)
    assert [row["bits"] for row in again.history if "bits" in row] == [
        row["bits"] for row in result.history if "bits" in row
    ]
    assert traced == [(config.objective, True)]  # compiled once


def test_no_files_and_too_little_text_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no files match"):
        train(TrainConfig(data=str(tmp_path), output=str(tmp_path / "out")))
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="the held-out rows have no target at depth 1"):
        train(TrainConfig(data=str(tmp_path), output=str(tmp_path / "out")))


@pytest.mark.slow
def test_a_run_on_two_sources_keeps_its_tokenizer_and_says_what_it_read(run, tmp_path, capsys):
    pytest.importorskip("grain")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(30)} | {"<|end|>": 30}, "w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 30}')
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}w1 {{ m.content }} {% endfor %}")
    texts = [" ".join(f"w{(n * k) % 29}" for k in range(20)) for n in range(1, 29)]
    talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, ""]))
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    sources = (
        Source(path=str(tmp_path / "texts.jsonl"), kind="jsonl"),
        Source(path=str(tmp_path / "talks.jsonl"), kind="chat", weight=2.0),
    )
    changes = {"sources": sources, "tokenizer": str(tmp_path), "extra_tokens": 3, "steps": 4, "panel_prompts": 6}
    config = dataclasses.replace(run[0], output=str(tmp_path / "out"), data=None, **changes)
    result = train(config, evaluations=1)
    assert [row["step"] for row in result.history if "bits" in row] == [4]
    assert f"skipped documents of {sources[0].path}: 1 empty; the last:" in capsys.readouterr().err
    prompts = {name: kinds["greedy"].prompts for name, kinds in result.panel.decoded.items()}
    assert prompts == {"overall": 6, str(tmp_path / "talks.jsonl"): 3, str(tmp_path / "texts.jsonl"): 3}
    metadata = CheckpointReader(result.path, verify=False).metadata
    assert [each["empty"] for each in metadata["data"]["skipped"]] == [1, 0]
    assert [Source(**values) for values in metadata["train"]["sources"]] == list(sources)
    assert load_tokenizer(config.output + "/checkpoint", 256).digest == HuggingFaceTokenizer(tmp_path, 256).digest
    asked = {"tokenizer": HuggingFaceTokenizer(tmp_path, 256), "vocab_size": 256}
    readings = [read_source(source, **asked) for source in sources]
    assert metadata["data"]["fingerprint"] == fingerprint(sources, readings, **asked)


def test_too_much_of_no_use_stops_a_run_before_anything_is_compiled(run, tmp_path, monkeypatch):
    """T10; what is skipped below the limit is counted in the checkpoint (`test_a_run_on_two_sources…`)."""
    import dataclasses

    monkeypatch.setattr("mtpjax.training.run.Run._compile", None)
    (tmp_path / "some.jsonl").write_text('{"text": "good"}\n{"text": ""}\n{"text": 3}\n' * 2)
    source = Source(path=str(tmp_path / "some.jsonl"), kind="jsonl", max_skipped=3)
    config = dataclasses.replace(run[0], data=None, sources=(source,), output=str(tmp_path / "out"))
    with pytest.raises(
        ValueError, match=r"over 3 unusable documents \(2 corrupt, 2 empty\); the last: .* line 6 has no"
    ):
        train(config)


def test_a_depth_without_a_target_is_told_before_anything_is_compiled(run, tmp_path, monkeypatch):
    """T12: rows, answers or documents too short for a depth; of the rows that are held out, too."""
    import dataclasses

    monkeypatch.setattr("mtpjax.training.run.Run._compile", None)
    changes = {"row_length": 4, "batch_size": 1, "output": str(tmp_path / "out")}
    short = dataclasses.replace(run[0], **changes, num_depths=3)
    with pytest.raises(ValueError, match=r"the training rows have no target at depth 3: .* row of 4; use longer rows"):
        train(short)
    with pytest.raises(ValueError, match="at depth 3"):
        compute_run_sizes(short)
    with pytest.raises(TypeError, match="NoneType"):  # goes on to `_compile`
        train(dataclasses.replace(short, num_depths=2))
    monkeypatch.setattr("mtpjax.training.corpus.split_held_out", lambda documents, fraction: (documents, documents[:2]))
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("ab" + (" and more than two" if number > 20 else chr(97 + number)))
    with pytest.raises(ValueError, match="the training rows have no target at depth 3"):
        train(dataclasses.replace(short, row_length=32, data=str(tmp_path), pattern="?.txt"))
    with pytest.raises(ValueError, match="the held-out rows have no target at depth 3"):
        train(dataclasses.replace(short, row_length=32, data=str(tmp_path), pattern="*.txt"))


@pytest.mark.parametrize("num_modules", [0, 1])
def test_a_run_without_drafts_has_a_panel_of_the_trunk(num_modules, run, tmp_path):
    presets["bare"] = dataclasses.replace(presets["narrow"], num_mtp_modules=num_modules)
    config = dataclasses.replace(
        run[0], preset="bare", output=str(tmp_path / "out"), steps=2, num_depths=0, objective=Objective()
    )
    panel = train(config, evaluations=1).panel
    del presets["bare"]
    assert len(panel.bits_per_token) == 1 and not panel.agreement and not panel.decoded
    assert not check_acceptance(config.output, *load(config.output))
    assert (tmp_path / "out" / "panel.png").is_file()


def test_looping_text_is_recognised():
    lively = list(np.random.default_rng(0).integers(0, 256, 96))
    assert not is_looping(lively)
    assert is_looping(lively[:40] + [7] * 56)
    assert is_looping(lively[:40] + [1, 2, 3, 4, 5] * 12)
