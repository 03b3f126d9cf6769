"""The parameters of a guide in Pyro's global param store."""

from __future__ import annotations

from collections.abc import Iterator

import pyro
from pyro.nn.module import PyroModule
from pyro.params.param_store import param_with_module_name
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["register_parameters"]

# By identity and weakly: a parameter that was loaded from a file belongs to no guide yet.
_owned = WeakIdKeyDictionary()


def register_parameters(guide: PyroModule) -> None:
    """Make guide and param store hold the same tensor for every parameter of ``guide``.

    A parameter that the store loaded from a file replaces the guide's. One that another guide
    put there is an error: Pyro would train that one's and use ours.
    """
    store = pyro.get_param_store()
    for name, module, key in _named(guide, guide._pyro_name):
        mine = module._parameters[key]
        theirs = store._params.get(name)
        if theirs is not None and theirs is not mine:
            if theirs in _owned:
                raise ValueError(
                    f"another guide has put {name!r} into the param store, and Pyro would train "
                    f"that guide's parameter, not this one's. Call pyro.clear_param_store() if the "
                    f"other is no longer needed, or give this one a name of its own: "
                    f"{type(guide).__name__}(model, name=...)"
                )
            if not isinstance(theirs, nn.Parameter):
                theirs = nn.Parameter(theirs.detach())
                store._params[name] = theirs
                store._param_to_name[theirs] = name
            module._parameters[key] = mine = theirs
        if mine is not None:
            _owned[mine] = True


def _named(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Name in the store, owner and key of every parameter, as PyroModule names them."""
    constrained = getattr(module, "_pyro_params", {})
    for key in module._parameters:
        plain = key.removesuffix("_unconstrained")
        name = plain if plain in constrained else key
        yield (f"{prefix}.{name}" if prefix else name), module, key
    for key, child in module._modules.items():
        if child is None:
            continue
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(child, PyroModule):
            yield from _named(child, name)
        else:
            for path, sub in child.named_modules():
                for leaf in sub._parameters:
                    full = f"{path}.{leaf}" if path else leaf
                    yield param_with_module_name(name, full), sub, leaf
