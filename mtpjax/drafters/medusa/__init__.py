"""The Medusa draft method (2401.10774), with its heads, drafting and published files."""
