"""Defines the `DraftMethod` for prompt lookup."""

from mtpjax.drafters.lookup.drafting import LookupDrafter
from mtpjax.drafters.method import DraftMethod

LOOKUP = DraftMethod(
    name="lookup",
    title="n-gram lookup",
    drafter=LookupDrafter,
    algorithms=("NGRAM",),
    from_settings=lambda config: LookupDrafter(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max),
    # More levels than for MTP modules, because copied n-grams are often right for several tokens.
    default_levels=4,
)
