"""Runs `mtpjax generate`: reads the prompts, decodes them in batches, prints texts and log-probabilities."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mtpjax.cli.common import set_threads
from mtpjax.cli.config_flags import decode_settings, sampling_params, with_num_steps
from mtpjax.cli.drafter_flags import check_no_drafts, chosen_method, load_drafter_of
from mtpjax.cli.mesh_flags import load_on_mesh, open_mesh
from mtpjax.errors import UsageError, printable
from mtpjax.messages import count_of

MAX_TOP = 20  # alternatives per token, as on the server
MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM's value
STANDARD_INPUT = "-"


def run_generate(options) -> int:
    """Runs the command.

    Args:
        options: the parsed flags.

    Returns:
        The exit code.
    """
    check_no_drafts(options)
    set_threads(options.model_path)
    chosen_method(options)
    # Check the flags and read the prompts before the model is loaded, which may take minutes.
    # The flag `--logprobs` is a number, and its pass over the finished texts needs nothing of decoding.
    settings = decode_settings(options) | {"logprobs": False}
    _check_flags(options, settings)
    prompts = _read_prompts(options)
    with open_mesh(options) as mesh:
        return _generate_on(mesh, options, settings, prompts)


def _check_flags(options, settings: dict[str, Any]) -> None:
    """Raises ValueError for flags that contradict each other."""
    if options.profile is not None and options.depth_policy != "adaptive":
        raise ValueError("--profile has no effect without --depth-policy adaptive")
    if options.check and options.temperature and settings["acceptance"] != "sample":
        raise ValueError("--check above temperature 0 needs --acceptance sample: other rules draw other tokens")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.logprobs is not None and not 0 <= options.logprobs <= MAX_TOP:
        raise ValueError(f"--logprobs must be within 0..{MAX_TOP}, got {options.logprobs}")
    for stop in options.stop:
        if not stop:
            raise ValueError("--stop must not be empty")
        # A shell passes \n as two characters, which no text that breaks its lines contains.
        if any(escape in stop for escape in ("\\n", "\\t", "\\r")):
            print(
                f"mtpjax generate: --stop {printable(stop, 100)} has a backslash: write $'...' in the shell for a "
                "newline or a tab",
                file=sys.stderr,
            )


def _read_prompts(options) -> list:
    """Returns the prompts given on the command line, as `mtpjax.data.prompts.Prompt` objects."""
    from mtpjax.data.prompts import Prompt, read_prompts

    if not options.prompt and options.prompts is None:
        raise UsageError("what to continue is missing: give --prompt TEXT, --prompt - or --prompts FILE")
    if options.prompt and options.prompts is not None:
        raise UsageError("--prompt and --prompts are both given: put all prompts into the file")
    if options.prompts == STANDARD_INPUT:
        raise UsageError("--prompts takes a file; --prompt - reads one prompt from standard input")
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, max_characters=sys.maxsize)
        print(f"mtpjax generate: {count_of(len(prompts), 'prompt')} in {printable(options.prompts)}", file=sys.stderr)
        return prompts
    if options.prompt.count(STANDARD_INPUT) > 1:
        raise UsageError("--prompt - is given twice: standard input can be read once")
    if STANDARD_INPUT in options.prompt and options.nnodes > 1:
        raise UsageError("--prompt - needs one process: give several the prompt as --prompts FILE")
    texts = [_read_standard_input() if text == STANDARD_INPUT else text for text in options.prompt]
    return [Prompt(text, "--prompt", str(number)) for number, text in enumerate(texts, start=1)]


def _read_standard_input() -> str:
    """Reads a prompt from standard input, without the newline at its end that `echo` and editors add."""
    if sys.stdin is None:
        raise UsageError("--prompt - reads standard input, which is closed")
    if sys.stdin.isatty():
        print("mtpjax generate: type the prompt; Ctrl-D ends it", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text at byte {error.start + 1}") from error
    if not text.strip():
        raise UsageError("standard input is empty, but --prompt - reads the prompt from it")
    return text.removesuffix("\n").removesuffix("\r")


def _generate_on(mesh, options, settings: dict[str, Any], prompts: list) -> int:
    from mtpjax.data.prompts import encode_prompts
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.distributed import is_main_process
    from mtpjax.drafters.methods import uses_mtp_modules
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.inference.generate import without_drafts
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.serving.api.text_stream import TextStream
    from mtpjax.serving.offline import complete

    path = find_checkpoint(options.model_path)
    model, params, loaded_config = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    rows, _ = encode_prompts(prompts, tokenizer, max_tokens=sys.maxsize, chat=options.chat)
    settings, draft_params = load_drafter_of(options, settings, model)
    config = _decode_config(options, settings, loaded_config, tokenizer, batch=min(options.batch_size, len(rows)))
    _check_lengths(prompts, rows, config, model.config.max_position_embeddings)
    # Warn if the MTP modules draft worse than they did in training; damaged modules raise no error otherwise.
    if config.num_steps and uses_mtp_modules(config.drafter):
        check_acceptance(path, model, params)
    # The texts go to stdout, everything about them to stderr, so that the texts can be piped. All processes have the
    # texts, and one prints them.
    prints = is_main_process()
    output = _Output(options, tokenizer, prints, is_one=len(prompts) == 1)
    sampling = sampling_params(options, 1)

    def make_stream(prompt: list[int]) -> TextStream:
        # Stop tokens are no part of the texts.
        settings = {"stop": options.stop, "hidden_tokens": config.stop_token_ids}
        return TextStream(tokenizer.incremental_decoder(prompt), **settings, min_tokens=int(sampling.min_new_tokens))  # type: ignore[arg-type]

    arguments: dict[str, Any] = {
        "model": model,
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
        output.write(prompts[batch], rows[batch], completions, scores)
    if prints:
        _print_stats(results, texts, config)
        _tell_of_limit(rows, config, model.config.max_position_embeddings)
    if not options.check:
        return 0

    # Decode again without drafts and compare the tokens.
    def decode_plainly(min_rows: int | None) -> list[list[int]]:
        plain = dataclasses.replace(without_drafts(config), min_rows=min_rows)
        batches = complete(params, rows, config=plain, **arguments)
        return [completion.tokens for batch in batches for completion in batch.completions]

    lines, code = _compare_with_plain(params, rows, texts, decode_plainly, model=model, config=config)
    if prints:
        print(*lines, sep="\n", file=sys.stderr)
    return code


def _check_lengths(prompts: list, rows: list[list[int]], config, positions: int) -> None:
    """Raises ValueError for a prompt that leaves no room for a new token; the message names it."""
    limit = min(config.max_length or positions, positions)
    for prompt, row in zip(prompts, rows, strict=True):
        if len(row) >= limit:
            raise ValueError(
                f"prompt {prompt.id} of {prompt.category} has {len(row)} tokens; max_length {limit} leaves room for "
                f"{limit - 1}"
            )


def _score(params, rows: list[list[int]], completions: Sequence, options, model) -> list | None:
    """Returns the log-probabilities of the new tokens, if requested."""
    if options.logprobs is None:
        return None
    from mtpjax.evaluation.token_scores import score_tokens

    texts = [completion.tokens for completion in completions]
    return score_tokens(params, rows, texts, model=model, num_top=options.logprobs)


class _Output:
    """Prints texts and their log-probabilities to stdout, for people or as JSON."""

    def __init__(self, options, tokenizer, prints: bool, *, is_one: bool):
        self._options, self._tokenizer, self._prints, self._is_one = options, tokenizer, prints, is_one

    def write(self, prompts: list, rows: list[list[int]], completions: Sequence, scores: list | None) -> None:
        """Prints a batch."""
        if not self._prints:
            return
        for place, (prompt, row, completion) in enumerate(zip(prompts, rows, completions, strict=True)):
            own_scores = None if scores is None else scores[place]
            if self._options.json:
                print(self._to_json(prompt, row, completion, own_scores), flush=True)
                continue
            # A chat shows only the answer. Several answers need a line that identifies the prompt.
            if self._options.chat and not self._is_one:
                print(f"[{prompt.id}] {printable(prompt.text, 70)}")
            _print_text("" if self._options.chat else prompt.text, completion.spans)
            if own_scores is not None:
                print(*self._format_scores(completion.tokens, own_scores), sep="\n")
            sys.stdout.flush()

    def _to_json(self, prompt, row: list[int], completion, scores) -> str:
        values = {
            "id": prompt.id,
            "prompt": prompt.text,
            "text": completion.text,
            "tokens": completion.tokens,
            "num_prompt_tokens": len(row),
            "finish_reason": completion.finish_reason,
            "matched_stop": completion.matched_stop,
        }
        if scores is not None:
            places = zip(completion.tokens, *scores, strict=True)
            values["logprobs"] = [
                self._entry(token, logprob) | {"top_logprobs": list(map(self._entry, top_ids, top))}
                for token, logprob, top_ids, top in places
            ]
        return json.dumps(values, ensure_ascii=False)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text_of(token), "id": token, "logprob": round(max(logprob, MIN_LOGPROB), 6)}

    def _format_scores(self, tokens: list[int], scores) -> list[str]:
        """Formats a line per token: its log-probability, its text, and the most likely tokens in its place."""
        num_top = self._options.logprobs
        lines = ["  logprob  token" + (f"            {num_top} most likely" if num_top else "")]
        for token, logprob, top_ids, top in zip(tokens, *scores, strict=True):
            best = "  ".join(f"{self._text_of(each)!r} {value:.3f}" for each, value in zip(top_ids, top, strict=True))
            lines.append(f"{logprob:9.3f}  {self._text_of(token)!r:<15}  {best}".rstrip())
        return lines

    def _text_of(self, token: int) -> str:
        """Returns the text of a single token; of one that stands for no text, such as an end token, its name."""
        return self._tokenizer.decode([token]) or f"<token {token}>"


def _print_text(prompt: str, spans: Sequence) -> None:
    """Prints a prompt and its continuation. A terminal shows accepted drafts in a colour per level."""
    import rich.console
    import rich.text

    console = rich.console.Console(highlight=False, soft_wrap=True)
    # rich replaces tabs and drops other control characters, so text for a file or pipe is printed without it.
    if not console.is_terminal:
        print(prompt, *(span.text for span in spans), sep="")
        return
    colours = ("green", "cyan", "magenta", "yellow")
    text = rich.text.Text(prompt, style="bold")
    # The colour tells the draft level that proposed the token; tokens of the trunk itself stay plain.
    for part, level in spans:
        text.append(part, style=colours[(level - 1) % len(colours)] if level else "")
    console.print(text)


def _print_stats(results: list, texts: list[list[int]], config) -> None:
    """Prints the counts of all batches on stderr."""
    import numpy as np

    from mtpjax.decoding.result import DecodeStats

    names = [field.name for field in dataclasses.fields(DecodeStats)]
    parts = {name: np.concatenate([getattr(result.stats, name) for result in results]) for name in names}
    stats = DecodeStats(**parts)
    rates = " ".join(f"{rate:.2f}" for rate in stats.survival_rates)
    num_tokens = sum(map(len, texts))
    # Rounds continue until the next search for stop strings, and until the other texts of the batch have ended.
    num_after = int(stats.emitted.sum()) - num_tokens
    after = f" and {num_after} after stop strings" if num_after else ""
    counts = f"{count_of(num_tokens, 'token')}{after} in {count_of(stats.rounds.sum(), 'round')}"
    line = f"{counts}, accept length {stats.accept_length:.2f}"
    # Without drafts there are no rates to show.
    if rates:
        line += f", accepted per level {rates}"
    if not all(result.is_exact for result in results):
        line += f"; acceptance '{config.acceptance}' has changed the text's distribution"
    print(line, file=sys.stderr)


def _tell_of_limit(prompts: list[list[int]], config, positions: int) -> None:
    """Prints on stderr that a text may have fewer new tokens than requested."""
    longest = max(map(len, prompts))
    if config.max_length is None and longest + config.max_new_tokens > positions:
        print(
            f"mtpjax generate: a prompt of {count_of(longest, 'token')} and --max-new-tokens {config.max_new_tokens} "
            f"are more than the {positions} positions of the model: its text has at most "
            f"{count_of(positions - longest, 'new token')}",
            file=sys.stderr,
        )


def _compare_with_plain(
    params, prompts, texts, decode_plainly: Callable[[int | None], list[list[int]]], *, model, config
) -> tuple[list[str], int]:
    """Returns lines that say whether the texts equal plain decoding's and where not, and the exit code, 0 or 4."""
    import jax.numpy as jnp

    from mtpjax.evaluation.same_text import first_divergences

    plain = decode_plainly(config.min_rows)
    is_equal = [text == other for text, other in zip(texts, plain, strict=True)]
    how = ""
    # Below float32, matmuls round differently at different widths, so near-tied logits can flip. Where texts differ,
    # compare again with plain decoding in passes of the drafts' width.
    if not all(is_equal) and jnp.finfo(params["embedding"].dtype).bits < 32:
        wide = decode_plainly(max(config.num_nodes, config.min_rows or 1))
        is_equal = [same or text == other for same, text, other in zip(is_equal, texts, wide, strict=True)]
        how = ", in passes of the same width: narrower ones round differently" if all(is_equal) else ""
    lines = [f"identical to plain decoding: {'yes' if all(is_equal) else 'NO'}{how}"]
    # For each prompt that differs, show where, and how close the two tokens' logits are: a near tie is rounding.
    for number, divergence in enumerate(first_divergences(params, prompts, texts, plain, model=model), start=1):
        if divergence is not None:
            gap = f"the trunk's logits of the two tokens are {divergence.gap:.2g} apart"
            where = "one text ends" if math.isinf(divergence.gap) else gap
            lines.append(f"prompt {number} differs from new token {divergence.position + 1} on, where {where}")
    return lines, 0 if all(is_equal) else 4


def _decode_config(options, settings: dict[str, Any], config, tokenizer, *, batch: int):
    """Makes the `DecodeConfig` of the command; adaptive depth takes its costs from a profile."""
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.evaluation.profile_file import load_depth_settings

    settings = with_num_steps(settings, config)
    # Adaptive depth weighs accept length against measured round times, which depend on the device.
    if options.depth_policy == "adaptive" and settings["num_steps"]:
        profile = options.profile or options.speculative_draft_model_path or options.model_path
        settings |= load_depth_settings(
            profile,
            batch=batch,
            num_steps=settings["num_steps"],
            config=config,
            drafter=settings["drafter"],
        )
    return DecodeConfig(**settings, stop_token_ids=tokenizer.eos_token_ids)
