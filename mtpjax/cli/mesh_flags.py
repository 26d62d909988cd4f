"""Flags for meshes and multi-process runs, for the commands that decode and train."""

import contextlib
from collections.abc import Iterator

AXES = ("data", "fsdp", "expert", "context", "tensor")


def add_mesh_flag(parser, help: str) -> None:
    """Adds `--mesh` with this help text. `parse_mesh` reads its value."""
    parser.flag_group("devices").add_argument("--mesh", default="", metavar="AXIS=SIZE,...", help=help)


def add_mesh_flags(parser) -> None:
    """Adds `--mesh` for a command that decodes, and the flags for multi-process runs."""
    add_mesh_flag(
        parser,
        "shard the model over devices, such as data=2,tensor=4; rows are sharded over data, heads and columns over "
        "tensor, and experts over data and expert (default: one device)",
    )
    add_process_flags(parser)


def add_process_flags(parser) -> None:
    group = parser.flag_group("devices")
    group.add_argument("--nnodes", type=int, default=1, help="number of processes, one per host")
    group.add_argument("--node-rank", type=int, help="rank of this process, from 0 (default: from the launcher)")
    group.add_argument(
        "--dist-init-addr",
        metavar="HOST:PORT",
        help="address of process 0 (default: from the launcher, which can be Slurm, Open MPI or Kubernetes)",
    )


def parse_mesh(text: str) -> dict[str, int]:
    """Parses a mesh such as "data=2,tensor=4" into sizes by axis. Raises ValueError."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not (size.isascii() and size.isdecimal() and int(size)):
            raise ValueError(
                f"--mesh {part!r} must be an axis ({', '.join(AXES)}), used once, with its size, such as tensor=8"
            )
        sizes[axis] = int(size)
    return sizes


def load_on_mesh(path, options, mesh, *, rearrange=lambda params: params):
    """Loads the model for a command that decodes.

    Args:
        path: the checkpoint.
        options: parsed flags, including those of `add_mesh_flags` and `add_decoding_model_flags`.
        mesh: the mesh, or None.
        rearrange: changes the parameters before they are sharded for decoding.

    Returns:
        The model and its parameters, sharded for decoding, and the config of the checkpoint.
    """
    from mtpjax.io.checkpoint import load
    from mtpjax.models.params import shard_for_decoding

    # Load only each process's shards, then move them to the layout for decoding.
    settings = {"model_type": options.model_type, "implementation": options.implementation}
    model, params = load(path, mesh=mesh, allow_copies=options.allow_copies, **settings)
    config, params = model.config, rearrange(params)
    if mesh is not None:
        model, params = shard_for_decoding(model, params, mesh, allow_copies=options.allow_copies)
    return model, params, config


def connect_processes(options) -> None:
    """Joins the other processes, if any. Call it before any JAX call that initializes devices. Raises ValueError."""
    from mtpjax import distributed

    if options.nnodes > 1:
        distributed.connect(options.nnodes, options.node_rank, options.dist_init_addr)
    elif options.node_rank is not None or options.dist_init_addr is not None:
        raise ValueError("--node-rank and --dist-init-addr need --nnodes, the number of processes")


@contextlib.contextmanager
def open_mesh(options) -> Iterator:
    """Joins the other processes, if any, and yields the command's mesh, or None for one device.

    Raises:
        ValueError: the mesh does not match JAX's devices.
        LostProcess: another process ended during the block.
    """
    from mtpjax import compat, distributed

    sizes = parse_mesh(options.mesh)
    if options.nnodes > 1 and not sizes:
        raise ValueError(f"{options.nnodes} processes need --mesh, which shards the model over their devices")
    connect_processes(options)
    with distributed.raise_on_lost_peer():
        yield compat.make_mesh(sizes, distributed.mesh_devices(sizes)) if sizes else None
