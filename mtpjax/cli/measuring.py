"""`mtpjax profile`, `tune`, `plan`, `vocabulary`, `eval` and `ablate`."""

import json
import pathlib
import sys

from mtpjax.atomic import check_output_file
from mtpjax.cli.common import (
    add_implementation_flag,
    add_model_path_flag,
    add_plot_formats_flag,
    model_type,
    progress_bar,
    set_threads,
    show_bytes_read,
)
from mtpjax.cli.config_flags import DRAFT_FIELDS, SHAPE_FIELDS, add_config_flags, decode_settings, flag_names
from mtpjax.cli.drafter_flags import add_drafter_flags, add_reading_flags, load_drafter_of, reading_of
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flags, load_on_mesh, open_mesh
from mtpjax.cli.planning import add_plan, run_plan
from mtpjax.cli.prediction import add_prediction_flags, run_prediction
from mtpjax.cli.tuning import add_tune, run_tune
from mtpjax.errors import printable

DEFAULT_PROFILE_STEPS = 5  # deepest draft of `mtpjax profile` with MTP modules


def add_commands(commands) -> None:
    """Adds the commands and their flags.

    Args:
        commands: the subcommands of the `mtpjax` parser.
    """
    _add_profile(commands)
    add_tune(commands)
    add_plan(commands)
    _add_vocabulary(commands)
    _add_eval(commands)
    _add_ablate(commands)


def _add_profile(commands) -> None:
    profile = command_parser(
        "Measure on this device how long rounds of 0..num-steps draft levels take, per batch size. "
        "`mtpjax generate --depth-policy adaptive` reads the file."
    )
    add_model_path_flag(profile)
    add_implementation_flag(profile)
    profile.add_argument("--batch-size", type=int, nargs="+", default=[1], help="batch sizes to measure")
    profile.add_argument(
        *flag_names("num_steps"),
        type=int,
        default=None,
        help=f"deepest draft; by default {DEFAULT_PROFILE_STEPS} with MTP modules, else as "
        "--speculative-draft-model-path says",
    )
    add_config_flags(profile, SHAPE_FIELDS[1:])
    add_drafter_flags(profile)
    profile.add_argument("--context", type=int, default=512, help="tokens in the KV caches (default: %(default)s)")
    profile.add_argument(
        "--temperature", type=float, default=0.0, help="above 0: measure rounds that sample (default: %(default)s)"
    )
    profile.add_argument(
        "--acceptance-rates",
        default=None,
        metavar="FILE",
        help="file of `mtpjax eval acceptance --output`, measured on similar prompts: adaptive depth starts from its "
        "acceptance rates",
    )
    profile.add_argument("--repeats", type=int, default=48, help="most measurements per loop (default: %(default)s)")
    profile.add_argument(
        "--output", default=None, help="file to write (default: profile.json in the folder of the drafter or the model)"
    )
    add_prediction_flags(profile)
    commands.add_subcommand("profile", profile, help="measure what drafting costs, by depth and batch size")


def _add_vocabulary(commands) -> None:
    vocabulary = command_parser(
        "Count the tokens of a corpus and write the most frequent ones to a file. With --draft-vocabulary, "
        "MTP modules draft only those tokens, which makes their output head smaller."
    )
    add_model_path_flag(vocabulary)
    vocabulary.add_argument("--data", required=True, help="a text or JSONL file, or a folder of them")
    vocabulary.add_argument("--pattern", default="*", help="which files of a folder (default: %(default)s)")
    vocabulary.add_argument("--size", type=int, required=True, help="token ids to keep, special tokens included")
    vocabulary.add_argument("--output", required=True, help="JSON file to write")
    commands.add_subcommand("vocabulary", vocabulary, help="choose the tokens that MTP modules may draft")


