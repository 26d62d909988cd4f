"""Checkpoints on disk: mtpjax's format, and conversion from and to Hugging Face's."""
