"""Writes a drafter in a published format: with the bytes of the original, or as new files."""

import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from conversion.export import TensorAssembler
from conversion.files import CheckpointFiles
from conversion.shards import (
    Shard,
    TensorEntry,
    copy_files,
    entry_of,
    make_shard,
    split_into_shards,
    write_index,
    write_shards,
)
from conversion.tensor_slice import ParamSpec
from conversion.weight_files import SINGLE
from mtpjax.atomic import atomic_folder
from mtpjax.drafters.dflash.hf_config import describe_dflash
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dflash.tensor_names import dflash_specs
from mtpjax.drafters.dspark.network import DSparkConfig
from mtpjax.drafters.eagle3.hf_config import TrunkSizes, describe_eagle3
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.drafters.eagle3.tensor_names import IS_DRAFTED, OFFSETS, eagle3_specs, is_drafted
from mtpjax.drafters.files.read import (
    CONFIG,
    NO_SCALES,
    Config,
    DrafterPlan,
    Reading,
    StoredDrafter,
    config_bytes,
    make_drafter_plan,
    open_drafter,
)
from mtpjax.drafters.files.tensor_names import ALIASES, MIDLAYER, rename_slices
from mtpjax.drafters.files.torch_file import TorchFile
from mtpjax.drafters.files.trunk_layers import STATES
from mtpjax.drafters.medusa.hf_files import TOKEN_MAP, describe_medusa, medusa_specs
from mtpjax.drafters.medusa.network import MedusaConfig
from mtpjax.errors import CheckpointFileError, ConfigError


def write_drafter(path, drafter: StoredDrafter, *, like=None, form: str | None = None) -> None:
    """Writes a drafter as safetensors and `config.json`.

    Args:
        path: the folder to write; it appears once it is complete.
        drafter: the drafter.
        like: a directory of the same architecture, whose names, order, dtypes, `config.json` and other files are kept.
            Unchanged parameters then give the same bytes in every safetensors file.
        form: without `like`, the format: "specforge" or "speculators" for EAGLE-3, "medusa" or "vllm", "z-lab",
            "deepspec" or "speculators" for DFlash and DSpark. None: "speculators" for EAGLE-3, "medusa" for Medusa,
            "z-lab" for DFlash, "deepspec" for DSpark.

    Raises:
        CheckpointFileError: `like` is another architecture.
        ConfigError: the format cannot express the architecture.
        FileExistsError: `path` exists and is not empty.
    """
    with contextlib.ExitStack() as stack:
        if like is None:
            files, small_files, names = None, (), {}
            specs, values = _describe(drafter.config, form)
            content = (json.dumps(values, indent=2) + "\n").encode()
        else:
            like = pathlib.Path(like)
            files = stack.enter_context(open_drafter(like))
            plan = _plan_like(like, files, drafter.config)
            specs, names = plan.specs, plan.names
            content = config_bytes(like)
            small_files = files.other_files() if isinstance(files, CheckpointFiles) else ()
        blocks = _tensor_blocks(specs, drafter, names)
        if isinstance(files, CheckpointFiles):
            groups = {
                file: [entry_of(each) for each in files.tensors.values() if each.file == file] for file in files.headers
            }
            shards = [Shard(file, files.headers[file], tuple(entries)) for file, entries in groups.items()]
        else:
            shards = _new_shards(specs, drafter)
        folder = stack.enter_context(atomic_folder(pathlib.Path(path).absolute()))
        write_shards(folder, shards, blocks)
        if files is None or isinstance(files, TorchFile):
            write_index(folder, shards)
        else:
            copy_files(folder, files.bytes_of, [name for name in small_files if name != CONFIG])
        (folder / CONFIG).write_bytes(content)


def _plan_like(path: pathlib.Path, files: CheckpointFiles | TorchFile, config: Config) -> DrafterPlan:
    """Plans to write `config` like the files at `path`, under the reading of the files that gives this architecture."""
    if isinstance(config, Eagle3Config):
        trunk = TrunkSizes(config.block.vocab_size, config.target_hidden_size, config.num_target_layers)
    elif isinstance(config, DFlashConfig):
        trunk = TrunkSizes(config.block.vocab_size, config.block.hidden_size, config.num_target_layers)
    else:
        trunk = TrunkSizes(config.vocab_size, config.hidden_size, 0)
    for aux_layers, switch, state in itertools.product(("entered", "output"), (False, True), STATES):
        reading: Reading = {"aux_layers": aux_layers, "norm_before_residual": switch, "sample_from_anchor": switch}
        reading["last_layer_state"] = state
        try:
            plan = make_drafter_plan(path, files, trunk, **reading)
        except ConfigError:
            continue
        if plan.config == config:
            return plan
    raise CheckpointFileError(f"{path} is a drafter of another architecture: name a format instead")


