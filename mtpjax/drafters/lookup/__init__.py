"""Prompt lookup: drafts copied from the row's own text."""
