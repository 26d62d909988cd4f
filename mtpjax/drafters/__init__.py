"""Draft methods: a folder for each, their shared code, and the classes for a user-defined method."""

from mtpjax.decoding.decoder import Drafter
from mtpjax.decoding.state import Draft
from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.method import DrafterFiles, DraftMethod, DraftTraining
from mtpjax.drafters.trained import DraftLevels, DraftParams, TextRows, TrainedDrafter

__all__ = [
    "Draft",
    "DraftLevels",
    "DraftMethod",
    "DraftParams",
    "DraftTraining",
    "Drafter",
    "DrafterFiles",
    "TextRows",
    "TrainedDrafter",
    "TrunkSizes",
]
