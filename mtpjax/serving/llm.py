"""From text to text in Python: a model, its tokenizer and an engine, as in vLLM's `LLM`."""

import collections
import dataclasses
import json
import logging
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, overload

from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from mtpjax import compat
from mtpjax.console import progress_bar
from mtpjax.data.tokenizer import Tokenizer, load_tokenizer
from mtpjax.decoding.config import DecodeConfig, SamplingParams
from mtpjax.drafters.methods import load_drafter, uses_mtp_modules
from mtpjax.errors import UsageError, printable
from mtpjax.evaluation.self_check import check_acceptance
from mtpjax.inference.requests import params_to_device
from mtpjax.io.checkpoint import load
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.messages import count_of
from mtpjax.models.model import MTPModel
from mtpjax.models.params import shard_for_decoding
from mtpjax.serving.api.errors import ApiError
from mtpjax.serving.api.prompts import read_chat
from mtpjax.serving.api.settings import Limits
from mtpjax.serving.completion import Choice, Completion, Job
from mtpjax.serving.completion_stream import CompletionStream
from mtpjax.serving.engine import Engine
from mtpjax.serving.grammar import Grammars
from mtpjax.serving.llm_settings import make_config, split_settings
from mtpjax.serving.matcher import Grammar
from mtpjax.serving.memory import MEMORY_FRACTION, choose_num_pages
from mtpjax.serving.request import Delta, Finish
from mtpjax.serving.running import check_all, run_requests
from mtpjax.serving.sizes import EngineSettings
from mtpjax.serving.text_options import TextOptions

Messages = Sequence[Mapping[str, Any]]


_log = logging.getLogger("mtpjax.llm")


