"""The EAGLE-3 draft method (2503.01840), with its network, drafting and published files."""
