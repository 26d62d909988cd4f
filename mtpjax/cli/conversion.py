"""`mtpjax inspect`, `convert`, `export-mtp` and `merge-mtp`."""

import json
from typing import Any

from mtpjax import compilation_cache
from mtpjax.cli.common import add_model_type_flag, model_type, show_bytes_read
from mtpjax.cli.help import command_parser, flag_group
from mtpjax.cli.mesh_flags import add_mesh_flag, parse_mesh


def add_commands(commands) -> None:
    """Adds the commands and their flags.

    Args:
        commands: the subcommands of the `mtpjax` parser.
    """
    _add_inspect(commands)
    _add_convert(commands)
    _add_export(commands)
    _add_merge(commands)


def _add_inspect(commands) -> None:
    inspect = command_parser(
        "Describe a checkpoint without reading its weights. The exit code is 3 if it cannot be loaded."
    )
    group = flag_group(inspect, "model")
    group.add_argument(
        "path",
        help="a Hugging Face directory, a GGUF file, an mtpjax checkpoint, a run folder that holds one, or a "
        "repository of the Hugging Face Hub, which is downloaded: org/name or org/name@revision",
    )
    add_model_type_flag(inspect)
    group = flag_group(inspect, "output")
    add_mesh_flag(inspect, "show the memory per device of this mesh, such as tensor=8,expert=4 (default: one device)")
    group.add_argument("--json", action="store_true", help="print everything as JSON")
    commands.add_subcommand("inspect", inspect, help="show family, sizes, dtypes, missing tensors, memory per device")


def _add_convert(commands) -> None:
    convert = command_parser(
        "Convert a Hugging Face directory or a GGUF file to an mtpjax checkpoint, or an mtpjax checkpoint "
        "to a Hugging Face directory. Converting back gives the same bytes for everything that has not changed. "
        "--model-type also chooses the family that a trained model is written as."
    )
    group = flag_group(convert, "model")
    group.add_argument("source", help="folder, GGUF file or repository (org/name, org/name@revision) to read")
    add_model_type_flag(convert)
    group.add_argument(
        "--allow-extra",
        action="store_true",
        help="keep unknown tensors that are not part of the language model, instead of failing",
    )
    group.add_argument("--strict", action="store_true", help="fail on weights that are infinite or NaN")
    group = flag_group(convert, "output")
    group.add_argument("target", help="folder to write; it appears only when it is complete")
    group.add_argument(
        "--dtype",
        default=None,
        choices=("float32", "float16", "bfloat16"),
        metavar="DTYPE",
        help="convert all weights to float32, float16 or bfloat16 (default: keep each dtype, also fp8)",
    )
    commands.add_subcommand("convert", convert, help="convert between Hugging Face and mtpjax checkpoints")


def _add_export(commands) -> None:
    export = command_parser(
        "Write the MTP modules of a Hugging Face directory as a separate checkpoint, with the tensor "
        "names and the configuration of xLLM's export_mtp.py. Block-scaled fp8 becomes bfloat16."
    )
    flag_group(export, "model").add_argument(
        "--input-dir",
        required=True,
        help="a full Hugging Face checkpoint or repository, an mtpjax checkpoint, a GGUF file, or a run folder",
    )
    add_model_type_flag(export)
    flag_group(export, "output").add_argument(
        "--output-dir", required=True, help="folder to write; it appears only when it is complete"
    )
    commands.add_subcommand("export-mtp", export, help="write the MTP modules as a separate checkpoint")


def _add_merge(commands) -> None:
    merge = command_parser(
        "Put MTP modules into a full Hugging Face checkpoint. Every unchanged tensor keeps its bytes; a "
        "changed one is stored in the dtype of the tensor it replaces."
    )
    group = flag_group(merge, "model")
    group.add_argument(
        "--input-dir",
        required=True,
        help="a full Hugging Face checkpoint, a repository (org/name, org/name@revision) or a GGUF file, with or "
        "without MTP modules",
    )
    group.add_argument(
        "--mtp-dir",
        required=True,
        help="folder that export-mtp wrote, a full Hugging Face checkpoint, repository or GGUF file such as the "
        "original of a fine-tuned model, a trained mtpjax checkpoint, or a run folder",
    )
    add_model_type_flag(merge)
    group = flag_group(merge, "output")
    group.add_argument("--output-dir", required=True, help="folder to write; it appears only when it is complete")
    group.add_argument(
        "--check",
        default=None,
        metavar="PROMPTS",
        help="file of prompts, as for eval: decode them before and after the merge, and print both accept lengths",
    )
    group.add_argument("--max-new-tokens", type=int, default=64, help="new tokens per prompt of --check")
    commands.add_subcommand("merge-mtp", merge, help="put trained MTP modules into a full checkpoint")


def _inspect(options) -> int:
    from mtpjax.io.inspect import format_lines, inspect

    # Read the configuration and the tensor headers, and print one of two forms.
    facts = inspect(options.path, mesh=parse_mesh(options.mesh), model_type=model_type(options))
    print(json.dumps(facts, indent=1) if options.json else "\n".join(format_lines(facts)))
    return 3 if facts["problems"] else 0


def _convert(options) -> int:
    import ml_dtypes
    import numpy as np

    from mtpjax.io import convert
    from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint

    # The dtypes that weights may be converted to; fp8 is only kept, never made.
    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    choice: dict[str, Any] = {"dtype": options.dtype and dtypes[options.dtype], "model_type": model_type(options)}
    # The source's kind decides the direction: an mtpjax checkpoint goes to Hugging Face, anything else comes from it.
    source = find_checkpoint(options.source)
    with show_bytes_read(source, options.target) as progress:
        if is_checkpoint(source):
            convert.to_hugging_face(source, options.target, **choice, progress=progress)
        else:
            choice |= {"allow_extra": options.allow_extra, "strict": options.strict, "progress": progress}
            convert.to_mtpjax(source, options.target, **choice)
    return 0


def _export_mtp(options) -> int:
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.io.convert import export_mtp

    source = find_checkpoint(options.input_dir)
    with show_bytes_read(source, options.output_dir) as progress:
        export_mtp(source, options.output_dir, model_type=model_type(options), progress=progress)
    return 0


def _merge_mtp(options) -> int:
    if options.check is not None:
        compilation_cache.enable()
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.io.merge import merge_mtp

    choice: dict[str, Any] = {"model_type": model_type(options)}
    # Read the prompts first, so that a bad file is an error before anything is written.
    prompts = []
    if options.check is not None:
        from mtpjax.data.prompts import read_prompts

        prompts = read_prompts(options.check)
        if options.max_new_tokens < 2:
            raise ValueError(f"--max-new-tokens must be at least 2 to measure a round, got {options.max_new_tokens}")
    base = find_checkpoint(options.input_dir)
    with show_bytes_read(base, options.output_dir) as progress:
        report = merge_mtp(base, options.mtp_dir, options.output_dir, **choice, progress=progress)
    # The counts show at once whether the modules were trained or are those that the checkpoint already had.
    print(f"tensors of MTP modules: {report.equal} equal, {report.replaced} replaced, {report.added} added")
    if options.check is not None:
        from mtpjax.evaluation.merge_check import check_merge, format_check

        lengths = check_merge(base, options.output_dir, prompts, max_new_tokens=options.max_new_tokens, **choice)
        print(format_check(*lengths))
    return 0


COMMANDS = {
    "inspect": _inspect,
    "convert": _convert,
    "export-mtp": _export_mtp,
    "merge-mtp": _merge_mtp,
}
