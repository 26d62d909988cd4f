"""Training: settings, losses, steps, run folders and their evaluation."""
