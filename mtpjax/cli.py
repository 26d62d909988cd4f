"""The `mtpjax` command: parse, call, print."""

import codecs
import math
import os
import pathlib
import sys

import jsonargparse


def main(arguments: list[str] | None = None) -> None:
    """Exits with 0; 2 for wrong usage, 3 for a bad checkpoint, 4 if a text differs from the plain one, 1 otherwise."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if arguments is None and options.subcommand == "quickstart":
        _keep_memory()
    try:
        sys.exit({"quickstart": _quickstart, "generate": _generate}[options.subcommand](options[options.subcommand]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        is_checkpoint = type(error).__name__ == "CheckpointError"
        print(f"mtpjax {options.subcommand}: {error}", file=sys.stderr)
        sys.exit(3 if is_checkpoint else 2)


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
        "--speculative-num-steps", type=int, default=2, help="draft levels per round; 0: plain (default: %(default)s)"
    )
    generate.add_argument("--max-length", type=int, default=None, help="prompt and new tokens (default: the model's)")
    generate.add_argument("--check", action="store_true", help="decode plainly too, and exit with 4 if a text differs")
    commands.add_subcommand("generate", generate, help="continue a prompt with a trained model")
    return parser


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
    from mtpjax.checkpoint import load
    from mtpjax.config import DecodeConfig
    from mtpjax.decode.generate import generate, speculative_generate
    from mtpjax.tokenizer import ByteTokenizer

    config = DecodeConfig(
        max_new_tokens=options.max_new_tokens,
        num_steps=options.speculative_num_steps,
        max_length=options.max_length,
        stop_token_ids=(ByteTokenizer.eos_token_id,),
    )
    model, params = load(pathlib.Path(options.model_path))
    tokenizer = ByteTokenizer()
    if model.config.vocab_size != tokenizer.vocab_size:
        raise ValueError(f"the model has {model.config.vocab_size} tokens, and generate knows the 256 bytes only")
    prompts = [tokenizer.encode(text) for text in options.prompt]
    result = speculative_generate(params, prompts, model=model, config=config)
    for text, tokens, origins in zip(options.prompt, result.rows(), result.origins, strict=True):
        _print_text(text, tokens, origins)
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


def _print_text(prompt: str, tokens: list[int], origins) -> None:
    """Prompt and continuation; on a terminal accepted drafts are coloured by level, what the trunk added is plain."""
    import rich.console
    import rich.text

    console = rich.console.Console(highlight=False, soft_wrap=True)
    colours = ("green", "cyan", "magenta", "yellow")
    text = rich.text.Text(prompt, style="bold")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
    for token, origin in zip(tokens, origins, strict=False):
        style = colours[(int(origin) - 1) % len(colours)] if origin else ""
        text.append(decoder.decode(bytes([token]) if token else b""), style=style)
    text.append(decoder.decode(b"", final=True))
    console.print(text)


if __name__ == "__main__":
    main()
