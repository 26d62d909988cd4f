"""How many threads XLA has on a CPU. It takes their number when JAX makes its devices, and keeps it."""

import os
import pathlib

_VARIABLE = "PJRT_NPROC"  # of XLA's client; whatever it says, compiling has all cores
SMALL = 16 << 20


def limit_threads(count: int) -> None:
    """Leaves XLA so many threads (0: as it is), before JAX makes its devices."""
    if count:
        os.environ[_VARIABLE] = str(count)


def num_threads() -> int:
    """What XLA has in this process: all cores, where nothing limits it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(os.environ.get(_VARIABLE, 0)) or cores or 1


def suitable_threads(model_path) -> int:
    """1 for a checkpoint below 16 MB, where handing products out takes longer than computing them; 0: as it is.

    On two cores rounds of 16 nodes took up to 1.8 times as long with two threads.
    """
    from mtpjax.checkpoint import find

    if _VARIABLE in os.environ:
        return 0
    size = sum(file.stat().st_size for file in pathlib.Path(find(model_path)).rglob("*") if file.is_file())
    return 1 if size < SMALL else 0
