"""The `mtpjax` command: parse, call, print."""

import contextlib
import json
import logging
import math
import os
import pathlib
import sys
import time
from typing import Any

import jsonargparse


def main(arguments: list[str] | None = None) -> None:
    """Exits with 0; 2 for wrong usage, 3 for a bad checkpoint, 4 if a text differs from the plain one, 1 otherwise."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if arguments is None and options.subcommand == "quickstart":
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

    generate = jsonargparse.ArgumentParser(description="Continue prompts with a trained model, drafts in colour.")
    generate.add_argument("--model-path", "--model", required=True, help="a checkpoint, or a run folder with one")
    generate.add_argument("--prompt", action="append", required=True, help="text to continue; may be given again")
    generate.add_argument("--max-new-tokens", type=int, default=256, help="per prompt (default: %(default)s)")
    generate.add_argument(
        "--speculative-num-steps",
        type=int,
        default=None,
        help="draft levels per round; 0: plain (default: 2, or 0 for a model without MTP modules)",
    )
    generate.add_argument("--chat", action="store_true", help="take each prompt for a message, by the chat template")
    generate.add_argument("--max-length", type=int, default=None, help="prompt and new tokens (default: the model's)")
    generate.add_argument("--check", action="store_true", help="decode plainly too, and exit with 4 if a text differs")
    commands.add_subcommand("generate", generate, help="continue a prompt with a trained model")
    _add_profile(commands)
    _add_conversion(commands)
    return parser


def _add_profile(commands) -> None:
    profile = jsonargparse.ArgumentParser(
        description="Measure on this device what rounds of 0..num-steps draft levels cost, per batch size. The file is "
        "what adaptive depth goes by."
    )
    profile.add_argument("--model-path", "--model", required=True, help="a checkpoint, or a run folder with one")
    profile.add_argument("--batch", type=int, nargs="+", default=[1], help="batch sizes (default: %(default)s)")
    profile.add_argument(
        "--speculative-num-steps", "--num-steps", type=int, default=5, help="deepest round (default: %(default)s)"
    )
    profile.add_argument(
        "--speculative-eagle-topk", "--topk", type=int, default=1, help="above 1: trees (default: %(default)s)"
    )
    profile.add_argument(
        "--speculative-num-draft-tokens", "--num-draft-tokens", type=int, default=None, help="most nodes of a tree"
    )
    profile.add_argument("--context", type=int, default=512, help="tokens in the caches (default: %(default)s)")
    profile.add_argument("--rounds", type=int, default=8, help="measurements to take medians of (default: %(default)s)")
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


def _add_model_type(parser) -> None:
    parser.add_argument("--model-type", default="auto", help="take this instead of config.json's")


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("mtpjax")


def _quickstart(options) -> int:
    from mtpjax import quickstart
    from mtpjax.config import TrainConfig

    steps, seconds = (20, math.inf) if options.quick else (10**9, options.seconds)
    config = TrainConfig(preset=options.preset, output=options.output, seed=options.seed, steps=steps, seconds=seconds)
    return quickstart.run(config, **({"depths": (1,), "rounds": 2, "num_prompts": 2} if options.quick else {}))


def _generate(options) -> int:
    from mtpjax.checkpoint import find, load
    from mtpjax.decode.config import DecodeConfig
    from mtpjax.decode.generate import generate, speculative_generate
    from mtpjax.tokenizer import load_tokenizer

    path = find(options.model_path)
    model, params = load(path)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    num_steps = options.speculative_num_steps
    config = DecodeConfig(
        max_new_tokens=options.max_new_tokens,
        num_steps=(2 if model.config.num_mtp_modules else 0) if num_steps is None else num_steps,
        max_length=options.max_length,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    if options.chat:
        prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in options.prompt]
    else:
        prompts = [tokenizer.encode(text) for text in options.prompt]
    result = speculative_generate(params, prompts, model=model, config=config)
    for text, tokens, origins in zip(options.prompt, result.rows(), result.origins, strict=True):
        _print_text(text, tokens, origins, tokenizer.stream())
    stats = result.stats
    rates = " ".join(f"{rate:.2f}" for rate in stats.survival_rates)
    print(
        f"{stats.emitted.sum()} tokens in {stats.steps.sum()} steps, accept length {stats.accept_length:.2f}"
        + (f", accepted per level {rates}" if rates else ""),
        file=sys.stderr,
    )
    if options.check:
        identical = generate(params, prompts, model=model, config=config).rows() == result.rows()
        print(f"identical to plain decoding: {'yes' if identical else 'NO'}", file=sys.stderr)
        return 0 if identical else 4
    return 0


def _profile(options) -> int:
    import rich.console
    from rich.progress import Progress

    from mtpjax.checkpoint import find, load
    from mtpjax.decode import profile

    profile.shapes_up_to(
        options.speculative_num_steps, options.speculative_eagle_topk, options.speculative_num_draft_tokens
    )
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


@contextlib.contextmanager
def _progress(source: str, target: str):
    """Yields what takes counts of bytes: a bar with bytes/s on a terminal, and one closing line everywhere."""
    import rich.console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = rich.console.Console(stderr=True)
    total = sum(file.stat().st_size for file in pathlib.Path(source).rglob("*") if file.is_file())
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
    "generate": _generate,
    "profile": _profile,
    "inspect": _inspect,
    "convert": _convert,
    "export-mtp": _export_mtp,
    "merge-mtp": _merge_mtp,
}

if __name__ == "__main__":
    main()
