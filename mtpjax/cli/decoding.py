"""`mtpjax generate` and `mtpjax regenerate`."""

import dataclasses
import math
import pathlib
import sys
from typing import Any

from mtpjax.cli.common import add_implementation_flag, add_model_path_flag, list_data, set_threads
from mtpjax.cli.config_flags import (
    DRAFT_FIELDS,
    LOOKUP_FIELDS,
    add_config_flags,
    add_sampling_flags,
    choose_num_steps,
    decode_settings,
    sampling_params,
)
from mtpjax.cli.drafter_flags import add_drafter_flags, load_drafter_of
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flags, load_on_mesh, open_mesh
from mtpjax.errors import printable

# `num_steps=None` lets `choose_num_steps` choose by drafter and model.
DECODE_DEFAULTS: dict[str, Any] = {"max_new_tokens": 256, "num_steps": None}
DECODE_FIELDS = ("max_new_tokens", "max_length", "drafter", *DRAFT_FIELDS, *LOOKUP_FIELDS)
DECODE_FIELDS += ("kv_cache_dtype", "deterministic")


def add_commands(commands) -> None:
    """Adds the commands and their flags.

    Args:
        commands: the subcommands of the `mtpjax` parser.
    """
    _add_generate(commands)
    _add_regenerate(commands)


def _add_generate(commands) -> None:
    parser = command_parser("Continue prompts with a trained model. On a terminal, accepted drafts are coloured.")
    add_model_path_flag(parser)
    add_implementation_flag(parser)
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; repeat for more prompts")
    add_config_flags(parser, (*DECODE_FIELDS, "depth_policy"), **DECODE_DEFAULTS)
    parser.add_argument(
        "--profile",
        default=None,
        help="file of `mtpjax profile`, for --depth-policy adaptive (default: profile.json in the folder of the model, "
        "or of --speculative-draft-model-path)",
    )
    add_drafter_flags(parser)
    add_sampling_flags(parser)
    add_mesh_flags(parser)
    parser.add_argument("--chat", action="store_true", help="make each prompt a user message of the chat template")
    parser.add_argument("--check", action="store_true", help="decode without drafts too; exit with 4 if a text differs")
    commands.add_subcommand("generate", parser, help="continue prompts with a trained model")


def _add_regenerate(commands) -> None:
    parser = command_parser(
        "Let the model write the answers of conversations, or continue prompts and documents, as data for "
        "`mtpjax train`: drafts trained on the model's own text are accepted more often. Each record gives one line of "
        "the output, with 'messages' or 'text' and the reason each answer ended. OUTPUT.about.json holds the settings "
        "and the progress. Run the same command again to continue an interrupted run."
    )
    add_model_path_flag(parser)
    add_implementation_flag(parser)
    parser.add_argument(
        "--data",
        required=True,
        help="a file, or a folder of one kind: records (.jsonl, .jsonl.gz, .json, .parquet) of conversations, in the "
        "forms that training reads, whose answers are written anew; records of prompts (Spec-Bench, GSM8K and others); "
        "or documents (any other file)",
    )
    parser.add_argument("--pattern", default="*", help="which files of a folder (default: %(default)s)")
    parser.add_argument("--output", required=True, help="JSONL file to write or to continue")
    parser.add_argument("--chat", action="store_true", help="make each prompt a user message of the chat template")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=None,
        help="tokens to keep of each prompt or document (default: whole prompts, 64 tokens of a document)",
    )
    parser.add_argument("--batch-size", type=int, default=8, help="records decoded together (default: %(default)s)")
    add_config_flags(parser, DECODE_FIELDS, **DECODE_DEFAULTS)
    add_mesh_flags(parser)
    add_sampling_flags(parser, seed="seed of the run; a record's random numbers depend on it and the record's number")
    commands.add_subcommand("regenerate", parser, help="let the model write its own training data")


def _generate(options) -> int:
    set_threads(options.model_path)
    # Check the flags before the model is loaded, which may take minutes.
    settings = decode_settings(options)
    if options.profile is not None and options.depth_policy != "adaptive":
        raise ValueError("--profile has no effect without --depth-policy adaptive")
    if options.check and options.temperature and settings["acceptance"] != "sample":
        raise ValueError("--check above temperature 0 needs --acceptance sample: other rules draw other tokens")
    with open_mesh(options) as mesh:
        return _generate_on(mesh, options, settings)


