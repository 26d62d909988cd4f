"""Defines the `DraftMethod` for the model's MTP modules, which are part of its network, files and training."""

from mtpjax.drafters.method import DraftMethod
from mtpjax.drafters.mtp.drafting import MTPDrafter

MTP = DraftMethod(
    name="mtp",
    title="MTP modules",
    drafter=MTPDrafter,
    algorithms=("MTP", "NEXTN", "EAGLE"),
    from_settings=lambda config: MTPDrafter(),
    default_levels=2,
    is_of_model=True,
)
