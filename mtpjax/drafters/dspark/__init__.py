"""DSpark (2607.05147): network, drafting and published files."""
