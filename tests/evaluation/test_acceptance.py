"""Acceptance rates: against a plain count of one prompt after the other, and of drafters whose rates are known."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
import rich.console

from mtpjax import DecodeConfig, forward, generate
from mtpjax.cli.main import main
from mtpjax.drafters.methods import save_drafter
from mtpjax.evaluation import teacher_forced
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.evaluation.metrics import estimate, print_report, report, to_json
from mtpjax.evaluation.same_text import Divergence, first_divergences
from tests.helpers.small_models import constructed_drafter

CONFIG = DecodeConfig(max_new_tokens=20, num_steps=3, prefill_chunk=8)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
CATEGORIES = ["a", "b", "a", "b", "b"]


@pytest.fixture(scope="module")
def mixed(small):
    model, params = small("grouped", "mixed")
    acceptance = measure_acceptance(params, PROMPTS, model=model, config=CONFIG, batch_size=2)
    return model, params, acceptance


@pytest.mark.slow
def test_texts_part_at_their_first_other_token_by_the_trunk_s_logits(mixed):
    model, params, _ = mixed
    plain = generate(params, PROMPTS, model=model, config=CONFIG).rows()
    others = [list(row) for row in plain]
    others[0][0], others[2][5] = (others[0][0] + 1) % 60, (others[2][5] + 7) % 60
    others[2][6] += 1  # behind the first it says nothing
    others[3] = others[3][:4]
    found = first_divergences(params, PROMPTS, others, plain, model=model)
    assert found[1] is None and found[4] is None and found[3] == Divergence(4, float("inf"))
    for number, place in ((0, 0), (2, 5)):
        shared = PROMPTS[number] + plain[number][:place]
        logits = np.asarray(forward(params, np.array([shared]), model=model, num_depths=0).logits)[0, -1]
        divergence = found[number]
        assert divergence is not None and divergence.position == place
        np.testing.assert_allclose(
            divergence.gap, logits[plain[number][place]] - logits[others[number][place]], rtol=1e-5
        )


def test_teacher_forced_counts_are_those_of_one_row_and_place_after_the_other(mixed):
    model, params, acceptance = mixed
    texts = generate(params, PROMPTS, model=model, config=CONFIG).rows()
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        row = prompt + text
        output = forward(params, np.array([row + [0] * (32 - len(row))]), model=model, num_depths=3)
        target = jax.nn.softmax(output.logits[0])
        choices = np.argmax(target, axis=-1)
        positions, agrees, reached, survives = (np.zeros(3) for _ in range(4))
        overlap, overlap_survives = np.zeros(3), np.zeros(3)
        for place in range(len(prompt) - 1, len(row)):
            is_right, product = True, 1.0
            for depth, logits in enumerate(output.mtp_logits, start=1):
                if place + depth >= len(row):
                    break
                agreed = int(np.argmax(logits[0, place])) == choices[place + depth]
                shared = float(np.minimum(jax.nn.softmax(logits[0, place]), target[place + depth]).sum())
                positions[depth - 1] += 1
                agrees[depth - 1] += agreed
                reached[depth - 1] += is_right
                is_right, product = is_right and agreed, product * shared
                survives[depth - 1] += is_right
                overlap[depth - 1] += shared
                overlap_survives[depth - 1] += product
        found = acceptance.teacher_forced
        for name, value in (("positions", positions), ("agrees", agrees), ("reached", reached), ("survives", survives)):
            assert getattr(found, name)[number].tolist() == value.tolist(), name
        for name, wanted in (("overlap", overlap), ("overlap_survives", overlap_survives)):
            np.testing.assert_allclose(getattr(found, name)[number], wanted, rtol=1e-4, err_msg=name)
    assert 0 < found.agrees.sum() < found.positions.sum()


def test_rows_may_be_taken_in_parts(mixed, monkeypatch):
    model, params, acceptance = mixed
    monkeypatch.setattr(teacher_forced, "MAX_LOGITS_PER_PASS", 2 * 256 * model.config.vocab_size * 4)
    parts = measure_acceptance(params, PROMPTS, model=model, config=CONFIG, batch_size=5)
    for name, found, wanted in zip(
        parts.teacher_forced._fields, parts.teacher_forced, acceptance.teacher_forced, strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(("draft_quality", "expected"), [("right", 1.0), ("wrong", 0.0)])
def test_a_known_drafter_has_its_rates(small, draft_quality, expected):
    model, params = small("grouped", draft_quality)
    acceptance = measure_acceptance(params, PROMPTS, model=model, config=CONFIG, batch_size=5)
    assert acceptance.is_identical.all()
    (row,) = report(acceptance, ["all"] * 5).values()
    assert row["decoded"]["accept_length"].value == row["decoded"]["accept_length_macro"].low == 1 + 3 * expected
    assert [rate.value for rate in row["decoded"]["survival"]] == [expected] * 3
    assert [rate.value for rate in row["teacher_forced"]["agreement"]] == [expected] * 3
    conditional = [rate.value for rate in row["teacher_forced"]["conditional"]]
    assert conditional == [1.0] * 3 if expected else conditional[0] == 0.0 and np.isnan(conditional[1:]).all()


def test_identities_hold_in_every_category(mixed):
    _, _, acceptance = mixed
    figures = report(acceptance, CATEGORIES)
    assert list(figures) == ["overall", "a", "b"]
    assert [figures[name]["prompts"] for name in figures] == [5, 2, 3]
    for row in figures.values():
        decoded, forced = row["decoded"], row["teacher_forced"]
        survival = [rate.value for rate in decoded["survival"]]
        assert decoded["accept_length"].value == pytest.approx(1 + sum(survival))
        assert decoded["accept_length_without_bonus"].value == pytest.approx(sum(survival))
        assert np.cumprod([rate.value for rate in decoded["conditional"]]) == pytest.approx(survival)
        assert forced["accept_length"] == pytest.approx(1 + sum(rate.value for rate in forced["survival"]))
        for rate in (*decoded["survival"], *forced["agreement"], decoded["accept_length"]):
            assert rate.low <= rate.value <= rate.high
    own = 1 + acceptance.accepted.sum(axis=1) / acceptance.rounds
    assert figures["overall"]["decoded"]["accept_length_macro"].value == pytest.approx(own.mean())


def test_intervals_are_those_of_a_binomial_share():
    hits = np.random.default_rng(0).random((400, 2)) < [0.3, 1.0]
    share, sure = estimate(hits, np.ones((400, 2)))
    assert share.value == hits[:, 0].mean()
    half = 1.96 * (share.value * (1 - share.value) / 400) ** 0.5
    assert share.high - share.value == pytest.approx(half, rel=0.15)
    assert (sure.low, sure.high) == (1, 1)
    (nothing,) = estimate(np.zeros((3, 1)), np.zeros((3, 1)))
    assert nothing.to_dict() == {"value": None, "low": None, "high": None}


def test_tables_fit_80_columns_and_json_has_no_nan(mixed):
    _, _, acceptance = mixed
    figures = report(acceptance, ["math_reasoning", "overall", "math_reasoning", "[/b]", "[/b]"])
    assert list(figures) == ["overall", "math_reasoning", "category overall", "[/b]"]
    assert figures["overall"]["prompts"] == 5 and figures["category overall"]["prompts"] == 1
    file = io.StringIO()
    print_report(rich.console.Console(file=file, width=80), figures)
    shown = file.getvalue()
    assert "math_reasoning" in shown and "[/b]" in shown and max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    json.dumps(to_json(figures), allow_nan=False)


def test_plain_decoding_has_no_acceptance(small):
    model, params = small("grouped", "right")
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        measure_acceptance(params, PROMPTS, model=model, config=dataclasses.replace(CONFIG, num_steps=0))


def test_the_command_prints_and_writes(checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"text": "abc{n}", "category": "{kind}"}}\n' for n in range(3) for kind in "xy"))
    output = tmp_path / "out" / "acceptance.json"
    arguments = ["eval", "acceptance", "--model", str(checkpoint), "--prompts", str(prompts)]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--max-new-tokens", "12", "--num-steps", "2", "--num-prompts", "4", "--output", str(output)])
    assert exit_.value.code == 0
    assert "identical to plain decoding: 4 of 4" in capsys.readouterr().out
    content = json.loads(output.read_text())
    assert content["figures"]["x"]["prompts"] == 2 and content["settings"]["num_steps"] == 2
    assert len(content["figures"]["overall"]["decoded"]["conditional"]) == 2
    assert {file.name for file in output.parent.iterdir()} == {"acceptance.json", "acceptance.png", "acceptance.svg"}


@pytest.mark.slow
def test_the_command_samples_trees(checkpoint, tmp_path, capsys):
    """By the rule "sample" the tokens are those of plain sampling with the same seeds, and are compared."""
    prompts, output = tmp_path / "prompts.txt", tmp_path / "acceptance.json"
    prompts.write_text("one\ntwo\n")
    arguments = ["eval", "acceptance", "--model", str(checkpoint), "--prompts", str(prompts), "--output", str(output)]
    tree = ["--topk", "2", "--num-steps", "2", "--num-draft-tokens", "4", "--acceptance", "sample"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, *tree, "--temperature", "0.8", "--max-new-tokens", "12"])
    assert exit_.value.code == 0
    assert "identical to plain decoding: 2 of 2" in capsys.readouterr().out
    assert json.loads(output.read_text())["settings"]["num_draft_tokens"] == 4


@pytest.mark.slow
def test_the_command_counts_with_a_drafter_in_files_of_its_own(checkpoint, small, tmp_path, capsys):
    save_drafter(tmp_path / "draft", *constructed_drafter("eagle3", *small("grouped", "mixed", vocab_size=256)))
    prompts, output = tmp_path / "prompts.txt", tmp_path / "acceptance.json"
    prompts.write_text("one\ntwo\n")
    arguments = ["eval", "acceptance", "--model", str(checkpoint), "--prompts", str(prompts), "--output", str(output)]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--speculative-draft-model-path", str(tmp_path / "draft"), "--max-new-tokens", "20"])
    assert exit_.value.code == 0
    assert "identical to plain decoding: 2 of 2" in capsys.readouterr().out
    found = json.loads(output.read_text())["figures"]["overall"]
    assert found["decoded"]["accept_length"]["value"] > 1
    assert found["predicted"]["accept_length"]["value"] == found["decoded"]["accept_length"]["value"]


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        (["--num-prompts", "0"], 2, "at least 1, not 0"),
        (["--num-steps", "0"], 2, "num_steps must be at least 1"),
        (["--max-new-tokens", "256"], 2, "leaves no room"),
        (["--batch-size", "0"], 2, "batch_size must be at least 1"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--topk", "2", "--acceptance", "block"], 2, "'block' supports only chains"),
        (["--acceptance", "greedy", "--temperature", "1"], 2, "acceptance 'greedy' supports only temperature 0"),
        (["--categories", "zzz"], 2, "no prompts of category 'zzz'"),
        (["--prompts", "missing.jsonl"], 2, "missing.jsonl"),
        (["--model", "missing"], 3, "missing does not exist"),
    ],
)
def test_bad_input_is_one_line(checkpoint, tmp_path, capsys, extra, code, said):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    with pytest.raises(SystemExit) as exit_:
        main(["eval", "acceptance", "--model", str(checkpoint), "--prompts", str(prompts), *extra])
    assert exit_.value.code == code
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1, error
