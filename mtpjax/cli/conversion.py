"""`mtpjax inspect`, `convert`, `export-mtp` and `merge-mtp`."""

import json
from typing import Any

import jsonargparse

from mtpjax.cli.common import bytes_done


def add(commands) -> None:
    """Their flags."""
    inspect = jsonargparse.ArgumentParser(description="Tell what a checkpoint holds; its weights are not read.")
    inspect.add_argument("path", help="a Hugging Face directory, our checkpoint, or a run folder with one")
    inspect.add_argument("--mesh", default="", help="axes to divide the memory by, such as tensor=8,expert=4")
    inspect.add_argument("--json", action="store_true", help="everything, for programs")
    _add_model_type(inspect)
    commands.add_subcommand("inspect", inspect, help="family, sizes, dtypes, missing tensors, memory per device")

    convert = jsonargparse.ArgumentParser(
        description="A Hugging Face directory becomes our checkpoint; our checkpoint becomes a Hugging Face directory, "
        "the same bytes as it was read from where nothing has changed."
    )
    convert.add_argument("source", help="folder to read")
    convert.add_argument("target", help="folder to write; it appears complete or not at all")
    convert.add_argument("--dtype", default=None, help="float32, float16 or bfloat16 (default: as it is, fp8 included)")
    convert.add_argument("--allow-extra", action="store_true", help="keep tensors that are not known")
    convert.add_argument("--strict", action="store_true", help="refuse weights that are infinite or NaN")
    _add_model_type(convert)
    commands.add_subcommand("convert", convert, help="Hugging Face -> mtpjax, and back")

    export = jsonargparse.ArgumentParser(
        description="Write the MTP modules of a Hugging Face directory as a checkpoint of their own, with the names "
        "and the configuration of xLLM's export_mtp.py; scaled fp8 becomes bfloat16."
    )
    export.add_argument("--input-dir", required=True, help="a full Hugging Face checkpoint")
    export.add_argument("--output-dir", required=True, help="folder to write; it appears complete or not at all")
    _add_model_type(export)
    commands.add_subcommand("export-mtp", export, help="MTP modules as a checkpoint of their own")

    merge = jsonargparse.ArgumentParser(
        description="Put MTP modules back into a full Hugging Face checkpoint: every tensor that has not changed keeps "
        "its bytes, a changed one takes the dtype of the one that it replaces."
    )
    merge.add_argument("--input-dir", required=True, help="a full Hugging Face checkpoint; with or without modules")
    merge.add_argument("--mtp-dir", required=True, help="what export-mtp wrote, or a trained mtpjax checkpoint")
    merge.add_argument("--output-dir", required=True, help="folder to write; it appears complete or not at all")
    commands.add_subcommand("merge-mtp", merge, help="trained MTP modules into a full checkpoint")


def _add_model_type(parser) -> None:
    parser.add_argument("--model-type", default="auto", help="take this instead of config.json's")


def _model_type(options) -> str | None:
    return None if options.model_type == "auto" else options.model_type


def _inspect(options) -> int:
    from mtpjax.io.inspect import inspect, lines

    mesh = {}
    for part in filter(None, options.mesh.split(",")):
        axis, _, size = part.partition("=")
        if axis not in ("data", "fsdp", "expert", "tensor") or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh {part!r} is no axis (data, fsdp, expert, tensor) and its size, such as tensor=8")
        mesh[axis] = int(size)
    facts = inspect(options.path, mesh=mesh, model_type=_model_type(options))
    print(json.dumps(facts, indent=1) if options.json else "\n".join(lines(facts)))
    return 3 if facts["missing"] or facts["extra"] else 0


def _convert(options) -> int:
    import ml_dtypes
    import numpy as np

    from mtpjax.io import convert
    from mtpjax.io.checkpoint_format import find_checkpoint, is_checkpoint

    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    if options.dtype is not None and options.dtype not in dtypes:
        raise ValueError(f"--dtype {options.dtype!r} is not one of {', '.join(dtypes)}")
    choice: dict[str, Any] = {"dtype": options.dtype and dtypes[options.dtype], "model_type": _model_type(options)}
    with bytes_done(options.source, options.target) as progress:
        if is_checkpoint(find_checkpoint(options.source)):
            convert.to_hugging_face(options.source, options.target, **choice, progress=progress)
        else:
            choice |= {"allow_extra": options.allow_extra, "strict": options.strict, "progress": progress}
            convert.to_mtpjax(options.source, options.target, **choice)
    return 0


def _export_mtp(options) -> int:
    from conversion.export_mtp import export_mtp

    with bytes_done(options.input_dir, options.output_dir) as progress:
        export_mtp(options.input_dir, options.output_dir, model_type=_model_type(options), progress=progress)
    return 0


def _merge_mtp(options) -> int:
    from mtpjax.io.merge import merge_mtp

    with bytes_done(options.input_dir, options.output_dir) as progress:
        report = merge_mtp(options.input_dir, options.mtp_dir, options.output_dir, progress=progress)
    print(f"tensors of modules: {report.equal} equal, {report.replaced} replaced, {report.added} added")
    return 0


COMMANDS = {
    "inspect": _inspect,
    "convert": _convert,
    "export-mtp": _export_mtp,
    "merge-mtp": _merge_mtp,
}
