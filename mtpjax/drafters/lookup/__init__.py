"""Prompt lookup: copies drafts from the row's text."""
