"""Flags that choose the drafter, with SGLang's names. Imports no JAX before a drafter is loaded."""

import dataclasses
from typing import Any

from mtpjax.errors import UsageError
from mtpjax.messages import did_you_mean, require

NO_DRAFTS = "NONE"


def add_drafter_flags(parser) -> None:
    """Adds the flags of a command that decodes with one drafter."""
    group = parser.flag_group("drafts")
    group.add_argument(
        "--speculative-algorithm",
        metavar="NAME",
        help="draft method: MTP, NEXTN or EAGLE (the model's MTP modules), EAGLE3, MEDUSA, DFLASH or DSPARK (the "
        "drafter of --speculative-draft-model-path), NGRAM (n-grams of the text), NONE (no drafts), or "
        "package.module:RECORD for your own DraftMethod (default: the drafter of --speculative-draft-model-path, else "
        "the model's MTP modules, if any)",
    )
    group.add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        help="folder or Hub repository of an EAGLE-3, Medusa, DFlash or DSpark drafter for this model, in the format "
        "of SpecForge, speculators, vLLM, z-lab or DeepSpec. --num-steps then defaults to 3 for EAGLE-3, and to the "
        "drafter's number of levels for the others",
    )
    add_reading_flags(parser)
    group.add_argument(
        "--speculative-dspark-confidence-threshold",
        type=float,
        metavar="P",
        help="for DSpark: end the draft before the first token whose predicted acceptance probability is below this "
        "value, 0..1 (default: 0, never)",
    )


def add_reading_flags(parser) -> None:
    """Adds flags for settings that a drafter's files may leave out."""
    group = parser.flag_group("drafts")
    group.add_argument(
        "--aux-layers",
        choices=("entered", "output"),
        help="for an EAGLE-3 drafter: whether its list of trunk layers refers to the hidden states that enter these "
        "layers (vLLM) or to their outputs (SGLang), if its files do not say which",
    )
    group.add_argument(
        "--sample-from-anchor",
        action="store_true",
        default=None,
        help="let the first slot of a block also draft a token, for a DFlash drafter whose files do not specify this",
    )
    group.add_argument(
        "--last-layer-state",
        choices=("before_norm", "after_norm"),
        help="for a drafter that reads the last trunk layer: whether it reads the hidden states before the final norm "
        "(SGLang, vLLM) or after it (transformers), if its files do not say which",
    )


def reading_of(options) -> Any:
    """Returns the arguments of `mtpjax.load_drafter` that the flags of `add_reading_flags` set."""
    return {name: getattr(options, name) for name in ("aux_layers", "sample_from_anchor", "last_layer_state")}


def check_no_drafts(options) -> None:
    """Raises `UsageError` if a flag sets the number of drafts, and `--speculative-algorithm` is NONE."""
    if (options.speculative_algorithm or "").upper() != NO_DRAFTS:
        return
    given = {"--num-steps": options.num_steps, "--num-draft-tokens": options.num_draft_tokens}
    names = [name for name, value in (given | {"--topk": (options.topk or 1) - 1}).items() if value]
    if names:
        raise UsageError("; ".join(f"{name} has no effect with --speculative-algorithm NONE" for name in names))


def chosen_method(options):
    """Returns the `DraftMethod` of `--speculative-algorithm` or `--drafter`, or None without a flag or with NONE."""
    from mtpjax.drafters.methods import METHODS, find_method

    path, own = options.speculative_draft_model_path, getattr(options, "drafter", "mtp")
    if options.speculative_algorithm is None:
        if own != "mtp" and path is not None:
            raise ValueError(f"--drafter {own} and --speculative-draft-model-path select different drafters")
        if own == "mtp":
            return None
        if (method := find_method(own)).from_settings is None:
            raise ValueError(f"--drafter {own} is read from files: use --speculative-draft-model-path instead")
        return method
    require(own == "mtp", f"--drafter {own} and --speculative-algorithm select different drafters")
    name = options.speculative_algorithm
    name = name if ":" in name else name.upper()
    # SGLang's EAGLE is either a drafter in files or MTP modules. Sort the one that fits the path last, so that it wins.
    fitting = sorted(METHODS, key=lambda method: (method.files is not None) == (path is not None))
    known = {each: method for method in fitting for each in method.algorithms} | {NO_DRAFTS: None}
    if ":" not in name and name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"--speculative-algorithm must be one of {', '.join(known)}, got {name}{hint}")
    method = find_method(name) if ":" in name else known[name]
    if path is not None and (method is None or method.files is None):
        others = ", ".join(each.algorithms[0] for each in METHODS if each.files is not None)
        raise ValueError(
            f"--speculative-algorithm {name} uses no drafter files: remove --speculative-draft-model-path, or use one "
            f"of {others}"
        )
    if path is None and method is not None and method.from_settings is None:
        raise ValueError(f"--speculative-algorithm {name} needs --speculative-draft-model-path")
    return method


def load_drafter_of(options, settings: dict[str, Any], model) -> tuple[dict[str, Any], Any]:
    """Loads the drafter that the flags select. Returns the `DecodeConfig` arguments with it, and its parameters."""
    path, wanted, method = options.speculative_draft_model_path, options.speculative_algorithm, chosen_method(options)
    reading, threshold = reading_of(options), options.speculative_dspark_confidence_threshold
    # 1. Without drafter files, reject flags that apply only to them.
    if path is None:
        for name, value in (reading | {"speculative_dspark_confidence_threshold": threshold}).items():
            require(value is None, f"--{name.replace('_', '-')} needs --speculative-draft-model-path")
        if wanted is None:
            return settings, None
        if method is None:
            return settings | {"num_steps": 0, "topk": 1, "num_draft_tokens": None}, None
        return settings | {"drafter": wanted if ":" in wanted else method.name}, None
    from mtpjax.drafters.methods import METHODS, default_num_steps, load_drafter, method_of

    # 2. Load the drafter, and check that it is of the requested kind.
    is_users = method is not None and method not in METHODS
    drafter, draft_params = load_drafter(path, model=model, method=method if is_users else None, **reading)
    found: Any = method if is_users else method_of(drafter)
    if method not in (None, found):
        raise ValueError(f"--speculative-algorithm is {wanted}, but {path} is {found.title}")
    if threshold is not None:
        problem = f"--speculative-dspark-confidence-threshold is for DSPARK drafters, but {path} is {found.title}"
        require(hasattr(drafter, "confidence_threshold"), problem)
        drafter = dataclasses.replace(drafter, confidence_threshold=threshold)
    # 3. Choose the default depth, which is all levels of the drafter, or the method's usual number.
    steps = settings["num_steps"]
    steps = default_num_steps(drafter, model.config, found) if steps is None else steps
    return settings | {"drafter": drafter, "num_steps": steps}, draft_params
