"""Training: data, losses, steps, runs. The package is the function too: `mtpjax.train(TrainConfig(...))`."""

import sys
import types


class _Train(types.ModuleType):
    """A package and a public function share one name; importing a part must not take the function away."""

    def __call__(self, config, **options):
        from mtpjax.train.loop import train

        return train(config, **options)


sys.modules[__name__].__class__ = _Train
