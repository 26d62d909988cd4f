"""Flags that choose the drafter, by SGLang's names. Imports no JAX before a drafter is loaded."""

import dataclasses
from typing import Any

from mtpjax.cli.help import flag_group
from mtpjax.messages import did_you_mean

NO_DRAFTS = "NONE"


def add_drafter_flags(parser) -> None:
    """Adds the flags of a command that decodes with one drafter."""
    flag_group(parser, "drafts").add_argument(
        "--speculative-algorithm",
        default=None,
        metavar="NAME",
        help="draft method. MTP (or NEXTN, EAGLE): the model's MTP modules; EAGLE3, MEDUSA, DFLASH or DSPARK: the "
        "drafter of --speculative-draft-model-path; NGRAM: n-grams of the text; NONE: no drafts; "
        "package.module:RECORD: your own method (default: the drafter of --speculative-draft-model-path, else the "
        "MTP modules, if the model has any)",
    )
    add_path_flags(parser)


def add_path_flags(parser) -> None:
    """Adds the flags for the drafter's files and how to read them."""
    flag_group(parser, "drafts").add_argument(
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        default=None,
        help="folder or Hub repository of a drafter for this model: EAGLE-3, Medusa, DFlash or DSpark, in the format "
        "of SpecForge, speculators, vLLM, z-lab or DeepSpec. --num-steps is then by default 3 for EAGLE-3, else as "
        "many levels as the drafter has",
    )
    add_reading_flags(parser)


def add_reading_flags(parser) -> None:
    """Adds the flags that say how to read the files of drafters."""
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


def reading_of(options) -> Any:
    """Returns the arguments of `mtpjax.load_drafter` that the flags of `add_reading_flags` give."""
    return {name: getattr(options, name) for name in ("aux_layers", "sample_from_anchor", "last_layer_state")}


def chosen_method(options):
    """Returns the `DraftMethod` that `--speculative-algorithm` or `--drafter` names; None: no flag, or NONE."""
    from mtpjax.drafters.methods import METHODS, find_method

    path, own = options.speculative_draft_model_path, getattr(options, "drafter", "mtp")
    if options.speculative_algorithm is None:
        if own != "mtp" and path is not None:
            raise ValueError(f"--drafter {own} and --speculative-draft-model-path name two drafters")
        if own == "mtp":
            return None
        if (method := find_method(own)).from_settings is None:
            raise ValueError(f"--drafter {own} has files: name them with --speculative-draft-model-path instead")
        return method
    if own != "mtp":
        raise ValueError(f"--drafter {own} and --speculative-algorithm name two drafters")
    name = options.speculative_algorithm
    name = name if ":" in name else name.upper()
    # SGLang's EAGLE is a drafter in files, or MTP modules: the later one counts, which fits the path.
    fitting = sorted(METHODS, key=lambda method: (method.files is not None) == (path is not None))
    known = {each: method for method in fitting for each in method.algorithms} | {NO_DRAFTS: None}
    if ":" not in name and name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"--speculative-algorithm must be one of {', '.join(known)}, got {name}{hint}")
    method = find_method(name) if ":" in name else known[name]
    if path is not None and (method is None or method.files is None):
        others = ", ".join(each.algorithms[0] for each in METHODS if each.files is not None)
        raise ValueError(
            f"--speculative-algorithm {name} has no files of its own: leave --speculative-draft-model-path out, or "
            f"choose one of {others}"
        )
    if path is None and method is not None and method.from_settings is None:
        raise ValueError(f"--speculative-algorithm {name} needs --speculative-draft-model-path")
    return method


def load_drafter_of(options, settings: dict[str, Any], model) -> tuple[dict[str, Any], Any]:
    """Loads the drafter of the flags; returns arguments of `DecodeConfig` with it, and its parameters."""
    path, wanted, method = options.speculative_draft_model_path, options.speculative_algorithm, chosen_method(options)
    threshold = options.speculative_dspark_confidence_threshold
    # 1. Without files, no flag may need such a drafter.
    if path is None:
        needs_files = {f"--{name.replace('_', '-')}": value for name, value in reading_of(options).items()}
        for flag, value in (needs_files | {"--speculative-dspark-confidence-threshold": threshold}).items():
            if value is not None:
                raise ValueError(f"{flag} needs --speculative-draft-model-path")
        if wanted is None:
            return settings, None
        if method is None:
            return settings | {"num_steps": 0, "topk": 1, "num_draft_tokens": None}, None
        return settings | {"drafter": wanted if ":" in wanted else method.name}, None
    from mtpjax.drafters.methods import METHODS, load_drafter, method_of

    # 2. Load the drafter, and check that it is of the requested kind.
    is_users = method is not None and method not in METHODS
    drafter, draft_params = load_drafter(path, model=model, method=method if is_users else None, **reading_of(options))
    found: Any = method if is_users else method_of(drafter)
    if method not in (None, found):
        raise ValueError(f"--speculative-algorithm is {wanted}, but {path} is {found.title}")
    if threshold is not None:
        if not hasattr(drafter, "confidence_threshold"):
            raise ValueError(
                f"--speculative-dspark-confidence-threshold is for DSPARK drafters, but {path} is {found.title}"
            )
        drafter = dataclasses.replace(drafter, confidence_threshold=threshold)
    # 3. The default depth: all levels of the drafter, or the method's usual number.
    steps = settings["num_steps"]
    steps = drafter.max_levels or found.default_levels if steps is None else steps
    return settings | {"drafter": drafter, "num_steps": steps}, draft_params
