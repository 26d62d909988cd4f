"""Plans training on several GPUs: which mesh and `remat` fit, how long rows can be, and how long an update takes."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtpjax.evaluation.plan import USABLE_SHARE
from mtpjax.evaluation.roofline import Device
from mtpjax.evaluation.update_flops import Trained
from mtpjax.evaluation.update_report import predict_profile
from mtpjax.evaluation.update_roofline import UpdateSetting
from mtpjax.models.config import ModelConfig
from mtpjax.models.flops import RowCounts
from mtpjax.models.sharding import mesh_text
from mtpjax.training.compiled_update import CompiledUpdate
from mtpjax.training.update_memory import REMATS, UpdateShape, choose_remat, estimate_update, longest_row


def list_train_meshes(config: ModelConfig, count: int) -> Iterator[dict[str, int]]:
    """Lists the `fsdp x expert` meshes with `count` GPUs."""
    for expert in (size for size in range(1, count + 1) if count % size == 0):
        if expert == 1 or (config.n_routed_experts and config.n_routed_experts % expert == 0):
            yield {"fsdp": count // expert, "expert": expert}


def train_rows(
    config: ModelConfig, params: dict, device: Device, meshes: Sequence[Mapping[str, int]], shape: UpdateShape
) -> list[dict[str, Any]]:
    """Plans training on each mesh, as one JSON object per mesh; `params` are shapes, as in `estimate_update`."""
    rows, memory = [], USABLE_SHARE * device.memory
    for mesh in meshes:
        remat = choose_remat(config, params, mesh, shape, memory)
        estimates = {
            each: estimate_update(config, params, mesh, dataclasses.replace(shape, remat=each)) for each in REMATS
        }
        row: dict[str, Any] = {"mesh": dict(mesh), "arguments": estimates[remat].arguments}
        row["temps"] = {each: estimate.temp for each, estimate in estimates.items()}
        row |= {"remat": remat, "fits": estimates[remat].total <= memory}
        # The time of rows that are split by tokens is not predicted.
        if mesh.get("context", 1) == 1:
            counts = RowCounts.full(shape.tokens // shape.row_length, shape.row_length)
            setting = UpdateSetting(mesh, counts, Trained(shape.trains, shape.num_depths), remat != "none")
            row["update"] = predict_profile(config, params, device, setting)
        rows.append(row | {"longest_row": longest_row(config, params, mesh, shape, memory)})
    return rows


def train_table(rows: Sequence[Mapping[str, Any]], device: Device, shape: UpdateShape):
    """Returns the rows of `train_rows` as a table to print."""
    from mtpjax.evaluation.tables import number_table

    headings = ("state", *(f"temp:\n{remat}" for remat in REMATS), "remat", "longest\nrow", "s", "MFU")
    text = f"{shape.tokens} tokens in rows of {shape.row_length}"
    table = number_table(f"{device.name}: training, GB per GPU, {text} each", headings, "mesh")
    table.caption = (
        "state: parameters and AdamW's moments, exact. temp: estimated, for each remat. remat: the fastest that "
        f"fits in {USABLE_SHARE:.0%} of {device.memory / 1e9:.0f} GB. longest row: with remat layers, one row per GPU. "
        "s and MFU: estimated time and utilisation of an update, without overlap."
    )
    if any(row["mesh"].get("context", 1) > 1 for row in rows):
        table.caption += " With context, temp leaves out the gathered keys and values, and can be a third too low."
    for row in rows:
        temps = (_gigabytes(nbytes) for nbytes in row["temps"].values())
        chosen = row["remat"] if row["fits"] else "no room"
        times = "-", "-"
        if update := row.get("update"):
            times = f"{update['update_seconds']:.3g}", f"{update['mfu']:.0%}"
        cells = _gigabytes(row["arguments"]), *temps, chosen, f"{row['longest_row']:,}", *times
        table.add_row(mesh_text(row["mesh"]), *cells)
    return table


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}" if nbytes < 1e11 else f"{nbytes / 1e9:.0f}"


def compiled_line(row: Mapping[str, Any], found: CompiledUpdate) -> str:
    """Returns a line that compares a compiled update with the plan."""
    sizes = (found.arguments, row["arguments"], found.temp, row["temps"][row["remat"]])
    arguments, planned, temp, planned_temp = (f"{nbytes / 1e9:.3f}" for nbytes in sizes)
    return (
        f"compiled for {mesh_text(row['mesh'])}, remat {row['remat']}: arguments {arguments} GB (planned {planned}), "
        f"temp {temp} ({planned_temp}); {found.seconds:.0f} CPU s"
    )
