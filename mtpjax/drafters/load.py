"""`mtpjax.load_drafter` and `mtpjax.save_drafter`: published EAGLE-3, Medusa, DFlash and DSpark drafters."""

from typing import Any, Literal

import jax.numpy as jnp

from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.files.read import StoredDrafter, read_drafter
from mtpjax.drafters.files.trunk_layers import STATES, LastLayerState
from mtpjax.drafters.files.write import write_drafter
from mtpjax.drafters.method import DraftMethod
from mtpjax.drafters.methods import METHODS, find_method, method_of
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.errors import UsageError
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.models.model import MTPModel

DRAFTER_FOLDER = "drafter"  # in the run folder of `mtpjax train drafter=...`


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

    Reads these formats, and a `.pt` file without unpickling it. Tensors may have prefixes of training programs:

    - EAGLE-3 and 3.1: SpecForge and SGLang (`LlamaForCausalLMEagle3`), speculators and vLLM (`Eagle3Speculator`), with
      layers of Llama or Qwen3, whatever `model_type` says.
    - Medusa: its authors' (`medusa_lm_head`, safetensors or `.pt`), vLLM.
    - DFlash: z-lab (`DFlashDraftModel`), speculators.
    - DSpark: DeepSpec (`Qwen3DSparkModel`), SpecForge (`DSparkDraftModel`), speculators.

    Args:
        path: the drafter's directory, the run folder that trained it, or a repository of the Hugging Face Hub (extra
            `hub`).
        model: the trunk that the drafter is for.
        dtype: dtype to cast the parameters to. None keeps those of the files.
        aux_layers: the meaning of listed trunk layers of an EAGLE-3 file: states that enter these layers, or outputs of
            these layers. None takes the states that enter for speculators' files, and is an error for SpecForge's.
        norm_before_residual: this EAGLE-3 setting, for a speculators file without it.
        sample_from_anchor: this DFlash setting, for a file without it: the first slot of a block drafts too. None takes
            it as True for DeepSpec's files, and as False for others.
        last_layer_state: which output of the last trunk layer a drafter reads, if it reads one and its file does not
            say it: before the final norm, or after it. None takes the latter for z-lab's and DeepSpec's files and the
            former for others, with a warning.
        method: the drafter's method, or its name, such as "eagle3" or "package.module:RECORD" of a user-defined method.
            None: detected from the files.

    Returns:
        `(drafter, draft_params)`, for `DecodeConfig(drafter=drafter)` and `speculative_generate(draft_params=...)`.

    Raises:
        CheckpointError: the files are damaged, not supported, or have two readings and neither is chosen.
        ValueError: the drafter is for a trunk of different sizes.

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
    # 1. Read the files. A training run has its drafter in a separate folder.
    config = model.config
    trunk = TrunkSizes(config.vocab_size, config.hidden_size, config.num_hidden_layers)
    choices: dict[str, Any] = {"aux_layers": aux_layers, "norm_before_residual": norm_before_residual}
    choices |= {"sample_from_anchor": sample_from_anchor, "last_layer_state": last_layer_state}
    _check_reading(choices)
    found = find_checkpoint(path, is_model=False)
    found = found / DRAFTER_FOLDER if (found / DRAFTER_FOLDER / "config.json").is_file() else found
    methods = METHODS if method is None else (_with_files(method),)
    stored = read_drafter(found, trunk, methods=methods, dtype=dtype, **choices)
    # 2. The method makes the drafter of an architecture.
    drafter, sizes = stored.method.for_architecture(stored.config), stored.config.trunk
    params = DraftParams(stored.params, None if stored.draft_ids is None else jnp.asarray(stored.draft_ids))
    # 3. A drafter fits one vocabulary and width. The files do not say for which trunk of these sizes it was trained.
    if sizes[:2] != trunk[:2]:
        raise UsageError(
            f"{path} is for a trunk of vocabulary {sizes[0]} and width {sizes[1]}; this one has {trunk[0]} and "
            f"{trunk[1]}"
        )
    return drafter, params


def _check_reading(reading: dict[str, Any]) -> None:
    """Raises `UsageError` for a choice that does not exist."""
    switches = dict.fromkeys(("norm_before_residual", "sample_from_anchor"), (True, False))
    for name, choices in ({"aux_layers": ("entered", "output"), "last_layer_state": STATES} | switches).items():
        if reading[name] not in (None, *choices):
            raise UsageError(f"{name} must be {' or '.join(map(repr, choices))}, got {reading[name]!r}")


def _with_files(method: DraftMethod | str) -> DraftMethod:
    found = find_method(method) if isinstance(method, str) else method
    if found.files is None:
        raise UsageError(f"draft method {found.name} has no files of its own")
    return found


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
        like: the directory that it was loaded from: its `config.json`, its other files, and the names, order and dtypes
            of its tensors are kept. An unchanged drafter gives the same bytes.
        format: without `like`: "specforge" or "speculators" for EAGLE-3, "medusa" or "vllm" for Medusa, "z-lab" or
            "speculators" for DFlash, "deepspec" or "speculators" for DSpark. None takes "speculators" for EAGLE-3,
            where layer ids are unambiguous, and the authors' format for the others.
        method: the drafter's method, if it is user-defined.

    Returns:
        None.

    Raises:
        CheckpointError: the format, or `like`, does not fit the architecture.
        FileExistsError: `path` exists and is not empty.

    Example:
        >>> import mtpjax
        >>> mtpjax.save_drafter("out", None, None)
        Traceback (most recent call last):
        ...
        mtpjax.errors.UsageError: drafter must be a drafter with parameters of its own, got NoneType
    """
    if not isinstance(drafter, TrainedDrafter) or not isinstance(draft_params, DraftParams):
        raise UsageError(f"drafter must be a drafter with parameters of its own, got {type(drafter).__name__}")
    if like is not None and format is not None:
        raise UsageError(f"format {format!r} with like: the files of like decide the format")
    found = method_of(drafter) if method is None else _with_files(method)
    if found is None:
        raise UsageError(f"the draft method of {type(drafter).__name__} is not known: pass its record as method")
    stored = StoredDrafter(found, drafter.architecture, draft_params.network, draft_params.draft_ids)
    write_drafter(path, stored, like=None if like is None else find_checkpoint(like, is_model=False), form=format)
