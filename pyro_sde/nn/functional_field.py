"""A module as a function of its weights, which are one vector."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["FunctionalField"]


class FunctionalField(nn.Module):
    """A module as a function of (t, h, w), where the vector w holds all its parameters.

    The module itself is not changed. Parameters that need no gradient stay constants. Parameters
    that several layers share occur once.

    :param field: A module called as ``field(t, h)`` or ``field(h)``.
    """

    def __init__(self, field: nn.Module) -> None:
        super().__init__()
        if not isinstance(field, nn.Module):
            raise TypeError(f"field must be an nn.Module, found {type(field).__name__}")
        _refuse_batch_norm(field)
        self.takes_time = _takes_time(field)
        self.field = copy.deepcopy(field)
        self.names: list[list[str]] = []
        self.shapes: list[torch.Size] = []
        self._take_apart()
        if not self.shapes:
            raise ValueError("field has no parameters that need a gradient, and so no weights")
        self.sizes = [shape.numel() for shape in self.shapes]
        self.dim = sum(self.sizes)
        convolutions = [m for m in field.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        self.event_dim = max([1, *(m.weight.dim() - 1 for m in convolutions)])

    def _take_apart(self) -> None:
        slots: dict[int, int] = {}
        self._initial: list[Tensor] = []
        self._fan_in: list[int] = []
        for prefix, module in list(self.field.named_modules()):
            fan_in = _fan_in(module)
            for name, p in list(module._parameters.items()):
                if p is None or not p.requires_grad:
                    continue
                if id(p) not in slots:
                    slots[id(p)] = len(self.shapes)
                    self.shapes.append(p.shape)
                    self.names.append([])
                    self._initial.append(p.detach().clone())
                    self._fan_in.append(fan_in)
                self.names[slots[id(p)]].append(f"{prefix}.{name}" if prefix else name)
        # Not field.buffers(), which visits all names in every pass.
        self._all_modules = list(self.field.modules())
        self._places: list[list[tuple[nn.Module, str]]] = []
        for names, p in zip(self.names, self._initial, strict=True):
            places: list[tuple[nn.Module, str]] = []
            for full in names:
                owner, _, name = full.rpartition(".")
                module = self.field.get_submodule(owner)
                del module._parameters[name]
                # A call replaces this buffer by the weights.
                module.register_buffer(name, p.new_empty(0), persistent=False)
                places.append((module, name))
            self._places.append(places)

    def take_initial(self) -> tuple[Tensor, Tensor]:
        """The initial weights of the module, and 1 / sqrt(fan in) of each weight's layer."""
        start = torch.cat([p.flatten() for p in self._initial])
        scale = torch.cat(
            [
                torch.full_like(p.flatten(), 1 / math.sqrt(n))
                for p, n in zip(self._initial, self._fan_in, strict=True)
            ]
        )
        del self._initial, self._fan_in
        return start, scale

    def unflatten(self, w: Tensor) -> list[Tensor]:
        """The parameters in their own shapes, from vectors of shape ``(..., D)``."""
        parts, lead = w.split_with_sizes(self.sizes, -1), w.shape[:-1]
        return [p.reshape(lead + shape) for p, shape in zip(parts, self.shapes, strict=True)]

    def forward(self, t: Tensor, h: Tensor, w: Tensor) -> Tensor:
        # As torch.func.functional_call does, but without looking up all names every time.
        before = []
        try:
            for places, p in zip(self._places, self.unflatten(w), strict=True):
                for module, name in places:
                    before.append((module._buffers, name, module._buffers[name]))
                    module._buffers[name] = p
            return self.field(t, h) if self.takes_time else self.field(h)
        finally:
            for buffers, name, empty in before:
                buffers[name] = empty

    def call_purely(self, t: Tensor, h: Tensor, w: Tensor) -> Tensor:
        """The same as calling the module, in a form that torch.compile can follow."""
        weights = {
            name: p
            for names, p in zip(self.names, self.unflatten(w), strict=True)
            for name in names
        }
        return torch.func.functional_call(self.field, weights, (t, h) if self.takes_time else (h,))

    def buffer_state(self) -> list[tuple[Tensor, int]]:
        """The buffers of the field, and how often each has been written to."""
        buffers = (b for m in self._all_modules for b in m._buffers.values() if b is not None)
        return [(b, b._version) for b in buffers]

    def has_changed(self, before: list[tuple[Tensor, int]]) -> bool:
        """Whether a buffer was written to, or replaced, since :meth:`buffer_state`."""
        return any(
            old is not new or old_version != new_version
            for (old, old_version), (new, new_version) in zip(
                before, self.buffer_state(), strict=True
            )
        )


def _fan_in(module: nn.Module) -> int:
    """The number of inputs that one output of the layer sums over."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        return 1
    inputs = weight.shape[1]
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        inputs = weight.shape[0] // module.groups
    return max(1, inputs * weight[0, 0].numel())


def _takes_time(field: nn.Module) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        p
        for p in inspect.signature(field.forward).parameters.values()
        if p.kind in positional and p.default is p.empty
    ]
    if len(needed) not in (1, 2):
        raise TypeError(
            "field must be called as field(t, h) or field(h): found a forward with "
            f"{len(needed)} required arguments, {[p.name for p in needed]}"
        )
    return len(needed) == 2


def _refuse_batch_norm(field: nn.Module) -> None:
    for name, module in field.named_modules():
        if isinstance(module, _NormBase) and (
            module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm)
        ):
            raise ValueError(
                f"field contains {type(module).__name__} ({name or 'field itself'}): it divides "
                "by a spread that the whole batch shares and that may come near zero, so the "
                "field is not Lipschitz in h and dh/dt = field(t, h) need not have one solution; "
                "nor may its running statistics change between the evaluations of a solver. Use "
                "GroupNorm or LayerNorm, or no normalisation, inside a field"
            )
