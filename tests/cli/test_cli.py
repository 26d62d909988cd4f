"""The command line: help that answers, one line and the right exit code for what is wrong."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers

from mtpjax import DecodeConfig, MTPModel, SamplingParams, init_params, load, presets, save_drafter
from mtpjax.atomic import check_output_file
from mtpjax.cli import config_flags
from mtpjax.cli.generate_output import warn_of_limit
from mtpjax.cli.help import command_parser
from mtpjax.cli.main import COMMANDS, main
from mtpjax.data.draft_vocabulary import save_vocabulary
from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig
from mtpjax.drafters.medusa.drafting import MedusaDrafter
from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
from mtpjax.drafters.methods import find_method
from mtpjax.drafters.trained import DraftParams
from mtpjax.evaluation import profile, profile_file
from mtpjax.evaluation.profile_file import load_depth_settings
from mtpjax.io.checkpoint import save_model
from mtpjax.models.config import ModelConfig
from mtpjax.models.masks import full_view
from mtpjax.serving.offline import CompletedBatch, complete
from tests import golden


def exit_code(arguments):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return exit_.value.code


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8}
    model = MTPModel(dataclasses.replace(presets["tiny"], **narrow, max_position_embeddings=128))
    save_model(path, model, init_params(model, jax.random.key(0)))
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["quickstart", "--help"], ["generate", "--help"], ["--version"]])
def test_help_answers(arguments, capsys):
    assert exit_code(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["vocabulary", "--size", "\x1b[2J"], ["inspect", "\x1b[2J"], ["\x1b[2J"]])
def test_errors_escape_control_characters(arguments, capsys):
    assert exit_code(arguments) != 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err and "\\x1b" in printed.err


COMMAND_LINES = [["--help"], *([name, "--help"] for name in COMMANDS), ["eval", "acceptance", "--help"]]


def test_help_of_no_command_imports_jax():
    code = f"""
import contextlib, io, sys
from mtpjax.cli import config_flags
from mtpjax.cli.main import COMMANDS, main
for arguments in {COMMAND_LINES}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(arguments)
    assert "usage: mtpjax" in out.getvalue(), arguments
    assert not {{"jax", "numpy"}} & set(sys.modules), arguments
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_flag_of_a_setting_has_its_field_name_type_default_and_text(capsys):
    """Flags are derived: a field that changes in `DecodeConfig` or `SamplingParams` changes on the command line too."""
    parser = command_parser("Text.")
    sampling = config_flags.SAMPLING_FIELDS
    fields = [field.name for field in dataclasses.fields(DecodeConfig) if field.name in config_flags.FLAG_FIELDS]
    assert {*fields, *sampling} == config_flags.FLAG_FIELDS
    config_flags.add_config_flags(parser, [*fields, *sampling])
    options = parser.parse_args([])
    assert DecodeConfig(**config_flags.decode_settings(options)) == DecodeConfig()
    assert config_flags.sampling_params(options) == SamplingParams()
    texts = config_flags.field_docs(DecodeConfig) | config_flags.field_docs(SamplingParams)
    assert texts.keys() >= {*fields, *sampling}


def test_sglang_names_of_flags_are_aliases():
    parser = command_parser("Text.")
    config_flags.add_config_flags(parser, config_flags.SGLANG_FLAGS)
    values = {"num_steps": 3, "topk": 2, "num_draft_tokens": 5, "threshold_single": 0.5, "threshold_acc": 0.25}
    values |= {"draft_window": 64, "draft_sinks": 8, "draft_vocabulary": "frequent.json"}
    assert values.keys() == config_flags.SGLANG_FLAGS.keys()
    options = parser.parse_args([f"{config_flags.SGLANG_FLAGS[name]}={value}" for name, value in values.items()])
    assert {name: options[name] for name in values} == values


