"""Draft methods: a folder for each, what they share, and what a method of a user is made of."""

from mtpjax.decoding.drafter import Draft, Drafter
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
