"""The commands of `mtpjax`: in each file the flags of some, and what runs them. None imports JAX before it runs."""