def _generate_on(mesh, options, settings: dict[str, Any]) -> int:
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.generate import generate, speculative_generate
    from mtpjax.distributed import is_main_process
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint_format import find_checkpoint

    path = find_checkpoint(options.model_path)
    model, params, loaded_config = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    settings, draft_params = load_drafter_of(options, settings, model)
    config = _decode_config(options, settings, loaded_config, tokenizer)
    # Warn if the MTP modules draft worse than they did in training; damaged modules raise no error otherwise.
    if config.num_steps and config.drafter == "mtp":
        check_acceptance(path, model, params)
    # Make the prompts' tokens: messages through the chat template, or plain text.
    if options.chat:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in options.prompt]
    else:
        prompts = [tokenizer.encode(text) for text in options.prompt]
    decode_arguments: dict[str, Any] = {
        "model": model,
        "config": config,
        "sampling": sampling_params(options, len(prompts)),
    }
    result = speculative_generate(params, prompts, **decode_arguments, draft_params=draft_params)
    # The text goes to stdout, everything about it to stderr, so that the text can be piped. All processes have the
    # text, and one prints it.
    prints = is_main_process()
    if prints:
        for text, tokens, origins in zip(options.prompt, result.rows(), result.origins, strict=True):
            _print_text(text, tokens, origins, tokenizer.incremental_decoder())
        _print_stats(result, config)
        _tell_of_limit(prompts, config, model.config.max_position_embeddings)
    if not options.check:
        return 0
    # Decode again without drafts and compare the tokens.
    plain = generate(params, prompts, **decode_arguments).rows()
    lines, code = _compare_with_plain(params, prompts, result.rows(), plain, decode_arguments)
    if prints:
        print(*lines, sep="\n", file=sys.stderr)
    return code


def _tell_of_limit(prompts: list[list[int]], config, positions: int) -> None:
    """Says on stderr that a text may have fewer new tokens than the flags ask for."""
    longest = max(map(len, prompts))
    if config.max_length is None and longest + config.max_new_tokens > positions:
        print(
            f"mtpjax generate: a prompt of {longest} tokens and --max-new-tokens {config.max_new_tokens} are more than "
            f"the {positions} positions of the model: its text has at most {positions - longest} new tokens",
            file=sys.stderr,
        )


def _print_stats(result, config) -> None:
    stats = result.stats
    rates = " ".join(f"{rate:.2f}" for rate in stats.survival_rates)
    line = f"{stats.emitted.sum()} tokens in {stats.steps.sum()} steps, accept length {stats.accept_length:.2f}"
    # Without drafts there are no rates to show.
    if rates:
        line += f", accepted per level {rates}"
    if not result.is_exact:
        line += f"; acceptance '{config.acceptance}' has changed the text's distribution"
    print(line, file=sys.stderr)


def _compare_with_plain(params, prompts, rows, plain, decode_arguments: dict[str, Any]) -> tuple[list[str], int]:
    """Returns lines that say whether the texts equal plain decoding's and where not, and the exit code, 0 or 4."""
    from mtpjax.evaluation.acceptance import equals_plain_decoding, first_divergences

    # bfloat16 matmuls round differently at different widths, so near-tied logits can flip. Where texts differ,
    # `equals_plain_decoding` compares again with plain decoding in passes of the drafts' width.
    identical = bool(equals_plain_decoding(params, prompts, rows, plain, **decode_arguments).all())
    how = ", in passes of the same width: narrower ones round differently" if identical and rows != plain else ""
    lines = [f"identical to plain decoding: {'yes' if identical else 'NO'}{how}"]
    # For each prompt that differs, show where, and how close the two tokens' logits are: a near tie is rounding.
    for number, divergence in enumerate(
        first_divergences(params, prompts, rows, plain, model=decode_arguments["model"]), start=1
    ):
        if divergence is not None:
            gap = f"the trunk's logits of the two tokens are {divergence.gap:.2g} apart"
            where = "one text ends" if math.isinf(divergence.gap) else gap
            lines.append(f"prompt {number} differs from new token {divergence.position + 1} on, where {where}")
    return lines, 0 if identical else 4


