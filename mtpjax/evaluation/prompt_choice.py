"""The choice of prompts that a command measures on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mtpjax.data.prompts import Prompt, choose_prompts, encode_prompts, max_prompt_length, read_prompts
from mtpjax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class PromptChoice:
    """A choice of prompts.

    Attributes:
        path: a prompt file; None: not given.
        count: number of prompts, drawn evenly over the categories.
        categories: categories to draw from; empty: all.
        max_tokens: prompts are cut to this many tokens; None: to as many as the model has room for.
        chat: each prompt is a user message of the model's chat template.
    """

    path: str | None = None
    count: int = 12
    categories: tuple[str, ...] = ()
    max_tokens: int | None = None
    chat: bool = False

    def read(self, seed: int) -> list[Prompt]:
        """Reads the file, and draws the prompts."""
        return choose_prompts(read_prompts(self.path), self.count, categories=self.categories, seed=seed)

    def limit(self, config: ModelConfig, max_new_tokens: int) -> int:
        """Returns the maximum number of tokens of a prompt: with its new tokens it must fit the model's positions."""
        return max_prompt_length(config.max_position_embeddings, max_new_tokens, self.max_tokens)

    def encode(
        self, prompts: Sequence[Prompt], tokenizer: Any, config: ModelConfig, max_new_tokens: int
    ) -> tuple[list[list[int]], int, int]:
        """Encodes prompts for a model that generates `max_new_tokens` after each.

        Returns:
            Token ids, the length that longer prompts were cut to, and the number of those.
        """
        limit = self.limit(config, max_new_tokens)
        rows, num_cut = encode_prompts(prompts, tokenizer, max_tokens=limit, chat=self.chat)
        return rows, limit, num_cut
