"""`mtpjax profile`, `vocabulary`, `eval` and `ablate`."""

import dataclasses
import json
import sys

import jsonargparse

from mtpjax.cli.common import add_model, bytes_done, progress_bar, set_threads
from mtpjax.cli.decode_flags import add_draft_flags, add_shape_flags, draft_settings


def add(commands) -> None:
    """Their flags."""
    _add_profile(commands)
    _add_vocabulary(commands)
    _add_eval(commands)
    _add_ablate(commands)


def _add_profile(commands) -> None:
    profile = jsonargparse.ArgumentParser(
        description="Measure on this device what rounds of 0..num-steps draft levels cost, per batch size. The file is "
        "what adaptive depth goes by."
    )
    add_model(profile)
    profile.add_argument("--batch", type=int, nargs="+", default=[1], help="batch sizes (default: %(default)s)")
    add_shape_flags(profile, num_steps=5, note="of the deepest round (default: %(default)s)")
    profile.add_argument("--context", type=int, default=512, help="tokens in the caches (default: %(default)s)")
    profile.add_argument(
        "--temperature", type=float, default=0.0, help="above 0: rounds that draw their tokens (default: %(default)s)"
    )
    profile.add_argument(
        "--acceptance",
        default=None,
        metavar="FILE",
        help="what `mtpjax eval acceptance --output FILE` wrote, of prompts like those to come: its figures are where "
        "adaptive depth begins",
    )
    profile.add_argument("--rounds", type=int, default=48, help="most measurements of each loop (default: %(default)s)")
    profile.add_argument("--output", default=None, help="file to write (default: profile.json in the model's folder)")
    commands.add_subcommand("profile", profile, help="what drafting costs here, by depth and batch size")


def _add_vocabulary(commands) -> None:
    vocabulary = jsonargparse.ArgumentParser(
        description="Count the tokens of a corpus and keep the most frequent ones, for modules that draft from fewer: "
        "DecodeConfig(draft_vocabulary=mtpjax.data.draft_vocabulary.load_vocabulary(FILE))."
    )
    add_model(vocabulary)
    vocabulary.add_argument("--data", required=True, help="a text or JSONL file, or a folder of them")
    vocabulary.add_argument("--pattern", default="*", help="which files of a folder (default: %(default)s)")
    vocabulary.add_argument("--size", type=int, required=True, help="ids to keep, special tokens among them")
    vocabulary.add_argument("--output", required=True, help="JSON file to write")
    commands.add_subcommand("vocabulary", vocabulary, help="the most frequent tokens of a corpus, to draft from")


def _add_eval(commands) -> None:
    acceptance = jsonargparse.ArgumentParser(
        description="Accept length and rates by level, of each category of prompts and of all: decoded, and "
        "teacher-forced along the model's own text; with 95 %% intervals over prompts. The accept length is 1 + "
        "accepted drafts / steps; a conditional rate is over the steps that reached the level, a survival over all."
    )
    add_model(acceptance)
    _add_prompts(acceptance, required=True, count=64)
    add_draft_flags(acceptance, num_steps=3)
    acceptance.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: %(default)s)")
    acceptance.add_argument("--batch-size", type=int, default=8, help="prompts at a time (default: %(default)s)")
    acceptance.add_argument("--output", default=None, help="JSON file to write, with everything that was counted")
    evaluate = jsonargparse.ArgumentParser(description="Evaluate a trained model.")
    commands.add_subcommand("eval", evaluate, help="what drafts are worth on given prompts")
    kinds = evaluate.add_subcommands(title="what", metavar="WHAT", dest="what")
    kinds.add_subcommand("acceptance", acceptance, help="accept length and acceptance rates on prompts")


