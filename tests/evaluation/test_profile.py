"""What rounds cost: every shape is timed, stored and found again; what does not fit is told in one line."""

import dataclasses
import json
import logging
import types

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig
from mtpjax.evaluation import profile, profile_file, profile_report, round_costs, trust
from mtpjax.evaluation.profile_file import load_depth_settings, read_acceptance
from mtpjax.evaluation.round_costs import CostMeter
from mtpjax.evaluation.round_loops import RoundLoop, TimingConditions
from mtpjax.evaluation.round_shapes import PLAIN_STEP, RoundCosts, RoundShape, chain_shape
from mtpjax.host import num_threads
from tests.helpers.small_models import constructed_drafter

UNKNOWN = {"depth_rates": None}


def stored(tmp_path, *batches, **changes):
    """A profile of batch sizes; a round of depth d at batch b takes `b + d` seconds, half a second more by a change."""
    rows = [
        RoundCosts(
            batch, *({chain_shape(d): batch + share * d for d in range(4)} for share in (0.5, 0.9, 1.0)), 0.5
        ).to_json()
        for batch in batches
    ]
    file = tmp_path / "profile.json"
    about = {
        "format": profile_file.FORMAT,
        "version": profile_file.VERSION,
        **profile_file.device_properties(),
        "acceptance": None,
    }
    content = {**about, **profile_file.device_properties(), "batches": rows, **changes}
    profile_file.save(file, content)
    return file


def test_a_timing_that_a_pause_made_negative_is_repeated(monkeypatch):
    """The clock tells the duration of each call: the first of a timing paused, so that the second seems shorter."""
    pairs = [(0.1, 0.9)] * 3 + [(7.0, 0.5), (0.1, 0.5)]  # of the short and the long call
    readings = iter(np.cumsum([each for pair in pairs for each in (0.0, *pair)]).tolist())
    monkeypatch.setattr(trust, "time", types.SimpleNamespace(perf_counter=lambda: next(readings)))
    loop = RoundLoop(lambda params, draft_params: params, lambda params, index, inputs: inputs + 1, jax.numpy.zeros(2))
    run = round_costs._timer(({}, None), loop, seconds=0.02)
    assert run() == pytest.approx((0.5 - 0.1) / 4)


def test_costs_come_back_from_json():
    costs = RoundCosts(
        2,
        {PLAIN_STEP: 1.0, RoundShape(2, 3, 9): 2.5},
        {PLAIN_STEP: 1.0, RoundShape(2, 3, 9): 4.0},
        {PLAIN_STEP: 1.5},
        0.25,
    )
    assert RoundCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    assert costs.ideal_ratio(3.0, RoundShape(2, 3, 9)) == 0.75


@pytest.fixture
def no_captured_weights():
    """A warning, here an error, where weights become part of a program, which decoding's are not."""
    before = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 2**14)
    yield
    jax.config.update("jax_captured_constants_warn_bytes", before)


@pytest.mark.parametrize(
    ("modules", "shape", "batch", "temperature"),
    [
        pytest.param(1, RoundShape(2, 2, 6), 2, 0.0, marks=pytest.mark.slow),
        (2, chain_shape(3), 1, 0.0),
        (1, PLAIN_STEP, 1, 0.0),
        pytest.param(1, RoundShape(2, 2, 6), 1, 0.7, marks=pytest.mark.slow),
        (1, chain_shape(2), 2, 0.7),
    ],
)
@pytest.mark.slow
def test_every_shape_is_timed(small, modules, shape, batch, temperature, no_captured_weights):
    model, params = small(num_mtp_modules=modules)
    compiled = []
    meter = CostMeter(
        params,
        model=model,
        shapes=(shape,),
        conditions=TimingConditions(batch, 20, 64, 2, temperature),
        seconds=0.0,
        time_full_rounds=True,
    )
    meter.compile(lambda: compiled.append(1))
    meter.measure(1)
    costs = meter.costs()
    assert len(compiled) == (2 if shape == PLAIN_STEP else 5 + (shape.topk == 1))
    assert costs.change >= 0
    timed = [of[kind] for of in (costs.verify, costs.parts, costs.round) for kind in (PLAIN_STEP, shape)]
    assert np.isfinite(timed).all() and all(timed)  # in one round on a busy machine a difference may be negative


