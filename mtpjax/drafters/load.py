"""`mtpjax.load_drafter` and `mtpjax.save_drafter`: published EAGLE-3, Medusa, DFlash and DSpark drafters."""

from typing import Any, Literal

import jax.numpy as jnp

from mtpjax.drafters.dflash.drafting import DFlashDrafter, DFlashParams
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSparkConfig
from mtpjax.drafters.eagle3.drafting import Eagle3Drafter, Eagle3Params
from mtpjax.drafters.eagle3.hf_config import TrunkSizes
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.files.read import StoredDrafter, read_drafter
from mtpjax.drafters.files.trunk_layers import STATES, LastLayerState
from mtpjax.drafters.files.write import write_drafter
from mtpjax.drafters.medusa.drafting import MedusaDrafter, MedusaParams
from mtpjax.errors import UsageError
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.models.model import MTPModel

DRAFTER_FOLDER = "drafter"  # in the run folder of `mtpjax train drafter=...`
TrainedDrafter = Eagle3Drafter | MedusaDrafter | DFlashDrafter
TrainedParams = Eagle3Params | MedusaParams | DFlashParams


def load_drafter(
    path,
    *,
    model: MTPModel,
    dtype: Any = None,
    aux_layers: Literal["entered", "output"] | None = None,
    norm_before_residual: bool | None = None,
    sample_from_anchor: bool | None = None,
    last_layer_state: LastLayerState | None = None,
) -> tuple[TrainedDrafter, TrainedParams]:
    """Loads a published drafter for a trunk.

    Reads these formats, and a `.pt` file without unpickling it:

    - EAGLE-3 and 3.1: SpecForge and SGLang (`LlamaForCausalLMEagle3`), speculators and vLLM (`Eagle3Speculator`), with
      layers of Llama or Qwen3, whatever `model_type` says.
    - Medusa: its authors' (`medusa_lm_head`, safetensors or `.pt`), vLLM.
    - DFlash: z-lab (`DFlashDraftModel`), speculators.
    - DSpark: DeepSpec (`Qwen3DSparkModel`), SpecForge (`DSparkDraftModel`), speculators.

    Names of tensors may have the prefixes of training programs, such as `model.` or `module.`.

    Args:
        path: the drafter's directory, the run folder that trained it, or a repository of the Hugging Face Hub (extra
            `hub`).
        model: the trunk that the drafter is for.
        dtype: dtype to cast the parameters to. None keeps those of the files.
        aux_layers: the meaning of listed trunk layers of an EAGLE-3 file: states that enter these layers, or outputs of
            these layers. None takes the states that enter for speculators' files; SpecForge's do not say which.
        norm_before_residual: this switch of EAGLE-3, for a speculators file without it.
        sample_from_anchor: this switch of DFlash, for a file without it: the first slot of a block drafts too. None
            takes it as True for DeepSpec's files, and as False for others.
        last_layer_state: which output of the last trunk layer a drafter reads, if it reads one and its file does not
            say it: before the final norm, or after it. None takes the latter for z-lab's and DeepSpec's files and the
            former for others, with a warning.

    Returns:
        `(drafter, draft_params)`, for `DecodeConfig(drafter=drafter)` and `speculative_generate(draft_params=...)`.

    Raises:
        CheckpointError: the files are damaged, not supported, or have two readings and none is chosen.
        ValueError: the drafter is for a trunk of other sizes.

    Example:
        >>> import tempfile
        >>> import jax, mtpjax
        >>> from mtpjax.drafters.medusa.drafting import MedusaDrafter, MedusaParams
        >>> from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
        >>> model = mtpjax.MTPModel(mtpjax.presets["tiny"])
        >>> config = MedusaConfig(hidden_size=64, vocab_size=256, num_heads=2)
        >>> heads = Medusa(config).init(jax.random.key(0), jax.numpy.zeros((1, 64)))["params"]
        >>> path = tempfile.mkdtemp() + "/heads"
        >>> mtpjax.save_drafter(path, MedusaDrafter(architecture=config), MedusaParams(heads))
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
    if last_layer_state not in (None, *STATES):
        raise UsageError(f"last_layer_state must be {' or '.join(map(repr, STATES))}, got {last_layer_state!r}")
    if aux_layers not in (None, "entered", "output"):
        raise UsageError(f"aux_layers must be 'entered' or 'output', got {aux_layers!r}")
    for name in ("norm_before_residual", "sample_from_anchor"):
        if choices[name] not in (None, False, True):
            raise UsageError(f"{name} must be True or False, got {choices[name]!r}")
    found = find_checkpoint(path, is_model=False)
    found = found / DRAFTER_FOLDER if (found / DRAFTER_FOLDER / "config.json").is_file() else found
    stored = read_drafter(found, trunk, dtype=dtype, **choices)
    own, ids = stored.config, None if stored.draft_ids is None else jnp.asarray(stored.draft_ids)
    # 2. The architecture says which draft method runs the network.
    if isinstance(own, Eagle3Config):
        sizes, drafter = (own.block.vocab_size, own.target_hidden_size), Eagle3Drafter(architecture=own)
        params: TrainedParams = Eagle3Params(stored.params, ids)
    elif isinstance(own, DFlashConfig):
        sizes = own.block.vocab_size, own.block.hidden_size
        drafter = DSparkDrafter(architecture=own) if isinstance(own, DSparkConfig) else DFlashDrafter(architecture=own)
        params = DFlashParams(stored.params, ids)
    else:
        sizes, drafter = (own.vocab_size, own.hidden_size), MedusaDrafter(architecture=own)
        params = MedusaParams(stored.params, ids)
    # 3. A drafter fits one vocabulary and width. The files do not say for which trunk of these sizes it was trained.
    if sizes != trunk[:2]:
        raise UsageError(
            f"{path} is for a trunk of vocabulary {sizes[0]} and width {sizes[1]}; this one has {trunk[0]} and "
            f"{trunk[1]}"
        )
    return drafter, params


def save_drafter(
    path,
    drafter: TrainedDrafter,
    draft_params: TrainedParams,
    *,
    like=None,
    format: Literal["specforge", "speculators", "medusa", "vllm", "z-lab", "deepspec"] | None = None,
) -> None:
    """Saves a drafter as safetensors and `config.json`, for SGLang, vLLM or `mtpjax.load_drafter`.

    Args:
        path: the folder to write; it must be new or empty.
        drafter: the drafter.
        draft_params: its parameters.
        like: the directory that it was loaded from: its `config.json`, its other files, and the names, order and dtypes
            of its tensors are kept. A drafter that was not changed gives the same bytes.
        format: without `like`: "specforge" or "speculators" for EAGLE-3, "medusa" or "vllm" for Medusa, "z-lab" or
            "speculators" for DFlash, "deepspec" or "speculators" for DSpark. None takes "speculators" for EAGLE-3,
            whose layer ids have one meaning there, and the authors' format for the others.

    Returns:
        None.

    Raises:
        CheckpointError: the format, or `like`, is of another architecture.
        FileExistsError: `path` exists and is not empty.

    Example:
        >>> import mtpjax
        >>> mtpjax.save_drafter("out", None, None)
        Traceback (most recent call last):
        ...
        mtpjax.errors.UsageError: drafter must be an Eagle3Drafter, MedusaDrafter or DFlashDrafter, got NoneType
    """
    if isinstance(drafter, Eagle3Drafter) and isinstance(draft_params, Eagle3Params):
        stored = StoredDrafter(drafter.architecture, draft_params.network, draft_params.draft_ids)
    elif isinstance(drafter, MedusaDrafter) and isinstance(draft_params, MedusaParams):
        stored = StoredDrafter(drafter.architecture, draft_params.heads, draft_params.draft_ids)
    elif isinstance(drafter, DFlashDrafter) and isinstance(draft_params, DFlashParams):
        stored = StoredDrafter(drafter.architecture, draft_params.network, draft_params.draft_ids)
    else:
        raise UsageError(
            f"drafter must be an Eagle3Drafter, MedusaDrafter or DFlashDrafter, got {type(drafter).__name__}"
        )
    if like is not None and format is not None:
        raise UsageError(f"format {format!r} with like: the files of like decide the format")
    write_drafter(path, stored, like=None if like is None else find_checkpoint(like, is_model=False), form=format)