def _add_ablate(commands) -> None:
    ablate = jsonargparse.ArgumentParser(
        description="Decode the same prompts with every combination of settings, each in turns with plain decoding at "
        "the same batch size and temperature, and say which to use. Cells that are done are kept: the same command "
        "goes on where it was ended. Writes cells.jsonl, cells.csv, heatmap.png, pareto.png and recommendation.md."
    )
    add_model(ablate)
    ablate.add_argument("--output", required=True, help="folder to write, and to go on from")
    _add_prompts(ablate, required=False, count=12)
    grid: list[tuple[str, type, list, str]] = [
        ("--depths", int, [1, 2, 3], "draft levels per round"),
        ("--topk", int, [1, 2], "candidates per node; 1: chains"),
        ("--num-draft-tokens", int, [0], "nodes verified per round; 0: all that depth and topk give, up to 64"),
        (
            "--rules",
            str,
            ["auto"],
            "of acceptance; auto: the default one of temperature and tree; exact: all exact ones",
        ),
        ("--temperatures", float, [0.0, 1.0], "0: greedy"),
        ("--batch-sizes", int, [1, 4], "prompts decoded together"),
    ]
    for flag, kind, default, meaning in grid:
        ablate.add_argument(flag, type=kind, nargs="+", default=default, help=meaning)
    ablate.add_argument(
        "--repeats", type=int, default=5, help="rounds of plain and speculative decoding (default: %(default)s)"
    )
    ablate.add_argument(
        "--threads",
        type=int,
        default=0,
        help="of XLA on a CPU; 0: all, but 1 for a model below 16 MB, which is faster so (default: %(default)s)",
    )
    commands.add_subcommand("ablate", ablate, help="which draft settings to use: a grid of measurements")


