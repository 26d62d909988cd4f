"""Draft methods: MTP modules, prompt lookup, and the protocol for a drafter of your own."""

from mtpjax.decoding.drafters.base import Draft, Drafter

__all__ = ["Draft", "Drafter"]