def _add_eval(commands) -> None:
    acceptance = command_parser(
        "Measure accept length and acceptance rates per draft level, for each category of prompts and "
        "for all: by decoding, and teacher-forced along the model's own text, with 95 % intervals over prompts. The "
        "accept length is 1 + accepted drafts / steps. A conditional rate counts the steps that accepted the levels "
        "before; a survival rate counts all steps."
    )
    add_model_path_flag(acceptance)
    add_implementation_flag(acceptance)
    _add_prompt_flags(acceptance, required=True, count=64)
    add_config_flags(acceptance, (*DRAFT_FIELDS, "kv_cache_dtype"), num_steps=3)
    add_drafter_flags(acceptance)
    add_mesh_flags(acceptance)
    acceptance.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: %(default)s)")
    acceptance.add_argument("--batch-size", type=int, default=8, help="prompts decoded together (default: %(default)s)")
    acceptance.add_argument(
        "--output", default=None, help="JSON file to write, with all counts; its pictures get the same name"
    )
    add_plot_formats_flag(acceptance)
    evaluate = command_parser("Evaluate a trained model.")
    commands.add_subcommand("eval", evaluate, help="evaluate a model on prompts")
    kinds = evaluate.add_subcommands(title="what", metavar="WHAT", dest="what")
    kinds.add_subcommand("acceptance", acceptance, help="accept length and acceptance rates on prompts")


def _add_ablate(commands) -> None:
    ablate = command_parser(
        "Decode the same prompts with every combination of drafter and settings, each alternating with plain decoding "
        "at the same batch size and temperature, and recommend one. Finished cells are kept: run the same command "
        "again to continue. Writes cells.jsonl, cells.csv, recommendation.md, and the pictures heatmap and pareto, and "
        "of several drafters also positions."
    )
    add_model_path_flag(ablate)
    add_implementation_flag(ablate)
    ablate.add_argument("--output", required=True, help="folder to write or to continue")
    _add_prompt_flags(ablate, required=False, count=12)
    ablate.add_argument(
        "--drafters",
        nargs="+",
        default=["mtp"],
        metavar="DRAFTER",
        help="what drafts: mtp (the model's MTP modules), lookup or ngram (n-grams of the text), and folders, training "
        "runs or Hub repositories of EAGLE-3, Medusa, DFlash and DSpark drafters for this model",
    )
    add_reading_flags(ablate)
    # The flags of single settings, which take several values here; the grid is their product.
    grid: list[tuple[str, type, list, str]] = [
        ("num_steps", int, [1, 2, 3], "draft levels per round"),
        ("topk", int, [1, 2], "candidates per tree node; 1: chains"),
        ("num_draft_tokens", int, [0], "nodes verified per round; 0: as many as depth and topk allow, up to 64"),
        (
            "acceptance",
            str,
            ["auto"],
            "acceptance rules; auto: the default for temperature and tree; exact: all exact rules",
        ),
        ("temperature", float, [0.0, 1.0], "softmax temperatures; 0: greedy"),
        ("batch_size", int, [1, 4], "prompts decoded together"),
    ]
    for name, kind, default, meaning in grid:
        ablate.add_argument(*flag_names(name), type=kind, nargs="+", default=default, help=meaning)
    add_plot_formats_flag(ablate)
    ablate.add_argument(
        "--repeats", type=int, default=5, help="rounds of plain and speculative decoding (default: %(default)s)"
    )
    ablate.add_argument(
        "--threads",
        type=int,
        default=0,
        help="XLA's CPU threads; 0: one for a model below 16 MiB, else all cores (default: %(default)s)",
    )
    commands.add_subcommand("ablate", ablate, help="measure a grid of draft settings and recommend one")


