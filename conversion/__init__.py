"""Hugging Face checkpoints in and out.

`files` is the open checkpoint (`conversion.files.CheckpointFiles`), `plan` its `LoadPlan`, `config` the `ModelConfig`,
`layout` how the family names its tensors, `specs` the parameters by flat name, and `values` the content of
`config.json`. `has` returns whether the checkpoint holds a tensor, and `progress` is called with the bytes of each
block that is read or written.
"""
