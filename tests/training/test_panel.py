"""The panel's figures are those of a loop over positions, and those of decoding."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from mtpjax import DecodeConfig, speculative_generate
from mtpjax.data.packing import Batch, Document
from mtpjax.evaluation.intervals import Estimate
from mtpjax.evaluation.metrics import estimate_speed_up
from mtpjax.evaluation.round_costs import CostMeter
from mtpjax.evaluation.trust import speed_up_problem
from mtpjax.models.forward import forward
from mtpjax.training.corpus import Corpus
from mtpjax.training.decoding_eval import PanelDecoder, choose_panel_prompts
from mtpjax.training.panel import DecodedMetrics, Panel, acceptance_panel, print_panel


@pytest.mark.parametrize("num_depths", [0, 3])
def test_figures_are_those_of_a_loop_over_positions(num_depths, small):
    model, params = small()
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.config.vocab_size, size=(2, 12)).astype(np.int32)
    segment_ids = np.array([[1] * 7 + [2] * 5, [1] * 9 + [0] * 3], np.int32)
    loss_mask = (segment_ids > 0) & (rng.random((2, 12)) < 0.8)
    panel = acceptance_panel(params, Batch(tokens, segment_ids, loss_mask), model=model, num_depths=num_depths)

    output = forward(
        params, jnp.asarray(tokens), model=model, segment_ids=jnp.asarray(segment_ids), num_depths=num_depths
    )
    trunk, *drafts = (np.array(jax.nn.softmax(logits)) for logits in (output.logits, *output.mtp_logits))
    found = {name: [[] for _ in range(num_depths)] for name in ("agreement", "survival", "overlap", "sampled_survival")}
    for row, place in np.ndindex(2, 12):
        survives, product = True, 1.0
        for level, draft in enumerate(drafts, start=1):
            target = place + level + 1
            if target >= 12 or not segment_ids[row, place] or segment_ids[row, target] != segment_ids[row, place]:
                break
            p, q = trunk[row, place + level], draft[row, place]
            agrees, overlap = p.argmax() == q.argmax(), np.minimum(p, q).sum()
            survives, product = survives and agrees, product * overlap
            if loss_mask[row, target]:
                for name, value in zip(found, (agrees, survives, overlap, product), strict=True):
                    found[name][level - 1].append(value)
    for name, levels in found.items():
        np.testing.assert_allclose(getattr(panel, name), [np.mean(values) for values in levels], atol=1e-6)
    assert len(panel.bits_per_token) == num_depths + 1
    assert panel.accept_length == pytest.approx(1 + sum(panel.survival))
    assert panel.sampled_accept_length == pytest.approx(1 + sum(panel.sampled_survival))


def text_document(text, category=""):
    return Document("text", np.frombuffer(text.encode(), np.uint8), category=category)


def corpus_of(documents):
    return Corpus([], [], Batch(*[np.zeros((1, 1))] * 3), documents, None, {})


def test_prompts_begin_with_lines_and_end_before_answers():
    lines = text_document("abc\ndefg\nhi\njklmnop\n")
    for prompt, _ in choose_panel_prompts([lines], 9, length=5, seed=0):
        start = bytes(lines.tokens).index(bytes(prompt))
        assert len(prompt) == 5 and (start == 0 or lines.tokens[start - 1] == ord("\n"))
    tokens = np.arange(100, 112, dtype=np.int32)
    answers = np.array([0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], bool)
    talk = choose_panel_prompts([Document("talk", tokens, answers)], 9, length=5, seed=0)
    assert sorted(prompt for prompt, _ in talk) == [[100, 101, 102], [104, 105, 106, 107, 108]]
    words = choose_panel_prompts([Document("words", tokens)], 99, length=5, seed=0)
    assert sorted(words) == [([*range(100 + start, 105 + start)], "") for start in range(8)]
    assert choose_panel_prompts([text_document("short")], 9, length=64, seed=0) == [([*b"sho"], "")]


def test_categories_and_documents_take_turns():
    documents = [text_document(f"{number}\n" * 30, "many") for number in range(10, 16)]
    documents += [text_document("ab\ncd\nef\ngh\n", "few"), text_document("ab\ncd\nef\ngh\n", "few")]
    chosen = choose_panel_prompts(documents, 12, length=6, seed=0)
    assert sorted(category for _, category in chosen) == ["few"] * 3 + ["many"] * 9  # copies of a document are one
    assert len({tuple(prompt[:2]) for prompt, category in chosen if category == "many"}) == 6
    assert chosen[:4] == choose_panel_prompts(documents, 4, length=6, seed=0)
    assert chosen != choose_panel_prompts(documents, 12, length=6, seed=1)


@pytest.fixture(scope="module")
def decoder_of(small):
    def make(num_depths, count, modules=1):
        model, params = small("grouped", "mixed", num_mtp_modules=modules, vocab_size=128, max_position_embeddings=64)
        texts = [f"line {number} of text\n" * 5 for number in range(50)]
        documents = [text_document(text, "even" if number % 2 == 0 else "odd") for number, text in enumerate(texts)]
        return PanelDecoder(corpus_of(documents), model=model, num_depths=num_depths, max_prompts=count), params

    return make


@pytest.mark.slow
def test_decoded_figures_are_those_of_decoding(decoder_of):
    """Greedy ones as predicted; on the way a batch is decoded, at the end all prompts, with costs."""
    decoder, params = decoder_of(2, 70)
    decoded = decoder.measure(params, is_last=False)
    assert {name: kinds["greedy"].prompts for name, kinds in decoded.items()} == {"overall": 32, "even": 16, "odd": 16}
    prompts = [prompt for prompt, _ in decoder.prompts[:32]]
    config = DecodeConfig(max_new_tokens=32, num_steps=2, stop_token_ids=(0,))
    stats = speculative_generate(params, prompts, model=decoder.model, config=config).stats
    greedy, sampled = decoded["overall"]["greedy"], decoded["overall"]["sampled"]
    assert greedy.accept_length == greedy.predicted == pytest.approx(stats.accept_length)
    assert greedy.survival == pytest.approx(stats.survival_rates)
    assert sampled.accept_length_low <= sampled.accept_length <= sampled.accept_length_high
    assert sampled.accept_length != greedy.accept_length
    assert greedy.speed_up is None
    whole = decoder.measure(params, is_last=True)
    assert whole["overall"]["greedy"].prompts == 64
    for row in whole["even"].values():
        assert row.speed_up is not None and row.speed_up_low <= row.speed_up <= row.speed_up_high
        assert row.speed_up_low > 0 and row.waited is not None
        ratio = Estimate(row.speed_up, row.speed_up_low, row.speed_up_high)
        assert row.problem == speed_up_problem(ratio, row.accept_length, waited=row.waited)


def test_the_speed_ups_interval_covers_prompts_and_timings():
    steps, accepted = np.array([10, 10, 20]), np.array([[9, 5], [2, 0], [15, 10]])
    exact = estimate_speed_up(steps, accepted, np.full(5, 1.6))
    assert exact.value == pytest.approx((1 + 41 / 40) / 1.6)
    assert exact.low == pytest.approx(1.2 / 1.6) and exact.high == pytest.approx(2.4 / 1.6)  # the prompts alone
    same = np.array([[5], [5]])
    noisy = estimate_speed_up(np.array([10, 10]), same, np.array([1.0, 1.2, 1.5, 1.3, 1.1]))
    assert noisy.value == pytest.approx(1.5 / 1.2) and noisy.low < 1.5 / 1.2 < noisy.high <= 1.5
    nothing = estimate_speed_up(np.array([0, 10]), np.array([[0], [5]]), np.array([1.0]))
    assert nothing.value == nothing.low == nothing.high == pytest.approx(1.5)


@pytest.mark.slow
def test_a_timing_that_cannot_be_is_marked_in_the_panel(decoder_of, monkeypatch):
    """A round that seems to cost half a plain step."""
    decoder, params = decoder_of(1, 3)
    monkeypatch.setattr(CostMeter, "plain_steps", lambda meter, shape: np.full(5, 0.5))
    row = decoder.measure(params, is_last=True)["overall"]["greedy"]
    assert row.speed_up == pytest.approx(2 * row.accept_length)
    assert row.problem is not None
    assert row.problem.startswith(f"impossible: above the accept length {row.accept_length:.2f}")
    panel = Panel((1.0, 2.0), (0.9,), (0.9,), (0.9,), (0.9,), {"overall": {"greedy": row}})
    file = io.StringIO()
    print_panel(rich.console.Console(file=file, width=80), panel)
    assert "impossible: above" in file.getvalue()
    stored = panel.to_json()["decoded"]["overall"]["greedy"]
    assert stored["problem"] == row.problem and stored["speed_up_high"] == row.speed_up_high


def test_decoding_on_the_way_keeps_to_its_share(decoder_of):
    decoder, params = decoder_of(1, 3)
    assert not decoder.is_within_time_share(599) and decoder.is_within_time_share(601)
    decoder.measure(params, is_last=False)
    assert decoder.seconds_spent == decoder.expected_seconds > 0
    assert not decoder.is_within_time_share(39 * decoder.seconds_spent)
    assert decoder.is_within_time_share(41 * decoder.seconds_spent)


def test_a_device_without_room_is_a_warning(decoder_of, monkeypatch, caplog):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    decoder, params = decoder_of(1, 3)
    monkeypatch.setattr("mtpjax.training.decoding_eval.measure_acceptance", fail)
    assert decoder.measure(params, is_last=True) == {}
    assert "held-out prompts could not be decoded: RESOURCE_EXHAUSTED" in caplog.text


@pytest.mark.parametrize(("num_depths", "count"), [(0, 8), (2, 0)])
def test_without_levels_or_prompts_nothing_is_decoded(num_depths, count, decoder_of):
    decoder, params = decoder_of(num_depths, count)
    assert decoder.measure(params, is_last=True) == {}


def test_the_tables_fit_80_columns():
    rates = ((0.9, 0.8, 0.7, 0.6), (0.9,) * 4, (0.9,) * 4)
    problem = "disturbed: waited 12% of the time for a core"
    row = DecodedMetrics(128, 100, 3.456, 3.4, 3.52, 3.46, 3.5, *rates, 1.234, 1.1, 1.3, 0.12, problem)
    decoded = {"overall": {"greedy": row, "sampled": row}, "math_reasoning": {"sampled": row}}
    shares = (0.9, 0.8, 0.7, 0.6)
    file = io.StringIO()
    panel = Panel((1.0, 2.0, 3.0, 4.0, 5.0), shares, shares, shares, shares, decoded)
    print_panel(rich.console.Console(file=file, width=80), panel)
    printed = file.getvalue()
    assert max(len(line) for line in printed.splitlines() if not line.startswith("trust")) <= 80 and "…" not in printed
    assert printed.index("trust in the timings: no (3 disturbed, marked ?); threads") < printed.index("speed-up over")
    for part in ("3.46 3.40-3.52", "1.23 1.10-1.30 ?", "disturbed", "math_reasoning", "128", f"{1 + sum(shares):.2f}"):
        assert part in printed, part
    print_panel(rich.console.Console(file=file, width=80), Panel((1.0,), (), (), (), ()))