def _describe(config: Config, form: Any) -> tuple[dict[str, ParamSpec], dict[str, Any]]:
    """Returns the tensors and the configuration of a new file."""
    if isinstance(config, Eagle3Config):
        form = _choose_form(form, "EAGLE-3", ("speculators", "specforge"))
        specs, first = eagle3_specs(config), ALIASES[MIDLAYER]
        # SpecForge's own name of the only layer.
        names = {part.name: part.name.replace(first, MIDLAYER) for spec in specs.values() for part in spec.slices}
        return rename_slices(specs, names if form == "specforge" else {}), describe_eagle3(config, form)
    if isinstance(config, DSparkConfig):
        form = _choose_form(form, "DSpark", ("deepspec", "speculators"))
        return dflash_specs(config), describe_dflash(config, form)
    if isinstance(config, DFlashConfig):
        form = _choose_form(form, "DFlash", ("z-lab", "speculators"))
        return dflash_specs(config), describe_dflash(config, form)
    form = _choose_form(form, "Medusa", ("medusa", "vllm"))
    return medusa_specs(config, form), describe_medusa(config, form)


def find_form(config: Config, *, has_draft_ids: bool) -> Any:
    """Finds a format that can express a drafter.

    EAGLE-3 is written as speculators and vLLM read it, because SpecForge's list of layers has two readings. The others
    are written as their authors do, or, with a draft vocabulary, as vLLM reads Medusa and speculators the blocks.

    Args:
        config: the architecture.
        has_draft_ids: the drafter has a draft vocabulary.

    Returns:
        The name of the format.

    Raises:
        ConfigError: no format can.
    """
    if isinstance(config, Eagle3Config):
        forms = ["speculators"]
    elif isinstance(config, MedusaConfig):
        forms = ["medusa", "vllm"]
    else:
        forms = ["deepspec" if isinstance(config, DSparkConfig) else "z-lab", "speculators"]
    reasons = []
    for form in reversed(forms) if has_draft_ids else forms:
        try:
            _describe(config, form)
            return form
        except ConfigError as error:
            reasons.append(f"{form}: {error}")
    raise ConfigError(f"no format can express this drafter ({'; '.join(reasons)})")


def _choose_form(form: str | None, name: str, forms: tuple[str, str]) -> Any:
    """Returns the format to write; None is the first one."""
    if form not in (None, *forms):
        raise ConfigError(f"{name} is written as '{forms[0]}' or '{forms[1]}', not {form!r}")
    return form or forms[0]


def _ids_tensors(drafter: StoredDrafter) -> dict[str, np.ndarray]:
    """Returns the tensors of the draft vocabulary by name."""
    if drafter.draft_ids is None:
        return {}
    ids = np.asarray(drafter.draft_ids).astype(np.int64)
    if isinstance(drafter.config, MedusaConfig):
        return {TOKEN_MAP: ids}
    return {OFFSETS: ids - np.arange(len(ids)), IS_DRAFTED: is_drafted(ids, drafter.config.block.vocab_size)}


def _flat(drafter: StoredDrafter) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in flatten_dict(drafter.params, sep="/").items()}


def _tensor_blocks(
    specs: dict[str, ParamSpec], drafter: StoredDrafter, names: Mapping[str, str]
) -> Callable[[TensorEntry], Iterator[np.ndarray]]:
    """Returns the function that makes the rows of a tensor, block after block."""
    flat = _flat(drafter)
    ids = {names.get(plain, plain): array for plain, array in _ids_tensors(drafter).items()}
    different = sorted(flat.keys() ^ specs.keys())
    if different:
        raise CheckpointFileError(f"the parameters are not the drafter's: {', '.join(different[:5])}")
    for name, spec in specs.items():
        if flat[name].shape != spec.shape:
            raise CheckpointFileError(f"parameter {name} has shape {flat[name].shape}, not {spec.shape}")
    assembler = TensorAssembler(specs, lambda name, index: flat[name][index], scaled={}, scales=NO_SCALES, tied={})

    def blocks(entry: TensorEntry) -> Iterator[np.ndarray]:
        if entry.name in ids:
            return iter([ids[entry.name].astype(entry.dtype)])
        return assembler.blocks(entry)

    return blocks


def _new_shards(specs: dict[str, ParamSpec], drafter: StoredDrafter) -> list[Shard]:
    """Lays the tensors out as the safetensors package does: by falling size of an element, then by name."""
    flat, ids = _flat(drafter), _ids_tensors(drafter)
    entries = {
        piece.name: TensorEntry(piece.name, flat[path].dtype, piece.shape)
        for path, spec in specs.items()
        for piece in spec.slices
    }
    entries |= {name: TensorEntry(name, array.dtype, array.shape) for name, array in ids.items()}
    ordered = sorted(entries.values(), key=lambda entry: (-entry.dtype.itemsize, entry.name))
    shards = split_into_shards(ordered)
    return shards if len(shards) > 1 else [make_shard(SINGLE, ordered, {"format": "pt"})]
