"""The commands of `mtpjax`, one file per group. Parsing does not import JAX, but running a command does."""
