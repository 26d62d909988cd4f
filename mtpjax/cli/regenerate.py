"""`mtpjax regenerate`."""

import pathlib
import sys

from mtpjax.cli import common, config_flags
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flags, load_on_mesh, open_mesh
from mtpjax.errors import printable
from mtpjax.messages import count_of


def add_commands(commands) -> None:
    parser = command_parser(
        "Let the model rewrite the answers of conversations, or continue prompts and documents, to make training data "
        "for `mtpjax train`, because drafters trained on the model's own text have higher acceptance rates. Each "
        "record becomes a line of the output with 'messages' or 'text' and the reason why each answer ended. "
        "OUTPUT.about.json contains the settings and the progress. Run the same command again to resume."
    )
    common.add_decoding_model_flags(parser)
    group = common.add_data_flags(
        parser,
        "a file, or a folder of files of one kind: records (.jsonl, .jsonl.gz, .json, .parquet) of conversations, as "
        "for training, whose answers are rewritten; records of prompts (Spec-Bench, GSM8K and others); or documents "
        "(any other file)",
    )
    common.add_chat_flag(group)
    group.add_argument(
        "--prompt-tokens",
        type=int,
        help="cut each prompt or document to N tokens (default: keep prompts whole, cut documents to 64 tokens)",
    )
    group.add_argument("--batch-size", type=int, default=8, help="number of records to decode together")
    output = parser.flag_group("output")
    output.add_argument("--output", required=True, metavar="FILE", help="JSONL file to write or resume")
    config_flags.add_text_flags(parser, seed="random seed; each record's seed depends on it and the record's index")
    add_mesh_flags(parser)
    commands.add_subcommand("regenerate", parser, help="let the model write its own training data")


def _regenerate(options) -> int:
    common.set_threads(options.model_path)
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

    # The settings that determine the output; `regenerate` refuses to resume a file made with different ones.
    names = ("chat", "prompt_tokens", "batch_size", "seed")
    settings, output = config_flags.decode_settings(options), pathlib.Path(options.output).resolve()
    # If the output is in the data folder, it must not be read as data when the command runs again.
    written = (output, manifest_path(output))
    paths = [file for file in common.list_data(options) if file.resolve() not in written]
    path = find_checkpoint(options.model_path)
    model, params, loaded_config = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    settings = config_flags.with_num_steps(settings, loaded_config)
    config = DecodeConfig(**settings, stop_token_ids=tokenizer.eos_token_ids)
    chosen = {name: options[name] for name in names}
    request = RegenerationRequest(paths=paths, config=config, sampling=config_flags.sampling_params(options), **chosen)
    # On a terminal, a bar shows the progress. Elsewhere, each update is a line.
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
        # The output contains only complete records, so the same command can continue it.
        except KeyboardInterrupt:
            incomplete = f"{printable(options.output)} is incomplete; run the same command again"
            print(f"mtpjax regenerate: {incomplete}", file=sys.stderr)
            return 75
    if prints:
        print(f"{printable(options.output)} (kind {request.output_kind}): {tally}")
    return 0


COMMANDS = {"regenerate": _regenerate}
