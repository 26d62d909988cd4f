"""`mtpjax quickstart`, `train` and `compare`."""

import math
import sys

from mtpjax import compilation_cache
from mtpjax.atomic import check_output_file
from mtpjax.cli.common import add_model_type_flag, add_plot_formats_flag, model_type
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_process_flags
from mtpjax.errors import printable

SETTINGS_HELP = (
    "settings that override the file's, such as steps=500, num_depths=3, model.num_mtp_modules=3 or model=FILE.yaml"
)


def add_commands(commands) -> None:
    """Adds the commands and their flags.

    Args:
        commands: the subcommands of the `mtpjax` parser.
    """
    quickstart = command_parser(
        "Train a small model with an MTP module on the standard library of this Python, decode held-out "
        "prompts with and without drafts, and compare. Takes about three minutes on two cores and downloads nothing."
    )
    quickstart.add_argument("--output", default="runs/quickstart", help="folder to write (default: %(default)s)")
    quickstart.add_argument("--preset", default="tiny", help="name in `mtpjax.presets` (default: %(default)s)")
    quickstart.add_argument("--seconds", type=float, default=90.0, help="seconds of training (default: %(default)s)")
    quickstart.add_argument("--seed", type=int, default=0, help="seed of weights and data order (default: %(default)s)")
    add_plot_formats_flag(quickstart)
    quickstart.add_argument(
        "--quick", action="store_true", help="run a few steps and prompts only, to see that it works"
    )
    commands.add_subcommand("quickstart", quickstart, help="train a small model, decode with it, and see the speed-up")

    train = command_parser(
        "Train a model together with its MTP modules. `mtpjax.training.config.TrainConfig` documents every "
        "setting; --print-config prints them with their values. The settings model.* change fields of the preset's "
        "architecture (`mtpjax.ModelConfig`; --print-model prints them), and model=FILE.yaml names a whole one. "
        "model.num_mtp_modules is the number of MTP modules that the model has, and num_depths the number of draft "
        "depths that get a loss: depth k is module k, and depths beyond the last module run that module again. Modules "
        "beyond num_depths are not trained, so set both to the same number to train every module."
    )
    train.add_argument("--config", default=None, help="YAML file of settings (default: the defaults of TrainConfig)")
    train.add_argument("settings", nargs="*", default=[], metavar="key=value", help=SETTINGS_HELP)
    add_model_type_flag(train)
    train.add_argument("--resume", action="store_true", help="continue the run in the output folder")
    train.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    train.add_argument(
        "--allow-config-change",
        nargs="+",
        default=[],
        metavar="key",
        help="settings that may differ from the resumed run's; 'data' allows changed files too",
    )
    add_process_flags(train)
    train.add_argument("--dry-run", action="store_true", help="check settings and data, print sizes, and exit")
    train.add_argument("--print-config", action="store_true", help="print every setting as YAML, and exit")
    train.add_argument(
        "--print-model",
        action="store_true",
        help="print the architecture of new weights as YAML, to edit and pass as model=FILE.yaml, and exit",
    )
    commands.add_subcommand("train", train, help="train a model and its MTP modules")

    compare = command_parser(
        "Show training runs side by side: the settings that differ, the last losses, and accept lengths on "
        "held-out prompts, measured by decoding and predicted along the trunk's own text."
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="folder of a training run")
    compare.add_argument(
        "--output",
        default=None,
        metavar="PICTURE",
        help="picture to write, with the loss curves: .png, .svg or .pdf; without a suffix one file per --plot-formats",
    )
    add_plot_formats_flag(compare)
    commands.add_subcommand("compare", compare, help="compare training runs")


def _quickstart(options) -> int:
    compilation_cache.enable()
    from mtpjax.errors import Preempted
    from mtpjax.training import quickstart
    from mtpjax.training.config import TrainConfig

    # --quick stops after a few steps; otherwise the clock ends the training.
    steps, seconds = (20, math.inf) if options.quick else (10**9, options.seconds)
    config = TrainConfig(
        preset=options.preset,
        output=options.output,
        seed=options.seed,
        steps=steps,
        seconds=seconds,
        panel_prompts=2 if options.quick else 32,
        plot_formats=tuple(options.plot_formats),
    )
    try:
        return quickstart.run(config, **({"depths": (1,), "rounds": 2, "num_prompts": 2} if options.quick else {}))
    except Preempted:
        # This command has no --resume: it replaces its run.
        print("mtpjax quickstart: interrupted; the same command starts anew", file=sys.stderr)
        return 130


def _train(options) -> int:
    compilation_cache.enable()
    import rich.console

    from mtpjax import distributed
    from mtpjax.errors import Preempted
    from mtpjax.evaluation.plot_style import picture_paths
    from mtpjax.training.model_yaml import model_to_yaml
    from mtpjax.training.panel import print_panel
    from mtpjax.training.run_sizes import compute_run_sizes
    from mtpjax.training.trainer import train
    from mtpjax.training.yaml_config import read_train_config, to_yaml

    # Settings come from the file, then from `key=value` arguments, which win.
    family = model_type(options)
    config = read_train_config(options.config, [*options.settings, *([f"model_type={family}"] if family else [])])
    if options.resume and options.overwrite:
        raise ValueError("--resume and --overwrite exclude each other: one continues the run, the other replaces it")
    # Modes that train nothing: print the settings or the architecture, or check them against data and memory.
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    if options.print_model:
        if config.init_from is not None:
            raise ValueError("--print-model prints the architecture of new weights: leave out init_from")
        print(model_to_yaml(config.model_config), end="")
        return 0
    if options.dry_run:
        for name, value in compute_run_sizes(config).items():
            print(f"{name}: {value:,}")
        return 0
    # Join the other processes before the first JAX call that makes devices.
    if options.nnodes > 1:
        distributed.connect(options.nnodes, options.node_rank, options.dist_init_addr)
    try:
        result = train(
            config, resume=options.resume, overwrite=options.overwrite, allowed_changes=options.allow_config_change
        )
    # The state is saved; 75 tells a scheduler to start the command again.
    except Preempted as ended:
        print(f"mtpjax train: {ended}", file=sys.stderr)
        return 75
    # The losses became infinite or NaN; running again would end the same way.
    except FloatingPointError as error:
        print(f"mtpjax train: {error}", file=sys.stderr)
        return 1
    # All processes have the figures, and one prints them.
    if not distributed.is_main_process():
        return 0
    print_panel(rich.console.Console(), result.panel)
    pictures = ", ".join(file.name for file in picture_paths("panel", config.plot_formats))
    print(f"wrote {printable(config.output)}/: {result.path.name}/, metrics.jsonl{pictures and ', '}{pictures}")
    return 0


def _compare(options) -> int:
    import rich.console

    from mtpjax.evaluation.plot_style import picture_paths, require_matplotlib
    from mtpjax.training.compare import read_run, tables
    from mtpjax.training.plots import plot_comparison

    if options.output is not None:
        check_output_file(options.output)
        require_matplotlib()
    pictures = [] if options.output is None else picture_paths(options.output, options.plot_formats)
    # Read all runs first: a wrong folder fails before anything is printed.
    runs = [read_run(folder) for folder in options.runs]
    console = rich.console.Console()
    for table in tables(runs):
        console.print(table)
    if pictures:
        plot_comparison(options.output, {run.name: run.history for run in runs}, options.plot_formats)
        print(f"wrote {', '.join(map(str, pictures))}", file=sys.stderr)
    return 0


COMMANDS = {
    "quickstart": _quickstart,
    "train": _train,
    "compare": _compare,
}
