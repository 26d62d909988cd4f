"""Warns, so that `sphinx-build -W` fails, if a public name has no entry in the reference."""

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import mtpjax
import mtpjax.training


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Compares `__all__` of mtpjax and mtpjax.training with the documented objects."""
    documented = env.domains["py"].objects
    packages = (mtpjax, mtpjax.training)
    public = [f"{package.__name__}.{name}" for package in packages for name in package.__all__]
    missing = sorted({*public} - {*documented, "mtpjax.__version__"})
    if missing:
        logging.getLogger(__name__).warning("public names without an entry in docs/reference: %s", ", ".join(missing))


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the check."""
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
