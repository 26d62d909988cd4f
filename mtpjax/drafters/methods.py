"""Lists all draft methods, finds a method by name or drafter, and loads and saves drafters."""

from typing import Any, Literal

import jax.numpy as jnp

from mtpjax.decoding.decoder import Drafter
from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.dflash.method import DFLASH
from mtpjax.drafters.dspark.method import DSPARK
from mtpjax.drafters.eagle3.method import EAGLE3
from mtpjax.drafters.files.read import StoredDrafter, read_drafter
from mtpjax.drafters.files.trunk_layers import LastLayerState
from mtpjax.drafters.files.write import write_drafter
from mtpjax.drafters.lookup.method import LOOKUP
from mtpjax.drafters.medusa.method import MEDUSA
from mtpjax.drafters.method import READINGS, DraftMethod
from mtpjax.drafters.mtp.method import MTP
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.errors import UsageError, printable
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.messages import did_you_mean
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.records import import_record

METHODS: tuple[DraftMethod, ...] = (MTP, LOOKUP, EAGLE3, MEDUSA, DFLASH, DSPARK)
DRAFTER_FOLDER = "drafter"  # in the run folder of `mtpjax train drafter=...`


def find_method(name: DraftMethod | str) -> DraftMethod:
    """Finds a method by name, or a user-defined one by `package.module:RECORD`; returns a `DraftMethod` unchanged.

    Raises:
        UsageError: there is no such method, or the user's module or object cannot be imported.
    """
    if isinstance(name, DraftMethod):
        return name
    if ":" in name:
        return import_record(name, DraftMethod)
    known = {method.name: method for method in METHODS}
    if name not in known:
        raise UsageError(
            f"drafter must be one of {', '.join(known)}, or package.module:RECORD, got {printable(name, 60)}"
            f"{did_you_mean(name, known)}"
        )
    return known[name]


def method_of(drafter: str | Drafter) -> DraftMethod | None:
    """Returns the method of `DecodeConfig.drafter`; None for a user-defined drafter."""
    if isinstance(drafter, str):
        return find_method(drafter)
    return next((method for method in METHODS if method.drafter is type(drafter)), None)


def uses_mtp_modules(drafter: str | Drafter) -> bool:
    """Returns whether `DecodeConfig.drafter` drafts with the model's MTP modules."""
    method = method_of(drafter)
    return method is not None and method.is_of_model


def default_num_steps(drafter: str | Drafter, config: ModelConfig, method: DraftMethod | None = None) -> int:
    """Returns the default number of draft levels; 0 if the method uses the model's MTP modules and there are none.

    Args:
        drafter: as in `DecodeConfig`.
        config: the model's.
        method: the drafter's method; None: found by the drafter.
    """
    method = method or method_of(drafter)
    if method is not None and method.is_of_model and not config.num_mtp_modules:
        return 0
    return getattr(drafter, "max_levels", None) or (1 if method is None else method.default_levels)


