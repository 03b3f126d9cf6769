"""Residual stages: discrete, continuous, and continuous with weights that move."""

import copy

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_sde import MLPControl
from pyro_sde.nn.functional_field import FunctionalField
from pyro_sde.solvers import integrate


class ResNetStage(PyroModule):
    """So many residual blocks, h + field_i(h) / blocks, each with weights of its own."""

    def __init__(self, field: nn.Module, blocks: int) -> None:
        super().__init__()
        self.fields = PyroModule[nn.ModuleList](_fresh(field) for _ in range(blocks))

    @property
    def evaluations(self) -> int:
        return len(self.fields)

    def forward(self, h: Tensor) -> Tensor:
        for field in self.fields:
            h = h + field(h) / len(self.fields)
        return h


class ODEStage(PyroModule):
    """dh/dt = field(h) with constant weights, by Euler steps."""

    def __init__(self, field: nn.Module, steps: int) -> None:
        super().__init__()
        self.field = field
        self.register_buffer("times", torch.linspace(0, 1, steps + 1), persistent=False)

    @property
    def evaluations(self) -> int:
        return len(self.times) - 1

    def forward(self, h: Tensor) -> Tensor:
        field = self.field
        return integrate(lambda t, h, w: field(h), h, None, self.times)


class HyperODEStage(PyroModule):
    """dh/dt = field(h; w), dw/dt = hypernetwork(t, w), the same control as the SDE-BNN's, with
    weights measured in units of 1 / sqrt(fan in)."""

    def __init__(self, field: nn.Module, steps: int) -> None:
        super().__init__()
        self.skeleton = FunctionalField(field)
        start, scale = self.skeleton.take_initial()
        self.start = nn.Parameter(start / scale)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("times", torch.linspace(0, 1, steps + 1), persistent=False)
        self.hypernetwork = MLPControl(len(start), times=self.times)

    @property
    def evaluations(self) -> int:
        return len(self.times) - 1

    def forward(self, h: Tensor) -> Tensor:
        dt = self.times.diff()
        drift = self.hypernetwork.on_grid(self.times[:-1].unsqueeze(-1))
        w = [self.start]
        for i in range(len(dt)):
            w.append(w[-1] + dt[i] * drift.at(i, w[-1]))
        return integrate(self.skeleton, h, self.scale * torch.stack(w), self.times)


def _fresh(field: nn.Module) -> nn.Module:
    """A copy with weights of its own, of the same spread."""
    new = copy.deepcopy(field)
    for p in new.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=float(p.detach().std()))
    return new
