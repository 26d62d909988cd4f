"""Golden checkpoints in published layouts, with outputs of an independent implementation; see `README.md` here."""

import os
import pathlib

HERE = pathlib.Path(__file__).parent
RECYCLING = (  # one MTP module, which engines reuse for each further draft
    *("deepseek_v3", "deepseek_v3_fp8", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "qwen3_next", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_tied_bf16", "glm4_moe_lite", "hy_v3", "ernie4_5_moe"),
)
SEVERAL = ("deepseek_v3_mtp2_bf16", "mimo_v2_flash", "step3p5")  # several MTP modules
MTP_SETS = (*RECYCLING, *SEVERAL)
SETS = (*MTP_SETS, "qwen3", "qwen3_moe", "kimi_k25", "gpt_oss")
WINDOWS = ("mimo_v2_flash", "step3p5", "gpt_oss")  # layers with sliding windows
# Sets whose arithmetic is that of others: default tests check loading, names and most logits, slow ones the rest.
RENAMED = ("glm4_moe_lite", "hy_v3", "ernie4_5_moe", "qwen3_moe", "kimi_k25")


def path(name: str) -> pathlib.Path:
    return HERE / name


def drafter_path(name: str) -> pathlib.Path:
    return pathlib.Path(os.environ.get("MTPJAX_GOLDEN_DRAFTERS", HERE / "drafters")) / name


def has_trunk(name: str) -> bool:
    return any((drafter_path(name) / "trunk").glob("*.safetensors"))
