"""Data: tokenizers, chat templates, prompts, training sources, packing."""