@pytest.mark.parametrize(
    ("kind", "shape", "temperature"),
    [
        ("eagle3", chain_shape(3), 0.0),
        ("eagle3", RoundShape(2, 2, 6), 0.7),
        ("medusa", RoundShape(2, 2, 6), 0.0),
        ("medusa", chain_shape(2), 0.7),
        ("lookup", chain_shape(3), 0.0),
    ],
)
@pytest.mark.slow
def test_rounds_of_other_drafters_are_timed_with_the_drafting_alone(small, kind, shape, temperature):
    model, params = small("grouped", "mixed")
    drafter, draft_params = ("lookup", None) if kind == "lookup" else constructed_drafter(kind, model, params)
    meter = CostMeter(
        params,
        model=model,
        shapes=(shape,),
        conditions=TimingConditions(2, 20, 64, temperature=temperature),
        seconds=0.005,
        time_full_rounds=True,
        drafter=drafter,
        draft_params=draft_params,
    )
    meter.measure(3)
    costs = meter.costs()
    assert costs.draft.keys() == {shape} and costs.parts.keys() == {PLAIN_STEP, shape} == costs.round.keys()
    timed = (costs.draft, costs.parts, costs.verify, costs.round)
    assert all(0 < seconds < 1 for of in timed for seconds in of.values())
    # Drafting and verification together take at least as long as either, up to the noise of a busy machine.
    assert costs.parts[shape] > 0.5 * max(costs.draft[shape], costs.verify[shape])
    assert RoundCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs


def test_shapes_grow_to_the_one_asked_for():
    assert profile.shapes_up_to(3) == (chain_shape(1), chain_shape(2), chain_shape(3))
    assert profile.shapes_up_to(3, 2, 8) == (RoundShape(1, 2, 3), RoundShape(2, 2, 7), RoundShape(3, 2, 8))
    with pytest.raises(ValueError, match="num_draft_tokens must be 4 for a chain"):
        profile.shapes_up_to(3, 1, 9)


def test_the_nearest_batch_size_is_taken(tmp_path):
    file = stored(tmp_path, 1, 4, 16)
    one = load_depth_settings(file, batch=1, num_steps=2)
    assert one == {"depth_costs": (1.0, 2.0, 3.0), **UNKNOWN}
    four = load_depth_settings(tmp_path, batch=5, num_steps=3)
    assert four == {"depth_costs": (1.0, 1.25, 1.5, 1.75), **UNKNOWN}
    assert load_depth_settings(file, batch=8, num_steps=1)["depth_costs"][1] == 1 + 1 / 16  # as far from 4: the larger
    assert load_depth_settings(file, batch=1000, num_steps=0)["depth_costs"] == (1.0,)


ASKED = {"topk": 1, "acceptance": "auto"}
ASKED |= {f"threshold_{name}": 1.0 for name in ("single", "acc")}


def figures(rates, lengths):
    """What `mtpjax eval acceptance --output` writes beside ASKED, as far as it is read."""
    decoded, predicted = ([{"value": value} for value in values] for values in (rates, lengths))
    return {"decoded": {"conditional": decoded}, "predicted": {"accept_length_at_depth": predicted}}


