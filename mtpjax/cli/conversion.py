"""`mtpjax inspect`, `convert`, `export-mtp` and `merge-mtp`."""

import json
from typing import Any

from mtpjax import compilation_cache
from mtpjax.cli.common import add_model_type_flag, check_minimums, show_bytes_read
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flag, parse_mesh

OUTPUT_HELP = "folder to write; it appears only when it is complete"


def add_commands(commands) -> None:
    inspect = command_parser(
        "Describe a checkpoint without reading its weights. Exits with code 3 if it cannot be loaded."
    )
    inspect.flag_group("model").add_argument(
        "path",
        help="a Hugging Face directory, a GGUF file, an mtpjax checkpoint, a training run's folder, or a Hugging Face "
        "Hub repository, which is downloaded: org/name or org/name@revision",
    )
    add_model_type_flag(inspect)
    inspect.flag_group("output").add_argument("--json", action="store_true", help="print everything as JSON")
    add_mesh_flag(inspect, "show the memory per device for this mesh, such as tensor=8,expert=4 (default: one device)")
    commands.add_subcommand("inspect", inspect, help="show family, sizes, dtypes, missing tensors, memory per device")
    convert = command_parser(
        "Convert a Hugging Face directory or a GGUF file to an mtpjax checkpoint, or an mtpjax checkpoint to a Hugging "
        "Face directory. A round trip keeps everything unchanged byte for byte. --model-type also selects the "
        "family in which a trained model is written."
    )
    group = convert.flag_group("model")
    group.add_argument("source", help="folder, GGUF file or repository (org/name, org/name@revision) to read")
    add_model_type_flag(convert)
    group.add_argument(
        "--allow-extra", action="store_true", help="keep unknown tensors that do not belong to the language model"
    )
    group.add_argument("--strict", action="store_true", help="fail on weights that are infinite or NaN")
    group = convert.flag_group("output")
    group.add_argument("target", help=OUTPUT_HELP)
    group.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        metavar="DTYPE",
        help="convert all weights to float32, float16 or bfloat16 (default: keep the dtypes, including fp8)",
    )
    commands.add_subcommand("convert", convert, help="convert between Hugging Face and mtpjax checkpoints")
    _add_mtp_commands(commands)


def _add_mtp_commands(commands) -> None:
    export = command_parser(
        "Write the MTP modules of a checkpoint as a separate checkpoint, with the tensor names and configuration of "
        "xLLM's export_mtp.py. Block-scaled fp8 becomes bfloat16."
    )
    export.flag_group("model").add_argument(
        "--input-dir",
        required=True,
        help="a full Hugging Face checkpoint or repository, an mtpjax checkpoint, a GGUF file, or a run's folder",
    )
    add_model_type_flag(export)
    export.flag_group("output").add_argument("--output-dir", required=True, help=OUTPUT_HELP)
    commands.add_subcommand("export-mtp", export, help="write the MTP modules as a separate checkpoint")
    merge = command_parser(
        "Merge MTP modules into a full Hugging Face checkpoint. Unchanged tensors keep their bytes; changed ones are "
        "stored in the dtype of the tensor that they replace."
    )
    group = merge.flag_group("model")
    group.add_argument(
        "--input-dir",
        required=True,
        help="a full Hugging Face checkpoint, a repository (org/name, org/name@revision) or a GGUF file, with or "
        "without MTP modules",
    )
    group.add_argument(
        "--mtp-dir",
        required=True,
        help="the MTP modules: output of export-mtp, a trained mtpjax checkpoint or its run's folder, or a full "
        "Hugging Face checkpoint, repository or GGUF file, such as the original of a fine-tuned model",
    )
    add_model_type_flag(merge)
    group = merge.flag_group("output")
    group.add_argument("--output-dir", required=True, help=OUTPUT_HELP)
    group.add_argument(
        "--check",
        metavar="PROMPTS",
        help="file of prompts, as for eval, to decode before and after the merge; prints both accept lengths",
    )
    group.add_argument("--max-new-tokens", type=int, default=64, help="new tokens per prompt, for --check")
    commands.add_subcommand("merge-mtp", merge, help="merge trained MTP modules into a full checkpoint")


def _inspect(options) -> int:
    from mtpjax.io.inspect import format_lines, inspect

    # Read the configuration and the tensor headers only.
    facts = inspect(options.path, mesh=parse_mesh(options.mesh), model_type=options.model_type)
    print(json.dumps(facts, indent=1) if options.json else "\n".join(format_lines(facts)))
    return 3 if facts["problems"] else 0


def _convert(options) -> int:
    import ml_dtypes
    import numpy as np

    from mtpjax.io import convert
    from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint

    # The dtypes that weights may be converted to; fp8 can be kept, but not produced.
    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    choice: dict[str, Any] = {"dtype": options.dtype and dtypes[options.dtype], "model_type": options.model_type}
    # The kind of source decides the direction. An mtpjax checkpoint is converted to Hugging Face's format, and anything
    # else to mtpjax's format.
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
        export_mtp(source, options.output_dir, model_type=options.model_type, progress=progress)
    return 0


def _merge_mtp(options) -> int:
    # Read the prompts first, so that a bad file is rejected before anything is written.
    prompts = []
    if options.check is not None:
        compilation_cache.enable()
        from mtpjax.data.prompts import read_prompts

        prompts = read_prompts(options.check)
        check_minimums(options, max_new_tokens=2)  # the first token needs no round
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.io.merge import merge_mtp

    base = find_checkpoint(options.input_dir)
    with show_bytes_read(base, options.output_dir) as progress:
        report = merge_mtp(base, options.mtp_dir, options.output_dir, model_type=options.model_type, progress=progress)
    # The counts show whether the modules were trained or are equal to those already in the checkpoint.
    print(f"tensors of MTP modules: {report.equal} equal, {report.replaced} replaced, {report.added} added")
    if options.check is not None:
        from mtpjax.evaluation.merge_check import check_merge

        choice = {"max_new_tokens": options.max_new_tokens, "model_type": options.model_type}
        print(check_merge(base, options.output_dir, prompts, **choice))
    return 0


COMMANDS = {"inspect": _inspect, "convert": _convert, "export-mtp": _export_mtp, "merge-mtp": _merge_mtp}
