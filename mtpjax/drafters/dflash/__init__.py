"""DFlash (2602.06036): network, drafting and published files."""
