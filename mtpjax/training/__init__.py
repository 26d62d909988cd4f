"""Training of trunks and MTP modules: settings, losses, update steps, run folders and evaluation."""
