"""Golden checkpoints in published layouts, with outputs of an independent implementation (transformers, float64).

Two are here; a project that has the whole collection beside it tests all of them.
"""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent
COLLECTION = HERE.parents[2] / "shared" / "golden"
RECYCLING = (
    *("deepseek_v3", "deepseek_v3_fp8", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "qwen3_next", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_tied_bf16"),
)
MTP_SETS = (*RECYCLING, "deepseek_v3_mtp2_bf16")
SETS = (*MTP_SETS, "qwen3")


def path(name: str) -> pathlib.Path:
    inside = HERE / name
    return inside if inside.is_dir() else COLLECTION / name


def case(name: str, *more):
    """A parameter set that begins with `name`, skipped where that checkpoint is missing."""
    is_missing = not path(name).is_dir()
    return pytest.param(
        name, *more, marks=pytest.mark.skipif(is_missing, reason=f"golden checkpoint {name} is missing")
    )


def cases(*names: str) -> list:
    return [case(name) for name in names]
