"""The DFlash draft method (2602.06036), with its network, drafting and published files."""