def test_rates_and_lengths_are_those_that_acceptance_was_measured_at(tmp_path):
    file, least = tmp_path / "rates.json", profile_file.MIN_RATE

    def read(*found):
        file.write_text(json.dumps({"settings": ASKED, "figures": {"overall": figures(*found)}}))
        return read_acceptance(file)

    acceptance = read([0.8, 0.0, None], [1.75, 1.9, 1.9])  # a level that was never reached has no rate
    assert acceptance == {"rates": [0.8, least], "lengths": [1.75, 1.9]}
    file = stored(tmp_path, 1, acceptance=acceptance)
    settings = load_depth_settings(file, batch=1, num_steps=3)
    assert settings["depth_rates"] == (0.8, least, least)
    assert DecodeConfig(num_steps=3, depth_policy="adaptive", **settings).depth_rates == settings["depth_rates"]
    one = load_depth_settings(file, batch=1, num_steps=1)
    assert one["depth_rates"] == (0.8,)
    unpredicted = stored(tmp_path, 1, acceptance=read([0.8, 0.5], [None, None]))
    assert load_depth_settings(unpredicted, batch=1, num_steps=2)["depth_rates"] == (0.8, 0.5)
    for damaged in (figures([1.5], [1.5]), figures([None], [None]), figures([0.5], [2.5]), {}, [1]):
        file.write_text(json.dumps({"settings": ASKED, "figures": {"overall": damaged}}))
        with pytest.raises(ValueError, match=r"was not written by `mtpjax eval acceptance --output`"):
            read_acceptance(file)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"topk": 4}, "measured trees"),
        ({"acceptance": "relaxed"}, "measured a lossy rule"),
        ({"threshold_acc": 0.5}, "measured a lossy rule"),
    ],
)
def test_acceptance_of_trees_and_lossy_rules_is_no_chains(asked, said, tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({"settings": ASKED | asked, "figures": {"overall": figures([0.5], [1.5])}}))
    with pytest.raises(ValueError, match=f"{said}: adaptive depth needs chains and an exact rule"):
        read_acceptance(file)


def test_what_is_missing_is_told(tmp_path, small):
    with pytest.raises(ValueError, match=r"no profile at .*profile.json: run `mtpjax profile` to measure one"):
        load_depth_settings(tmp_path, batch=1, num_steps=1)
    file = stored(tmp_path, 1)
    with pytest.raises(
        ValueError, match=r"costs for chains of 1\.\.3 levels; depth 4 needs `mtpjax profile --num-steps 5`"
    ):
        load_depth_settings(file, batch=1, num_steps=5)
    with pytest.raises(ValueError, match="measured on a different model"):
        load_depth_settings(file, batch=1, num_steps=1, config=small()[0].config)
    for text in ("", "[]", '{"format": "mtpjax-profile", "version": 2}', "[" * 10**5):
        file.write_text(text)
        with pytest.raises(ValueError, match="is not a profile"):
            load_depth_settings(file, batch=1, num_steps=1)
    for batches in ([], [{}], [{"batch": 1, "rounds": []}], [1]):
        with pytest.raises(ValueError, match="is damaged"):
            load_depth_settings(stored(tmp_path, batches=batches), batch=1, num_steps=1)
    for rates, lengths in (([1.5], []), (["a"], []), (0.5, []), ([], []), ([0.5], [2.5]), ([0.5], [1.5, 2.5])):
        with pytest.raises(ValueError, match="is damaged"):
            acceptance = {"rates": rates, "lengths": lengths}
            load_depth_settings(stored(tmp_path, 1, acceptance=acceptance), batch=1, num_steps=1)


def test_a_profile_of_another_drafter_is_refused(tmp_path, small):
    model, params = small("grouped", "mixed")
    medusa, eagle3 = (constructed_drafter(kind, model, params)[0] for kind in ("medusa", "eagle3"))
    file = stored(tmp_path, 1, drafter=profile_file.describe_drafter(medusa))
    assert load_depth_settings(file, batch=1, num_steps=1, drafter=medusa)["depth_costs"] == (1.0, 2.0)
    fewer = dataclasses.replace(medusa, architecture=dataclasses.replace(medusa.architecture, num_heads=2))
    for other, name in (("mtp", "MTP modules"), (eagle3, "Eagle3Drafter"), (fewer, "MedusaDrafter")):
        with pytest.raises(ValueError, match=f"was measured with MedusaDrafter [0-9a-f]*, not with {name}"):
            load_depth_settings(file, batch=1, num_steps=1, drafter=other)
    with pytest.raises(ValueError, match="was measured with MTP modules, not with MedusaDrafter"):
        load_depth_settings(stored(tmp_path, 1), batch=1, num_steps=1, drafter=medusa)


