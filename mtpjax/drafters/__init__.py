"""Draft methods: MTP modules, prompt lookup, and the protocol for a custom drafter."""

from mtpjax.decoding.drafter import Draft, Drafter

__all__ = ["Draft", "Drafter"]
