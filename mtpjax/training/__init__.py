"""Training of trunks and MTP modules: settings, losses, update steps, run folders and evaluation.

The names in `__all__` are for custom training loops, callbacks and objectives.
"""

import importlib
from typing import TYPE_CHECKING

# Type checkers and editors follow these imports; at run time `__getattr__` imports the names.
if TYPE_CHECKING:
    from mtpjax.data.packing import Batch, Document, pack, shuffled_batches
    from mtpjax.training.callbacks import Callback, TrainEvent
    from mtpjax.training.corpus import Corpus, load_corpus
    from mtpjax.training.gradients import TrainSpec
    from mtpjax.training.losses import LossInputs, mtp_scale_at, multi_depth_loss
    from mtpjax.training.panel import Panel, acceptance_panel
    from mtpjax.training.progress import learning_rate_at
    from mtpjax.training.step import make_optimizer, train_step
    from mtpjax.training.train_state import TrainState, init_train_state
    from mtpjax.training.yaml_config import model_to_yaml, read_model_config

__all__ = [
    "Batch",
    "Callback",
    "Corpus",
    "Document",
    "LossInputs",
    "Panel",
    "TrainEvent",
    "TrainSpec",
    "TrainState",
    "acceptance_panel",
    "init_train_state",
    "learning_rate_at",
    "load_corpus",
    "make_optimizer",
    "model_to_yaml",
    "mtp_scale_at",
    "multi_depth_loss",
    "pack",
    "read_model_config",
    "shuffled_batches",
    "train_step",
]

# The module that defines each public name. `__getattr__` imports it on first use, as in `mtpjax`: reading settings
# must not import JAX.
_HOMES = {
    "data.packing": ("Batch", "Document", "pack", "shuffled_batches"),
    "training.callbacks": ("Callback", "TrainEvent"),
    "training.corpus": ("Corpus", "load_corpus"),
    "training.loss_inputs": ("LossInputs",),
    "training.losses": ("mtp_scale_at", "multi_depth_loss"),
    "training.model_yaml": ("model_to_yaml", "read_model_config"),
    "training.panel": ("Panel", "acceptance_panel"),
    "training.progress": ("learning_rate_at",),
    "training.spec": ("TrainSpec",),
    "training.step": ("TrainState", "init_train_state", "make_optimizer", "train_step"),
}


def __getattr__(name: str):
    """Imports a public name when it is first used."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"mtpjax.{home}"), name)
    raise AttributeError(f"module 'mtpjax.training' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Lists the public names, which are not in `globals()`."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
