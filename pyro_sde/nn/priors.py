"""Neural drifts and diffusions, for priors that are learned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._ops.common import has_hooks
from ..simulation.network import GridNetwork

__all__ = ["NeuralDiffusion", "NeuralDrift"]


class NeuralDrift(nn.Module):
    r"""A drift :math:`f(z)`, or :math:`f(t, z)`, that is a small network with smooth activations.

    As the drift of an :class:`~pyro_sde.distributions.SDEPath` in a model it is learned together
    with the guide, whose process begins as the process of the model: see
    :class:`~pyro_sde.AutoSDE`.

    Example::

        >>> drift = NeuralDrift(3, hidden=(32, 32))
        >>> drift(torch.zeros(1), torch.zeros(10, 3)).shape
        torch.Size([10, 3])

    :param dim: D, the dimension of the state.
    :param hidden: Widths of the hidden layers.
    :param time: Whether the drift depends on time, too.
    :param activation: The class of the activations.
    """

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (64,),
        *,
        time: bool = False,
        activation: type[nn.Module] = nn.Softplus,
    ) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must name at least one width >= 1: found {tuple(hidden)}")
        self.time = time
        sizes = [dim + time, *hidden]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), activation()]
        self.net = nn.Sequential(*layers, nn.Linear(sizes[-1], dim))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """The drift at times and states.

        :param t: Times, which broadcast against ``z[..., :1]``.
        :param z: States of shape ``(..., dim)``.
        :returns: A tensor of the shape of ``z``.
        """
        if self.time:
            z = torch.cat([z, t.expand(*z.shape[:-1], 1)], -1)
        return self.net(z)

    def on_grid(self, t: Tensor) -> GridNetwork | None:
        """The drift on a whole grid, with all that depends on time computed ahead.

        :param t: The times of the steps, time first.
        :returns: The drift as one network per step. None for other activations, for a subclass with
            a ``forward`` of its own, and with hooks: paths then call the module at every step.
        """
        layers: list[Any] = list(self.net)
        linear, activations = layers[::2], layers[1::2]
        kinds = {type(a) for a in activations}
        names = {nn.Softplus: "softplus", nn.Tanh: "tanh"}
        plain = (
            type(self).forward is NeuralDrift.forward
            and len(kinds) == 1
            and kinds <= names.keys()
            and all(type(layer) is nn.Linear for layer in linear)
            and all((a.beta, a.threshold) == (1, 20) for a in activations if type(a) is nn.Softplus)
            and not has_hooks(*self.modules())
        )
        if not plain:
            return None
        weights, biases = [x.weight for x in linear[:-1]], [x.bias for x in linear[:-1]]
        last, n = (linear[-1].weight, linear[-1].bias), len(t)
        grid = GridNetwork(weights, [b.expand(n, -1) for b in biases], last)
        grid.activation = names[kinds.pop()]
        if self.time:
            weights[0], of_time = weights[0].split([weights[0].shape[1] - 1, 1], 1)
            if t.numel() == n:
                grid.biases[0] = biases[0] + t.reshape(n, 1) * of_time.squeeze(-1)
            else:
                grid.context = [t]
                grid.context_weights = [of_time, *(w[:, :0] for w in weights[1:])]
        return grid


class NeuralDiffusion(nn.Module):
    r"""A positive diffusion :math:`g_d(z_d)` with a small network for each dimension.

    Each network reads its own coordinate alone, so the noise is diagonal and the equations of Itô
    and Stratonovich differ only by a drift. Before training the diffusion is ``scale`` everywhere.

    Example::

        >>> g = NeuralDiffusion(3, scale=0.5)
        >>> g(torch.zeros(1), torch.zeros(3))
        tensor([0.5000, 0.5000, 0.5000], grad_fn=<AddBackward0>)

    :param dim: D, the dimension of the state.
    :param hidden: The width of each network; 0 for learned constants.
    :param scale: The diffusion before training.
    :param floor: A lower bound; a diffusion that reaches zero makes the KL explode.
    """

    def __init__(
        self, dim: int, hidden: int = 16, *, scale: float = 0.5, floor: float = 1e-3
    ) -> None:
        super().__init__()
        if not 0 < floor < scale:
            raise ValueError(
                f"floor and scale must be positive, floor the smaller: found {floor:g}, {scale:g}"
            )
        self.floor, self.hidden = floor, hidden
        if hidden:
            self.slope = nn.Parameter(torch.randn(dim, hidden))
            self.shift = nn.Parameter(torch.randn(dim, hidden))
            self.weight = nn.Parameter(torch.zeros(dim, hidden))
        self.bias = nn.Parameter(torch.full((dim,), math.log(math.expm1(scale - floor))))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """The diffusion at times and states.

        :param t: Times, which do not matter.
        :param z: States of shape ``(..., dim)``.
        :returns: A positive tensor that broadcasts to the shape of ``z``.
        """
        out: Tensor = self.bias
        if self.hidden:
            h = torch.tanh(torch.addcmul(self.shift, z.unsqueeze(-1), self.slope))
            out = out + (h * self.weight).sum(-1)
        return nn.functional.softplus(out) + self.floor

    def without_state(self, t: Tensor) -> Tensor | None:
        """The diffusion at given times, where it does not depend on the state.

        :param t: Times, time first.
        :returns: A positive tensor; None if the diffusion depends on the state.
        """
        overridden = type(self).forward is not NeuralDiffusion.forward
        if self.hidden or overridden or has_hooks(self):
            return None
        return self(t, t)
