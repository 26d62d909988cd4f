"""The MTP drafter, which drafts with the modules that were trained with the model."""