def load_drafter(
    path,
    *,
    model: MTPModel,
    dtype: Any = None,
    aux_layers: Literal["entered", "output"] | None = None,
    norm_before_residual: bool | None = None,
    sample_from_anchor: bool | None = None,
    last_layer_state: LastLayerState | None = None,
    method: DraftMethod | str | None = None,
) -> tuple[TrainedDrafter, DraftParams]:
    """Loads a published drafter for a trunk.

    Reads EAGLE-3 and 3.1 drafters from SpecForge, SGLang, speculators and vLLM, Medusa heads from the authors and vLLM,
    DFlash drafters from z-lab and speculators, and DSpark drafters from DeepSpec, SpecForge and speculators. Files are
    safetensors or a `.pt` file, which is never unpickled. Tensor names may have prefixes from training programs.

    Args:
        path: the drafter's directory, the folder of its training run, or a Hugging Face Hub repository (extra `hub`).
        model: the trunk that the drafter is for.
        dtype: dtype to cast the parameters to. None keeps the dtypes in the files.
        aux_layers: whether the layer list of an EAGLE-3 file means the states that enter these layers ("entered") or
            their outputs ("output"). None means "entered" for speculators' files, and raises an error for ambiguous
            SpecForge files.
        norm_before_residual: value of this EAGLE-3 setting, for a speculators file that does not specify it.
        sample_from_anchor: whether the first slot of a DFlash block also drafts, for a file that does not specify it.
            None means True for DeepSpec's files and False for others.
        last_layer_state: whether a drafter that reads the last trunk layer reads its state before or after the final
            norm, for a file that does not specify it. None means after the norm for z-lab's and DeepSpec's files and
            before it for others, and logs a warning.
        method: the drafter's method or its name, such as "eagle3", or "package.module:RECORD" for a user-defined
            method. None detects the method from the files.

    Returns:
        `(drafter, draft_params)`, for `DecodeConfig(drafter=drafter)` and `speculative_generate(draft_params=...)`.

    Raises:
        CheckpointError: the files are damaged or not supported, or no argument resolves their ambiguity.
        ValueError: the drafter is for a trunk with different sizes.

    Example:
        >>> import tempfile
        >>> import jax, mtpjax
        >>> from mtpjax.drafters import DraftParams
        >>> from mtpjax.drafters.medusa.drafting import MedusaDrafter
        >>> from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
        >>> model = mtpjax.MTPModel(mtpjax.presets["tiny"])
        >>> config = MedusaConfig(hidden_size=64, vocab_size=256, num_heads=2)
        >>> heads = Medusa(config).init(jax.random.key(0), jax.numpy.zeros((1, 64)))["params"]
        >>> path = tempfile.mkdtemp() + "/heads"
        >>> mtpjax.save_drafter(path, MedusaDrafter(architecture=config), DraftParams(heads))
        >>> drafter, draft_params = mtpjax.load_drafter(path, model=model)
        >>> drafter.architecture.num_heads
        2
    """
    if not isinstance(model, MTPModel):
        raise UsageError(f"model must be an MTPModel, got {type(model).__name__}")
    # 1. Read the files. A training run saves its drafter in a subfolder.
    trunk = TrunkSizes(model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers)
    reading: Any = {"aux_layers": aux_layers, "norm_before_residual": norm_before_residual}
    reading |= {"sample_from_anchor": sample_from_anchor, "last_layer_state": last_layer_state}
    for name, choices in READINGS.items():
        if reading[name] not in (None, *choices):
            raise UsageError(f"{name} must be {' or '.join(map(repr, choices))}, got {reading[name]!r}")
    found = find_checkpoint(path, is_model=False)
    found = found / DRAFTER_FOLDER if (found / DRAFTER_FOLDER / "config.json").is_file() else found
    methods = METHODS if method is None else (find_method(method),)
    if method is not None:
        methods[0].require_files()
    stored = read_drafter(found, trunk, methods=methods, dtype=dtype, **reading)
    # 2. Check the vocabulary and width. The files do not say which trunk of these sizes the drafter was trained for.
    sizes = stored.config.trunk
    if sizes[:2] != trunk[:2]:
        raise UsageError(
            f"{path} is for a trunk of vocabulary {sizes[0]} and width {sizes[1]}; this one has vocabulary "
            f"{trunk[0]} and width {trunk[1]}"
        )
    ids = None if stored.draft_ids is None else jnp.asarray(stored.draft_ids)
    return stored.method.for_architecture(stored.config), DraftParams(stored.params, ids)


def save_drafter(
    path,
    drafter: TrainedDrafter,
    draft_params: DraftParams,
    *,
    like=None,
    format: str | None = None,
    method: DraftMethod | str | None = None,
) -> None:
    """Saves a drafter as safetensors and `config.json`, for SGLang, vLLM or `mtpjax.load_drafter`.

    Args:
        path: the folder to write; it must be new or empty.
        drafter: the drafter.
        draft_params: its parameters.
        like: directory that the drafter was loaded from. Its `config.json`, other files, and tensor names, order and
            dtypes are kept, so an unchanged drafter gives the same bytes.
        format: format to write without `like`: "specforge" or "speculators" for EAGLE-3, "medusa" or "vllm" for Medusa,
            "z-lab" or "speculators" for DFlash, "deepspec" or "speculators" for DSpark. None means "speculators" for
            EAGLE-3, because its layer ids are unambiguous there, and the authors' format for other methods.
        method: the drafter's method, if it is user-defined.

    Returns:
        None.

    Raises:
        CheckpointError: the format or `like` does not match the architecture.
        FileExistsError: `path` exists and is not empty.

    Example:
        >>> import mtpjax
        >>> mtpjax.save_drafter("out", None, None)
        Traceback (most recent call last):
        ...
        mtpjax.errors.UsageError: drafter must be a TrainedDrafter, got NoneType
    """
    if not isinstance(drafter, TrainedDrafter) or not isinstance(draft_params, DraftParams):
        raise UsageError(f"drafter must be a TrainedDrafter, got {type(drafter).__name__}")
    if like is not None and format is not None:
        raise UsageError(f"format {format!r} and like exclude each other: the files of like decide the format")
    found = method_of(drafter) if method is None else find_method(method)
    if found is None:
        raise UsageError(f"the draft method of {type(drafter).__name__} is unknown: pass its DraftMethod as method")
    stored = StoredDrafter(found, drafter.architecture, draft_params.network, draft_params.draft_ids)
    write_drafter(path, stored, like=None if like is None else find_checkpoint(like, is_model=False), form=format)
