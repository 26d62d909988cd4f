"""Checkpoints on disk: mtpjax's own format, and conversion from and to Hugging Face's."""
