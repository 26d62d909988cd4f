"""`mtpjax quickstart`, `train` and `compare`."""

import math
import sys
from typing import Any

from mtpjax import compilation_cache
from mtpjax.cli.common import add_model_type_flag, add_plot_formats_flag, check_output
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flag, add_process_flags, connect_processes, parse_mesh
from mtpjax.errors import printable
from mtpjax.messages import require

SETTINGS_HELP = (
    "settings that override the file's, such as data=FOLDER, steps=500, objective.mix.kl=1.0, "
    "model.num_mtp_modules=3 or model=FILE.yaml"
)
QUICKSTART_UPDATES = 500  # with fewer, the model's greedy texts loop


def add_commands(commands) -> None:
    _add_quickstart(commands)
    _add_train(commands)
    _add_compare(commands)


def _add_quickstart(commands) -> None:
    quickstart = command_parser(
        "Train a small model with an MTP module on the source code of Python's standard library, and compare decoding "
        "of held-out prompts with and without drafts. Takes about three minutes on two idle cores, and downloads "
        "nothing."
    )
    group = quickstart.flag_group("training")
    group.add_argument("--preset", default="tiny", help="architecture: a name in `mtpjax.presets`, such as small")
    group.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        help=f"training time in seconds; at least {QUICKSTART_UPDATES} updates are made, even if they take longer",
    )
    group.add_argument("--seed", type=int, default=0, help="random seed of the weights and of the data order")
    group.add_argument("--quick", action="store_true", help="smoke test: make only a few updates, and use few prompts")
    quickstart.flag_group("output").add_argument("--output", default="runs/quickstart", help="folder to write")
    add_plot_formats_flag(quickstart)
    commands.add_subcommand("quickstart", quickstart, help="train a small model, decode with it, and see the speedup")


def _add_train(commands) -> None:
    train = command_parser(
        "Train a model with its MTP modules, or only the modules on a frozen trunk, for example with mtpjax train "
        "data=FOLDER output=runs/mine. FOLDER contains text files of any kind, or records in .jsonl, .json or "
        ".parquet. `mtpjax.TrainConfig` documents the settings, and --print-config prints them. Nested settings are "
        "written with dots. model.* settings change the preset's architecture (--print-model prints it), and "
        "model=FILE.yaml replaces it. To train every MTP module, set model.num_mtp_modules and num_depths to the same "
        "number: depth k trains module k, depths beyond the last module run that module again, and modules beyond "
        "num_depths are not trained."
    )
    group = train.flag_group("settings")
    group.add_argument("--config", metavar="FILE", help="YAML file of settings (default: none)")
    group.add_argument("settings", nargs="*", default=[], metavar="key=value", help=SETTINGS_HELP)
    add_model_type_flag(train)
    add_mesh_flag(
        train,
        "shard the run over devices, such as data=2,fsdp=4: rows over all axes, their tokens over context; parameters "
        "and optimizer state over fsdp and context; experts over expert (default: the file's mesh, or one device)",
    )
    group = train.flag_group("existing runs")
    group.add_argument("--resume", action="store_true", help="resume the run in the output folder")
    group.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    group.add_argument(
        "--allow-config-change",
        nargs="+",
        default=[],
        metavar="KEY",
        help="settings that may differ from the resumed run's; 'data' also allows changed files",
    )
    add_process_flags(train)
    group = train.flag_group("inspect without training")
    group.add_argument("--dry-run", action="store_true", help="check settings and data, print sizes, and exit")
    group.add_argument("--print-config", action="store_true", help="print all settings as YAML, and exit")
    group.add_argument(
        "--print-model",
        action="store_true",
        help="print the architecture of a new model as YAML, to edit and pass as model=FILE.yaml, and exit",
    )
    commands.add_subcommand("train", train, help="train a model and its MTP modules")


def _add_compare(commands) -> None:
    compare = command_parser(
        "Show training runs side by side: the settings that differ, the final losses, and accept lengths on held-out "
        "prompts, both measured by decoding and predicted on the trunk's own text."
    )
    compare.flag_group("runs").add_argument("runs", nargs="+", metavar="RUN", help="folder of a training run")
    compare.flag_group("output").add_argument(
        "--output",
        metavar="PLOT",
        help="file for a plot of the loss curves: .png, .svg or .pdf; without a suffix, one file per format in "
        "--plot-formats",
    )
    add_plot_formats_flag(compare)
    commands.add_subcommand("compare", compare, help="compare training runs")


