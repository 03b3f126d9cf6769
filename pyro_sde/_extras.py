"""Importing packages that only some functions need."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["EXTRAS", "import_extra"]

EXTRAS = {
    "arviz": "arviz",
    "matplotlib": "plot",
    "torchmetrics": "metrics",
    "torchvision": "vision",
}
"""From a package to the extra of pyproject.toml that installs it."""


def import_extra(name: str, function: str) -> ModuleType:
    """The module ``name``, or an error that says what needs it and how to install it.

    Example::

        >>> import_extra("arviz", "to_arviz").__name__
        'arviz'

    :param name: A module of a package in ``EXTRAS``, dotted where it is inside.
    :param function: The function that the user has called.
    :returns: The module.
    """
    package = name.partition(".")[0]
    try:
        module = importlib.import_module(
            package
        )  # first, so that a missing submodule is another error
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        raise ImportError(
            f"{function} needs {error.name}: pip install 'pyro-sde[{extra}]'", name=error.name
        ) from error
    return module if name == package else importlib.import_module(name)
