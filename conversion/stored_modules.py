"""Finds the MTP modules in the files of a checkpoint: their number, their files, and which copies are tied."""

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

KNOWN_FILE = "consolidated"  # prefix of files with the same weights under Mistral's names


def read_module_files(files: CheckpointFiles, parsed: hf_config.ParsedConfig) -> None:
    """Reads MTP modules from files that the index does not list, such as `mtp.safetensors`, and reports other files.

    A file is taken if it holds new tensors of the family's modules, and no tensor that differs from one of the
    checkpoint. An export may repeat embedding and head.
    """
    unused = []
    for file in files.unread:
        try:
            tensors = {tensor.name: tensor for tensor in files.peek(file)}
        except CheckpointFileError as error:
            log.warning("left out: %s", error)
            continue
        layout = stored_layout(parsed.layout, parsed.model, (tensors.keys() | files.tensors.keys()).__contains__)
        prefixes = module_prefixes(parsed.model, layout)
        is_module = [name for name in tensors if name.startswith(prefixes) and name not in files.tensors]
        again = sorted(tensors.keys() & files.tensors.keys()) if is_module else []
        differing = [name for name in again if _differs(files, file, name)]
        if is_module and not differing:
            log.warning(
                "%s is not named by the index; its %d tensors, %d of them of MTP modules, are read",
                *(files.path / file, len(tensors), len(is_module)),
            )
            files.adopt(file)
        elif is_module:
            name = differing[0]
            unused.append(f"{file} (it holds MTP modules, but {name} differs from that of {files.tensors[name].file})")
        elif not file.startswith(KNOWN_FILE):
            unused.append(file)
    if unused:
        log.warning(
            "%s has safetensors files that do not belong to the checkpoint, and are not read: %s",
            *(files.path, ", ".join(unused)),
        )


def _differs(files: CheckpointFiles, file: str, name: str) -> bool:
    """Returns whether an additional file's tensor of this name differs from the checkpoint's."""
    with CheckpointFiles(files.path, only=file) as further:
        mine, other = files.tensors[name], further.tensors[name]
        return mine.shape != other.shape or not streams_equal(files.blocks(name), further.blocks(name))


def count_stored_modules(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> int:
    """Counts the MTP modules that the files contain, by the first norm of each."""
    found = 0
    # Every module has a decoder layer, and every decoder layer has this norm.
    while mtp_names(config, layout, found)[0] + "input_layernorm.weight" in files.tensors:
        found += 1
    return found


def with_stored_modules(parsed: hf_config.ParsedConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Counts MTP modules: those in the files, or the configuration's number if the files hold some of them.

    Returns:
        The model's configuration with the number of modules to load.
    """
    config = parsed.model
    found, named = count_stored_modules(config, layout, files), config.num_mtp_modules
    # Fine-tuning tools drop the modules and keep the configuration. If the files hold no tensor of a module, count 0.
    if named and not any(name.startswith(module_prefixes(config, layout)) for name in files.tensors):
        modules = f"{named} MTP module{'s' if named > 1 else ''}"
        log.warning(
            "config.json names %s, but the files hold none of their tensors: loaded as a trunk with 0 modules. "
            "mtpjax merge-mtp --input-dir %s --mtp-dir ORIGINAL --output-dir OUT puts the modules of the original "
            "release or of an export back; mtpjax.add_mtp_modules makes new ones to train",
            *(modules, files.path),
        )
        return dataclasses.replace(config, num_mtp_modules=0)
    # Some published configurations state fewer modules than the files hold. The reverse means missing tensors.
    if found > named:
        if parsed.names_modules:
            log.warning("config.json names %d MTP modules; the files hold %d, which are used", named, found)
        config = dataclasses.replace(config, num_mtp_modules=found)
    return config


def with_own_head(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Compares the head with a tied embedding: a head that differs is kept, as in transformers.

    Returns:
        The configuration, without the tie if the files hold two different tensors.
    """
    both = {layout.head, layout.embedding} <= files.tensors.keys() and layout.head != layout.embedding
    if not config.tie_word_embeddings or not both or _same_bytes(files, layout.head, layout.embedding):
        return config
    log.warning(
        "tie_word_embeddings is true, but %s differs from %s: both are used, as in transformers",
        *(layout.head, layout.embedding),
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def with_own_copies(config: ModelConfig, layout: Layout, files: CheckpointFiles) -> ModelConfig:
    """Compares the copies of embedding and head in MTP modules: ties equal ones, and loads the others separately.

    Returns:
        The configuration with `mtp_own_embedding` and `mtp_own_head` set.

    Raises:
        CheckpointFileError: some modules have one and others do not.
    """
    own = {"embedding": [], "head": []}
    for copy, original in tied_copies(config, layout):
        # Most checkpoints leave the copies out.
        if copy not in files.tensors or original not in files.tensors:
            log.info("%s is shared: the files contain no copy", copy)
            continue
        same = _same_bytes(files, copy, original)
        log.info("%s %s %s", copy, "equals, and is tied to," if same else "differs from, and is kept beside,", original)
        own["embedding" if "embed_tokens" in copy else "head"].append(not same)
    # The model has own embeddings or heads for all modules or for none.
    changes = {}
    for name, differs in own.items():
        if any(differs):
            if len(differs) < config.num_mtp_modules:
                raise CheckpointFileError(f"unsupported: some MTP modules have a {name} of their own and others do not")
            changes[f"mtp_own_{name}"] = True
    return dataclasses.replace(config, **changes) if changes else config


def _same_bytes(files: CheckpointFiles, one: str, other: str) -> bool:
    """Returns whether two tensors have the same values, and the same scales if they have any."""
    for end in ("", *SCALE_ENDS):
        a, b = files.tensors.get(f"{one}{end}"), files.tensors.get(f"{other}{end}")
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not streams_equal(files.blocks(a.name), files.blocks(b.name)):
            return False
    return True
