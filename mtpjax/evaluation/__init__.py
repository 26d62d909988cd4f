"""Measures models: acceptance, round costs, self-check."""
