"""One file per kind of layer; `block.py` puts them together."""
