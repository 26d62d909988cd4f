"""Tokenizers, chat templates, prompts, training sources and packing."""
