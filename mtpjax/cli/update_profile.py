"""`mtpjax profile --train`."""

import pathlib
import sys

from mtpjax import compilation_cache
from mtpjax.cli import common
from mtpjax.cli.prediction import read_model
from mtpjax.console import progress_bar
from mtpjax.errors import printable


def add_update_flags(profile) -> None:
    group = profile.flag_group("training")
    group.add_argument(
        "--train",
        nargs="*",
        metavar="SETTING",
        help="measure the parts of a training update instead of decoding rounds: data, trunk, modules, losses, "
        "backward pass and optimizer, with the model FLOPs and the utilisation of each. SETTING is a YAML file or "
        "key=value, as for `mtpjax train`. With --predict, estimate the update on GPUs, sharded over --num-devices "
        "(fsdp) or the mesh in the file",
    )
    common.add_plot_formats_flag(profile)


def profile_update(options) -> int:
    """Measures or predicts the parts of a training update."""
    compilation_cache.enable()
    import rich.console

    from mtpjax.console import print_parts
    from mtpjax.evaluation import update_report
    from mtpjax.evaluation.plot_style import picture_paths
    from mtpjax.training.yaml_config import read_train_config

    # 1. Read the settings. An argument without "=" is the file.
    files = [each for each in options.train if "=" not in each]
    if len(files) > 1:
        raise ValueError(f"--train takes at most one file of settings, got {', '.join(files)}")
    config = read_train_config(files[0] if files else None, [each for each in options.train if "=" in each])
    common.check_output(options)
    if options.output is not None:
        picture_paths(pathlib.Path(options.output).stem, options.plot_formats)  # warns early if plots are impossible
    # 2. Measure here, or predict for each device.
    if options.predict:
        profiles = _predictions(options, config)
    else:
        from mtpjax.training.update_profile import measure_update

        with progress_bar() as bar:
            task = bar.add_task("compiling and measuring", total=None)
            advance = lambda done, total: bar.update(task, completed=done, total=total)
            profiles = [measure_update(config, repeats=options.repeats, progress=advance)]
    # 3. Save before printing, because the tables are only a summary of the file.
    if options.output is not None:
        common.write_json(options.output, profiles)
        path = pathlib.Path(options.output).with_suffix("")
        title = f"Parts of a training update, {'predicted, not ' * options.predict}measured"
        update_report.plot_updates(
            path, {each["device_kind"]: each for each in profiles}, options.plot_formats, title=title
        )
    for each in profiles:
        print_parts(rich.console.Console(), update_report.tables(each))
    if options.output is not None:
        print(f"wrote {printable(options.output)}", file=sys.stderr)
    return 0


def _predictions(options, config) -> list:
    """Predicts an update on each device. Only the settings that determine its shapes are used."""
    import dataclasses
    import math

    import jax

    from mtpjax.evaluation.compiled_call import stored_shapes
    from mtpjax.evaluation.roofline import DEVICES
    from mtpjax.evaluation.update_flops import Trained
    from mtpjax.evaluation.update_report import predict_profile
    from mtpjax.evaluation.update_roofline import UpdateSetting
    from mtpjax.models.flops import RowCounts

    if not config.draft_method.is_of_model or config.dtype != "bfloat16":
        raise ValueError("--predict with --train needs drafter=mtp and dtype=bfloat16")
    # Read shapes only. A run adds a module to a trunk without one.
    model, params = config.model_config, None
    if config.init_from is not None:
        model, params = read_model(config.init_from, config.model_type)
        model = dataclasses.replace(model, num_mtp_modules=max(model.num_mtp_modules, int(config.num_depths > 0)))
    has_fp8 = params is not None and any(leaf.dtype.itemsize == 1 for leaf in jax.tree.leaves(params))
    shapes = stored_shapes(model, has_fp8=has_fp8 and config.trunk_dtype == "stored")
    sizes = dict(config.mesh) or {"fsdp": options.num_devices}
    if sizes.get("context", 1) > 1:
        raise ValueError("--predict with --train does not support the mesh axis context")
    rows = RowCounts.full(-(-config.batch_size // math.prod(sizes.values())), config.row_length)
    depths = config.num_depths if model.num_mtp_modules else 0
    trained = Trained(config.trains, depths, config.trunk_states is None)
    setting = UpdateSetting(sizes, rows, trained, recomputes_layers=config.remat != "none")
    return [predict_profile(model, shapes, DEVICES[name], setting) for name in options.device]
