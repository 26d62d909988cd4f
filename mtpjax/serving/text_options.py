"""The options of a text, and the engine's requests for texts with them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mtpjax.decoding.config import SamplingParams
from mtpjax.errors import UsageError
from mtpjax.messages import did_you_mean
from mtpjax.serving.completion import Job
from mtpjax.serving.matcher import Grammar
from mtpjax.serving.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of `LLM.generate`, `LLM.chat` and `LLM.stream`, which take them as keyword arguments.

    Attributes:
        max_new_tokens: maximum number of new tokens; None: as many as `LLM.engine.max_length` leaves room for.
        stop: a stop string, or several. A text ends before the first of them.
        stop_token_ids: tokens that end a text, in addition to the model's end tokens.
        ignore_eos: the model's end tokens do not end a text.
        logprobs: return the log-probability of each new token.
        json_schema: a JSON schema that the text must match, as an object or as JSON.
        regex: a regular expression that the whole text must match.
        speculative: False decodes without drafts.
    """

    max_new_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    speculative: bool = True

    def __post_init__(self):
        if not all(isinstance(each, str) and each for each in self.stop_strings):
            raise UsageError(f"stop must be a string or strings, none of them empty, got {self.stop!r}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.json_schema is not None and self.regex is not None:
            raise UsageError("json_schema and regex cannot be combined")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> "TextOptions":
        """Makes the options from keyword arguments. Raises `UsageError` for unknown names and wrong values."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(f"unknown option {name}{did_you_mean(name, known)}; known: {', '.join(known)}")
        return cls(**options)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def jobs(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        ends: Sequence[int],
        max_length: int,
        grammar: Grammar | None,
    ) -> list[Job]:
        """Makes the engine's requests.

        Args:
            prompts: token ids.
            sampling: for all prompts, or one per prompt; None is greedy. Prompt i gets seed + i, or a random seed.
            ends: the model's end tokens.
            max_length: maximum number of tokens in a text, including the prompt.
            grammar: the compiled grammar.

        Raises:
            UsageError: there are not as many sampling parameters as prompts.
        """
        each = sampling if isinstance(sampling, Sequence) else [sampling or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise UsageError(f"sampling has {len(each)} entries for {len(prompts)} prompts")
        first_seed = int.from_bytes(os.urandom(8))
        stop_token_ids = tuple(dict.fromkeys([*(() if self.ignore_eos else ends), *self.stop_token_ids]))
        jobs = []
        for number, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            # A prompt that leaves no room is rejected when the engine checks the request.
            room = max(max_length - len(prompt), 1)
            seed: Any = first_seed if params.seed is None else params.seed
            if not isinstance(seed, int):
                raise UsageError("seed must be one integer: prompt i uses seed + i")
            request = Request(
                prompt=tuple(prompt),
                max_new_tokens=min(self.max_new_tokens or room, room),
                sampling=dataclasses.replace(params, seed=(seed + number) % 2**64),
                stop_token_ids=stop_token_ids,
                logprobs=self.logprobs,
                speculative=self.speculative,
                grammar=grammar,
            )
            jobs.append(Job(request, self.stop_strings))
        return jobs
