"""The MTP drafter: drafts with the modules that were trained with the model."""
