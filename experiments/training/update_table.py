"""Predicts training updates of a dense 1B and 8B on H100s, part by part (nothing runs).

    python -m experiments.training.update_table

The 1B runs on one GPU. The parameters of the 8B are split over 8 GPUs (fsdp). Both have one MTP module, compute in
bfloat16, and train everything or only the module on a frozen trunk. The table shows milliseconds per update.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.gpu.bench_gpu import MODELS
from mtpjax.console import narrow_table
from mtpjax.evaluation.compiled_call import stored_shapes
from mtpjax.evaluation.roofline import DEVICES
from mtpjax.evaluation.update_flops import Trained
from mtpjax.evaluation.update_report import predict_profile
from mtpjax.evaluation.update_roofline import UpdateSetting
from mtpjax.models.flops import RowCounts

RESULT = RESULTS / "update_table.json"
GPUS = {"1B": 1, "8B": 8}
ROWS = ((1, 4096), (8, 4096), (1, 32768))  # rows of a GPU, tokens of a row
PARTS = ("trunk", "modules", "losses", "backward", "optimizer", "links")
KINDS = (("all", True), ("all", False), ("modules", True))  # what is trained, and whether layers are computed again


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts the updates, prints them, and writes a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100", choices=DEVICES)
    parser.add_argument("--output", type=pathlib.Path, default=RESULT, help=f"JSON file to write (default: {RESULT})")
    options = parser.parse_args(argv)
    device, rows = DEVICES[options.device], []
    table = narrow_table(f"a training update on {device.name}: predicted, not measured; milliseconds")
    for heading in ("model", "GPUs", "trains", "remat", "rows", "tokens", *PARTS, "sum", "MFU"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, count in GPUS.items():
        config = dataclasses.replace(MODELS[name], max_position_embeddings=32768)
        params = stored_shapes(config, has_fp8=False)
        for trains, recomputes in KINDS:
            remat = "-" if trains == "modules" else "layers" if recomputes else "none"
            for num_rows, length in ROWS:
                counts, trained = RowCounts.full(num_rows, length), Trained(trains, config.num_mtp_modules)
                setting = UpdateSetting({"fsdp": count}, counts, trained, recomputes and trains == "all")
                profile = predict_profile(config, params, device, setting)
                rows.append({"model": name, "remat": remat, **profile})
                seconds = {part["name"]: part["seconds"] for part in profile["parts"]}
                cells = [f"{1e3 * seconds[part]:.1f}" if part in seconds else "-" for part in PARTS]
                cells += [f"{1e3 * profile['update_seconds']:.0f}", f"{profile['mfu']:.0%}"]
                table.add_row(name, str(count), trains, remat, str(num_rows), f"{length:,}", *cells)
    write(options.output, {**about(argv), "rows": rows})
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
