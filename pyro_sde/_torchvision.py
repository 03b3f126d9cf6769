"""Import of torchvision, and of packages that import it, with a torch for other hardware."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import torch

from ._extras import import_extra

__all__ = ["import_with_repair"]

_PACKAGES = {"torchmetrics", "torchvision"}


def import_with_repair(name: str, function: str) -> ModuleType:
    """The module ``name``, imported even where torchvision's compiled operators do not load.

    A torchvision from a CUDA wheel beside a CPU build of torch cannot load its compiled library,
    and then dies with ``RuntimeError: operator torchvision::nms does not exist`` upon import.
    torchmetrics, which imports torchvision wherever it is installed, dies with it. Upon that
    failure, and no other, the two missing schemas are declared and the import is tried again.
    Datasets, transforms and models then work; the compiled operators, such as
    ``torchvision.ops.nms``, still raise when called.

    Example::

        >>> classification = import_with_repair("torchmetrics.functional.classification", "auroc")
        >>> classification.binary_auroc(torch.tensor([0.1, 0.9]), torch.tensor([0, 1])).item()
        1.0

    :param name: A module of torchvision or torchmetrics, dotted where it is inside.
    :param function: The function that the user has called, for the error if there is no package.
    :returns: The module.
    """
    try:
        return import_extra(name, function)
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare_schemas()
    # Python takes back only the package whose import failed, not what that one had imported.
    # A package that is still there was imported whole, and others hold references to it.
    broken = {package for package in _PACKAGES if package not in sys.modules}
    for module in list(sys.modules):
        if module.partition(".")[0] in broken:
            del sys.modules[module]
    return import_extra(name, function)


# Cached to keep the library alive, with which the schemas would vanish; and torch refuses a second.
@functools.cache
def _declare_schemas() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
