"""Draft methods, with one folder per method, shared code, and base classes for user-defined methods."""

from mtpjax.decoding.decoder import Drafter
from mtpjax.decoding.limits import DraftLimits
from mtpjax.decoding.state import Draft
from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.method import DrafterFiles, DraftMethod, DraftTraining
from mtpjax.drafters.trained import DraftLevels, DraftParams, TextRows, TrainedDrafter

__all__ = [
    "Draft",
    "DraftLevels",
    "DraftLimits",
    "DraftMethod",
    "DraftParams",
    "DraftTraining",
    "Drafter",
    "DrafterFiles",
    "TextRows",
    "TrainedDrafter",
    "TrunkSizes",
]
