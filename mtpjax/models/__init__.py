"""Model definition: configuration, trunk, MTP modules, caches, sharding.

`params` is the tree of `init_params` for `model`, `config` is `model.config`, `view` holds positions and masks of a
pass (`mtpjax.models.view`), and `sizes` the sizes of the axes of a mesh by name. `implementation` chooses the kernels
(`pallas_kernels`).
"""
