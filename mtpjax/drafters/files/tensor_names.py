"""Computes plain names for a drafter's tensors, without the prefixes that training programs add.

Programs save the drafter inside other modules (`model.fc.weight`, `draft_model.layers.0...`, or PyTorch DDP's
`module.fc.weight`), and formats name a few modules differently. Parameter specs use the plain names.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from conversion.load_plan import IGNORED_SUFFIXES
from conversion.tensor_slice import ParamSpec
from mtpjax.drafters.method import DraftMethod
from mtpjax.errors import CheckpointFileError

# Wrappers of DDP, torch.compile, FSDP and activation checkpointing, which can occur anywhere in a name.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Attributes that hold the whole drafter and therefore prefix its names; methods may add more (`DrafterFiles.owners`).
OWNERS = {"model", "draft_model", "draft", "drafter", "speculator"}
MIDLAYER = "midlayer."  # the first layer in EAGLE's and SpecForge's files; `layers.0.` in speculators'
# Maps older module names for EAGLE-3.1's three norms, and Muse's names for DFlash's context, to plain names.
ALIASES = {
    MIDLAYER: "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}


def plain_name(name: str, owners: Collection[str]) -> str:
    """Returns the plain name of a tensor, without the attributes that hold the drafter."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] in owners:
        parts = parts[1:]
    name = ".".join(parts)
    for other, plain in ALIASES.items():
        if name.startswith(other):
            return plain + name.removeprefix(other)
    return name


def names_in_files(tensors: Iterable[str], path, methods: Sequence[DraftMethod]) -> dict[str, str]:
    """Maps plain names to the names in the files. Raises an error if two tensors have the same plain name."""
    owners = OWNERS.union(*((method.name, *method.files.owners) for method in methods if method.files is not None))
    names: dict[str, str] = {}
    for name in sorted(tensors):
        if name.endswith(IGNORED_SUFFIXES):
            continue
        plain = plain_name(name, owners)
        other = names.setdefault(plain, name)
        if other != name:
            raise CheckpointFileError(
                f"{path} holds {other} and {name}, which both mean {plain}: keep the tensors of one drafter"
            )
    return names


def rename_slices(specs: dict[str, ParamSpec], names: Mapping[str, str]) -> dict[str, ParamSpec]:
    """Replaces plain names in specs with the names in the files, and keeps unknown names."""
    rename = lambda part: part._replace(name=names.get(part.name, part.name))
    return {path: dataclasses.replace(spec, slices=tuple(map(rename, spec.slices))) for path, spec in specs.items()}
