"""The commands of `mtpjax`, one file per group. Parsing imports no JAX; a command imports it when it runs."""
