"""`mtpjax generate`, which reads prompts, decodes them in batches, and prints texts and log-probabilities."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from mtpjax.cli import common, config_flags
from mtpjax.cli.drafter_flags import add_drafter_flags, check_no_drafts, chosen_method, load_drafter_of
from mtpjax.cli.generate_output import Output, compare_with_plain, print_stats, warn_of_limit
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flags, load_on_mesh, open_mesh
from mtpjax.errors import UsageError, printable
from mtpjax.messages import count_of, require

MAX_TOP = 20  # alternatives per token, as on the server
STANDARD_INPUT = "-"


def add_commands(commands) -> None:
    parser = command_parser(
        "Continue prompts with a trained model. On a terminal, accepted drafts are colored. With --chat, only the "
        "answers are printed."
    )
    common.add_decoding_model_flags(parser)
    group = parser.flag_group("prompts")
    group.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; repeat the flag for more prompts; - reads one from standard input",
    )
    group.add_argument("--prompts", metavar="FILE", help=common.PROMPT_FILE_HELP)
    group.add_argument("--batch-size", type=int, default=8, help="number of prompts to decode together")
    common.add_chat_flag(group)
    config_flags.add_text_flags(parser, "depth_policy", seed="random seed; prompt i, counted from 0, uses SEED + i")
    parser.flag_group("drafts").add_argument(
        "--profile",
        metavar="FILE",
        help="output of `mtpjax profile`, for --depth-policy adaptive (default: profile.json in the drafter's or the "
        "model's folder)",
    )
    add_drafter_flags(parser)
    add_mesh_flags(parser)
    group = parser.flag_group("output")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop string, not printed; repeat the flag for more. In a shell, write a newline as $'\\n'",
    )
    group.add_argument(
        "--logprobs",
        type=int,
        help="print the log-probability of each new token and the N most likely tokens at its position, computed "
        "from the model's logits at temperature 1",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print one line of JSON per prompt: id, prompt, text, tokens, num_prompt_tokens, finish_reason, "
        "matched_stop, and logprobs with --logprobs",
    )
    group.add_argument(
        "--check", action="store_true", help="also decode without drafts, and exit with code 4 if a text differs"
    )
    commands.add_subcommand("generate", parser, help="continue prompts with a trained model")


def _generate(options) -> int:
    check_no_drafts(options)
    common.set_threads(options.model_path)
    chosen_method(options)
    # Check the flags and read the prompts before the model is loaded, which may take minutes.
    # Log-probabilities of `--logprobs` are computed after decoding, so the field of the same name stays off.
    settings = config_flags.decode_settings(options) | {"logprobs": False}
    _check_flags(options, settings)
    prompts = _read_prompts(options)
    with open_mesh(options) as mesh:
        return _generate_on(mesh, options, settings, prompts)


def _check_flags(options, settings: dict[str, Any]) -> None:
    """Raises ValueError for flags that contradict each other."""
    if options.profile is not None and options.depth_policy != "adaptive":
        raise ValueError("--profile has no effect without --depth-policy adaptive")
    if options.check and options.temperature and settings["acceptance"] != "sample":
        raise ValueError("--check above temperature 0 needs --acceptance sample: other rules draw different tokens")
    common.check_minimums(options, batch_size=1)
    if options.logprobs is not None and not 0 <= options.logprobs <= MAX_TOP:
        raise ValueError(f"--logprobs must be within 0..{MAX_TOP}, got {options.logprobs}")
    for stop in options.stop:
        require(stop, "--stop must not be empty")
        # A shell passes \n as two characters, which do not match a newline in a text.
        if any(escape in stop for escape in ("\\n", "\\t", "\\r")):
            advice = "has a backslash: in a shell, write a newline or a tab as $'...'"
            print(f"mtpjax generate: --stop {printable(stop, 100)} {advice}", file=sys.stderr)


def _read_prompts(options) -> list:
    """Returns the prompts given on the command line, as `mtpjax.data.prompts.Prompt` objects."""
    from mtpjax.data.prompts import Prompt, read_prompts

    if not options.prompt and options.prompts is None:
        raise UsageError("the prompt is missing: use --prompt TEXT, --prompt - or --prompts FILE")
    if options.prompt and options.prompts is not None:
        raise UsageError("--prompt and --prompts cannot be combined: put all prompts into the file")
    if options.prompts == STANDARD_INPUT:
        raise UsageError("--prompts takes a file; --prompt - reads one prompt from standard input")
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, max_characters=sys.maxsize)
        print(f"mtpjax generate: {count_of(len(prompts), 'prompt')} in {printable(options.prompts)}", file=sys.stderr)
        return prompts
    require(options.prompt.count(STANDARD_INPUT) <= 1, "--prompt - is repeated: standard input can be read only once")
    if STANDARD_INPUT in options.prompt and options.nnodes > 1:
        raise UsageError("--prompt - needs one process: with several, use --prompts FILE")
    texts = [_read_standard_input() if text == STANDARD_INPUT else text for text in options.prompt]
    return [Prompt(text, "--prompt", str(number)) for number, text in enumerate(texts, start=1)]


def _read_standard_input() -> str:
    """Reads a prompt from standard input, without the trailing newline that `echo` and editors add."""
    require(sys.stdin is not None, "--prompt - reads standard input, which is closed")
    if sys.stdin.isatty():
        print("mtpjax generate: type the prompt; Ctrl-D ends it", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text at byte {error.start + 1}") from error
    require(bool(text.strip()), "standard input is empty, but --prompt - reads the prompt from it")
    return text.removesuffix("\n").removesuffix("\r")


def _generate_on(mesh, options, settings: dict[str, Any], prompts: list) -> int:
    from mtpjax.data.prompts import encode_prompts
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.distributed import is_main_process
    from mtpjax.drafters.methods import uses_mtp_modules
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.inference.generate import without_drafts
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.serving.offline import complete
    from mtpjax.serving.text_stream import TextStream

    path = find_checkpoint(options.model_path)
    model, params, loaded_config = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    rows, _ = encode_prompts(prompts, tokenizer, max_tokens=sys.maxsize, chat=options.chat)
    settings, draft_params = load_drafter_of(options, settings, model)
    config = _decode_config(options, settings, loaded_config, tokenizer, batch=min(options.batch_size, len(rows)))
    _check_lengths(prompts, rows, config, model.config.max_position_embeddings)
    # Warn if the MTP modules draft worse than they did in training. Otherwise, damaged modules would go unnoticed.
    if config.num_steps and uses_mtp_modules(config.drafter):
        check_acceptance(path, model, params)
    # Print the texts to stdout and everything else to stderr, so that the texts can be piped. All processes have the
    # texts, but only one prints them.
    prints = is_main_process()
    output = Output(options, tokenizer, is_one=len(prompts) == 1)
    sampling = config_flags.sampling_params(options)

    def make_stream(prompt: list[int]) -> TextStream:
        # Stop tokens are not part of the texts.
        settings = {"stop": options.stop, "hidden_tokens": config.stop_token_ids}
        return TextStream(tokenizer.incremental_decoder(prompt), **settings, min_tokens=int(sampling.min_new_tokens))  # type: ignore[arg-type]

    arguments: dict[str, Any] = {
        "model": model,
        # Use a different seed per row, so that a repeated prompt gets a different text.
        "sampling": dataclasses.replace(sampling, seed=[options.seed + number for number in range(len(rows))]),
        "make_stream": make_stream,
        "batch_size": options.batch_size,
    }
    texts, results = [], []
    for completions, result in complete(params, rows, config=config, draft_params=draft_params, **arguments):
        batch = slice(len(texts), len(texts) + len(completions))
        texts += [completion.tokens for completion in completions]
        results.append(result)
        scores = _score(params, rows[batch], completions, options, model)
        if prints:
            output.write(prompts[batch], rows[batch], completions, scores)
    if prints:
        print_stats(results, texts, config)
        warn_of_limit(rows, config, model.config.max_position_embeddings)
    if not options.check:
        return 0

    # Decode again without drafts and compare the tokens.
    def decode_plainly(min_rows: int | None) -> list[list[int]]:
        plain = dataclasses.replace(without_drafts(config), min_rows=min_rows)
        batches = complete(params, rows, config=plain, **arguments)
        return [completion.tokens for batch in batches for completion in batch.completions]

    lines, code = compare_with_plain(params, rows, texts, decode_plainly, model=model, config=config)
    if prints:
        print(*lines, sep="\n", file=sys.stderr)
    return code


def _check_lengths(prompts: list, rows: list[list[int]], config, positions: int) -> None:
    """Raises a ValueError that identifies the prompt if a prompt leaves no room for a new token."""
    limit = min(config.max_length or positions, positions)
    for prompt, row in zip(prompts, rows, strict=True):
        if len(row) >= limit:
            room = f"max_length {limit} leaves room for {limit - 1}"
            raise ValueError(f"prompt {prompt.id} of {prompt.category} has {len(row)} tokens; {room}")


def _score(params, rows: list[list[int]], completions: Sequence, options, model) -> list | None:
    """Returns the log-probabilities of the new tokens, if requested."""
    if options.logprobs is None:
        return None
    from mtpjax.evaluation.token_scores import score_tokens

    texts = [completion.tokens for completion in completions]
    return score_tokens(params, rows, texts, model=model, num_top=options.logprobs)


def _decode_config(options, settings: dict[str, Any], config, tokenizer, *, batch: int):
    """Makes the `DecodeConfig` of the command. Adaptive depth reads its costs from a profile."""
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.evaluation.profile_file import load_depth_settings

    settings = config_flags.with_num_steps(settings, config)
    # Adaptive depth weighs accept length against measured round times, which depend on the device.
    if options.depth_policy == "adaptive" and settings["num_steps"]:
        profile = options.profile or options.speculative_draft_model_path or options.model_path
        settings |= load_depth_settings(
            profile, batch=batch, num_steps=settings["num_steps"], config=config, drafter=settings["drafter"]
        )
    return DecodeConfig(**settings, stop_token_ids=tokenizer.eos_token_ids)


COMMANDS = {"generate": _generate}
