"""EAGLE-3 (2503.01840): network, drafting and published files."""
