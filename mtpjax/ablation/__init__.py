"""Implements `mtpjax ablate`, which times a grid of draft settings and alternates each with plain decoding."""
