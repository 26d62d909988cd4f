"""Converts requests and settings to a model, a drafter and arrays, which `mtpjax.decoding` runs."""
