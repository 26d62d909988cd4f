"""Recognizes folders that are given as a model but are something else, so that every command can report them."""

import pathlib
from typing import Any

from mtpjax.errors import CheckpointError, UnsafeFileError, printable
from mtpjax.safe_open import parse_json, read_inside

CONFIG, ADAPTER = "config.json", "adapter_config.json"
MAX_CONFIG_BYTES = 16 << 20
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
# Parts of the class names of published drafters, supported or not, and keys in their config.json.
DRAFTER_CLASSES = ("Eagle3", "CausalLMEagle", "EagleForCausalLM", "EagleLlama", "Medusa", "DFlash", "DSpark")
DRAFTER_KEYS = ("speculators_model_type", "medusa_num_heads")


def reject_other_folder(folder: pathlib.Path) -> None:
    """Raises an error for a folder that is not a model; the message describes the folder and what to do.

    Args:
        folder: the path that was given as a model. Files, missing folders and models raise nothing.

    Raises:
        CheckpointError: the folder contains an adapter, a drafter, a diffusion pipeline, parts of a training state, or
            weights in an unsupported format.
    """
    if not folder.is_dir():
        return
    names = sorted(file.name for file in folder.iterdir())
    problem = _describe(folder, names)
    if problem is not None:
        raise CheckpointError(f"{folder} {problem}")


def _describe(folder: pathlib.Path, names: list[str]) -> str | None:
    """Describes what the folder is instead of a model; returns None for a model."""
    has_model = CONFIG in names and any(
        name.endswith(".safetensors") and not name.startswith("adapter_model") for name in names
    )
    if ADAPTER in names and not has_model:
        base = _read(folder, ADAPTER).get("base_model_name_or_path")
        base = printable(base, 200) if isinstance(base, str) and base else "an unnamed model"
        return (
            f"is an adapter for {base}, not a model: merge it first. With peft: PeftModel.from_pretrained(base, folder)"
            ".merge_and_unload().save_pretrained(OUT); then give OUT"
        )
    if "model_index.json" in names:
        return "is a diffusers pipeline (model_index.json), not a language model"
    if CONFIG in names:
        return _describe_config(_read(folder, CONFIG)) if has_model else _describe_weights(names)
    return _describe_training(folder, names) or _describe_weights(names)


def _describe_config(values: dict[str, Any]) -> str | None:
    classes = values.get("architectures")
    classes = [str(each) for each in classes] if isinstance(classes, list) else []
    drafters = [each for each in classes if any(part in each for part in DRAFTER_CLASSES)]
    drafters += [key for key in DRAFTER_KEYS if values.get(key) is not None]
    if not drafters:
        return None
    return (
        f"is a drafter ({printable(drafters[0], 100)}), not a model: give the model that it drafts for, and the "
        "drafter as --speculative-draft-model-path"
    )


def _describe_training(folder: pathlib.Path, names: list[str]) -> str | None:
    """Recognizes the state of another program's training run, without its model."""
    if any(name.endswith(".distcp") for name in names) or any((folder / name / ".metadata").exists() for name in names):
        return (
            "contains the shards of a distributed training state (.distcp), not a model: consolidate them first, for "
            "example with accelerate merge-weights"
        )
    if "zero_to_fp32.py" in names or any(name.startswith("global_step") for name in names):
        return "contains a DeepSpeed state, not a model: run its zero_to_fp32.py first"
    if any(name.startswith("optimizer.") for name in names) and not any(
        name.startswith(("model", "pytorch_model")) for name in names
    ):
        return "contains optimizer state but no model: give the folder that contains config.json"
    inside = [name for name in names if (folder / name / CONFIG).is_file() or (folder / name / ADAPTER).is_file()]
    if inside and not any(name.endswith(WEIGHTS) for name in names):
        return f"has no {CONFIG}, but its subfolders do: give one of them, such as {folder / inside[-1]}"
    return None


def _describe_weights(names: list[str]) -> str | None:
    """Recognizes weights in other formats."""
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf and not any(name.endswith(".safetensors") for name in names):
        return f"contains GGUF files ({len(gguf)}) but no safetensors: give one of these files, such as {gguf[0]}"
    pickles = [name for name in names if name.endswith(WEIGHTS[2:])]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        return (
            f"contains {pickles[0]}, an unsupported weight format; supported: safetensors. Load it with transformers "
            "and save it with save_pretrained first"
        )
    return None


def _read(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if the file is damaged, because loading reports the damage."""
    try:
        values = parse_json(read_inside(folder, name, max_bytes=MAX_CONFIG_BYTES) or b"null")
    except (UnsafeFileError, OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
