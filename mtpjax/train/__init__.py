"""Training: documents, losses, steps and the loop over them."""
