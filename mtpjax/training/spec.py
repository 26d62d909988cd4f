"""`TrainSpec`: what an update trains and how."""

import dataclasses

from jax.sharding import Mesh

from mtpjax.drafters.trained import TrainedDrafter
from mtpjax.models.model import MTPModel
from mtpjax.training.anchors import MAX_ANCHORS
from mtpjax.training.losses import ObjectiveFunction
from mtpjax.training.objective import Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """The static settings of `train_step`: what it trains and how. Hashable.

    Attributes:
        model: the model, with stacked layers; the unrolled trunk of a drafter.
        num_depths: draft depths with a loss.
        trains: the trained part, as in `TrainConfig`. For "modules" the frozen parameters have no backward pass.
        objective: the draft losses.
        objective_function: computes the loss from `LossInputs`, instead of `objective`.
        attention_layout: "ttt" or "stream", as in `TrainConfig`.
        accumulation: number of parts of the batch that run one after the other. The gradients are the same up to
            rounding; the LK hybrid needs an additional forward pass.
        mesh: splits the rows over its devices (`mtpjax.training.data_parallel`); None: one device.
        drafter: the drafter that trains instead of MTP modules (`mtpjax.drafters.trained`); None: MTP modules.
        num_anchors: maximum number of anchors in a row, for a drafter that draws them.
        seed: seed of the anchors. Those of an update depend only on the seed and the update's number.

    Example:
        >>> from mtpjax import MTPModel, presets
        >>> from mtpjax.training import TrainSpec
        >>> spec = TrainSpec(model=MTPModel(presets["tiny"], scan_layers=True), num_depths=1, trains="modules")
    """

    model: MTPModel
    num_depths: int
    trains: str = "all"
    objective: Objective = Objective()  # noqa: RUF009, frozen
    objective_function: ObjectiveFunction | None = None
    attention_layout: str = "ttt"
    accumulation: int = 1
    mesh: Mesh | None = None
    drafter: TrainedDrafter | None = None
    num_anchors: int = MAX_ANCHORS
    seed: int = 0