def _quickstart(options) -> int:
    compilation_cache.enable()
    from mtpjax.errors import Preempted
    from mtpjax.training import quickstart
    from mtpjax.training.config import TrainConfig

    # --quick stops after a few updates. Otherwise, the time limit ends training, but a slow or busy machine still makes
    # enough updates so that the model's texts do not loop.
    steps, seconds, min_steps = (20, math.inf, 0) if options.quick else (10**9, options.seconds, QUICKSTART_UPDATES)
    config = TrainConfig(
        preset=options.preset,
        output=options.output,
        seed=options.seed,
        steps=steps,
        seconds=seconds,
        min_steps=min_steps,
        panel_prompts=2 if options.quick else 32,
        plot_formats=tuple(options.plot_formats),
    )
    try:
        return quickstart.run(config, **({"depths": (1,), "rounds": 2, "num_prompts": 2} if options.quick else {}))
    except Preempted:
        # This command has no --resume, because it replaces its run.
        print("mtpjax quickstart: interrupted; run the same command to start again", file=sys.stderr)
        return 130


def _train(options) -> int:
    compilation_cache.enable()
    import rich.console

    from mtpjax import distributed
    from mtpjax.errors import Preempted
    from mtpjax.evaluation.plot_style import picture_paths
    from mtpjax.training.panel import print_panel
    from mtpjax.training.run_sizes import compute_run_sizes
    from mtpjax.training.trainer import train
    from mtpjax.training.yaml_config import model_to_yaml, read_train_config, to_yaml

    # Settings come from the file, then from `key=value` arguments, which take precedence.
    flags: dict[str, Any] = {"model_type": options.model_type, "mesh": parse_mesh(options.mesh)}
    config = read_train_config(options.config, options.settings, flags={k: v for k, v in flags.items() if v})
    if options.resume and options.overwrite:
        raise ValueError("--resume and --overwrite cannot be combined: one resumes the run, the other replaces it")
    if options.allow_config_change and not options.resume:
        raise ValueError("--allow-config-change needs --resume: a new run has no earlier settings to change")
    # Some modes train nothing, and only print the settings or the architecture, or check them against data and memory.
    if options.print_config:
        print(to_yaml(config), end="")
        return 0
    if options.print_model:
        require(config.init_from is None, "--print-model prints the architecture of a new model: remove init_from")
        print(model_to_yaml(config.model_config), end="")
        return 0
    if options.dry_run:
        for name, value in compute_run_sizes(config).items():
            print(f"{name}: {value:,}")
        return 0
    connect_processes(options)
    try:
        result = train(
            config, resume=options.resume, overwrite=options.overwrite, allowed_changes=options.allow_config_change
        )
    # The state is saved; 75 tells a scheduler to start the command again.
    except Preempted as ended:
        print(f"mtpjax train: {ended}", file=sys.stderr)
        return 75
    # The losses became infinite or NaN, and another run would end in the same way.
    except FloatingPointError as error:
        print(f"mtpjax train: {error}", file=sys.stderr)
        return 1
    # All processes have the results, but only one prints them.
    if not distributed.is_main_process():
        return 0
    print_panel(rich.console.Console(), result.panel)
    pictures = ", ".join(file.name for file in picture_paths("panel", config.plot_formats))
    print(f"wrote {printable(config.output)}/: {result.path.name}/, metrics.jsonl{pictures and ', '}{pictures}")
    return 0


def _compare(options) -> int:
    import rich.console

    from mtpjax.console import print_parts
    from mtpjax.evaluation.plot_style import picture_paths, require_matplotlib
    from mtpjax.messages import count_of
    from mtpjax.training.compare import read_run, short_names, tables
    from mtpjax.training.plots import plot_comparison

    check_output(options)
    if options.output is not None:
        require_matplotlib()
    pictures = [] if options.output is None else picture_paths(options.output, options.plot_formats)
    # Read all runs first, so that a wrong folder fails before anything is printed.
    runs = [read_run(folder) for folder in options.runs]
    console = rich.console.Console()
    print_parts(console, tables(runs, console.width))
    if pictures:
        histories = dict(zip(short_names(runs), (run.history for run in runs), strict=True))
        title = f"Comparison of {count_of(len(runs), 'training run')}"
        plot_comparison(options.output, histories, options.plot_formats, title=title)
        print(f"wrote {', '.join(map(str, pictures))}", file=sys.stderr)
    return 0


COMMANDS = {"quickstart": _quickstart, "train": _train, "compare": _compare}
