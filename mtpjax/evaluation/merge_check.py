"""Measures how merging MTP modules into a checkpoint changes acceptance."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mtpjax.data.prompts import Prompt, encode_prompts, max_prompt_length
from mtpjax.data.tokenizer import load_tokenizer
from mtpjax.decoding.config import DecodeConfig
from mtpjax.evaluation.metrics import decoded_rates
from mtpjax.inference.generate import speculative_generate
from mtpjax.io.checkpoint import load

NUM_STEPS = 3  # draft levels, the default of inference engines for one module


@dataclasses.dataclass(frozen=True)
class MergeCheck:
    """Acceptance of one checkpoint on the prompts."""

    num_mtp_modules: int
    accept_length: float  # tokens per round with the bonus token; 1.0 without modules


def check_merge(
    before, after, prompts: Sequence[Prompt], *, max_new_tokens: int = 64, model_type: str | None = None
) -> tuple[MergeCheck, MergeCheck]:
    """Decodes prompts greedily with drafts of the checkpoint before and after a merge.

    Raises:
        TokenizerError: the checkpoint has no tokenizer.
        ValueError: a prompt cannot be encoded.
    """
    first, second = (_measure(path, prompts, max_new_tokens, model_type) for path in (before, after))
    return first, second


def format_check(before: MergeCheck, after: MergeCheck) -> str:
    """Formats the acceptance before and after a merge as one line."""
    old = f"{before.accept_length:.2f}" + ("" if before.num_mtp_modules else " (no MTP modules)")
    return f"accept length with {NUM_STEPS} draft levels: {old} before, {after.accept_length:.2f} after"


def _measure(path, prompts: Sequence[Prompt], max_new_tokens: int, model_type: str | None) -> MergeCheck:
    """Loads a checkpoint and decodes the prompts, eight at a time."""
    model, params = load(path, model_type=model_type)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    limit = max_prompt_length(model.config.max_position_embeddings, max_new_tokens)
    rows, _ = encode_prompts(prompts, tokenizer, max_tokens=limit)
    if not model.config.num_mtp_modules:
        return MergeCheck(0, 1.0)
    config = DecodeConfig(max_new_tokens=max_new_tokens, num_steps=NUM_STEPS, stop_token_ids=tokenizer.eos_token_ids)
    batches = [
        speculative_generate(params, rows[begin : begin + 8], model=model, config=config).stats
        for begin in range(0, len(rows), 8)
    ]
    # Rates are over all rounds of all prompts.
    rounds = np.concatenate([stats.rounds for stats in batches])
    accepted = np.concatenate([stats.accepted for stats in batches])
    # If all texts end with their first token, there are no rounds.
    length = decoded_rates(rounds, accepted)["accept_length"].value if rounds.any() else 1.0
    return MergeCheck(model.config.num_mtp_modules, length)
