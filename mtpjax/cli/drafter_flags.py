"""Flags for a drafter in files of its own (EAGLE-3, Medusa, DFlash, DSpark), by SGLang's names. Imports no JAX."""

from typing import Any

# SGLang's names -> the drafters' classes.
ALGORITHMS = {
    "EAGLE3": "Eagle3Drafter",
    "MEDUSA": "MedusaDrafter",
    "DFLASH": "DFlashDrafter",
    "DSPARK": "DSparkDrafter",
}
DEFAULT_EAGLE3_STEPS = 3


def add_drafter_flags(parser) -> None:
    """Adds the flags.

    Args:
        parser: an argument parser.
    """
    parser.add_argument(
        "--speculative-draft-model-path",
        default=None,
        help="folder or Hub repository of an EAGLE-3, Medusa, DFlash or DSpark drafter for this model (SpecForge, "
        f"speculators, vLLM, z-lab, DeepSpec); --num-steps then defaults to {DEFAULT_EAGLE3_STEPS}, to the number of "
        "Medusa heads, or to the drafts of a block",
    )
    parser.add_argument(
        "--speculative-algorithm",
        choices=tuple(ALGORITHMS),
        default=None,
        help="what the drafter must be; by default its files say so",
    )
    parser.add_argument(
        "--aux-layers",
        choices=("entered", "output"),
        default=None,
        help="what the trunk layers that an EAGLE-3 file lists mean, where its format does not say: the states that "
        "enter these layers (vLLM), or the outputs of these layers (SGLang)",
    )
    parser.add_argument(
        "--sample-from-anchor",
        action="store_true",
        default=None,
        help="the first slot of a DFlash block drafts too, where its file does not say so",
    )


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
    if path is None:
        for name in ("speculative_algorithm", "aux_layers", "sample_from_anchor"):
            if options[name] is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --speculative-draft-model-path")
        return settings, None
    if settings["drafter"] != "mtp":
        raise ValueError(f"--drafter {settings['drafter']} and --speculative-draft-model-path name two drafters")
    if settings.get("depth_policy") == "adaptive":
        raise ValueError("--depth-policy adaptive takes its costs from a profile, which is of MTP modules")
    from mtpjax.decoding.drafters.load import load_drafter

    switches = {"aux_layers": options.aux_layers, "sample_from_anchor": options.sample_from_anchor}
    drafter, draft_params = load_drafter(path, model=model, **switches)
    kind = next(name for name, of in ALGORITHMS.items() if of == type(drafter).__name__)
    if options.speculative_algorithm not in (None, kind):
        raise ValueError(f"--speculative-algorithm is {options.speculative_algorithm}, but {path} is {kind}")
    own = drafter.architecture
    most = getattr(own, "num_heads", None) or getattr(own, "num_drafts", DEFAULT_EAGLE3_STEPS)
    steps = most if settings["num_steps"] is None else settings["num_steps"]
    return settings | {"drafter": drafter, "num_steps": steps}, draft_params
