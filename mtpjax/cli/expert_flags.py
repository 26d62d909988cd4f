"""Flags for experts that are sharded over devices, with SGLang's names. Imports no JAX."""

from typing import Any

from mtpjax.errors import UsageError

MAX_COUNTS_BYTES = 64 << 20  # maximum size of an --init-expert-location file


def add_expert_flags(parser) -> None:
    group = parser.flag_group("experts")
    group.add_argument(
        "--ep-num-redundant-experts",
        type=int,
        default=0,
        help="number of additional expert copies per layer, which balance the load between devices; the experts with "
        "the highest counts in --init-expert-location are copied",
    )
    group.add_argument(
        "--init-expert-location",
        default="trivial",
        metavar="FILE",
        help="JSON file whose 'logical_count' has token counts per layer and expert; trivial: equal counts",
    )
    group.add_argument(
        "--enable-eplb",
        action="store_true",
        help="count the tokens routed to each expert while the server runs, and move experts to balance the devices",
    )
    group.add_argument(
        "--eplb-rebalance-num-iterations",
        type=int,
        default=1000,
        help="for --enable-eplb: scheduler iterations between two moves",
    )


def check_expert_devices(options, mesh) -> None:
    """Raises UsageError for `--enable-eplb` if `mesh` (None for one device) does not shard the experts."""
    if options.enable_eplb and _num_expert_devices(mesh) == 1:
        raise UsageError("--enable-eplb needs experts sharded over several devices: use --ep-size or --mesh expert=N")


def place_experts_by_flags(params: dict, options, mesh) -> dict:
    """Places the experts according to the flags. Without such flags, returns the same parameters.

    Args:
        params: parameters with unrolled layers.
        options: the parsed flags.
        mesh: the server's mesh, or None if the server uses one device.

    Raises:
        UsageError: the file of counts does not have SGLang's format.
        ValueError: the model has no routed experts, or their counts do not fit.
    """
    counts, num_redundant = read_expert_counts(options.init_expert_location), options.ep_num_redundant_experts
    if counts is None and not num_redundant and not options.enable_eplb:
        return params
    from mtpjax.models.expert_placement import place_all_layers

    num_devices = _num_expert_devices(mesh)
    return place_all_layers(params, num_devices=num_devices, num_redundant=num_redundant, counts=counts)


def read_expert_counts(path: str) -> dict[str, Any] | None:
    """Reads SGLang's `logical_count`, a list of numbers for each trunk layer. Returns None for "trivial"."""
    from mtpjax.safe_open import read_json_file

    if path == "trivial":
        return None
    content = read_json_file(path, max_bytes=MAX_COUNTS_BYTES)
    layers = content.get("logical_count") if isinstance(content, dict) else None
    is_count = lambda value: isinstance(value, int | float) and 0 <= value < float("inf")
    if not isinstance(layers, list) or not all(isinstance(row, list) and all(map(is_count, row)) for row in layers):
        raise UsageError(f"--init-expert-location {path}: 'logical_count' must have a list of numbers for each layer")
    return {f"layer_{index}": row for index, row in enumerate(layers)}


def _num_expert_devices(mesh) -> int:
    return 1 if mesh is None else mesh.shape.get("data", 1) * mesh.shape.get("expert", 1)
