"""Counts what an update of a run processes, for its logged speed and model FLOPs utilisation."""

import jax

from mtpjax.drafters.trained import TrainedDrafter
from mtpjax.evaluation.roofline import find_device
from mtpjax.evaluation.update_flops import Trained, total_flops, update_flops
from mtpjax.models.flops import RowCounts
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.log import UpdateWork


def trained_part(config: TrainConfig, spec: TrainSpec) -> Trained:
    """Returns what an update of a run trains."""
    drafter: TrainedDrafter | None = spec.drafter
    return Trained(config.trains, spec.num_depths, config.trunk_states is None, drafter, spec.num_anchors)


def update_work(config: TrainConfig, spec: TrainSpec, params: dict, corpus: Corpus) -> UpdateWork:
    """Counts the work of an update, with the documents' lengths in the training rows."""
    tokens, flops = config.batch_size * config.row_length, 0.0
    # Sources are mixed by their weights, so each contributes its mean per token.
    for rows, weight in zip(corpus.source_rows, corpus.source_weights, strict=True):
        counts = RowCounts.of_segments(rows.segment_ids)
        parts = update_flops(spec.model.config, params, counts, trained_part(config, spec))
        if parts is None:
            return UpdateWork(tokens, None, None)
        # Rows may overlap (`extra_tokens`), so they are longer than the tokens that an update counts.
        per_row = total_flops(parts) / counts.num_rows
        flops += config.batch_size * per_row * weight / sum(corpus.source_weights)
    device = find_device(jax.devices()[0].device_kind)
    num_devices = 1 if spec.mesh is None else spec.mesh.size
    return UpdateWork(tokens, flops, device and num_devices * device.peak_flops(config.dtype))