def _add_prompts(parser, *, required: bool, count: int) -> None:
    kinds = "Spec-Bench's, GSM8K's or other JSONL, or a text file by paragraphs"
    otherwise = "" if required else " (default: held-out files of what the model was trained on, for a model of bytes)"
    parser.add_argument("--prompts", required=required, default=None, help=kinds + otherwise)
    parser.add_argument(
        "--num-prompts", type=int, default=count, help="in all, evenly over the categories (default: %(default)s)"
    )
    parser.add_argument("--categories", nargs="+", default=[], help="these only (default: all)")
    parser.add_argument("--prompt-tokens", type=int, default=None, help="cut prompts to so many (default: what fits)")
    parser.add_argument("--chat", action="store_true", help="take each prompt for a message, by the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="per prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of sampling (default: %(default)s)")


def _profile(options) -> int:
    set_threads(options.model_path)
    import rich.console

    from mtpjax.evaluation import profile
    from mtpjax.io.checkpoint import load
    from mtpjax.io.checkpoint_format import find_checkpoint

    profile.shapes_up_to(
        options.speculative_num_steps, options.speculative_eagle_topk, options.speculative_num_draft_tokens
    )
    acceptance = None if options.acceptance is None else profile.read_acceptance(options.acceptance)
    model, params = load(find_checkpoint(options.model_path))
    output = profile.default_path(options.model_path) if options.output is None else options.output
    with progress_bar() as bar:
        task = bar.add_task("compiling and measuring", total=None)
        measured = profile.measure(
            params,
            model=model,
            batches=tuple(options.batch),
            num_steps=options.speculative_num_steps,
            topk=options.speculative_eagle_topk,
            num_draft_tokens=options.speculative_num_draft_tokens,
            context=options.context,
            temperature=options.temperature,
            acceptance=acceptance,
            rounds=options.rounds,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    profile.save(output, measured)
    console = rich.console.Console()
    for table in profile.tables(measured):
        console.print(table)
    print(f"wrote {output}", file=sys.stderr)
    return 0


def _vocabulary(options) -> int:
    import numpy as np
    import rich.console
    import rich.table

    from mtpjax.data import draft_vocabulary
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.io.inspect import inspect

    path = find_checkpoint(options.model_path)
    vocab_size = inspect(path)["configuration"]["vocab_size"]
    tokenizer = load_tokenizer(path, vocab_size)
    kept = {*tokenizer.eos_token_ids, *tokenizer.special_token_ids}
    draft_vocabulary.choose_vocabulary(
        np.zeros(vocab_size), options.size, kept=kept
    )  # a wrong size is told before the work
    files = draft_vocabulary.corpus_files(options.data, options.pattern)
    with bytes_done(options.data, options.output) as progress:
        corpus = draft_vocabulary.count_tokens(files, tokenizer, vocab_size, progress=progress)

    def choose(size: int) -> tuple[int, ...]:
        return draft_vocabulary.choose_vocabulary(corpus.counts, size, kept=kept)

    sizes = draft_vocabulary.sizes_around(options.size, vocab_size, len(kept))
    shares = {size: draft_vocabulary.coverage(corpus.counts, choose(size)) for size in sizes}
    ids = choose(options.size)
    draft_vocabulary.save_vocabulary(options.output, ids, counts=corpus.counts, source=options.data, sizes=shares)
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("size", "of the vocabulary", "of the corpus"):
        table.add_column(heading, justify="right")
    for size, share in shares.items():
        chosen = "bold" if size == options.size else ""
        table.add_row(str(size), f"{size / vocab_size:.1%}", f"{share:.2%}", style=chosen)
    rich.console.Console().print(table)
    skipped = f", {len(corpus.skipped)} files that are no text skipped" if corpus.skipped else ""
    print(f"{corpus.counts.sum()} tokens of {corpus.num_files} files{skipped}; {len(ids)} ids in {options.output}")
    return 0


def _eval(options) -> int:
    return {"acceptance": _eval_acceptance}[options.what](options[options.what])


def _eval_acceptance(options) -> int:
    set_threads(options.model_path)
    import rich.console

    from mtpjax.atomic import write_text
    from mtpjax.data.prompts import choose_prompts, encode_prompts, read_prompts, room_for_prompts
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.evaluation.acceptance import measure_acceptance
    from mtpjax.evaluation.metrics import print_report, report, to_json
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint import load
    from mtpjax.io.checkpoint_format import find_checkpoint

    config = DecodeConfig(max_new_tokens=options.max_new_tokens, **draft_settings(options))
    chosen = choose_prompts(
        read_prompts(options.prompts), options.num_prompts, categories=options.categories, seed=options.seed
    )
    path = find_checkpoint(options.model_path)
    model, params = load(path)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    most = room_for_prompts(model.config.max_position_embeddings, options.max_new_tokens, options.prompt_tokens)
    prompts, cut = encode_prompts(chosen, tokenizer, most_tokens=most, chat=options.chat)
    config = dataclasses.replace(config, stop_token_ids=tokenizer.eos_token_ids)
    check_acceptance(path, model, params)
    console = rich.console.Console()
    if cut:
        print(f"{cut} of {len(prompts)} prompts are cut to {most} tokens", file=sys.stderr)
    with progress_bar() as bar:
        task = bar.add_task("prompts", total=len(prompts))
        acceptance = measure_acceptance(
            params,
            prompts,
            model=model,
            config=config,
            temperature=options.temperature,
            seed=options.seed,
            batch_size=options.batch_size,
            progress=lambda count: bar.update(task, advance=count),
        )
    figures = report(acceptance, [prompt.category for prompt in chosen])
    if options.output is not None:
        settings = {name: value for name, value in vars(options).items() if isinstance(value, (str, int, float, list))}
        content = {"settings": settings, "prompts_cut": cut, "figures": to_json(figures)}
        write_text(options.output, json.dumps(content, indent=1, allow_nan=False) + "\n")
    print_report(console, figures)
    identical = int(acceptance.is_identical.sum())
    if options.temperature and config.acceptance != "sample":
        return 0
    print(f"identical to plain decoding: {identical} of {len(prompts)}")
    return 0 if identical == len(prompts) else 4


def _ablate(options) -> int:
    set_threads(options.model_path, options.threads)
    import rich.console

    from mtpjax.ablation import run

    names = ("depths", "topk", "num_draft_tokens", "rules", "temperatures", "batch_sizes")
    settings = run.Settings(
        **{name: tuple(options[name]) for name in names},
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        seed=options.seed,
    )
    return run.run(
        options.model_path,
        options.output,
        settings,
        console=rich.console.Console(),
        prompts=options.prompts,
        num_prompts=options.num_prompts,
        categories=options.categories,
        prompt_tokens=options.prompt_tokens,
        chat=options.chat,
    )


COMMANDS = {
    "profile": _profile,
    "vocabulary": _vocabulary,
    "eval": _eval,
    "ablate": _ablate,
}
