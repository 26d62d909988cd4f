"""What a draft method does not support."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """What a draft method does not support: the reason per feature, for error messages; None: the feature is supported.

    Attributes:
        trees: `topk` above 1.
        draft_window: a window of the drafter's cache.
        draft_vocabulary: a reduced head of the MTP modules.
        sharded_trunk: a mesh that splits the trunk's width, heads or experts.
        levels: the noun for the levels of a drafter with `max_levels`, for messages.
    """

    trees: str | None = None
    draft_window: str | None = None
    draft_vocabulary: str | None = None
    sharded_trunk: str | None = None
    levels: str = "levels of the drafter"
