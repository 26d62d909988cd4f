"""The `mtpjax` command: parse, call, print."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import sys
import time
from typing import Any

import jsonargparse

from mtpjax.decode.options import add_draft_flags, add_sampling_flags, add_shape_flags, draft_settings, sampling_params

DEFAULT_STEPS = "(0: plain; default: 2, or 0 for a model without MTP modules)"


def main(arguments: list[str] | None = None) -> None:
    """Exits with 0; 2 for wrong usage, 3 for a bad checkpoint, 4 if a text differs from the plain one, 1 otherwise.

    75: interrupted with all that is needed to go on where it was.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if arguments is None and options.subcommand in ("quickstart", "train"):
        _keep_memory()
    logging.basicConfig(level=logging.WARNING, format="mtpjax: %(message)s")
    command = options.subcommand
    try:
        sys.exit(COMMANDS[command](options[command]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"mtpjax {command}: {error}", file=sys.stderr)
        sys.exit(3 if type(error).__name__ in CHECKPOINT_ERRORS else 2)


def _keep_memory() -> None:
    """Starts the command again with a C library that keeps freed memory, in huge pages, where none was set up.

    Every training step frees and takes some hundred megabytes; faulting them in anew took 40 % of a step (glibc).
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        tunables = ("hugetlb=1", "mmap_threshold=4000000000", "trim_threshold=8000000000")
        os.environ["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{tunable}" for tunable in tunables)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "mtpjax.cli", *sys.argv[1:]])


def _parser() -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(
        prog="mtpjax", description="Multi-token prediction in JAX.", version=_version()
    )
    commands = parser.add_subcommands(title="commands", metavar="COMMAND")

    quickstart = jsonargparse.ArgumentParser(
        description="Train a small model with an MTP module on the standard library of this Python, decode held-out "
        "prompts plainly and speculatively, and compare: about three minutes on two cores, nothing is downloaded."
    )
    quickstart.add_argument("--output", default="runs/quickstart", help="folder to write (default: %(default)s)")
    quickstart.add_argument("--preset", default="tiny", help="architecture (default: %(default)s)")
    quickstart.add_argument("--seconds", type=float, default=90.0, help="time to train (default: %(default)s)")
    quickstart.add_argument("--seed", type=int, default=0, help="of weights and data order (default: %(default)s)")
    quickstart.add_argument("--quick", action="store_true", help="a few steps and prompts only, to see that it runs")
    commands.add_subcommand("quickstart", quickstart, help="train, decode, compare: see a lossless speed-up")

    train = jsonargparse.ArgumentParser(
        description="Train a model with its MTP modules. What the settings mean stands in `mtpjax.config.TrainConfig`; "
        "--print-config shows all of them."
    )
    train.add_argument("--config", default=None, help="YAML file of settings (default: TrainConfig's own)")
    train.add_argument("settings", nargs="*", default=[], metavar="key=value", help="settings over those of the file")
    train.add_argument("--resume", action="store_true", help="go on with the run in the output folder")
    train.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    train.add_argument(
        "--allow-config-change",
        nargs="+",
        default=[],
        metavar="key",
        help="settings that may differ from those that the resumed run began with; 'data': files too",
    )
    train.add_argument("--nnodes", type=int, default=1, help="processes that train together, one per host (default: 1)")
    train.add_argument("--node-rank", type=int, default=None, help="which of them this one is, from 0")
    train.add_argument(
        "--dist-init-addr",
        default=None,
        metavar="HOST:PORT",
        help="where the first listens; without it and --node-rank the launcher is asked (Slurm, Open MPI, Kubernetes)",
    )
    train.add_argument("--dry-run", action="store_true", help="check settings and data, tell sizes, train nothing")
    train.add_argument("--print-config", action="store_true", help="print every setting as YAML, train nothing")
    commands.add_subcommand("train", train, help="train a model and its MTP modules; resumable")

    compare = jsonargparse.ArgumentParser(
        description="Settings that differ between training runs, and their last losses and panels side by side: "
        "accept lengths on held-out prompts as decoded, and as predicted along the trunk's own text."
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run folder of `mtpjax train`")
    compare.add_argument("--output", default=None, help="PNG file to draw")
    commands.add_subcommand("compare", compare, help="training runs side by side")

    generate = jsonargparse.ArgumentParser(description="Continue prompts with a trained model, drafts in colour.")
    _add_model(generate)
    generate.add_argument("--prompt", action="append", required=True, help="text to continue; may be given again")
    generate.add_argument("--max-new-tokens", type=int, default=256, help="per prompt (default: %(default)s)")
    add_draft_flags(generate, num_steps=None, note=DEFAULT_STEPS)
    generate.add_argument(
        "--depth-policy",
        default="fixed",
        help="'adaptive': at most so many levels, by what `mtpjax profile` measured (default: %(default)s)",
    )
    add_sampling_flags(generate)
    generate.add_argument("--chat", action="store_true", help="take each prompt for a message, by the chat template")
    generate.add_argument("--max-length", type=int, default=None, help="prompt and new tokens (default: the model's)")
    generate.add_argument("--check", action="store_true", help="decode plainly too, and exit with 4 if a text differs")
    commands.add_subcommand("generate", generate, help="continue a prompt with a trained model")
    _add_regenerate(commands)
    _add_profile(commands)
    _add_conversion(commands)
    _add_measuring(commands)
    return parser


def _add_regenerate(commands) -> None:
    parser = jsonargparse.ArgumentParser(
        description="Let the model write the answers of conversations, or continuations of prompts and documents, for "
        "`mtpjax train`: drafts trained on the model's own text are accepted more often. The output has a line for "
        "each record, with 'messages' or 'text' and how each answer ended; what was asked, and how far it is, stands "
        "beside it in OUTPUT.about.json. The same command goes on where it was ended."
    )
    _add_model(parser)
    parser.add_argument(
        "--data",
        required=True,
        help="JSONL of conversations (OpenAI's 'messages'; each of the assistant's is answered anew) or of prompts "
        "(Spec-Bench's, GSM8K's, others); any other file is a document. A file, or a folder of one kind",
    )
    parser.add_argument("--pattern", default="*", help="which files of a folder (default: %(default)s)")
    parser.add_argument("--output", required=True, help="JSONL file to write, and to go on with")
    parser.add_argument("--chat", action="store_true", help="take prompts for messages, by the chat template")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=None,
        help="keep so many of a prompt or document (default: all of a prompt, 64 of a document)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="per answer (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=None, help="prompt and new tokens (default: the model's)")
    parser.add_argument("--batch-size", type=int, default=8, help="records decoded together (default: %(default)s)")
    add_draft_flags(parser, num_steps=None, note=DEFAULT_STEPS)
    add_sampling_flags(parser, seed="a record's noise depends on it and on the record's number")
    commands.add_subcommand("regenerate", parser, help="answers of the model itself, to train drafts on")


def _add_profile(commands) -> None:
    profile = jsonargparse.ArgumentParser(
        description="Measure on this device what rounds of 0..num-steps draft levels cost, per batch size. The file is "
        "what adaptive depth goes by."
    )
    _add_model(profile)
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


def _add_conversion(commands) -> None:
    inspect = jsonargparse.ArgumentParser(description="Tell what a checkpoint holds; its weights are not read.")
    inspect.add_argument("path", help="a Hugging Face directory, our checkpoint, or a run folder with one")
    inspect.add_argument("--mesh", default="", help="axes to divide the memory by, such as tensor=8,expert=4")
    inspect.add_argument("--json", action="store_true", help="everything, for programs")
    _add_model_type(inspect)
    commands.add_subcommand("inspect", inspect, help="family, sizes, dtypes, missing tensors, memory per device")

    convert = jsonargparse.ArgumentParser(
        description="A Hugging Face directory becomes our checkpoint; our checkpoint becomes a Hugging Face directory, "
        "the same bytes as it was read from where nothing has changed."
    )
    convert.add_argument("source", help="folder to read")
    convert.add_argument("target", help="folder to write; it appears complete or not at all")
    convert.add_argument("--dtype", default=None, help="float32, float16 or bfloat16 (default: as it is, fp8 included)")
    convert.add_argument("--allow-extra", action="store_true", help="keep tensors that are not known")
    convert.add_argument("--strict", action="store_true", help="refuse weights that are infinite or NaN")
    _add_model_type(convert)
    commands.add_subcommand("convert", convert, help="Hugging Face -> mtpjax, and back")

    export = jsonargparse.ArgumentParser(
        description="Write the MTP modules of a Hugging Face directory as a checkpoint of their own, with the names "
        "and the configuration of xLLM's export_mtp.py; scaled fp8 becomes bfloat16."
    )
    export.add_argument("--input-dir", required=True, help="a full Hugging Face checkpoint")
    export.add_argument("--output-dir", required=True, help="folder to write; it appears complete or not at all")
    _add_model_type(export)
    commands.add_subcommand("export-mtp", export, help="MTP modules as a checkpoint of their own")

    merge = jsonargparse.ArgumentParser(
        description="Put MTP modules back into a full Hugging Face checkpoint: every tensor that has not changed keeps "
        "its bytes, a changed one takes the dtype of the one that it replaces."
    )
    merge.add_argument("--input-dir", required=True, help="a full Hugging Face checkpoint; with or without modules")
    merge.add_argument("--mtp-dir", required=True, help="what export-mtp wrote, or a trained mtpjax checkpoint")
    merge.add_argument("--output-dir", required=True, help="folder to write; it appears complete or not at all")
    commands.add_subcommand("merge-mtp", merge, help="trained MTP modules into a full checkpoint")


def _add_measuring(commands) -> None:
    vocabulary = jsonargparse.ArgumentParser(
        description="Count the tokens of a corpus and keep the most frequent ones, for modules that draft from fewer: "
        "DecodeConfig(draft_vocabulary=mtpjax.vocabulary.load_vocabulary(FILE))."
    )
    _add_model(vocabulary)
    vocabulary.add_argument("--data", required=True, help="a text or JSONL file, or a folder of them")
    vocabulary.add_argument("--pattern", default="*", help="which files of a folder (default: %(default)s)")
    vocabulary.add_argument("--size", type=int, required=True, help="ids to keep, special tokens among them")
    vocabulary.add_argument("--output", required=True, help="JSON file to write")
    commands.add_subcommand("vocabulary", vocabulary, help="the most frequent tokens of a corpus, to draft from")

    acceptance = jsonargparse.ArgumentParser(
        description="Accept length and rates by level, of each category of prompts and of all: decoded, and "
        "teacher-forced along the model's own text; with 95 %% intervals over prompts. The accept length is 1 + "
        "accepted drafts / steps; a conditional rate is over the steps that reached the level, a survival over all."
    )
    _add_model(acceptance)
    _add_prompts(acceptance, required=True, count=64)
    add_draft_flags(acceptance, num_steps=3)
    acceptance.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: %(default)s)")
    acceptance.add_argument("--batch-size", type=int, default=8, help="prompts at a time (default: %(default)s)")
    acceptance.add_argument("--output", default=None, help="JSON file to write, with everything that was counted")
    evaluate = jsonargparse.ArgumentParser(description="Evaluate a trained model.")
    commands.add_subcommand("eval", evaluate, help="what drafts are worth on given prompts")
    kinds = evaluate.add_subcommands(title="what", metavar="WHAT", dest="what")
    kinds.add_subcommand("acceptance", acceptance, help="accept length and acceptance rates on prompts")

    ablate = jsonargparse.ArgumentParser(
        description="Decode the same prompts with every combination of settings, each in turns with plain decoding at "
        "the same batch size and temperature, and say which to use. Cells that are done are kept: the same command "
        "goes on where it was ended. Writes cells.jsonl, cells.csv, heatmap.png, pareto.png and recommendation.md."
    )
    _add_model(ablate)
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
        help="of the processor; 0: all, but 1 for a model below 16 MB, which is faster so (default: %(default)s)",
    )
    commands.add_subcommand("ablate", ablate, help="which draft settings to use: a grid of measurements")


def _add_model(parser) -> None:
    parser.add_argument("--model-path", "--model", required=True, help="a checkpoint, or a run folder with one")


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


def _add_model_type(parser) -> None:
    parser.add_argument("--model-type", default="auto", help="take this instead of config.json's")


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("mtpjax")


def _quickstart(options) -> int:
    from mtpjax import quickstart
    from mtpjax.config import TrainConfig

    steps, seconds = (20, math.inf) if options.quick else (10**9, options.seconds)
    config = TrainConfig(
        preset=options.preset,
        output=options.output,
        seed=options.seed,
        steps=steps,
        seconds=seconds,
        panel_prompts=2 if options.quick else 32,
    )
    return quickstart.run(config, **({"depths": (1,), "rounds": 2, "num_prompts": 2} if options.quick else {}))


def _train(options) -> int:
    import rich.console

    from mtpjax.allocator import keep_freed_memory
    from mtpjax.train import processes
    from mtpjax.train.loop import Preempted, describe, train
    from mtpjax.train.options import read_config, to_yaml
    from mtpjax.train.panel import print_panel

    config = read_config(options.config, options.settings)
    if options.resume and options.overwrite:
        raise ValueError("--resume goes on with the run that --overwrite would replace: give one of them")
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    if options.dry_run:
        for name, value in describe(config).items():
            print(f"{name}: {value:,}")
        return 0
    keep_freed_memory()
    if options.nnodes > 1:
        processes.connect(options.nnodes, options.node_rank, options.dist_init_addr)
    try:
        result = train(
            config, resume=options.resume, overwrite=options.overwrite, allowed_changes=options.allow_config_change
        )
    except Preempted as ended:
        print(f"mtpjax train: {ended}", file=sys.stderr)
        return 75
    except processes.LostProcess as lost:
        print(f"mtpjax train: {lost}; go on with --resume", file=sys.stderr)
        processes.leave(75)
    except FloatingPointError as error:
        print(f"mtpjax train: {error}", file=sys.stderr)
        return 1
    print_panel(rich.console.Console(), result.panel)
    print(f"wrote {config.output}/: checkpoint/, metrics.jsonl, panel.png")
    return 0


def _compare(options) -> int:
    import rich.console

    from mtpjax.train.compare import read_run, tables
    from mtpjax.train.pictures import plot_comparison

    runs = [read_run(folder) for folder in options.runs]
    console = rich.console.Console()
    for table in tables(runs):
        console.print(table)
    if options.output is not None:
        plot_comparison(options.output, {run.name: run.history for run in runs})
        print(f"wrote {options.output}", file=sys.stderr)
    return 0


def _generate(options) -> int:
    from mtpjax.checkpoint import find, load
    from mtpjax.decode.generate import generate, speculative_generate
    from mtpjax.decode.self_check import check_acceptance
    from mtpjax.tokenizer import load_tokenizer

    settings = draft_settings(options)
    if options.check and options.temperature and settings["acceptance"] != "sample":
        raise ValueError("--check above temperature 0 takes --acceptance sample: other rules give other tokens")
    path = find(options.model_path)
    model, params = load(path)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    config = _decode_config(options, settings, model, tokenizer)
    if config.num_steps:
        check_acceptance(path, model, params)
    if options.chat:
        prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in options.prompt]
    else:
        prompts = [tokenizer.encode(text) for text in options.prompt]
    asked: dict[str, Any] = {"model": model, "config": config, "sampling": sampling_params(options, len(prompts))}
    result = speculative_generate(params, prompts, **asked)
    for text, tokens, origins in zip(options.prompt, result.rows(), result.origins, strict=True):
        _print_text(text, tokens, origins, tokenizer.stream())
    stats = result.stats
    rates = " ".join(f"{rate:.2f}" for rate in stats.survival_rates)
    print(
        f"{stats.emitted.sum()} tokens in {stats.steps.sum()} steps, accept length {stats.accept_length:.2f}"
        + (f", accepted per level {rates}" if rates else "")
        + ("" if result.is_exact else f"; acceptance '{config.acceptance}' has changed the text's distribution"),
        file=sys.stderr,
    )
    if options.check:
        identical = generate(params, prompts, **asked).rows() == result.rows()
        print(f"identical to plain decoding: {'yes' if identical else 'NO'}", file=sys.stderr)
        return 0 if identical else 4
    return 0


def _decode_config(options, settings: dict[str, Any], model, tokenizer):
    """Of `mtpjax generate`, with `settings` from its flags of drafts; an adaptive depth reads the model's profile."""
    from mtpjax.decode.config import DecodeConfig
    from mtpjax.decode.profile import load_settings

    num_steps = _num_steps(settings.pop("num_steps"), model)
    if options.depth_policy == "adaptive" and num_steps:
        batch = len(options.prompt)
        settings |= load_settings(options.model_path, batch=batch, num_steps=num_steps, config=model.config)
    return DecodeConfig(
        max_new_tokens=options.max_new_tokens,
        num_steps=num_steps,
        depth_policy=options.depth_policy,
        max_length=options.max_length,
        stop_token_ids=tokenizer.eos_token_ids,
        **settings,
    )


def _num_steps(asked: int | None, model) -> int:
    return asked if asked is not None else 2 if model.config.num_mtp_modules else 0


def _regenerate(options) -> int:
    import rich.console
    import rich.progress

    from mtpjax import checkpoint
    from mtpjax.decode.config import DecodeConfig
    from mtpjax.decode.regenerate import Request, regenerate
    from mtpjax.tokenizer import load_tokenizer
    from mtpjax.vocabulary import corpus_files

    names = ("chat", "prompt_tokens", "batch_size", "seed")
    settings, paths = draft_settings(options), corpus_files(options.data, options.pattern)
    path = checkpoint.find(options.model_path)
    model, params = checkpoint.load(path)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    num_steps = _num_steps(settings.pop("num_steps"), model)
    config = DecodeConfig(
        **settings,
        num_steps=num_steps,
        max_new_tokens=options.max_new_tokens,
        max_length=options.max_length,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    sampling = dataclasses.replace(sampling_params(options, 1), seed=None)
    request = Request(paths=paths, config=config, sampling=sampling, **{name: options[name] for name in names})
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=1.0)

        def show(tally, share: float) -> None:
            bar.update(task, completed=share, description=f"{tally.regenerated} records")
            if not console.is_terminal:
                print(f"{share:.0%} done: {tally}", file=sys.stderr, flush=True)

        try:
            tally = regenerate(
                params,
                request,
                options.output,
                model=model,
                tokenizer=tokenizer,
                model_digest=checkpoint.digest(path),
                progress=show,
            )
        except KeyboardInterrupt:
            print(f"mtpjax regenerate: {options.output} is not complete: the same command goes on", file=sys.stderr)
            return 75
    print(f"{options.output} (kind {request.output_kind}): {tally}")
    return 0


def _profile(options) -> int:
    import rich.console
    from rich.progress import Progress

    from mtpjax.checkpoint import find, load
    from mtpjax.decode import profile

    profile.shapes_up_to(
        options.speculative_num_steps, options.speculative_eagle_topk, options.speculative_num_draft_tokens
    )
    acceptance = None if options.acceptance is None else profile.read_acceptance(options.acceptance)
    model, params = load(find(options.model_path))
    output = profile.default_path(options.model_path) if options.output is None else options.output
    console = rich.console.Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
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


def _model_type(options) -> str | None:
    return None if options.model_type == "auto" else options.model_type


def _inspect(options) -> int:
    from conversion.inspect import inspect, lines

    mesh = {}
    for part in filter(None, options.mesh.split(",")):
        axis, _, size = part.partition("=")
        if axis not in ("data", "fsdp", "expert", "tensor") or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh {part!r} is no axis (data, fsdp, expert, tensor) and its size, such as tensor=8")
        mesh[axis] = int(size)
    facts = inspect(options.path, mesh=mesh, model_type=_model_type(options))
    print(json.dumps(facts, indent=1) if options.json else "\n".join(lines(facts)))
    return 3 if facts["missing"] or facts["extra"] else 0


def _convert(options) -> int:
    import ml_dtypes
    import numpy as np

    from conversion import convert
    from mtpjax import checkpoint

    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    if options.dtype is not None and options.dtype not in dtypes:
        raise ValueError(f"--dtype {options.dtype!r} is not one of {', '.join(dtypes)}")
    choice: dict[str, Any] = {"dtype": options.dtype and dtypes[options.dtype], "model_type": _model_type(options)}
    with _progress(options.source, options.target) as progress:
        if checkpoint.is_checkpoint(checkpoint.find(options.source)):
            convert.to_hugging_face(options.source, options.target, **choice, progress=progress)
        else:
            choice |= {"allow_extra": options.allow_extra, "strict": options.strict, "progress": progress}
            convert.to_mtpjax(options.source, options.target, **choice)
    return 0


def _export_mtp(options) -> int:
    from conversion.export_mtp import export

    with _progress(options.input_dir, options.output_dir) as progress:
        export(options.input_dir, options.output_dir, model_type=_model_type(options), progress=progress)
    return 0


def _merge_mtp(options) -> int:
    from conversion.merge_mtp import merge

    with _progress(options.input_dir, options.output_dir) as progress:
        report = merge(options.input_dir, options.mtp_dir, options.output_dir, progress=progress)
    print(f"tensors of modules: {report.equal} equal, {report.replaced} replaced, {report.added} added")
    return 0


def _vocabulary(options) -> int:
    import numpy as np
    import rich.console
    import rich.table

    from conversion.inspect import inspect
    from mtpjax import vocabulary
    from mtpjax.checkpoint import find
    from mtpjax.tokenizer import load_tokenizer

    path = find(options.model_path)
    vocab_size = inspect(path)["configuration"]["vocab_size"]
    tokenizer = load_tokenizer(path, vocab_size)
    kept = {*tokenizer.eos_token_ids, *tokenizer.special_token_ids}
    vocabulary.choose_vocabulary(np.zeros(vocab_size), options.size, kept=kept)  # a wrong size is told before the work
    files = vocabulary.corpus_files(options.data, options.pattern)
    with _progress(options.data, options.output) as progress:
        corpus = vocabulary.count_tokens(files, tokenizer, vocab_size, progress=progress)

    def choose(size: int) -> tuple[int, ...]:
        return vocabulary.choose_vocabulary(corpus.counts, size, kept=kept)

    sizes = vocabulary.sizes_around(options.size, vocab_size, len(kept))
    shares = {size: vocabulary.coverage(corpus.counts, choose(size)) for size in sizes}
    ids = choose(options.size)
    vocabulary.save_vocabulary(options.output, ids, counts=corpus.counts, source=options.data, sizes=shares)
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
    import rich.console
    import rich.progress

    from mtpjax.atomic import write_text
    from mtpjax.checkpoint import find, load
    from mtpjax.decode.config import DecodeConfig
    from mtpjax.decode.evaluate import measure_acceptance
    from mtpjax.decode.figures import print_report, report, to_json
    from mtpjax.decode.self_check import check_acceptance
    from mtpjax.prompts import choose_prompts, encode_prompts, read_prompts, room_for_prompts
    from mtpjax.tokenizer import load_tokenizer

    config = DecodeConfig(max_new_tokens=options.max_new_tokens, **draft_settings(options))
    chosen = choose_prompts(
        read_prompts(options.prompts), options.num_prompts, categories=options.categories, seed=options.seed
    )
    path = find(options.model_path)
    model, params = load(path)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    most = room_for_prompts(model.config.max_position_embeddings, options.max_new_tokens, options.prompt_tokens)
    prompts, cut = encode_prompts(chosen, tokenizer, most_tokens=most, chat=options.chat)
    config = dataclasses.replace(config, stop_token_ids=tokenizer.eos_token_ids)
    check_acceptance(path, model, params)
    console = rich.console.Console()
    if cut:
        print(f"{cut} of {len(prompts)} prompts are cut to {most} tokens", file=sys.stderr)
    errors = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
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
    print_report(console, figures)
    identical = int(acceptance.is_identical.sum())
    if options.output is not None:
        settings = {name: value for name, value in vars(options).items() if isinstance(value, (str, int, float, list))}
        content = {"settings": settings, "prompts_cut": cut, "figures": to_json(figures)}
        write_text(options.output, json.dumps(content, indent=1, allow_nan=False) + "\n")
    if options.temperature and config.acceptance != "sample":
        return 0
    print(f"identical to plain decoding: {identical} of {len(prompts)}")
    return 0 if identical == len(prompts) else 4


def _ablate(options) -> int:
    _limit_threads(options.threads, options.model_path)
    import rich.console

    from experiments import ablate

    names = ("depths", "topk", "num_draft_tokens", "rules", "temperatures", "batch_sizes")
    settings = ablate.Settings(
        **{name: tuple(options[name]) for name in names},
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        seed=options.seed,
    )
    return ablate.run(
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


def _limit_threads(threads: int, model_path: str) -> None:
    """Before JAX starts: 0 is what suits the model."""
    if threads < 0:
        raise ValueError(f"threads must be 0 or more, not {threads}")
    from mtpjax.timing import limit_threads, threads_for

    if "jax" not in sys.modules:
        limit_threads(threads or threads_for(model_path))


@contextlib.contextmanager
def _progress(source: str, target: str):
    """Yields what takes counts of bytes: a bar with bytes/s on a terminal, and one closing line everywhere."""
    import rich.console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = rich.console.Console(stderr=True)
    place = pathlib.Path(source)
    total = sum(file.stat().st_size for file in (place, *place.rglob("*")) if file.is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    done, begin = 0, time.perf_counter()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(pathlib.Path(target).name, total=total)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(task, completed=done)

        yield advance
    seconds = time.perf_counter() - begin
    print(f"{target}: {done / 1e9:.3f} GB in {seconds:.1f} s, {done / 1e6 / seconds:.0f} MB/s", file=sys.stderr)


def _print_text(prompt: str, tokens: list[int], origins, stream) -> None:
    """Prompt and continuation; on a terminal accepted drafts are coloured by level, what the trunk added is plain."""
    import rich.console
    import rich.text

    console = rich.console.Console(highlight=False, soft_wrap=True)
    colours = ("green", "cyan", "magenta", "yellow")
    text = rich.text.Text(prompt, style="bold")
    for token, origin in zip(tokens, origins, strict=False):
        style = colours[(int(origin) - 1) % len(colours)] if origin else ""
        text.append(stream(token), style=style)
    text.append(stream(None))
    console.print(text)


CHECKPOINT_ERRORS = ("CheckpointError", "CheckpointFileError", "ConfigError", "OutsideError", "TokenizerError")
COMMANDS = {
    "quickstart": _quickstart,
    "train": _train,
    "compare": _compare,
    "generate": _generate,
    "regenerate": _regenerate,
    "profile": _profile,
    "inspect": _inspect,
    "convert": _convert,
    "export-mtp": _export_mtp,
    "merge-mtp": _merge_mtp,
    "vocabulary": _vocabulary,
    "eval": _eval,
    "ablate": _ablate,
}

if __name__ == "__main__":
    main()
