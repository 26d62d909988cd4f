"""Measures what merging MTP modules into a checkpoint does to acceptance."""

import dataclasses
from collections.abc import Sequence

from mtpjax.data.prompts import Prompt, encode_prompts, max_prompt_length
from mtpjax.data.tokenizer import load_tokenizer
from mtpjax.decoding.config import DecodeConfig
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

    Args:
        before: the checkpoint without the merged modules.
        after: the merged checkpoint.
        prompts: the prompts to continue.
        max_new_tokens: tokens per prompt.
        model_type: the family to use instead of the one that `config.json` names.

    Returns:
        The acceptance before and after.

    Raises:
        TokenizerError: the checkpoint has no tokenizer.
        ValueError: a prompt cannot be encoded.
    """
    return (
        _measure(before, prompts, max_new_tokens, model_type),
        _measure(after, prompts, max_new_tokens, model_type),
    )


def format_check(before: MergeCheck, after: MergeCheck) -> str:
    """Formats the acceptance before and after a merge as one line.

    Args:
        before: of the checkpoint without the merged modules.
        after: of the merged checkpoint.

    Returns:
        The line.
    """
    old = f"{before.accept_length:.2f}" + ("" if before.num_mtp_modules else " (no MTP modules)")
    return f"accept length with {NUM_STEPS} draft levels: {old} before, {after.accept_length:.2f} after"


def _measure(path, prompts: Sequence[Prompt], max_new_tokens: int, model_type: str | None) -> MergeCheck:
    """Loads a checkpoint and decodes the prompts, eight at a time."""
    model, params = load(path, model_type=model_type)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    most = max_prompt_length(model.config.max_position_embeddings, max_new_tokens)
    rows, _ = encode_prompts(prompts, tokenizer, max_tokens=most)
    if not model.config.num_mtp_modules:
        return MergeCheck(0, 1.0)
    config = DecodeConfig(max_new_tokens=max_new_tokens, num_steps=NUM_STEPS, stop_token_ids=tokenizer.eos_token_ids)
    # Accept length is the mean over all rounds: the tokens that rounds emitted over their number.
    rounds = tokens = 0.0
    for begin in range(0, len(rows), 8):
        stats = speculative_generate(params, rows[begin : begin + 8], model=model, config=config).stats
        count = float(stats.rounds.sum())
        rounds, tokens = rounds + count, tokens + (stats.accept_length * count if count else 0.0)
    return MergeCheck(model.config.num_mtp_modules, tokens / rounds if rounds else 1.0)
