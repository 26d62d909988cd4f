"""Token counts and speculation statistics of a response."""

import itertools
from collections.abc import Sequence
from typing import Any

from mtpjax.serving.completion import Choice
from mtpjax.serving.request import Finish


def usage(choices: Sequence[Choice], num_choices: int) -> dict[str, Any]:
    """Makes OpenAI's `usage` object; a prompt with several choices counts once, and rejected drafts never count."""
    num_prompt_tokens = sum(len(choice.request.prompt) for choice in choices[::num_choices])
    num_new_tokens = sum(len(choice.tokens) for choice in choices)
    num_cached_tokens = sum(choice.finish.num_cached_tokens for choice in choices[::num_choices] if choice.finish)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def speculation(choices: Sequence[Choice]) -> dict[str, Any]:
    """Makes the `speculative_decoding` object for texts that have ended.

    `accept_length` is the mean number of tokens per verification pass; entry k of the histogram counts the passes that
    accepted k drafts.
    """
    finishes = [choice.finish for choice in choices if choice.finish]
    num_steps = sum(finish.num_steps for finish in finishes)
    proposed = _sum_levels([finish.proposed for finish in finishes])
    accepted = _sum_levels([finish.accepted for finish in finishes])
    # A draft is accepted only after those of all earlier levels, so entry k counts passes with at least k drafts.
    at_least = [num_steps, *accepted, 0]
    return {
        "num_spec_steps": num_steps,
        "accept_length": 1 + sum(accepted) / num_steps if num_steps else None,
        "proposed_per_level": proposed,
        "accepted_per_level": accepted,
        "acceptance_histogram": [here - deeper for here, deeper in itertools.pairwise(at_least)],
    }


def meta_info(name: str, choice: Choice, seconds: float, weight_version: str) -> dict[str, Any]:
    """Makes SGLang's `meta_info` object for a text; speculation statistics are added only at the end."""
    finish = choice.finish
    info = {
        "id": name,
        "finish_reason": finish and _sglang_reason(finish, choice),
        "prompt_tokens": len(choice.request.prompt),
        "completion_tokens": len(choice.tokens),
        "cached_tokens": finish.num_cached_tokens if finish else 0,
        "weight_version": weight_version,
        "e2e_latency": seconds,
    }
    if finish:
        counts = speculation([choice])
        num_proposed, num_accepted = sum(counts["proposed_per_level"]), sum(counts["accepted_per_level"])
        info |= {
            "spec_accept_length": counts["accept_length"] or 0.0,
            "spec_accept_rate": num_accepted / num_proposed if num_proposed else 0.0,
            "spec_accept_token_num": num_accepted,
            "spec_draft_token_num": num_proposed,
            "spec_verify_ct": counts["num_spec_steps"],
            "spec_accept_histogram": counts["acceptance_histogram"],
        }
    return info


def _sglang_reason(finish: Finish, choice: Choice) -> dict[str, Any]:
    if finish.reason == "stop":
        return {"type": "stop", "matched": choice.stream.matched}
    if finish.reason == "length":
        return {"type": "length", "length": choice.request.max_new_tokens}
    return {"type": "abort", "message": finish.reason}


def _sum_levels(rows: Sequence[Sequence[int]]) -> list[int]:
    depth = max((len(row) for row in rows), default=0)
    return [sum(row[level] for row in rows if level < len(row)) for level in range(depth)]
