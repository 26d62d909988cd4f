"""The DSpark draft method (2607.05147), with its network, drafting and published files."""
