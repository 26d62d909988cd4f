"""Implements `mtpjax.save`, which writes a model, its parameters and its tokenizer as a checkpoint."""

import pathlib
from collections.abc import Mapping
from typing import Any

from mtpjax.errors import UsageError
from mtpjax.io.checkpoint import save_model
from mtpjax.io.huggingface_files import count_token_ids, has_tokenizer, huggingface_folder, read_small_file
from mtpjax.models.model import MTPModel
from mtpjax.models.params import check_params
from mtpjax.models.trunk import unstack_layers
from mtpjax.safe_open import list_chat_templates

# Files that determine tokens, chat templates and end tokens.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
NUM_BYTES = 256  # vocabulary size of the byte tokenizer


def save(
    path, model: MTPModel, params: dict, *, tokenizer: Any = None, metadata: Mapping[str, Any] | None = None
) -> None:
    """Saves a model as a checkpoint that `mtpjax.load` and all commands read.

    The folder appears only when it is complete, and then replaces an older checkpoint at `path`. All processes of a run
    must call this function; each writes its devices' shards of sharded parameters.

    Args:
        path: the folder to write; missing parents are created.
        model: the model; its `config` is saved.
        params: the parameters, for example from `init_params`, `load` or a `TrainState`. If the model has
            `scan_layers`, its stacked trunk layers are saved unstacked, as decoding needs them.
        tokenizer: a folder with a `tokenizer.json`, or a tokenizer object from mtpjax, transformers or tokenizers. If
            None, a model with `vocab_size` 256 uses the byte tokenizer, and other models have no tokenizer.
        metadata: additional JSON values to store, such as the number of steps.

    Raises:
        ValueError: the parameters do not match the model, the metadata contains NaN, or the tokenizer has no
            `tokenizer.json` or more tokens than the model.
        TypeError: the metadata does not consist of JSON values.
        FileExistsError: `path` is neither a checkpoint nor an empty folder, so it is not replaced.

    Example:
        >>> import tempfile
        >>> import jax, mtpjax
        >>> config = mtpjax.ModelConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        ...                             intermediate_size=32, num_mtp_modules=1)
        >>> model = mtpjax.MTPModel(config)
        >>> path = tempfile.mkdtemp() + "/mine"
        >>> mtpjax.save(path, model, mtpjax.init_params(model, jax.random.key(0)), metadata={"steps": 0})
        >>> model, params = mtpjax.load(path)
        >>> model.config == config
        True
    """
    check_params(params, model)
    # Checkpoints have one entry per layer, as decoding needs it.
    if model.scan_layers:
        model, params = model.clone(scan_layers=False), unstack_layers(params, model.config)
    writer = None if tokenizer is None else _TokenizerWriter(tokenizer, model.config.vocab_size)
    # Record the tokenizer's kind, because exports must recognise the byte tokenizer, whose token 0 ends a text.
    kind = {"tokenizer": "huggingface"} if writer else {"tokenizer": "bytes"}
    if not writer and model.config.vocab_size != NUM_BYTES:
        kind = {}
    save_model(path, model, params, metadata={**kind, **(metadata or {})}, tokenizer=writer)


class _TokenizerWriter:
    """Writes the files of any supported tokenizer, and checks them."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.tokenizer, self.vocab_size, self.folder = tokenizer, vocab_size, None
        # Report a missing file before anything is written.
        if isinstance(tokenizer, str | pathlib.Path):
            self.folder = huggingface_folder(tokenizer)
            if not has_tokenizer(self.folder):
                raise UsageError(f"{self.folder} has no tokenizer.json")
        elif not hasattr(tokenizer, "save_pretrained") and not hasattr(tokenizer, "save"):
            raise UsageError(
                f"tokenizer must be a folder or a tokenizer with save_pretrained or save, got {tokenizer!r}"
            )

    def save(self, folder: pathlib.Path) -> None:
        """Writes the files into an existing folder."""
        if self.folder is not None:
            names = (*TOKENIZER_FILES, *list_chat_templates(self.folder))
            contents = {name: read_small_file(self.folder, name) for name in names}
            for name, content in contents.items():
                if content is not None:
                    (folder / name).parent.mkdir(exist_ok=True)
                    (folder / name).write_bytes(content)
        # transformers writes a folder; the tokenizers package writes one file.
        elif hasattr(self.tokenizer, "save_pretrained"):
            self.tokenizer.save_pretrained(str(folder))
        elif hasattr(self.tokenizer, "to_str"):
            (folder / "tokenizer.json").write_text(self.tokenizer.to_str())
        else:
            self.tokenizer.save(folder)
        # A tokenizer with too many tokens would otherwise fail only when the checkpoint is used.
        count = count_token_ids(folder)
        if count is None:
            raise UsageError(f"the tokenizer {type(self.tokenizer).__name__} wrote no readable tokenizer.json")
        if count > self.vocab_size:
            raise UsageError(f"the tokenizer has {count} tokens, but the model's vocab_size is {self.vocab_size}")
