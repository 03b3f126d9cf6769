"""Parameters that DistributedDataParallel does not know of are an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pyro import poutine
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["check_shared", "shared_parameters_only"]


def check_shared(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise an error if we are inside of ``DistributedDataParallel`` and it does not know all of
    these parameters: each rank would train its own copy of the others."""
    wrapper: Any = DistributedDataParallel._active_ddp_module
    if wrapper is None:
        return
    known = {id(p) for p in wrapper._module_parameters}
    unknown = [name for name, p in parameters if p.requires_grad and id(p) not in known]
    if unknown:
        raise RuntimeError(
            f"DistributedDataParallel was not given {len(unknown)} parameters, {unknown[0]!r} the "
            "first, so their gradients would not be averaged and every rank would train its own. "
            "Make all parameters before: call guide.setup(*args), with the arguments of the "
            "model, before DistributedDataParallel(elbo(model, guide)). A parameter made by "
            "pyro.param must become a PyroParam of the model, a PyroModule"
        )


@contextmanager
def shared_parameters_only() -> Iterator[None]:
    """:func:`check_shared`, of every parameter that is used inside."""
    if DistributedDataParallel._active_ddp_module is None:
        yield
        return
    with poutine.trace(param_only=True) as used:
        yield
    sites: Any = used.trace.nodes.items()
    check_shared((name, site["value"].unconstrained()) for name, site in sites)
