"""A user's acceptance rule, one file with its function and its record, runs wherever a built-in rule runs."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, speculative_generate
from mtpjax.cli import serve as serve_command
from mtpjax.cli import serve_flags
from mtpjax.cli.main import main
from mtpjax.data.packing import Batch, Document
from mtpjax.decoding.acceptance.rules import RULES, AcceptanceRule
from mtpjax.serving.engine import Engine
from mtpjax.serving.request import Request
from mtpjax.serving.sizes import EngineSettings
from mtpjax.training.corpus import Corpus
from mtpjax.training.decoding_eval import PanelDecoder
from tests.helpers.engine_client import Client
from tests.helpers.toy_rule import FIRST

NAME = "tests.helpers.toy_rule:FIRST"
PROMPT = [1, 2, 3]


def exit_code(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return exit_.value.code


def test_a_record_and_its_name_are_the_same_rule(small):
    model, params = small()
    for acceptance in (FIRST, NAME):
        config = DecodeConfig(max_new_tokens=12, num_steps=3, acceptance=acceptance, prefill_chunk=8)
        result = speculative_generate(params, [PROMPT], model=model, config=config)
        assert not result.is_exact
        assert result.stats.accepted.tolist() == [[int(result.stats.rounds[0]), 0, 0]]


def test_parameters_reach_the_rule(small):
    model, params = small()
    rule = dataclasses.replace(FIRST, parameters={"count": 2})
    assert rule == FIRST and hash(rule) == hash(FIRST)  # one compiled program
    config = DecodeConfig(max_new_tokens=12, num_steps=3, acceptance=rule, prefill_chunk=8)
    result = speculative_generate(params, [PROMPT], model=model, config=config)
    rounds = int(result.stats.rounds[0])
    assert result.stats.accepted.tolist() == [[rounds, rounds, 0]]


def test_generate_takes_the_name(checkpoint, capsys):
    flags = ["--prompt", "ab", "--acceptance", NAME, "--num-steps", "2", "--max-new-tokens", "8"]
    assert exit_code(["generate", "--model-path", str(checkpoint), *flags]) == 0
    said = capsys.readouterr()
    assert f"acceptance '{NAME}' has changed the text's distribution" in said.out + said.err


def test_an_engine_serves_the_rule(small):
    model, params = small()
    settings = EngineSettings(
        num_slots=2, max_length=64, page_size=8, num_pages=16, batch_sizes=(2,), prefill_tokens=16
    )
    config = DecodeConfig(num_steps=3, prefill_chunk=8, acceptance=NAME)
    engine = Engine(params, model=model, config=config, settings=settings)
    engine.start()
    request = Request(prompt=tuple(PROMPT), max_new_tokens=12, sampling=SamplingParams(temperature=0.7, seed=5))
    [(tokens, _, finish)] = Client(engine).run([request])
    engine.close()
    assert len(tokens) == 12 and finish.accepted == (finish.num_steps, 0, 0)


def test_the_server_asks_the_record_whether_it_is_lossy():
    line = ["--model-path", "model", "--acceptance", NAME]
    options = serve_flags.make_parser().parse_args(line)
    assert serve_command.engine_settings(options)["acceptance"] == NAME
    with pytest.raises(ValueError, match="changes the text's distribution: use --allow-lossy"):
        serve_command.check_lossy(NAME, options)
    serve_command.check_lossy(NAME, serve_flags.make_parser().parse_args([*line, "--allow-lossy"]))


def test_the_panel_of_a_run_decodes_with_the_rule(small):
    model, params = small("grouped", "mixed", vocab_size=128, max_position_embeddings=64)
    documents = [Document("lines", np.frombuffer(b"a line of text\n" * 5, np.uint8))]
    corpus = Corpus([], [], Batch(*[np.zeros((1, 1))] * 3), documents, None, {})
    decoder = PanelDecoder(corpus, model=model, num_depths=3, max_prompts=2, acceptance=NAME)
    decoded = decoder.measure(params, is_last=False)
    assert {row.survival for row in decoded["overall"].values()} == {(1.0, 0.0, 0.0)}
    with pytest.raises(ValueError, match="'greedy' supports only temperature 0"):
        PanelDecoder(corpus, model=model, num_depths=3, max_prompts=2, acceptance="greedy")


def test_ablate_measures_the_rule(checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "out"), "--acceptance", NAME]
    flags += ["--num-steps", "2", "--topk", "1", "--temperature", "1", "--batch-size", "2", "--repeats", "1"]
    assert exit_code(["ablate", "--model-path", str(checkpoint), *flags, "--max-new-tokens", "8"]) == 0
    [row] = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert (row["cell"]["acceptance"], row["lossless"]) == (NAME, "lossy")
    assert [rate["value"] for rate in row["survival"]] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.helpers.missing:FIRST", "tests.helpers.missing:FIRST cannot be imported: No module named"),
        ("tests.helpers.toy_rule:SECOND", "has no attribute 'SECOND'"),
        ("tests.helpers.toy_rule:accept_first", "must be an instance of AcceptanceRule, got function"),
        (":", "cannot be imported"),
    ],
)
def test_a_wrong_name_is_an_error_of_one_line(name, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        DecodeConfig(acceptance=name)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "must set exactly one of 'function' and 'follows'"),
        ({"function": print, "needs_q": True}, "must be 'chain' or 'fixed tree'"),
        ({"function": print, "drafts": "fixed tree"}, "set on_chain if, and only if, drafts is 'fixed tree'"),
        ({"function": print, "parameters": dict.fromkeys("abc", 1.0)}, "more than 2 parameters"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        AcceptanceRule("mine", **fields)


def test_the_table_of_the_guide_says_what_the_records_say():
    lines = pathlib.Path("docs/guides/acceptance_rules.md").read_text().splitlines()
    rows = [line.split("|")[1:5] for line in lines if re.match(r"\| `\w+` \| (chain|tree)", line)]
    assert [name.strip(" `") for name, *_ in rows] == list(RULES)
    for name, drafts, temperature, text in rows:
        rule = RULES[name.strip(" `")]
        shape = {"chain": "chain", "fixed tree": "tree", "any": "chain, tree"}[rule.drafts]
        assert drafts.strip() == shape and ("lossy" in text) == (not rule.is_exact)
        assert temperature.strip() == ("0" if rule.follows == "arg-max" else "any")
