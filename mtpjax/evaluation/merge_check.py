"""Measures how merging MTP modules into a checkpoint changes acceptance."""

from collections.abc import Sequence

import numpy as np

from mtpjax.data.prompts import Prompt, encode_prompts, max_prompt_length
from mtpjax.data.tokenizer import load_tokenizer
from mtpjax.decoding.config import DecodeConfig
from mtpjax.evaluation.metrics import decoded_rates
from mtpjax.inference.generate import speculative_generate
from mtpjax.io.checkpoint import load

NUM_STEPS = 3  # draft levels, the default of inference engines for one module


def check_merge(
    before, after, prompts: Sequence[Prompt], *, max_new_tokens: int = 64, model_type: str | None = None
) -> str:
    """Decodes prompts greedily with drafts, using the checkpoints before and after a merge.

    Returns:
        A line with the two accept lengths, in tokens per round including the bonus token.

    Raises:
        TokenizerError: the checkpoint has no tokenizer.
        ValueError: a prompt cannot be encoded.
    """
    old, new = (_accept_length(path, prompts, max_new_tokens, model_type) for path in (before, after))
    return f"accept length with {NUM_STEPS} draft levels: {old} before, {new} after"


def _accept_length(path, prompts: Sequence[Prompt], max_new_tokens: int, model_type: str | None) -> str:
    """Loads a checkpoint, decodes the prompts eight at a time, and formats the accept length."""
    model, params = load(path, model_type=model_type)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    limit = max_prompt_length(model.config.max_position_embeddings, max_new_tokens)
    rows, _ = encode_prompts(prompts, tokenizer, max_tokens=limit)
    if not model.config.num_mtp_modules:
        return "1.00 (no MTP modules)"
    config = DecodeConfig(max_new_tokens=max_new_tokens, num_steps=NUM_STEPS, stop_token_ids=tokenizer.eos_token_ids)
    batches = [
        speculative_generate(params, rows[begin : begin + 8], model=model, config=config).stats
        for begin in range(0, len(rows), 8)
    ]
    # Average over all rounds of all prompts. If every text ends with its first token, there are no rounds.
    rounds = np.concatenate([stats.rounds for stats in batches])
    accepted = np.concatenate([stats.accepted for stats in batches])
    return f"{decoded_rates(rounds, accepted)['accept_length'].value if rounds.any() else 1.0:.2f}"