def test_generate_prints_the_text_and_checks_it(checkpoint, capsys):
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "\tdef\f", "--max-new-tokens", "8", "--check"]
    assert exit_code(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("\tdef\f")  # as it is, for it may be written to a file
    assert "accept length" in captured.err
    assert "identical to plain decoding: yes" in captured.err


@pytest.mark.parametrize(
    ("as_wide", "code", "verdict"),
    [(False, 4, "NO\n"), (True, 0, "yes, in passes of the same width: narrower ones round differently\n")],
)
def test_generate_says_where_a_text_leaves_plain_decoding(
    as_wide, code, verdict, checkpoint, tmp_path, capsys, monkeypatch
):
    def altered(params, prompts, *, config, **keywords):
        for completions, result in complete(params, prompts, config=config, **keywords):
            # Passes as wide as those of the drafts give the same tokens, where the second comparison finds them equal.
            if config.num_steps or (as_wide and config.min_rows):
                yield CompletedBatch(completions, result)
                continue
            tokens = [[*each.tokens[:3], *((token + 1) % 61 for token in each.tokens[3:])] for each in completions]
            changed = map(lambda each, own: dataclasses.replace(each, tokens=own), completions, tokens)
            yield CompletedBatch(list(changed), result)

    # Only below float32 is there a second comparison.
    model, params = load(checkpoint)
    dtype = jax.numpy.bfloat16 if as_wide else jax.numpy.float32
    checkpoint = tmp_path / "checkpoint"
    save_model(checkpoint, model, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    monkeypatch.setattr("mtpjax.serving.offline.complete", altered)
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "8", "--check"]
    assert exit_code(arguments) == code
    where = "prompt 1 differs from new token 4 on, where the trunk's logits for the two tokens are"
    assert f"identical to plain decoding: {verdict}{where}" in capsys.readouterr().err


@pytest.mark.slow  # .ci/run has the command
def test_generate_samples_a_tree_and_checks_it(checkpoint, capsys):
    arguments = [
        "generate",
        "--model",
        str(checkpoint),
        "--prompt",
        "def ",
        "--prompt",
        "def ",
        "--max-new-tokens",
        "8",
    ]
    arguments += ["--temperature", "0.8", "--top-p", "0.95", "--seed", "3"]
    arguments += [
        "--speculative-num-steps",
        "2",
        "--speculative-eagle-topk",
        "2",
        "--speculative-num-draft-tokens",
        "5",
    ]
    assert exit_code([*arguments, "--acceptance", "sample", "--check"]) == 0
    captured = capsys.readouterr()
    assert "identical to plain decoding: yes" in captured.err
    first, second = captured.out.split("def ")[1:]
    assert first.strip() != second.strip()  # a seed for each prompt
    assert exit_code([*arguments, "--speculative-accept-threshold-single", "0.3"]) == 0
    assert "acceptance 'threshold' has changed the text's distribution" in capsys.readouterr().err


@pytest.mark.slow  # .ci/run has the command
def test_generate_chooses_the_depth_by_a_profile(checkpoint, tmp_path, capsys):
    model = shutil.copytree(checkpoint, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("profile.json"))
    arguments = ["generate", "--model", str(model), "--prompt", "def ", "--max-new-tokens", "8", "--check"]
    arguments += ["--depth-policy", "adaptive", "--speculative-num-steps", "1"]
    assert exit_code(arguments) == 2
    error = capsys.readouterr().err
    assert "no profile at" in error and "run `mtpjax profile` to measure one" in error and error.count("\n") == 1
    assert exit_code(["profile", "--model", str(model), "--num-steps", "1", "--context", "40", "--repeats", "1"]) == 0
    assert exit_code(arguments) == 0
    assert "identical to plain decoding: yes" in capsys.readouterr().err
    (model / "profile.json").rename(tmp_path / "elsewhere.json")
    assert exit_code([*arguments, "--profile", str(tmp_path / "elsewhere.json")]) == 0


def test_generate_drafts_from_a_vocabulary(checkpoint, tmp_path, capsys):
    file = tmp_path / "frequent.json"
    save_vocabulary(file, tuple(range(97, 123)), counts=np.ones(256, int), source="letters", sizes={})
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "8", "--check"]
    assert exit_code([*arguments, "--draft-vocabulary", str(file), "--speculative-draft-window-size", "16"]) == 0
    assert "identical to plain decoding: yes" in capsys.readouterr().err


