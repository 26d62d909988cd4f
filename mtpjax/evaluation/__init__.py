"""Measurements of a model: acceptance, round costs, self-check."""
