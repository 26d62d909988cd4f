"""One file per kind of layer; `block.py` combines them."""
