"""Reads and writes mtpjax checkpoints, and converts them from and to Hugging Face's format."""
