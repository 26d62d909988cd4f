"""`mtpjax generate` and `mtpjax regenerate`."""

import dataclasses
import pathlib
import sys
from typing import Any

from mtpjax.cli.common import add_implementation_flag, add_model_path_flag, list_data, set_threads
from mtpjax.cli.config_flags import (
    DRAFT_FIELDS,
    LOOKUP_FIELDS,
    add_config_flags,
    add_sampling_flags,
    decode_settings,
    sampling_params,
    with_num_steps,
)
from mtpjax.cli.drafter_flags import add_drafter_flags
from mtpjax.cli.generate import run_generate
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flags, load_on_mesh, open_mesh
from mtpjax.errors import printable
from mtpjax.messages import count_of

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
    prompts = parser.flag_group("prompts")
    prompts.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; give the flag again for each further one. - reads a text from standard input, without "
        "the newline at its end",
    )
    prompts.add_argument(
        "--prompts",
        default=None,
        metavar="FILE",
        help="file of prompts: JSONL of prompts (Spec-Bench, GSM8K and others), or any other text file, with a prompt "
        "per line, or per paragraph if it has blank lines",
    )
    prompts.add_argument("--batch-size", type=int, default=8, help="prompts decoded together (default: %(default)s)")
    prompts.add_argument(
        "--chat",
        action="store_true",
        help="make each prompt a user message of the model's chat template, and print the answer alone",
    )
    add_config_flags(parser, (*DECODE_FIELDS, "depth_policy"), **DECODE_DEFAULTS)
    parser.flag_group("drafts").add_argument(
        "--profile",
        default=None,
        metavar="FILE",
        help="file of `mtpjax profile`, for --depth-policy adaptive (default: profile.json in the folder of the "
        "drafter or the model)",
    )
    add_drafter_flags(parser)
    add_sampling_flags(parser)
    add_mesh_flags(parser)
    output = parser.flag_group("output")
    output.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before this string; repeat the flag for further ones. A newline is $'\\n' in the shell",
    )
    output.add_argument(
        "--logprobs",
        type=int,
        default=None,
        metavar="N",
        help="print the log-probability of each new token and of the N most likely tokens in its place, under the "
        "model's logits at temperature 1",
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per prompt and line: id, prompt, text, tokens, num_prompt_tokens, finish_reason, "
        "matched_stop, and with --logprobs logprobs",
    )
    output.add_argument(
        "--check", action="store_true", help="decode without drafts too, and exit with code 4 if a text differs"
    )
    commands.add_subcommand("generate", parser, help="continue prompts with a trained model")


def _add_regenerate(commands) -> None:
    parser = command_parser(
        "Let the model write the answers of conversations, or continue prompts and documents, as data for "
        "`mtpjax train`: drafts trained on text of the model are accepted more often. Each record gives one line of "
        "the output, with 'messages' or 'text' and the reason each answer ended. OUTPUT.about.json holds the settings "
        "and the progress. Run the same command again to continue an interrupted run."
    )
    add_model_path_flag(parser)
    add_implementation_flag(parser)
    group = parser.flag_group("data")
    group.add_argument(
        "--data",
        required=True,
        metavar="PATH",
        help="a file, or a folder of one kind: records (.jsonl, .jsonl.gz, .json, .parquet) of conversations, in the "
        "forms that training reads, whose answers are written anew; records of prompts (Spec-Bench, GSM8K and others); "
        "or documents (any other file)",
    )
    group.add_argument(
        "--pattern", default="*", help="glob pattern of the files to read in a folder, such as '*.jsonl'"
    )
    group.add_argument(
        "--chat", action="store_true", help="make each prompt a user message of the model's chat template"
    )
    group.add_argument(
        "--prompt-tokens",
        type=int,
        default=None,
        help="tokens to keep of each prompt or document (default: whole prompts, 64 tokens of a document)",
    )
    group.add_argument("--batch-size", type=int, default=8, help="records decoded together")
    parser.flag_group("output").add_argument(
        "--output", required=True, metavar="FILE", help="JSONL file to write or to continue"
    )
    add_config_flags(parser, DECODE_FIELDS, **DECODE_DEFAULTS)
    add_mesh_flags(parser)
    add_sampling_flags(parser, seed="seed of the run; a record's random numbers depend on it and the record's number")
    commands.add_subcommand("regenerate", parser, help="let the model write its own training data")


def _regenerate(options) -> int:
    set_threads(options.model_path)
    from mtpjax.drafters.methods import find_method

    find_method(options.drafter)  # before the model is loaded
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
    written = (output, manifest_path(output))
    paths = [file for file in list_data(options) if file.resolve() not in written]
    path = find_checkpoint(options.model_path)
    model, params, loaded_config = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    config = DecodeConfig(**with_num_steps(settings, loaded_config), stop_token_ids=tokenizer.eos_token_ids)
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
            bar.update(task, completed=share, description=f"{count_of(tally.regenerated, 'record')}")
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
    "generate": run_generate,
    "regenerate": _regenerate,
}
