"""Describes the features that a draft method does not support."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """For each feature, the reason why a draft method does not support it, for error messages; None if it does.

    Attributes:
        trees: `topk` above 1.
        draft_window: a window for the drafter's cache.
        draft_vocabulary: a reduced head for the MTP modules.
        sharded_trunk: a mesh that splits the trunk's width, heads or experts.
        levels: what messages call the levels of a drafter with `max_levels`.
    """

    trees: str | None = None
    draft_window: str | None = None
    draft_vocabulary: str | None = None
    sharded_trunk: str | None = None
    levels: str = "levels of the drafter"