def _add_prompt_flags(parser, *, required: bool, count: int) -> None:
    # Without a file, `mtpjax ablate` takes held-out files of the model's own training data.
    kinds = "JSONL of prompts (Spec-Bench, GSM8K and others), or a text file with a prompt per paragraph"
    otherwise = "" if required else " (default: held-out files of the training data, for byte-level models)"
    parser.add_argument("--prompts", required=required, default=None, help=kinds + otherwise)
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=count,
        help="prompts in all, spread over the categories (default: %(default)s)",
    )
    parser.add_argument("--categories", nargs="+", default=[], help="only these categories (default: all)")
    parser.add_argument("--prompt-tokens", type=int, default=None, help="longest prompt in tokens (default: what fits)")
    parser.add_argument("--chat", action="store_true", help="make each prompt a user message of the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="per prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompt choice and sampling (default: %(default)s)")


def _profile(options) -> int:
    drafter_path = options.speculative_draft_model_path
    # This default is for MTP modules; a drafter with its own files brings its own depth.
    if options.num_steps is None and drafter_path is None:
        options.num_steps = DEFAULT_PROFILE_STEPS
    if options.predict:
        return run_prediction(options)
    set_threads(options.model_path)
    import rich.console

    from mtpjax.evaluation import profile
    from mtpjax.io.checkpoint import load

    # Check the shape and the files before the model is loaded.
    if options.num_steps is not None:
        profile.shapes_up_to(options.num_steps, options.topk, options.num_draft_tokens)
    acceptance = None if options.acceptance_rates is None else profile.read_acceptance(options.acceptance_rates)
    if options.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {options.repeats}")
    if options.output is not None:
        check_output_file(options.output)
    model, params = load(options.model_path, model_type=model_type(options), implementation=options.implementation)
    settings, draft_params = load_drafter_of(options, {"num_steps": options.num_steps}, model)
    output = profile.default_path(drafter_path or options.model_path) if options.output is None else options.output
    with progress_bar() as bar:
        # Compile a loop per shape and batch size, then time the loops in turns.
        task = bar.add_task("compiling and measuring", total=None)
        measured = profile.measure(
            params,
            model=model,
            batches=tuple(options.batch_size),
            num_steps=settings["num_steps"],
            topk=options.topk,
            num_draft_tokens=options.num_draft_tokens,
            context=options.context,
            temperature=options.temperature,
            acceptance=acceptance,
            rounds=options.repeats,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            drafter=settings.get("drafter", "mtp"),
            draft_params=draft_params,
        )
    if measured.get("context", options.context) < options.context:
        print(
            f"mtpjax profile: --context {options.context} leaves no room in the model's "
            f"{model.config.max_position_embeddings} positions: measured with {measured['context']}",
            file=sys.stderr,
        )
    # Save before printing: the tables are only a summary of the file.
    profile.save(output, measured)
    console = rich.console.Console()
    for table in profile.tables(measured):
        console.print(table)
    print(f"wrote {printable(output)}", file=sys.stderr)
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
    vocab_size = inspect(path, model_type=model_type(options))["configuration"]["vocab_size"]
    tokenizer = load_tokenizer(path, vocab_size)
    # Always keep the special tokens: without end-of-text, MTP modules could not draft the end of an answer.
    kept = {*tokenizer.eos_token_ids, *tokenizer.special_token_ids}
    # Raise for a wrong output and size before the corpus is read.
    check_output_file(options.output)
    draft_vocabulary.choose_vocabulary(np.zeros(vocab_size), options.size, required_ids=kept)
    # Count the corpus once; every size below is chosen from the same counts.
    files = draft_vocabulary.list_corpus_files(options.data, options.pattern)
    with show_bytes_read(options.data, options.output) as progress:
        corpus = draft_vocabulary.count_tokens(files, tokenizer, vocab_size, progress=progress)

    def choose(size: int) -> tuple[int, ...]:
        return draft_vocabulary.choose_vocabulary(corpus.counts, size, required_ids=kept)

    # Report how much of the corpus other sizes would cover, to help choose one.
    sizes = draft_vocabulary.report_sizes(options.size, vocab_size, len(kept))
    shares = {size: draft_vocabulary.coverage(corpus.counts, choose(size)) for size in sizes}
    ids = choose(options.size)
    draft_vocabulary.save_vocabulary(options.output, ids, counts=corpus.counts, source=options.data, sizes=shares)
    # Show the sizes with the chosen one in bold.
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("size", "of the vocabulary", "of the corpus"):
        table.add_column(heading, justify="right")
    for size, share in shares.items():
        chosen = "bold" if size == options.size else ""
        table.add_row(str(size), f"{size / vocab_size:.1%}", f"{share:.2%}", style=chosen)
    rich.console.Console().print(table)
    # Name what was not read, so that a wrong --pattern does not pass unnoticed.
    skipped = f", {len(corpus.skipped)} files skipped, which are not text" if corpus.skipped else ""
    counted = f"{corpus.counts.sum()} tokens of {corpus.num_files} files{skipped}"
    print(f"{counted}; {len(ids)} ids in {printable(options.output)}")
    return 0


def _eval(options) -> int:
    return {"acceptance": _eval_acceptance}[options.what](options[options.what])


def _eval_acceptance(options) -> int:
    set_threads(options.model_path)
    with open_mesh(options) as mesh:
        return _eval_acceptance_on(mesh, options)


def _eval_acceptance_on(mesh, options) -> int:
    import rich.console

    from mtpjax.atomic import write_text
    from mtpjax.data.prompts import choose_prompts, encode_prompts, max_prompt_length, read_prompts
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.distributed import is_main_process
    from mtpjax.evaluation.acceptance import measure_acceptance
    from mtpjax.evaluation.metrics import print_report, report, to_json
    from mtpjax.evaluation.plot_style import picture_paths
    from mtpjax.evaluation.plots import plot_acceptance
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint_format import find_checkpoint

    # Check the settings and read the prompts before the model is loaded.
    settings = decode_settings(options)
    DecodeConfig(**settings)
    chosen = choose_prompts(
        read_prompts(options.prompts), options.num_prompts, categories=options.categories, seed=options.seed
    )
    if options.output is not None:
        check_output_file(options.output)
        picture_paths(pathlib.Path(options.output).stem, options.plot_formats)  # warns now if none can be drawn
    path = find_checkpoint(options.model_path)
    model, params, _ = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    settings, draft_params = load_drafter_of(options, settings, model)
    most = max_prompt_length(model.config.max_position_embeddings, options.max_new_tokens, options.prompt_tokens)
    prompts, cut = encode_prompts(chosen, tokenizer, max_tokens=most, chat=options.chat)
    config = DecodeConfig(**settings, stop_token_ids=tokenizer.eos_token_ids)
    # Warn if the MTP modules draft worse than they did in training.
    if draft_params is None:
        check_acceptance(path, model, params)
    console = rich.console.Console()
    # Cut prompts change what is measured, so say so.
    if cut:
        print(f"{cut} of {len(prompts)} prompts were cut to {most} tokens", file=sys.stderr)
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
            draft_params=draft_params,
        )
    # Summarise per category and over all prompts, with intervals.
    figures = report(acceptance, [prompt.category for prompt in chosen])
    # Check that speculation did not change the text. Above temperature 0 only the rule "sample" draws plain decoding's
    # own tokens.
    identical = int(acceptance.is_identical.sum())
    is_compared = not options.temperature or config.acceptance == "sample"
    code = 4 if is_compared and identical < len(prompts) else 0
    # All processes have the figures, and one writes and prints them.
    if not is_main_process():
        return code
    # The file also records the settings, so that two files can be compared.
    if options.output is not None:
        settings = {name: value for name, value in vars(options).items() if isinstance(value, (str, int, float, list))}
        content = {"settings": settings, "prompts_cut": cut, "figures": to_json(figures)}
        write_text(options.output, json.dumps(content, indent=1, allow_nan=False) + "\n")
        plot_acceptance(pathlib.Path(options.output).with_suffix(""), figures, options.plot_formats)
    print_report(console, figures)
    if is_compared:
        print(f"identical to plain decoding: {identical} of {len(prompts)}")
    return code


def _ablate(options) -> int:
    set_threads(options.model_path, options.threads)
    import rich.console

    from mtpjax.ablation import run

    # The grid's axes; every other setting is the same in all cells.
    settings = run.Settings(
        depths=tuple(options.num_steps),
        topk=tuple(options.topk),
        num_draft_tokens=tuple(options.num_draft_tokens),
        rules=tuple(options.acceptance),
        temperatures=tuple(options.temperature),
        batch_sizes=tuple(options.batch_size),
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        seed=options.seed,
    )
    check_output_file(pathlib.Path(options.output) / "cells.jsonl")
    return run.run(
        options.model_path,
        options.output,
        settings,
        console=rich.console.Console(),
        model_type=model_type(options),
        implementation=options.implementation,
        prompts=options.prompts,
        num_prompts=options.num_prompts,
        categories=options.categories,
        prompt_tokens=options.prompt_tokens,
        chat=options.chat,
        plot_formats=options.plot_formats,
        drafters=options.drafters,
        **reading_of(options),
    )


COMMANDS = {
    "profile": _profile,
    "tune": run_tune,
    "plan": run_plan,
    "vocabulary": _vocabulary,
    "eval": _eval,
    "ablate": _ablate,
}
