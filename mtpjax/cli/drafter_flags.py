"""Flags for a drafter with its own files (EAGLE-3, Medusa, DFlash, DSpark), by SGLang's names. Imports no JAX."""

import dataclasses
from typing import Any

from mtpjax.cli.help import flag_group

# SGLang's names -> the drafters' classes.
ALGORITHMS = {
    "EAGLE3": "Eagle3Drafter",
    "MEDUSA": "MedusaDrafter",
    "DFLASH": "DFlashDrafter",
    "DSPARK": "DSparkDrafter",
}
# Other names that SGLang accepts for them.
ALIASES = {"EAGLE": "EAGLE3"}
DEFAULT_EAGLE3_STEPS = 3


def add_drafter_flags(parser) -> None:
    """Adds the flags.

    Args:
        parser: an argument parser.
    """
    flag_group(parser, "drafts").add_argument(
        "--speculative-algorithm",
        choices=tuple(ALGORITHMS),
        metavar="NAME",
        default=None,
        help=f"kind of the drafter in --speculative-draft-model-path: {', '.join(ALGORITHMS)} (default: as its files "
        "say)",
    )
    add_path_flags(parser)


def add_path_flags(parser) -> None:
    """Adds the flags that name the drafter's files, and say how to read them.

    Args:
        parser: an argument parser.
    """
    flag_group(parser, "drafts").add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        default=None,
        help="folder or Hub repository of a drafter for this model: EAGLE-3, Medusa, DFlash or DSpark, in the format "
        "of SpecForge, speculators, vLLM, z-lab or DeepSpec. --num-steps is then by default "
        f"{DEFAULT_EAGLE3_STEPS} for EAGLE-3, else as many levels as the drafter has",
    )
    add_reading_flags(parser)


def add_reading_flags(parser) -> None:
    """Adds the flags that say how to read the files of drafters.

    Args:
        parser: an argument parser.
    """
    group = flag_group(parser, "drafts")
    group.add_argument(
        "--aux-layers",
        choices=("entered", "output"),
        default=None,
        help="how to read the list of trunk layers of an EAGLE-3 drafter whose files do not say it: the drafter reads "
        "the states that enter these layers (vLLM), or their outputs (SGLang)",
    )
    group.add_argument(
        "--sample-from-anchor",
        action="store_true",
        default=None,
        help="for a DFlash drafter whose files do not say it: the first slot of a block drafts too",
    )
    group.add_argument(
        "--last-layer-state",
        choices=("before_norm", "after_norm"),
        default=None,
        help="for a drafter that reads the last trunk layer and whose files do not say how: its output before the "
        "final norm (SGLang, vLLM), or after it (transformers)",
    )
    group.add_argument(
        "--speculative-dspark-confidence-threshold",
        type=float,
        default=None,
        metavar="CHANCE",
        help="for a DSpark drafter: end a draft before the first slot whose predicted chance of acceptance is lower, "
        "0..1 (default: 0, which never ends one early)",
    )


def name_of_drafter(drafter: Any) -> str:
    """Returns SGLang's name of a drafter with its own files."""
    return next(name for name, of in ALGORITHMS.items() if of == type(drafter).__name__)


def reading_of(options) -> dict[str, Any]:
    """Returns the arguments of `mtpjax.load_drafter` that the flags of `add_reading_flags` give."""
    return {name: getattr(options, name) for name in ("aux_layers", "sample_from_anchor", "last_layer_state")}


def load_drafter_of(options, settings: dict[str, Any], model) -> tuple[dict[str, Any], Any]:
    """Loads the drafter that the flags name.

    Args:
        options: what a parser with `add_drafter_flags` returned.
        settings: arguments of `DecodeConfig`.
        model: the model.

    Returns:
        The settings with the drafter, and its parameters; without the flag, the settings as they are and None.

    Raises:
        ValueError: the flags contradict each other, or the drafter is of another kind.
        CheckpointError: the files are damaged or not supported.
    """
    path = options.speculative_draft_model_path
    # 1. Without files, no flag may need such a drafter.
    if path is None:
        needs_files = {
            "--speculative-algorithm": options.speculative_algorithm in ALGORITHMS,
            **{f"--{name.replace('_', '-')}": value is not None for name, value in reading_of(options).items()},
            "--speculative-dspark-confidence-threshold": options.speculative_dspark_confidence_threshold is not None,
        }
        for flag in (flag for flag, is_needed in needs_files.items() if is_needed):
            raise ValueError(f"{flag} needs --speculative-draft-model-path")
        return settings, None
    if settings.get("drafter", "mtp") != "mtp":
        raise ValueError(f"--drafter {settings['drafter']} and --speculative-draft-model-path name two drafters")
    from mtpjax.drafters.load import load_drafter

    # 2. Load the drafter, and check that it is of the kind that the flags name.
    drafter, draft_params = load_drafter(path, model=model, **reading_of(options))
    kind, wanted = name_of_drafter(drafter), options.speculative_algorithm
    if wanted is not None and ALIASES.get(wanted.upper(), wanted.upper()) != kind:
        raise ValueError(f"--speculative-algorithm is {wanted}, but {path} is {kind}")
    threshold = options.speculative_dspark_confidence_threshold
    if threshold is not None:
        if kind != "DSPARK":
            raise ValueError(f"--speculative-dspark-confidence-threshold is for DSPARK drafters, but {path} is {kind}")
        drafter = dataclasses.replace(drafter, confidence_threshold=threshold)
    # 3. The default depth: all heads of Medusa, all slots of a block, or a fixed number for EAGLE-3.
    own = drafter.architecture
    most = getattr(own, "num_heads", None) or getattr(own, "num_drafts", DEFAULT_EAGLE3_STEPS)
    steps = most if settings["num_steps"] is None else settings["num_steps"]
    return settings | {"drafter": drafter, "num_steps": steps}, draft_params
