"""Reads and writes Hugging Face checkpoints.

Arguments that many functions share: `files` is the open checkpoint (`conversion.files.CheckpointFiles`), `plan` its
`LoadPlan`, `config` the `ModelConfig`, `layout` the family's tensor names, `specs` the parameters by flat name,
`values` the parsed `config.json`. `has(name)` returns whether the checkpoint has a tensor with this name.
`progress(count)` is called with the size in bytes of each block that is read or written.
"""
