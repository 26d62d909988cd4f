"""Medusa (2401.10774): heads, drafting and published files."""
