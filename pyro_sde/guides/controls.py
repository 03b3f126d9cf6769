"""Neural controls: how the posterior pushes the prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["MLPControl"]

Output = Tensor | tuple[Tensor, Tensor]


class MLPControl(nn.Module):
    r"""A control u(t, z): a tanh MLP of the state whose biases are functions of time.

    The bias of every hidden layer is linear in features of :math:`\tau = (t - t_0) / (t_1 - t_0)`, namely
    :math:`\tau, \sin \pi k \tau, \cos \pi k \tau` for k up to ``features``; so all that depends on
    time is computed once per path. The last layer starts at zero: the untrained posterior is the
    prior. Small widths at both ends, as in ``hidden=(2, 128, 2)``, keep the cost linear in a
    large ``dim``.

    :param dim: D, the dimension of the state.
    :param hidden: Widths of the hidden layers.
    :param span: ``(t_0, t_1)``, the times between which the features are spread.
    :param features: How many sines, and cosines, of time.
    :param context: Size of an additional input that does not depend on time.
    :param contraction: Return ``(u, log c)``, the logarithm of the factor by which the noise of
        a step shrinks too.
    """

    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] = (64, 64),
        *,
        span: tuple[float, float] = (0.0, 1.0),
        features: int = 16,
        context: int = 0,
        contraction: bool = False,
    ) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must name at least one width >= 1: found {tuple(hidden)}")
        if not span[0] < span[1]:
            raise ValueError(f"span must be an increasing pair (t_0, t_1): found {span}")
        self.dim, self.span, self.contraction = dim, (float(span[0]), float(span[1])), contraction
        self.register_buffer(
            "frequencies", math.pi * torch.arange(1.0, features + 1.0), persistent=False
        )
        sizes = [dim, *hidden, 2 * dim if contraction else dim]
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in zip(sizes[:-2], hidden, strict=True)
        )
        self.biases = nn.ModuleList(nn.Linear(2 * features + 1, b) for b in hidden)
        self.context = nn.Linear(context, hidden[0], bias=False) if context else None
        self.last = nn.Linear(hidden[-1], sizes[-1])
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def time_features(self, t: Tensor) -> Tensor:
        """tau and its sines and cosines, along the last dimension of ``t`` (of size 1)."""
        tau = (t - self.span[0]) / (self.span[1] - self.span[0])
        angle = tau * self.frequencies
        return torch.cat([tau, angle.sin(), angle.cos()], -1)

    def _run(self, z: Tensor, biases: Sequence[Tensor]) -> Output:
        h = z
        for layer, bias in zip(self.layers, biases, strict=True):
            h = torch.tanh(_affine(h, layer.weight, bias))
        out = self.last(h)
        if not self.contraction:
            return out
        u, log_c = out.chunk(2, -1)
        return u, log_c

    def _biases(self, t: Tensor, context: Tensor | None) -> list[Tensor]:
        features = self.time_features(t)
        biases = [bias(features) for bias in self.biases]
        if self.context is not None and context is not None:
            biases[0] = biases[0] + self.context(context)
        return biases

    def forward(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Output:
        return self._run(z, self._biases(t, context))

    def on_grid(
        self, t: Tensor, context: Tensor | None = None
    ) -> Callable[[int, Tensor], Output]:
        """The control as a function of the step's number, all biases computed now."""
        biases = self._biases(t, context)
        if biases[0].numel() == len(t) * biases[0].shape[-1]:
            biases = [b.reshape(len(t), -1) for b in biases]
        steps = list(zip(*(b.unbind(0) for b in biases), strict=True))
        return lambda i, z: self._run(z, steps[i])


def _affine(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One fused operation where the bias is the same for all rows."""
    if bias.dim() == 1:
        return nn.functional.linear(h, weight, bias)
    return nn.functional.linear(h, weight) + bias
