"""Decoding by name: requests and settings become a model, a drafter and arrays, and `mtpjax.decoding` runs them."""
