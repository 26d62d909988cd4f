"""`mtpjax chat`: a dialogue with a model in the terminal, streamed, with accepted drafts in color."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from typing import Any

from mtpjax.cli import common, config_flags
from mtpjax.cli.drafter_flags import add_drafter_flags, check_no_drafts, chosen_method, load_drafter_of
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flag, load_on_mesh, parse_mesh
from mtpjax.errors import UsageError, printable
from mtpjax.messages import count_of

COMMANDS_HELP = (
    "/reset starts a new conversation; /exit or Ctrl-D ends; Ctrl-C stops an answer; a line that ends with \\ "
    "continues on the next line"
)


def add_commands(commands) -> None:
    parser = command_parser(
        "Talk to a model in the terminal. Answers appear as they are generated, with accepted drafts in color, "
        f"followed by their speed and accept length. {COMMANDS_HELP}. Standard input may also be a pipe or file with "
        "one message per line; then only the answers go to standard output."
    )
    common.add_decoding_model_flags(parser)
    group = parser.flag_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("--chat-template", metavar="FILE", help="jinja2 chat template (default: the checkpoint's)")
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the chat template as a JSON object, such as '{\"enable_thinking\": false}'",
    )
    # `num_steps=None` lets `with_num_steps` choose by drafter and model; an answer may be as long as fits.
    fields = (*config_flags.TEXT_FIELDS, *config_flags.SAMPLING_FIELDS)
    config_flags.add_config_flags(parser, fields, max_new_tokens=None, num_steps=None)
    config_flags.add_seed_flag(parser, "random seed; answer i, counted from 0, uses SEED + i")
    add_drafter_flags(parser)
    add_mesh_flag(parser, "shard the model over devices, such as tensor=4 (default: one device)")
    commands.add_subcommand("chat", parser, help="talk to a model in the terminal")


def _chat(options) -> int:
    check_no_drafts(options)
    common.set_threads(options.model_path)
    chosen_method(options)
    settings = config_flags.decode_settings(options)
    variables = _template_variables(options.chat_template_kwargs)
    from mtpjax import compat
    from mtpjax.data.prompts import read_text
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.drafters.methods import uses_mtp_modules
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.serving.llm import LLM

    path, sizes = find_checkpoint(options.model_path), parse_mesh(options.mesh)
    template = None if options.chat_template is None else read_text(options.chat_template)
    model, params, loaded_config = load_on_mesh(path, options, compat.make_mesh(sizes) if sizes else None)
    tokenizer = load_tokenizer(path, model.config.vocab_size, chat_template=template)
    settings, draft_params = load_drafter_of(options, settings, model)
    settings = config_flags.with_num_steps(settings, loaded_config)
    if settings["num_steps"] and uses_mtp_modules(settings["drafter"]):
        check_acceptance(path, model, params)
    max_new_tokens = settings.pop("max_new_tokens")
    arguments = {"model": model, "tokenizer": tokenizer, "draft_params": draft_params, "num_slots": 1}
    with LLM.from_params(params, **arguments, **settings) as llm:
        return _Dialogue(llm, options, {"max_new_tokens": max_new_tokens, "chat_template_kwargs": variables}).run()


def _template_variables(text: str | None) -> dict[str, Any]:
    try:
        variables = {} if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise UsageError("--chat-template-kwargs must be a JSON object, such as '{\"enable_thinking\": false}'")
    return variables


class _Dialogue:
    """A conversation on standard input and output."""

    def __init__(self, llm, options, arguments: dict[str, Any]):
        from mtpjax.cli.generate_output import SpanPrinter

        self._llm, self._options, self._arguments = llm, options, arguments
        self._printer, self._num_answers = SpanPrinter(), 0
        self._is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._start = [] if options.system is None else [{"role": "system", "content": options.system}]

    def run(self) -> int:
        # Find out now whether the model can chat, not after the first message.
        probe = [*self._start, {"role": "user", "content": "Hello"}]
        self._llm.encode_chat(probe, (), self._arguments["chat_template_kwargs"])
        if self._is_interactive:
            print(f"mtpjax chat: {COMMANDS_HELP}", file=sys.stderr)
        messages = list(self._start)
        while (text := self._read_message()) is not None:
            command = text.strip() if self._is_interactive else ""
            if command == "/exit":
                break
            if command == "/reset":
                messages = list(self._start)
                continue
            if command == "/help":
                print(f"mtpjax chat: {COMMANDS_HELP}", file=sys.stderr)
                continue
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = self._answer(messages)
            # A message that the template rejects, or that does not fit, does not end a dialogue in a terminal.
            except ValueError as error:
                messages.pop()
                print(f"mtpjax chat: {printable(error)}", file=sys.stderr)
                if not self._is_interactive:
                    return 2
                continue
            messages.append({"role": "assistant", "content": answer})
        return 0

    def _read_message(self) -> str | None:
        """Returns the user's next message; None at the end of standard input."""
        line = self._read_line("> ")
        while self._is_interactive and line is not None and line.endswith("\\"):
            more = self._read_line("| ")
            if more is None:
                break
            line = f"{line[:-1]}\n{more}"
        return line

    def _read_line(self, prompt: str) -> str | None:
        if sys.stdin is None:
            return None
        if self._is_interactive and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # `input` then edits the line and keeps a history
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
        try:
            line = sys.stdin.buffer.readline().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text: {error.reason}") from error
        return line.removesuffix("\n").removesuffix("\r") if line else None

    def _answer(self, messages: list[dict[str, Any]]) -> str:
        """Prints the answer to a conversation as it is generated, and returns it. In a terminal, Ctrl-C stops it."""
        from mtpjax.serving.running import first_interrupt_calls

        sampling = config_flags.sampling_params(self._options)
        sampling = dataclasses.replace(sampling, seed=self._options.seed + self._num_answers)
        stream = self._llm.stream(messages, sampling, **self._arguments)

        def stop() -> None:
            nonlocal is_stopped
            is_stopped = True
            stream.close()
            if not stream.tokens:  # a signal handler must not use buffered streams
                os.write(2, b"\nmtpjax chat: stops when its programs are compiled; Ctrl-C again ends\n")

        # The first answer waits for its programs to compile, which the speed must not count.
        first_time, num_first, is_stopped = time.monotonic(), 0, False
        with contextlib.ExitStack() as stack:
            if self._is_interactive:
                stack.enter_context(first_interrupt_calls(stop))
            waiting = stack.enter_context(contextlib.ExitStack())
            waiting.enter_context(self._printer.waiting("" if self._num_answers else "compiling"))
            for number, spans in enumerate(stream.spans()):
                if not number:
                    waiting.close()
                    first_time, num_first = time.monotonic(), len(stream.tokens)
                self._printer.write(spans)
        seconds = time.monotonic() - first_time
        self._num_answers += 1
        print(flush=True)
        completion = stream.completion
        parts = [count_of(len(completion.tokens), "token")]
        if seconds > 0 and len(completion.tokens) > num_first > 0:
            parts.append(f"{(len(completion.tokens) - num_first) / seconds:.1f} tokens/s")
        if completion.finish.num_steps and self._llm.engine.config.num_steps:
            parts.append(f"accept length {completion.accept_length:.2f}")
        if is_stopped:
            parts.append("stopped")
        elif completion.finish_reason != "stop":
            parts.append(f"ended by {completion.finish_reason}")
        print(f"[{', '.join(parts)}]", file=sys.stderr, flush=True)
        return completion.text


COMMANDS = {"chat": _chat}
