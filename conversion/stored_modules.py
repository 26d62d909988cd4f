"""Finds the files of a checkpoint's MTP modules, the number of modules, and which copies are tied."""

import dataclasses
import logging

from conversion import hf_config
from conversion.array_checks import streams_equal
from conversion.families import Layout
from conversion.files import CheckpointFiles
from conversion.names import module_prefixes, mtp_names, stored_layout, tied_copies
from conversion.quantized_formats import SCALE_ENDS
from mtpjax.errors import CheckpointFileError
from mtpjax.models.config import ModelConfig

log = logging.getLogger("mtpjax.conversion")

KNOWN_FILE = "consolidated"  # prefix of files that contain the same weights under Mistral's names


def read_module_files(files: CheckpointFiles, parsed: hf_config.ParsedConfig) -> None:
    """Reads MTP modules from files that the index does not list, such as `mtp.safetensors`, and reports other files.

    A file is read if it has new tensors of MTP modules and no tensor that differs from the checkpoint's tensor of the
    same name. An export may repeat embedding and head.
    """
    unused = []
    for file in files.unread:
        try:
            with CheckpointFiles(files.path, only=file) as further:
                names, differing = _find_modules(parsed, files, further)
        except CheckpointFileError as error:
            log.warning("left out: %s", error)
            continue
        if names and not differing:
            log.warning(
                "%s is not in the index; its %d tensors are read, of which %d belong to MTP modules",
                *(files.path / file, len(further.tensors), len(names)),
            )
            files.adopt(file)
        elif names:
            other = files.tensors[differing].file
            unused.append(f"{file} (it has MTP modules, but its {differing} differs from the one in {other})")
        elif not file.startswith(KNOWN_FILE):
            unused.append(file)
    if unused:
        log.warning(
            "%s has safetensors files that are not part of the checkpoint and are not read: %s",
            *(files.path, ", ".join(unused)),
        )


def _find_modules(
    parsed: hf_config.ParsedConfig, files: CheckpointFiles, further: CheckpointFiles
) -> tuple[list[str], str]:
    """Returns a file's new MTP module tensors, and the name of a tensor that differs from the checkpoint's, or ""."""
    layout = stored_layout(parsed.layout, parsed.model, (further.tensors.keys() | files.tensors.keys()).__contains__)
    prefixes = module_prefixes(parsed.model, layout)
    names = [name for name in further.tensors if name.startswith(prefixes) and name not in files.tensors]
    for name in sorted(further.tensors.keys() & files.tensors.keys()) if names else ():
        mine, other = files.tensors[name], further.tensors[name]
        if mine.shape != other.shape or not streams_equal(files.blocks(name), further.blocks(name)):
            return names, name
    return names, ""


def count_stored_modules(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> int:
    """Counts the MTP modules in the files, by each module's first norm."""
    found = 0
    # Every module has a decoder layer, and every decoder layer has this norm.
    while mtp_names(config, layout, found)[0] + "input_layernorm.weight" in files.tensors:
        found += 1
    return found


def with_stored_modules(parsed: hf_config.ParsedConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Returns the configuration with the number of MTP modules to load.

    This is the number of modules in the files. However, if the files have only some of the modules that the
    configuration states, it is the stated number, and loading reports the missing tensors.
    """
    config = parsed.model
    found, named = count_stored_modules(config, layout, files), config.num_mtp_modules
    # Fine-tuning tools drop the modules but keep the configuration.
    if named and not any(name.startswith(module_prefixes(config, layout)) for name in files.tensors):
        modules = f"{named} MTP module{'s' if named > 1 else ''}"
        log.warning(
            "config.json states %s, but the files have none of their tensors: loaded as a trunk without modules. To "
            "restore the modules of the original release or of an export: mtpjax merge-mtp --input-dir %s --mtp-dir "
            "ORIGINAL --output-dir OUT. To train new ones: mtpjax.add_mtp_modules",
            *(modules, files.path),
        )
        return dataclasses.replace(config, num_mtp_modules=0)
    # Some published configurations state fewer modules than the files have. The reverse means missing tensors.
    if found > named:
        if parsed.names_modules:
            log.warning("config.json states %d MTP modules; the files have %d, all of which are used", named, found)
        config = dataclasses.replace(config, num_mtp_modules=found)
    return config


def with_own_head(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Unties the configuration's head if the head and the embedding in the files differ, as transformers does."""
    both = {layout.head, layout.embedding} <= files.tensors.keys() and layout.head != layout.embedding
    if not config.tie_word_embeddings or not both or _same_bytes(files, layout.head, layout.embedding):
        return config
    log.warning(
        "tie_word_embeddings is true, but %s differs from %s: both are used, as in transformers",
        *(layout.head, layout.embedding),
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def with_own_copies(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Ties copies of embedding and head in MTP modules if they equal the trunk's, and loads other ones separately.

    Returns:
        The configuration with `mtp_own_embedding` and `mtp_own_head` set.

    Raises:
        CheckpointFileError: only some modules have a separate embedding or head.
    """
    own = {"embedding": [], "head": []}
    for copy, original in tied_copies(config, layout):
        # Most checkpoints omit the copies.
        if copy not in files.tensors or original not in files.tensors:
            log.info("%s is shared: the files contain no copy", copy)
            continue
        same = _same_bytes(files, copy, original)
        relation = "equals and is tied to" if same else "differs from, and is loaded in addition to,"
        log.info("%s %s %s", copy, relation, original)
        own["embedding" if "embed_tokens" in copy else "head"].append(not same)
    # The model has a separate embedding or head for all modules or for none.
    changes = {}
    for name, differs in own.items():
        if any(differs):
            if len(differs) < config.num_mtp_modules:
                raise CheckpointFileError(f"unsupported: only some of the MTP modules have a separate {name}")
            changes[f"mtp_own_{name}"] = True
    return dataclasses.replace(config, **changes) if changes else config


def _same_bytes(files: CheckpointFiles, one: str, other: str) -> bool:
    """Returns whether two tensors have the same values and, if they have scales, the same scales."""
    for end in ("", *SCALE_ENDS):
        a, b = files.tensors.get(f"{one}{end}"), files.tensors.get(f"{other}{end}")
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not streams_equal(files.blocks(a.name), files.blocks(b.name)):
            return False
    return True