def test_a_text_that_the_model_s_positions_cut_is_told(capsys):
    prompts = [[1] * 20, [1] * 30]
    for config in (DecodeConfig(max_new_tokens=98), DecodeConfig(max_new_tokens=200, max_length=100)):
        warn_of_limit(prompts, config, 128)
        assert not capsys.readouterr().err
    warn_of_limit(prompts, DecodeConfig(max_new_tokens=99), 128)
    told = capsys.readouterr().err
    assert "30 tokens and --max-new-tokens 99 exceed the model's maximum length of 128 tokens" in told
    assert told.endswith("at most 98 new tokens\n")


@pytest.mark.parametrize("num_mtp_modules", [0, 1])
def test_generate_drafts_by_lookup_with_and_without_mtp_modules(num_mtp_modules, tmp_path, capsys):
    """The drafts of `DecodeConfig(drafter="lookup")`, from flags; without modules "mtp" decodes plainly."""
    narrow = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 8}
    config = dataclasses.replace(presets["tiny"], **narrow, num_mtp_modules=num_mtp_modules)
    model = MTPModel(config)
    save_model(tmp_path / "model", model, init_params(model, jax.random.key(0)))
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", "abcabcabcab", "--max-new-tokens", "24"]
    arguments += ["--check"]
    assert exit_code([*arguments, "--drafter", "lookup", "--prompt-lookup-min", "1", "--prompt-lookup-max", "3"]) == 0
    error = capsys.readouterr().err
    assert "identical to plain decoding: yes" in error
    rates = error.split("accepted per level ")[1].split("\n")[0].split()
    assert len(rates) == find_method("lookup").default_levels and float(rates[0]) > 0
    assert exit_code([*arguments, "--drafter", "lookup", "--topk", "2"]) == 2
    assert "drafter 'lookup' supports only chains" in capsys.readouterr().err
    assert exit_code([*arguments, "--drafter", "n-gram"]) == 2
    assert (
        "drafter must be one of mtp, lookup, eagle3, medusa, dflash, dspark, or package.module:RECORD, got n-gram"
        in capsys.readouterr().err
    )
    if not num_mtp_modules:
        assert exit_code(arguments) == 0
        assert "accepted per level" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--prompt", "x", "--temperature", "1", "--check"], "--check above temperature 0 needs --acceptance sample"),
        (["--prompt", "x", "--acceptance", "block", "--speculative-accept-threshold-acc", "0.5"], "not 'block'"),
        (
            ["--prompt", "x", "--speculative-accept-threshold-single", "-1"],
            "threshold_single must be within 0..1, got",
        ),
        (["--prompt", "x", "--draft-vocabulary", "missing.json"], "missing.json"),
        (["--prompt", "x", "--profile", "x.json"], "--profile has no effect without --depth-policy adaptive"),
        (["--prompt", "x", "--top-p", "2"], "top_p"),
        (["--prompt", ""], "prompt 1 of --prompt has no tokens"),
        (["--prompt", "x" * 200], "max_length 128 leaves room for 127"),
        (["--prompt", "x", "--speculative-num-steps", "-1"], "num_steps must be at least 0, got -1"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
        (["--prompt", "x", "--max-length", "1000"], "max_length 1000 exceeds the model's 128 positions"),
        (["--prompt", "a\0b"], "NUL at character 1"),
        (
            ["--prompt", "x", "--speculative-algorithm", "NONE", "--num-steps", "3"],
            "--num-steps has no effect with --speculative-algorithm NONE",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(checkpoint, extra, said, capsys):
    assert exit_code(["generate", "--model", str(checkpoint), *extra]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_wrong_usage_is_exit_code_2(capsys):
    assert exit_code(["generate"]) == 2
    assert exit_code(["no-such-command"]) == 2
    assert exit_code(["quickstart", "--preset", "huge"]) == 2
    assert "unknown preset 'huge'; supported: tiny" in capsys.readouterr().err


def test_a_bad_checkpoint_is_exit_code_3(tmp_path, capsys):
    assert exit_code(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 3
    assert "no mtpjax checkpoint" in capsys.readouterr().err


def test_a_converted_checkpoint_generates_with_its_own_tokenizer(tmp_path, capsys):
    """From a Hugging Face directory, and from ours made of it: the same text, by its tokens and its template."""
    source = shutil.copytree(golden.path("qwen3_5_tied_bf16"), tmp_path / "source")
    vocabulary = {f"w{index}": index for index in range(310)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text("w5 {{ messages[0].content }} w6")
    assert exit_code(["convert", str(source), str(tmp_path / "ours")]) == 0
    texts = []
    for model in (source, tmp_path / "ours"):
        arguments = [
            "generate",
            "--model",
            str(model),
            "--prompt",
            "w7 w8",
            "--chat",
            "--max-new-tokens",
            "6",
            "--check",
        ]
        assert exit_code(arguments) == 0
        captured = capsys.readouterr()
        assert "identical to plain decoding: yes" in captured.err
        texts.append(captured.out)
    assert texts[0] == texts[1] and texts[0].startswith(" w") and not texts[0].startswith(" w7 w8")
    assert exit_code(["generate", "--model", str(golden.path("deepseek_v3_fp8")), "--prompt", "x"]) == 3
    assert "no tokenizer.json, and the model has 320 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "convert", "export-mtp", "merge-mtp"])
def test_conversion_commands_answer_and_refuse(command, tmp_path, capsys):
    assert exit_code([command, "--help"]) == 0
    assert capsys.readouterr().out
    missing, target = str(tmp_path / "missing"), str(tmp_path / "target")
    arguments = {
        "inspect": [missing],
        "convert": [missing, target],
        "export-mtp": ["--input-dir", missing, "--output-dir", target],
        "merge-mtp": ["--input-dir", missing, "--mtp-dir", missing, "--output-dir", target],
    }[command]
    assert exit_code([command, *arguments]) == 3
    captured = capsys.readouterr()
    assert captured.err == f"mtpjax {command}: {missing} does not exist; its folder is empty\n"
    assert list(tmp_path.iterdir()) == []


def test_converting_to_a_dtype_that_is_none_is_refused(tmp_path, capsys):
    arguments = ["convert", str(golden.path("deepseek_v3_fp8")), str(tmp_path / "ours"), "--dtype", "int4"]
    assert exit_code(arguments) == 2
    assert "--dtype must be one of float32, float16, bfloat16, got int4" in capsys.readouterr().err


@pytest.mark.slow  # .ci/run has the command
def test_profile_measures_rounds_and_stores_them(checkpoint, tmp_path, capsys):
    file = tmp_path / "costs.json"
    acceptance = tmp_path / "rates.json"
    overall = {"decoded": {"conditional": [{"value": 0.75}]}, "predicted": {"accept_length_at_depth": [{"value": 1.7}]}}
    asked = {"topk": 1, "acceptance": "auto", "threshold_single": 1.0, "threshold_acc": 1.0}
    acceptance.write_text(json.dumps({"settings": asked, "figures": {"overall": overall}}))
    arguments = [
        "--batch-size",
        "1",
        "3",
        "--num-steps",
        "1",
        "--context",
        "40",
        "--repeats",
        "1",
        "--output",
        str(file),
    ]
    arguments += ["--acceptance-rates", str(acceptance)]
    assert exit_code(["profile", "--model", str(checkpoint), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines if line.startswith("batch")] == [["batch", "1,"], ["batch", "3,"]]
    settings = load_depth_settings(file, batch=4, num_steps=1)
    assert settings["depth_rates"] == (0.75,)
    assert len(DecodeConfig(num_steps=1, depth_policy="adaptive", **settings).depth_costs or ()) == 2


def test_profile_stands_beside_the_model_or_where_it_is_told(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "measure", lambda params, **_: {"batches": [], "problem": None, "waited": 0.0})
    assert exit_code(["profile", "--model", str(checkpoint)]) == 0
    assert (checkpoint / "profile.json").is_file()
    load(checkpoint)  # is still one
    monkeypatch.setattr(profile_file.os, "access", lambda *_: False)
    assert exit_code(["profile", "--model", str(checkpoint)]) == 2
    assert "choose a file with --output FILE" in capsys.readouterr().err
    assert exit_code(["profile", "--model", str(checkpoint), "--num-steps", "0", "--output", str(tmp_path / "x")]) == 2
    assert "num_steps must be at least 1" in capsys.readouterr().err
    assert exit_code(["profile", "--model", str(tmp_path)]) == 3


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--repeats", "-1"], "repeats must be at least 1, got -1"),
        (["--num-steps", "127"], "num_steps must be at most 32, got 127"),
        (["--output", "/dev/null/profile.json"], "/dev/null is not a folder"),
        (["--output", "/dev"], "/dev is a folder, not a file to write"),
    ],
)
def test_profile_refuses_what_it_cannot_do_before_it_loads_the_model(extra, said, capsys, monkeypatch):
    monkeypatch.setattr("mtpjax.io.checkpoint.load", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setattr("mtpjax.io.checkpoint_format.checkpoint_bytes", lambda path: 0)
    assert exit_code(["profile", "--model", "model", *extra]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_permission_is_no_output(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=f"cannot be written: no permission to write in {tmp_path}"):
        check_output_file(tmp_path / "missing" / "file.json")


def test_other_outputs_are_checked_first_too(checkpoint, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("one")
    prompts = ["eval", "acceptance", "--model", str(checkpoint), "--prompts", str(tmp_path / "prompts.txt")]
    data = ["vocabulary", "--model", str(checkpoint), "--data", str(tmp_path), "--size", "9"]
    for command in (prompts, data):
        assert exit_code([*command, "--output", str(tmp_path)]) == 2
        assert f"{tmp_path} is a folder, not a file to write" in capsys.readouterr().err


def test_ctrl_c_prints_one_line(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "compare", interrupted)
    assert exit_code(["compare", "run"]) == 130
    assert capsys.readouterr().err == "mtpjax compare: interrupted\n"


def test_compare_refuses_a_folder_as_its_picture(tmp_path, capsys):
    assert exit_code(["compare", "run", "--output", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder, not a file to write" in capsys.readouterr().err


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_help_that_cannot_be_written_fails():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mtpjax.cli.main", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot be written" in done.stderr


def test_a_path_with_control_characters_is_printed_without_them(checkpoint, tmp_path, capsys):
    assert exit_code(["convert", str(checkpoint), str(tmp_path / "\x1b[2J")]) == 0
    captured = capsys.readouterr()
    assert r"\x1b[2J: " in captured.err
    assert "\x1b" not in captured.out + captured.err


@pytest.fixture(scope="module")
def heads(checkpoint, tmp_path_factory):
    """Untrained Medusa heads for the checkpoint."""
    model, _ = load(checkpoint)
    config = MedusaConfig(hidden_size=32, vocab_size=model.config.vocab_size, num_heads=2)
    path = tmp_path_factory.mktemp("heads") / "heads"
    save_drafter(path, MedusaDrafter(architecture=config), DraftParams(init_medusa(config)))
    return path


def init_medusa(config):
    return Medusa(config).init(jax.random.key(0), np.zeros((1, config.hidden_size), np.float32))["params"]


def test_generate_drafts_with_medusa_heads(checkpoint, heads, capsys):
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "8", "--check"]
    arguments += ["--speculative-draft-model-path", str(heads), "--speculative-algorithm", "MEDUSA"]
    assert exit_code(arguments) == 0
    printed = capsys.readouterr().err
    assert "identical to plain decoding: yes" in printed and "accepted per level" in printed


@pytest.mark.slow
def test_a_drafter_is_profiled_and_drafts_at_the_depths_that_pay(checkpoint, heads, tmp_path, capsys):
    heads = shutil.copytree(heads, tmp_path / "heads")  # the profile is written beside them
    drafter = ["--speculative-draft-model-path", str(heads)]
    arguments = ["profile", "--model", str(checkpoint), *drafter, "--context", "40", "--repeats", "1"]
    assert exit_code(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any("MedusaDrafter" in line for line in lines)
    assert not any("…" in line for line in lines)
    # As deep as there are heads.
    stored = json.loads((heads / "profile.json").read_text())
    assert [row["num_steps"] for row in stored["batches"][0]["rounds"]] == [0, 1, 2]
    assert all(row["draft_seconds"] > 0 for row in stored["batches"][0]["rounds"][1:])
    generate = ["generate", "--model", str(checkpoint), *drafter, "--prompt", "def ", "--max-new-tokens", "12"]
    assert exit_code([*generate, "--check", "--depth-policy", "adaptive"]) == 0
    assert "identical to plain decoding: yes" in capsys.readouterr().err
    assert exit_code([*arguments, "--num-steps", "3"]) == 2
    assert "exceeds the 2 Medusa heads" in capsys.readouterr().err


def test_kernels_of_a_drafter_are_not_predicted(checkpoint, capsys):
    arguments = ["profile", "--model", str(checkpoint), "--predict", "--speculative-draft-model-path", "x"]
    assert exit_code(arguments) == 2
    assert "--predict supports MTP modules only" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [("DFLASH", []), ("DSPARK", []), ("DSPARK", ["--speculative-dspark-confidence-threshold", "0.5"])],
)
def test_generate_drafts_with_blocks(algorithm, flags, checkpoint, tmp_path, capsys):
    model, _ = load(checkpoint)
    own = model.config
    block = ModelConfig(
        vocab_size=own.vocab_size, hidden_size=own.hidden_size, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, use_qk_norm=True,
    )  # fmt: skip
    layers = {"layer_ids": (1,), "num_target_layers": own.num_hidden_layers}
    sizes = {"block": block, "block_size": 3, "mask_token_id": 0, **layers}
    drafter, network = DFlashDrafter(architecture=DFlashConfig(**sizes)), DFlash
    if algorithm == "DSPARK":
        heads = {"sample_from_anchor": True, "markov_head": "vanilla", "markov_rank": 2, "has_confidence": True}
        drafter, network = DSparkDrafter(architecture=DSparkConfig(**sizes, **heads)), DSpark
    view = full_view(block, np.ones((1, 2), np.int32))
    zeros = np.zeros((1, 2, own.hidden_size), np.float32)
    params = network(drafter.architecture).init(jax.random.key(0), zeros, zeros, view)["params"]
    save_drafter(tmp_path / "draft", drafter, DraftParams(params))
    arguments = ["generate", "--model", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "8", "--check"]
    arguments += ["--speculative-draft-model-path", str(tmp_path / "draft")]
    arguments += ["--speculative-algorithm", algorithm, *flags]
    assert exit_code(arguments) == 0
    printed = capsys.readouterr().err
    assert "identical to plain decoding: yes" in printed and "accepted per level" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sample-from-anchor"], "--sample-from-anchor needs --speculative-draft-model-path"),
        (["--last-layer-state", "after_norm"], "--last-layer-state needs --speculative-draft-model-path"),
        (["--speculative-algorithm", "EAGLE3"], "--speculative-algorithm EAGLE3 needs --speculative-draft-model-path"),
        (["--drafter", "eagle3"], "--drafter eagle3 is read from files: use --speculative-draft-model-path"),
        (["--speculative-dspark-confidence-threshold", "0"], "threshold needs --speculative-draft-model-path"),
        (
            ["--speculative-draft-model-path", "HEADS", "--speculative-dspark-confidence-threshold", "0.5"],
            "is for DSPARK drafters, but",
        ),
        (["--speculative-draft-model-path", "HEADS", "--speculative-algorithm", "EAGLE3"], "is EAGLE3, but"),
        (["--speculative-draft-model-path", "HEADS", "--drafter", "lookup"], "select different drafters"),
        (["--speculative-draft-model-path", "HEADS", "--depth-policy", "adaptive"], "no profile at"),
        (["--speculative-draft-model-path", "HEADS", "--num-steps", "3"], "exceeds the 2 Medusa heads"),
    ],
)
def test_flags_of_a_drafter_that_do_not_fit_are_refused(flags, message, checkpoint, heads, capsys):
    flags = [str(heads) if flag == "HEADS" else flag for flag in flags]
    assert exit_code(["generate", "--model", str(checkpoint), "--prompt", "x", *flags]) == 2
    assert message in capsys.readouterr().err
