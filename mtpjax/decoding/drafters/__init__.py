"""Draft methods: MTP modules, prompt lookup, and the protocol for a custom drafter."""

from mtpjax.decoding.drafters.base import Draft, Drafter

__all__ = ["Draft", "Drafter"]