def test_another_device_is_a_warning(tmp_path, caplog):
    file = stored(tmp_path, 1, device_kind="abacus", threads=99)
    with caplog.at_level(logging.WARNING):
        load_depth_settings(file, batch=1, num_steps=1)
    assert "device_kind 'abacus'; here it is 'cpu'" in caplog.text
    assert f"threads 99; here it is {num_threads()}" in caplog.text


def test_a_disturbed_profile_says_so_first_and_where_it_is_used(tmp_path, caplog):
    busy = {"waited": 0.4, "problem": "disturbed: waited 40% of the time for a core"}
    own = {"context": 64, "dtype": "float32", "temperature": 0.0}
    file = stored(tmp_path, 1, **busy, **own)
    with caplog.at_level(logging.WARNING):
        load_depth_settings(file, batch=1, num_steps=1)
    assert "cannot be trusted: it was disturbed: waited 40%" in caplog.text
    line, table = profile_report.tables(json.loads(file.read_text()))
    assert line.startswith("trust in the timings: no (1 disturbed, marked ?)") and table.title.startswith(
        "batch 1 ?, 64"
    )
    line, table = profile_report.tables({**json.loads(file.read_text()), "waited": 0.0, "problem": None})
    assert line.startswith("trust in the timings: yes") and "?" not in table.title


def test_rates_that_break_even():
    assert profile_report.break_even_rate(1.5, 1) == pytest.approx(0.5)
    assert profile_report.break_even_rate(1.75, 2) == pytest.approx(0.5)
    assert profile_report.break_even_rate(3.1, 2) is None


def test_what_cannot_be_measured_is_refused(small):
    model, params = small()
    tree = DecodeConfig(num_steps=5, topk=2)
    for changes, said in (
        ({"num_mtp_modules": 0}, "no MTP modules"),
        ({"num_mtp_modules": 2}, "trees need exactly one MTP module; the model has 2"),
        ({"max_position_embeddings": 8}, "leaves no room for a round: the model's maximum length is 8"),
    ):
        other = model.clone(config=dataclasses.replace(model.config, **changes))
        with pytest.raises(ValueError, match=said):
            profile.measure(params, model=other, config=tree, conditions=profile.Conditions())
    with pytest.raises(ValueError, match=r"batch sizes \[0\]"):
        profile.Conditions(batches=(0,))
    with pytest.raises(ValueError, match="temperature -1 must be at least 0"):
        profile.Conditions(temperature=-1)


def test_a_drafter_refuses_what_it_cannot_do_before_anything_is_compiled(small):
    model, params = small("grouped", "mixed", num_mtp_modules=0)
    heads, head_params = constructed_drafter("medusa", model, params)
    arguments = {"model": model, "draft_params": head_params, "conditions": profile.Conditions()}
    deep = DecodeConfig(num_steps=4, drafter=heads)
    wide = DecodeConfig(num_steps=2, topk=model.config.vocab_size, num_draft_tokens=9, drafter=heads)
    for config, said in ((deep, "num_steps 4 exceeds the 3 Medusa heads"), (wide, "can be drafted")):
        with pytest.raises(ValueError, match=said):
            profile.measure(params, config=config, **arguments)


def test_a_file_has_no_folder_for_its_profile(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="not a writable folder: choose a file with --output"):
        profile_file.default_path(tmp_path / "model.gguf")
