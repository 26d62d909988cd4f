"""The command line's flags for decoding, SGLang's names where it has one, and what they make. Imports no JAX."""

from typing import Any

from mtpjax.decoding.config import EXACT_RULES, LOSSY_RULES, SamplingParams

SAMPLING = {  # field -> type, what it asks for
    "temperature": (float, "0: the likeliest token"),
    "top_k": (int, "of so many of the likeliest tokens; 0: all"),
    "top_p": (float, "of the likeliest tokens that hold this share; 1: all"),
    "min_p": (float, "of tokens with at least this share of the likeliest one's probability; 0: all"),
    "repetition_penalty": (float, "of tokens in prompt or text; 1: none"),
    "frequency_penalty": (float, "of new tokens, per occurrence; 0: none"),
    "presence_penalty": (float, "of new tokens, once; 0: none"),
}


def add_shape_flags(parser, *, num_steps: int | None, note: str) -> None:
    """Levels, topk and nodes; `note` tells the default of `num_steps`."""
    parser.add_argument(
        "--speculative-num-steps", "--num-steps", type=int, default=num_steps, help=f"draft levels per round {note}"
    )
    parser.add_argument(
        "--speculative-eagle-topk", "--topk", type=int, default=1, help="above 1: trees (default: %(default)s)"
    )
    parser.add_argument(
        "--speculative-num-draft-tokens",
        "--num-draft-tokens",
        type=int,
        default=None,
        help="nodes of a tree (default: all that topk and steps give, up to 64)",
    )


def add_draft_flags(parser, *, num_steps: int | None, note: str = "(default: %(default)s)") -> None:
    """What `draft_settings` reads; `note` tells the default of `num_steps`."""
    add_shape_flags(parser, num_steps=num_steps, note=note)
    parser.add_argument(
        "--acceptance",
        default="auto",
        help=f"rule: {', '.join(EXACT_RULES)}; {', '.join(LOSSY_RULES)} change the text's distribution "
        "(default: %(default)s)",
    )
    for name in ("single", "acc"):
        parser.add_argument(
            f"--speculative-accept-threshold-{name}", type=float, default=1.0, help="below 1: acceptance 'threshold'"
        )
    parser.add_argument("--draft-vocabulary", default=None, help="file of `mtpjax vocabulary`: draft these tokens only")
    parser.add_argument(
        "--speculative-draft-window-size", type=int, default=None, help="newest tokens that drafts attend to"
    )


def draft_settings(options) -> dict[str, Any]:
    """The fields of a `DecodeConfig` that `add_draft_flags` is about. Raises `ValueError`, `OSError`."""
    thresholds = [options[f"speculative_accept_threshold_{name}"] for name in ("single", "acc")]
    acceptance = options.acceptance
    if min(thresholds) < 1:
        if acceptance not in ("auto", "threshold"):
            raise ValueError(f"thresholds below 1 are for acceptance 'threshold', not '{acceptance}'")
        acceptance = "threshold"
    draft_vocabulary = None
    if options.draft_vocabulary is not None:
        from mtpjax.data.draft_vocabulary import load_vocabulary

        draft_vocabulary = load_vocabulary(options.draft_vocabulary)
    return {
        "num_steps": options.speculative_num_steps,
        "topk": options.speculative_eagle_topk,
        "num_draft_tokens": options.speculative_num_draft_tokens,
        "acceptance": acceptance,
        "threshold_single": thresholds[0],
        "threshold_acc": thresholds[1],
        "draft_vocabulary": draft_vocabulary,
        "draft_window": options.speculative_draft_window_size,
    }


def add_sampling_flags(parser, *, seed: str = "of the first prompt; +1 for each other") -> None:
    """What `sampling_params` reads; `seed` tells what that is of."""
    defaults = SamplingParams()
    for name, (kind, meaning) in SAMPLING.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(defaults, name),
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument("--seed", type=int, default=0, help=f"{seed} (default: %(default)s)")


def sampling_params(options, batch: int) -> SamplingParams:
    """One seed per row: the same prompt twice gives two texts."""
    numbers = {name: options[name] for name in SAMPLING}
    return SamplingParams(**numbers, seed=[options.seed + row for row in range(batch)])
