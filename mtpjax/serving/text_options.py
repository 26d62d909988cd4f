"""The options of a text, and the engine's requests for texts with them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mtpjax.decoding.config import SamplingParams, check_integer
from mtpjax.errors import UsageError
from mtpjax.messages import did_you_mean
from mtpjax.serving.completion import Job
from mtpjax.serving.matcher import Grammar
from mtpjax.serving.request import Request

SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of `LLM.generate`, `LLM.chat` and `LLM.stream`, which take them as keyword arguments.

    Attributes:
        max_new_tokens: maximum number of new tokens of each text, or a list with one limit per prompt. None allows as
            many as fit. Every text ends at `LLM.engine.max_length`, prompt included.
        stop: a stop string, or several. A text ends before the first of them.
        stop_token_ids: tokens that end a text, in addition to the model's end tokens.
        ignore_eos: the model's end tokens do not end a text.
        logprobs: return the log-probability of each new token.
        json_schema: a JSON schema that the text must match, as an object or as JSON.
        regex: a regular expression that the whole text must match.
        speculative: False decodes without drafts.
    """

    max_new_tokens: int | Sequence[int] | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    speculative: bool = True

    def __post_init__(self):
        if not all(isinstance(each, str) and each for each in self.stop_strings):
            raise UsageError(f"stop must be a string or strings, none of them empty, got {self.stop!r}")
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise UsageError(f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}")
        for name in ("ignore_eos", "logprobs", "speculative"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, got {getattr(self, name)!r}")
        limits = self.max_new_tokens if isinstance(self.max_new_tokens, Sequence) else [self.max_new_tokens]
        for limit in limits:
            if limit is not None and check_integer("max_new_tokens", limit) < 1:
                raise UsageError(f"max_new_tokens must be at least 1, got {limit}")
        if self.json_schema is not None and self.regex is not None:
            raise UsageError("json_schema and regex cannot be combined")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> "TextOptions":
        """Makes the options from keyword arguments. Raises `UsageError` for unknown names and wrong values."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name in SAMPLING_FIELDS:
                raise UsageError(f"{name} is a sampling parameter: pass mtpjax.SamplingParams({name}=...) as sampling")
            if name not in known:
                raise UsageError(f"unknown option {name}{did_you_mean(name, known)}; known: {', '.join(known)}")
        return cls(**options)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

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
            sampling: for all prompts, or one per prompt; None is greedy. If it is for all prompts, prompt i gets seed +
                i. Without a seed, each prompt gets a random one.
            ends: the model's end tokens.
            max_length: maximum number of tokens in a text, including the prompt.
            grammar: the compiled grammar.

        Raises:
            UsageError: a sequence does not have as many values as there are prompts.
        """
        is_shared = sampling is None or isinstance(sampling, SamplingParams)
        params = _per_prompt("sampling", SamplingParams() if sampling is None else sampling, len(prompts))
        if not all(isinstance(each, SamplingParams) for each in params):
            raise UsageError("sampling must be mtpjax.SamplingParams, or a list of them")
        limits = _per_prompt("max_new_tokens", self.max_new_tokens, len(prompts))
        first_seed = int.from_bytes(os.urandom(8))
        stop_token_ids = tuple(dict.fromkeys([*(() if self.ignore_eos else ends), *self.stop_token_ids]))
        jobs = []
        for number, prompt in enumerate(prompts):
            # A prompt that leaves no room is rejected when the engine checks the request.
            room = max(max_length - len(prompt), 1)
            seed: Any = params[number].seed
            if seed is None:
                seed = first_seed + number
            elif is_shared and isinstance(seed, int):
                seed += number
            if not isinstance(seed, int):
                raise UsageError("seed must be one integer; for a seed per prompt, pass a list of SamplingParams")
            request = Request(
                prompt=tuple(prompt),
                max_new_tokens=min(limits[number] or room, room),
                sampling=dataclasses.replace(params[number], seed=seed % 2**64),
                stop_token_ids=stop_token_ids,
                logprobs=self.logprobs,
                speculative=self.speculative,
                grammar=grammar,
            )
            jobs.append(Job(request, self.stop_strings))
        return jobs


def _per_prompt(name: str, value: Any, count: int) -> Sequence[Any]:
    """Returns a value for each prompt, given one for all prompts or a sequence."""
    values = value if isinstance(value, Sequence) else [value] * count
    if len(values) != count:
        raise UsageError(f"{name} has {len(values)} values for {count} prompts")
    return values