def _print_text(prompt: str, tokens: list[int], origins, stream) -> None:
    """Prints a prompt and its continuation. A terminal shows accepted drafts in a colour per level."""
    import rich.console
    import rich.text

    console = rich.console.Console(highlight=False, soft_wrap=True)
    # rich replaces tabs and drops other control characters, so text for a file or pipe is printed without it.
    if not console.is_terminal:
        print(prompt, *map(stream, (*tokens, None)), sep="")
        return
    colours = ("green", "cyan", "magenta", "yellow")
    text = rich.text.Text(prompt, style="bold")
    # The colour tells the draft level that proposed the token; tokens of the trunk itself stay plain.
    for token, origin in zip(tokens, origins, strict=False):
        style = colours[(int(origin) - 1) % len(colours)] if origin else ""
        text.append(stream(token), style=style)
    text.append(stream(None))
    console.print(text)


def _decode_config(options, settings: dict[str, Any], config, tokenizer):
    """Makes the `DecodeConfig` of `mtpjax generate`; adaptive depth takes its costs from a profile."""
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.evaluation.profile import load_depth_settings

    settings = _with_num_steps(settings, config)
    # Adaptive depth weighs accept length against measured round times, which depend on the device.
    if options.depth_policy == "adaptive" and settings["num_steps"]:
        profile = options.profile or options.speculative_draft_model_path or options.model_path
        settings |= load_depth_settings(
            profile,
            batch=len(options.prompt),
            num_steps=settings["num_steps"],
            config=config,
            drafter=settings["drafter"],
        )
    return DecodeConfig(**settings, stop_token_ids=tokenizer.eos_token_ids)


def _with_num_steps(settings: dict[str, Any], config) -> dict[str, Any]:
    steps = choose_num_steps(settings["num_steps"], settings["drafter"], config.num_mtp_modules)
    return settings | {"num_steps": steps}


def _regenerate(options) -> int:
    set_threads(options.model_path)
    with open_mesh(options) as mesh:
        return _regenerate_on(mesh, options)


def _regenerate_on(mesh, options) -> int:
    import rich.console
    import rich.progress

    from mtpjax.data.regeneration_output import manifest_path
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.distributed import is_main_process
    from mtpjax.io.checkpoint_format import checkpoint_digest, find_checkpoint
    from mtpjax.training.regenerate import RegenerationRequest, regenerate

    # The settings that decide the output's content; `regenerate` refuses to continue a file made with others.
    names = ("chat", "prompt_tokens", "batch_size", "seed")
    settings, output = decode_settings(options), pathlib.Path(options.output).resolve()
    # The output may lie in the folder of the data. It must not be read as data when the command runs again.
    own = (output, manifest_path(output))
    paths = [file for file in list_data(options) if file.resolve() not in own]
    path = find_checkpoint(options.model_path)
    model, params, loaded_config = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    config = DecodeConfig(**_with_num_steps(settings, loaded_config), stop_token_ids=tokenizer.eos_token_ids)
    # Each record gets its own seed, so the batch's seeds are left out.
    sampling = dataclasses.replace(sampling_params(options, 1), seed=None)
    request = RegenerationRequest(
        paths=paths, config=config, sampling=sampling, **{name: options[name] for name in names}
    )
    # On a terminal a bar shows the progress; elsewhere each update is a line.
    console, prints = rich.console.Console(stderr=True), is_main_process()
    with rich.progress.Progress(console=console, disable=not (console.is_terminal and prints)) as bar:
        task = bar.add_task("compiling", total=1.0)

        def show(tally, share: float) -> None:
            bar.update(task, completed=share, description=f"{tally.regenerated} records")
            if not console.is_terminal and prints:
                print(f"{share:.0%} done: {tally}", file=sys.stderr, flush=True)

        try:
            tally = regenerate(
                params,
                request,
                options.output,
                model=model,
                tokenizer=tokenizer,
                model_digest=checkpoint_digest(path),
                progress=show,
            )
        # The output is complete up to the last record, so the same command continues it.
        except KeyboardInterrupt:
            print(
                f"mtpjax regenerate: {printable(options.output)} is incomplete; run the same command again",
                file=sys.stderr,
            )
            return 75
    if prints:
        print(f"{printable(options.output)} (kind {request.output_kind}): {tally}")
    return 0


COMMANDS = {
    "generate": _generate,
    "regenerate": _regenerate,
}
