"""Chooses the prompts that a command measures on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mtpjax.data.prompts import Prompt, choose_prompts, encode_prompts, max_prompt_length, read_prompts
from mtpjax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class PromptChoice:
    """The settings that choose prompts.

    Attributes:
        path: a prompt file; None: not given.
        count: number of prompts, drawn evenly from the categories.
        categories: categories to draw from; empty: all.
        max_tokens: maximum prompt length; longer prompts are cut. None: as many tokens as the model has room for.
        chat: treat each prompt as a user message and apply the model's chat template.
    """

    path: str | None = None
    count: int = 12
    categories: tuple[str, ...] = ()
    max_tokens: int | None = None
    chat: bool = False

    def read(self, seed: int) -> list[Prompt]:
        """Reads the file and draws the prompts."""
        return choose_prompts(read_prompts(self.path), self.count, categories=self.categories, seed=seed)

    def limit(self, config: ModelConfig, max_new_tokens: int) -> int:
        """Returns the maximum prompt length that leaves room for the new tokens within the model's maximum length."""
        return max_prompt_length(config.max_position_embeddings, max_new_tokens, self.max_tokens)

    def encode(
        self, prompts: Sequence[Prompt], tokenizer: Any, config: ModelConfig, max_new_tokens: int
    ) -> tuple[list[list[int]], int, int]:
        """Encodes prompts for a model that generates `max_new_tokens` after each.

        Returns:
            Token ids, the maximum prompt length, and the number of prompts that were cut to it.
        """
        limit = self.limit(config, max_new_tokens)
        rows, num_cut = encode_prompts(prompts, tokenizer, max_tokens=limit, chat=self.chat)
        return rows, limit, num_cut
