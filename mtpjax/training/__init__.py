"""Training of trunks and drafters, including settings, losses, update steps, run folders and evaluation.

The names in `__all__` are for custom training loops, callbacks and objectives.
"""

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
