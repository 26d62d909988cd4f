"""The MTP drafter: the modules that were trained with the model draft."""
