"""`mtpjax generate` and `regenerate`."""

import dataclasses
import math
import pathlib
import sys
from typing import Any

import jsonargparse

from mtpjax.cli.common import add_model, set_threads
from mtpjax.cli.decode_flags import add_draft_flags, add_sampling_flags, draft_settings, sampling_params

DEFAULT_STEPS = "(0: plain; default: 2, or 0 for a model without MTP modules)"


def add(commands) -> None:
    """Their flags."""
    generate = jsonargparse.ArgumentParser(description="Continue prompts with a trained model, drafts in colour.")
    add_model(generate)
    generate.add_argument("--prompt", action="append", required=True, help="text to continue; may be given again")
    generate.add_argument("--max-new-tokens", type=int, default=256, help="per prompt (default: %(default)s)")
    add_draft_flags(generate, num_steps=None, note=DEFAULT_STEPS)
    generate.add_argument(
        "--depth-policy",
        default="fixed",
        help="'adaptive': at most so many levels, by what `mtpjax profile` measured (default: %(default)s)",
    )
    generate.add_argument("--profile", default=None, help="its file (default: profile.json in the model's folder)")
    add_sampling_flags(generate)
    generate.add_argument("--chat", action="store_true", help="take each prompt for a message, by the chat template")
    generate.add_argument("--max-length", type=int, default=None, help="prompt and new tokens (default: the model's)")
    generate.add_argument("--check", action="store_true", help="decode plainly too, and exit with 4 if a text differs")
    commands.add_subcommand("generate", generate, help="continue a prompt with a trained model")

    _add_regenerate(commands)


def _add_regenerate(commands) -> None:
    parser = jsonargparse.ArgumentParser(
        description="Let the model write the answers of conversations, or continuations of prompts and documents, for "
        "`mtpjax train`: drafts trained on the model's own text are accepted more often. The output has a line for "
        "each record, with 'messages' or 'text' and how each answer ended; what was asked, and how far it is, stands "
        "beside it in OUTPUT.about.json. The same command goes on where it was ended."
    )
    add_model(parser)
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


def _generate(options) -> int:
    set_threads(options.model_path)
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.generate import generate, speculative_generate
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint import load
    from mtpjax.io.checkpoint_format import find_checkpoint

    settings = draft_settings(options)
    if options.check and options.temperature and settings["acceptance"] != "sample":
        raise ValueError("--check above temperature 0 takes --acceptance sample: other rules give other tokens")
    path = find_checkpoint(options.model_path)
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
        return _compare(params, prompts, result.rows(), generate(params, prompts, **asked).rows(), asked)
    return 0


def _compare(params, prompts, rows, plain, asked: dict[str, Any]) -> int:
    """Says whether the texts are those of plain decoding, and where and by how little they leave it: 0 or 4."""
    from mtpjax.evaluation.acceptance import is_plain, partings

    identical = bool(is_plain(params, prompts, rows, plain, **asked).all())
    how = ", in passes as wide: narrow ones round otherwise" if identical and rows != plain else ""
    print(f"identical to plain decoding: {'yes' if identical else 'NO'}{how}", file=sys.stderr)
    for number, parting in enumerate(partings(params, prompts, rows, plain, model=asked["model"]), start=1):
        if parting is not None:
            gap = f"the trunk's logits of the two tokens are {parting.gap:.2g} apart"
            where = "one text ends" if math.isinf(parting.gap) else gap
            print(f"prompt {number} differs from new token {parting.place + 1} on, where {where}", file=sys.stderr)
    return 0 if identical else 4


def _print_text(prompt: str, tokens: list[int], origins, stream) -> None:
    """Prompt and continuation; on a terminal accepted drafts are coloured by level, what the trunk added is plain."""
    import rich.console
    import rich.text

    console = rich.console.Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:  # rich would replace tabs and leave out other control characters
        print(prompt, *map(stream, (*tokens, None)), sep="")
        return
    colours = ("green", "cyan", "magenta", "yellow")
    text = rich.text.Text(prompt, style="bold")
    for token, origin in zip(tokens, origins, strict=False):
        style = colours[(int(origin) - 1) % len(colours)] if origin else ""
        text.append(stream(token), style=style)
    text.append(stream(None))
    console.print(text)


def _decode_config(options, settings: dict[str, Any], model, tokenizer):
    """Of `mtpjax generate`, with `settings` from its flags of drafts; an adaptive depth reads a profile."""
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.evaluation.profile import load_settings

    num_steps = _num_steps(settings.pop("num_steps"), model)
    if options.depth_policy == "adaptive" and num_steps:
        profile = options.profile or options.model_path
        settings |= load_settings(profile, batch=len(options.prompt), num_steps=num_steps, config=model.config)
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
    set_threads(options.model_path)
    import rich.console
    import rich.progress

    from mtpjax.data.draft_vocabulary import corpus_files
    from mtpjax.data.regeneration_output import about_path
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.io.checkpoint import load
    from mtpjax.io.checkpoint_format import checkpoint_digest, find_checkpoint
    from mtpjax.training.regenerate import Request, regenerate

    names = ("chat", "prompt_tokens", "batch_size", "seed")
    settings, output = draft_settings(options), pathlib.Path(options.output).resolve()
    own = (output, about_path(output))  # the data's folder may hold them
    paths = [file for file in corpus_files(options.data, options.pattern) if file.resolve() not in own]
    path = find_checkpoint(options.model_path)
    model, params = load(path)
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
                model_digest=checkpoint_digest(path),
                progress=show,
            )
        except KeyboardInterrupt:
            print(f"mtpjax regenerate: {options.output} is not complete: the same command goes on", file=sys.stderr)
            return 75
    print(f"{options.output} (kind {request.output_kind}): {tally}")
    return 0


COMMANDS = {
    "generate": _generate,
    "regenerate": _regenerate,
}