class LLM:
    """Generates texts with a model: loads it, and decodes many prompts at a time with continuous batching.

    Drafts never change a text at temperature 0 in float32, nor the distribution of texts above it, unless `acceptance`
    is a lossy rule. A program is compiled when a call first needs it. All methods may be called from any thread.

    Args:
        path: anything that `mtpjax.load` accepts.
        draft_model: folder or Hub repository of a trained drafter (`mtpjax.load_drafter`); None: the draft method is
            `drafter`, which defaults to the model's MTP modules.
        mesh: shards the model over devices: a mesh, or its sizes by axis, such as `{"tensor": 2}`.
        dtype: dtype to cast the parameters to; None keeps the files' dtypes.
        chat_template: jinja2 template that replaces the checkpoint's.
        model_type: model family, if the checkpoint's `config.json` does not say it.
        memory_fraction: fraction of an accelerator's memory for weights and KV cache.
        **settings: fields of `DecodeConfig`, such as `num_steps`, `topk` and `acceptance`, and of
            `mtpjax.serving.sizes.EngineSettings`, such as `num_slots` (texts that decode at the same time) and
            `max_length`. `num_steps` defaults to 2 with MTP modules, and to the usual depth of other draft methods.

    Raises:
        CheckpointError: the files are missing, damaged or unsupported.
        UsageError: there is no such setting.
        ValueError: settings contradict each other or the model.
        MemoryTooSmall: the memory has no room for one text.

    Attributes:
        engine: the engine that runs the texts.
        tokenizer: the tokenizer.

    Example:
        >>> import tempfile
        >>> import jax, mtpjax
        >>> model = mtpjax.MTPModel(mtpjax.presets["tiny"])  # a model of bytes, not trained
        >>> folder = tempfile.mkdtemp() + "/checkpoint"
        >>> mtpjax.save(folder, model, mtpjax.init_params(model, jax.random.key(0)))
        >>> with mtpjax.LLM(folder, max_length=64, num_slots=1) as llm:
        ...     completions = llm.generate(["def ", "import "], max_new_tokens=4, progress=False)
        >>> [len(each.tokens) for each in completions]
        [4, 4]
    """

    def __init__(
        self,
        path: Any,
        *,
        draft_model: Any = None,
        mesh: Mesh | Mapping[str, int] | None = None,
        dtype: Any = None,
        chat_template: str | None = None,
        model_type: str | None = None,
        memory_fraction: float = MEMORY_FRACTION,
        **settings: Any,
    ):
        decode, engine = split_settings(settings)
        allow_copies = bool(decode.get("allow_copies", False))
        on_mesh = compat.make_mesh(dict(mesh)) if isinstance(mesh, Mapping) else mesh
        place = find_checkpoint(path)
        model, params = load(place, dtype=dtype, mesh=on_mesh, allow_copies=allow_copies, model_type=model_type)
        tokenizer = load_tokenizer(place, model.config.vocab_size, chat_template=chat_template)
        draft_params = None
        if draft_model is not None:
            decode["drafter"], draft_params = load_drafter(draft_model, model=model, method=decode.get("drafter"))
        config = make_config(decode, model)
        # Warn if the MTP modules draft worse than they did in training; damaged modules raise no error otherwise.
        if config.num_steps and uses_mtp_modules(config.drafter):
            check_acceptance(place, model, params)
        if on_mesh is not None:
            model, params = shard_for_decoding(model, params, on_mesh, allow_copies=allow_copies)
        self._start(params, model, tokenizer, draft_params, config, EngineSettings(**engine), memory_fraction)

    @classmethod
    def from_params(
        cls,
        params: dict,
        *,
        model: MTPModel,
        tokenizer: Tokenizer,
        draft_params: Any = None,
        memory_fraction: float = MEMORY_FRACTION,
        **settings: Any,
    ) -> "LLM":
        """Makes an `LLM` from parameters in memory, for example during training.

        Args:
            params: parameters of `model`, with unrolled layers.
            model: the model.
            tokenizer: from `mtpjax.load_tokenizer`.
            draft_params: parameters of the setting `drafter`, both from `mtpjax.load_drafter`.
            memory_fraction: as in `LLM`.
            **settings: as in `LLM`.

        Raises:
            UsageError, ValueError, MemoryTooSmall: as in `LLM`.
        """
        llm, (decode, engine), params = cls.__new__(cls), split_settings(settings), params_to_device(params)
        config = make_config(decode, model)
        llm._start(params, model, tokenizer, draft_params, config, EngineSettings(**engine), memory_fraction)
        return llm

    def _start(
        self,
        params: dict,
        model: MTPModel,
        tokenizer: Tokenizer,
        draft_params: Any,
        config: DecodeConfig,
        settings: EngineSettings,
        memory_fraction: float,
    ) -> None:
        if settings.num_pages is None:
            num_pages = choose_num_pages(params, model, config, settings, memory_fraction)
            settings = dataclasses.replace(settings, num_pages=num_pages)
        self.tokenizer, self._grammars, self._no_grammars = tokenizer, None, ""
        try:
            self._grammars = Grammars(tokenizer, model.config.vocab_size)
        except (ImportError, ValueError) as error:
            self._no_grammars = str(error)
        self.engine = Engine(
            params,
            model=model,
            config=config,
            settings=settings,
            draft_params=draft_params,
            grammars=self._grammars,
        )
        self.engine.start()
        # The engine's thread refers to the engine, so nothing else would end it. The garbage collector must not wait.
        self._stop = weakref.finalize(self, self.engine.stop)
        self._stop.atexit = False

    @overload
    def generate(
        self,
        prompts: str,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(self, prompts, sampling=None, *, progress=True, **options):
        """Continues texts.

        A first Ctrl-C ends the texts that still run with the reason "abort", and returns all texts; a second one
        raises.

        Args:
            prompts: one text, or any number of texts or lists of token ids, of any lengths.
            sampling: sampling parameters for all prompts, or a list with one per prompt; None is greedy. With one for
                all, prompt i uses seed + i. Without a seed, each prompt gets a random one.
            progress: show a progress bar on a terminal.
            **options: fields of `mtpjax.serving.text_options.TextOptions`; `max_new_tokens` defaults to 128.

        Returns:
            The completion of each prompt, in order; of a single text, its completion. `finish_reason` is "error", with
            a warning in the log, if a call of the engine failed.

        Raises:
            ValueError: a prompt or an option is out of range; no text has been generated.
        """
        is_one = isinstance(prompts, str)
        texts = [prompts] if is_one else list(prompts)
        tokens = [self._encode(text) for text in texts]
        completions = self._run(self._jobs(tokens, sampling, {"max_new_tokens": 128} | options), progress)
        return completions[0] if is_one else completions

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        **options: Any,
    ) -> Any:
        """Answers conversations, encoded by the model's chat template exactly as the server does.

        Args:
            messages: a conversation, such as `[{"role": "user", "content": "Hello"}]`, or a list of conversations.
            sampling: as in `generate`.
            tools: JSON schemas of tools, for templates that show them. Calls in the answer are not parsed.
            chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`.
            progress: as in `generate`.
            **options: fields of `mtpjax.serving.text_options.TextOptions`; without `max_new_tokens`, an answer may be
                as long as fits.

        Returns:
            The answer's `Completion`; for a list of conversations, a list of them.

        Raises:
            ConversationError: the chat template rejects a conversation.
            ValueError: as for `generate`.
        """
        is_one = not isinstance(messages, Sequence) or (bool(messages) and isinstance(messages[0], Mapping | str))
        conversations: Any = [messages] if is_one else messages
        tokens = [self.encode_chat(each, tools, chat_template_kwargs) for each in conversations]
        completions = self._run(self._jobs(tokens, sampling, options), progress)
        return completions[0] if is_one else completions

    def stream(
        self,
        prompt: str | Sequence[int] | Messages,
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> CompletionStream:
        """Starts to continue a text, or to answer a conversation, and yields the new text as it is generated.

        Args:
            prompt: a text, token ids, or a conversation.
            sampling: sampling parameters; None is greedy.
            tools: as in `chat`.
            chat_template_kwargs: as in `chat`.
            **options: fields of `mtpjax.serving.text_options.TextOptions`; `max_new_tokens` has the default of
                `generate` or `chat`.

        Returns:
            An iterable of strings, for `for` and for `async for`; afterwards it has the `completion`.

        Raises:
            ValueError: the prompt or an option is out of range.
            QueueFull: too many requests wait.
        """
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            tokens = self.encode_chat(prompt, tools, chat_template_kwargs)
        else:
            tokens, options = self._encode(prompt), {"max_new_tokens": 128} | options
        [job] = self._jobs([tokens], sampling, options)
        return CompletionStream(self.engine.stream(job.request), Choice(0, job, job.text_stream(self.tokenizer)), self)

    def update_params(self, params: dict, draft_params: Any = None) -> None:
        """Replaces the model's parameters without compiling; see `mtpjax.Engine.update_params`."""
        self.engine.update_params(params, draft_params)

    def close(self) -> None:
        """Ends the texts that still run, and stops the engine."""
        self._stop.detach()
        self.engine.close(timeout=0.0)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After Ctrl-C, nobody wants to wait for a compilation.
        if kind is KeyboardInterrupt:
            self._stop()
        else:
            self.close()

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
        if not is_list or not all(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
            raise UsageError(f"a prompt must be a string or a list of token ids, got {printable(repr(prompt), 100)}")
        return list(prompt)

    def encode_chat(self, messages: Any, tools: Any, variables: Mapping[str, Any] | None) -> list[int]:
        """Encodes a conversation as the server does, up to the start of the answer.

        Args:
            messages: as in `chat`, one conversation.
            tools: as in `chat`.
            variables: variables of the template.

        Raises:
            UsageError: the conversation is invalid, or the chat template rejects it.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise UsageError(
                "a conversation must be a list of messages, such as [{'role': 'user', 'content': 'Hello'}], got "
                f"{printable(repr(messages), 100)}"
            )
        variables = dict(variables or {})
        if reserved := sorted(variables.keys() & {"messages", "tools", "add_generation_prompt"}):
            raise UsageError(f"chat_template_kwargs must not set {reserved[0]}")
        plain = [dict(each) if isinstance(each, Mapping) else each for each in messages]
        body = {"messages": plain, "tools": list(tools), "chat_template_kwargs": variables}
        limits = Limits(
            max_length=self.engine.max_length,
            vocab_size=self.engine.vocab_size,
            max_prompt_characters=sys.maxsize,
            max_total_characters=sys.maxsize,
            template_variables=tuple(variables),
        )
        try:
            return read_chat(self.tokenizer, body, limits, add_generation_prompt=True)
        except ApiError as error:
            raise UsageError(str(error)) from error

    def _jobs(self, prompts: Sequence[Sequence[int]], sampling: Any, options: dict[str, Any]) -> list[Job]:
        text = TextOptions.read(options)
        ends, max_length = self.tokenizer.eos_token_ids, self.engine.max_length
        return text.jobs(prompts, sampling, ends=ends, max_length=max_length, grammar=self._grammar(text))

    def _grammar(self, text: TextOptions) -> Grammar | None:
        if text.json_schema is None and text.regex is None:
            return None
        if self._grammars is None:
            raise UsageError(f"json_schema and regex are not available: {self._no_grammars}")
        if text.regex is not None:
            return self._grammars.compile("regex", text.regex)
        schema = text.json_schema
        return self._grammars.compile("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    def _run(self, jobs: list[Job], progress: bool) -> list[Completion]:
        """Runs requests to their end, with a progress bar."""
        requests = [job.request for job in jobs]
        check_all(self.engine, requests)
        choices = [Choice(index, job, job.text_stream(self.tokenizer)) for index, job in enumerate(jobs)]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        begin, num_tokens = time.monotonic(), 0
        with progress_bar(*columns, is_shown=progress) as bar:
            task = bar.add_task("generating", total=len(jobs))

            def receive(index: int, event: Delta | Finish) -> bool:
                nonlocal num_tokens
                choice = choices[index]
                if isinstance(event, Finish):
                    choice.end(event)
                    bar.update(task, advance=1)
                elif not choice.stream.is_stopped:
                    num_tokens += len(choice.push(event).tokens)
                    bar.update(task, description=f"{num_tokens / (time.monotonic() - begin):.0f} tokens/s")
                return choice.stream.is_stopped

            run_requests(self.engine, requests, receive)
        completions = [choice.completion() for choice in choices]
        reasons = collections.Counter(completion.finish_reason for completion in completions)
        for reason in ("abort", "timeout", "error", "invalid"):
            if reasons[reason]:
                first = next(each for each in completions if each.finish_reason == reason)
                message = first.finish.message if first.finish else ""
                problem = f"{reasons[reason]} of {count_of(len(completions), 'text')} ended early ({reason})"
                _log.warning("%s", ": ".join(filter(None, [problem, message])))
        return completions
