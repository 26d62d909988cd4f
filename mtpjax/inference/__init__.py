"""Converts requests and settings to the model, drafter and arrays that `mtpjax.decoding` runs."""
