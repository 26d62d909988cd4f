"""The model definition, with configuration, trunk, MTP modules, caches and sharding.

In all modules, `params` is the parameter tree that `init_params` makes for `model`, `config` is `model.config`, `view`
holds the positions and masks of a pass (`mtpjax.models.view`), `sizes` maps mesh axis names to sizes, and
`implementation` selects the kernels (`pallas_kernels`).
"""
