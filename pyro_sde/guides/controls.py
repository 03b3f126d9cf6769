"""Neural controls, which push the prior to the posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._ops.common import has_hooks
from ..simulation.network import GridNetwork, network, outputs_of, split_control

__all__ = ["MLPControl"]

LARGE = 512

DAMPING = 0.2
"""The learning rate of the contraction, relative to that of u. Adam's first steps are as large as
later ones and less certain: undamped, they may multiply the noise of every step of a path."""

Output = Tensor | tuple[Tensor, Tensor]


class MLPControl(nn.Module):
    r"""A control u(t, z): a tanh MLP of the state whose biases are functions of time.

    The bias of every hidden layer is a linear function of features of time. The smooth features
    are :math:`\tau, \sin \pi k \tau, \cos \pi k \tau` with :math:`\tau = (t - t_0) / (t_1 - t_0)`,
    for k up to ``features`` (limited by the resolution of the grid). A learned embedding of the
    start of each step, interpolated in between, represents changes from one step to the next. All
    that depends on time is computed once per path. The last layer starts at zero, so the untrained
    posterior is the prior. Narrow layers at both ends keep the cost linear in a large ``dim``:
    there the default is the bottleneck of Xu et al. (2022).

    Example::

        >>> import torch
        >>> control = MLPControl(2, hidden=(32,), times=torch.linspace(0.0, 1.0, 11))
        >>> t, z = torch.tensor([0.3]), torch.ones(4, 2)
        >>> control(t, z).detach()[0]  # untrained: the posterior is the prior
        tensor([0., 0.])
        >>> control.last.bias.data += 1.0
        >>> control(t, z).detach()[0]
        tensor([1., 1.])

    :param dim: D, the dimension of the state.
    :param hidden: Widths of the hidden layers; by default (64, 64), and (2, 128, 2) for a state
        of more than 512 dimensions, the weights of a network.
    :param times: The grid, increasing, of shape ``(T,)``; or the pair ``(t_0, t_1)`` alone, which
        has no embedding of steps.
    :param features: The number of sines, and of cosines, of time.
    :param embedding: Size of the learned embedding of each step.
    :param context: Size of an additional input, the context.
    :param contraction: None returns u alone. ``"diagonal"`` returns ``(u, log c)``, where c are the
        factors by which the noise of a step shrinks. ``"full"`` returns ``(u, C)`` with a
        lower-triangular matrix C whose diagonal holds logarithms, as described in
        :class:`~pyro_sde.distributions.ControlledPath`: the noise of a step shrinks and becomes
        correlated. True, and ``"full"`` with ``dim=1``, mean ``"diagonal"``.
    """

    frequencies: Tensor
    times: Tensor
    damping: Tensor
    state_loc: Tensor | None
    state_scale: Tensor

    def __init__(
        self,
        dim: int,
        hidden: Sequence[int] | None = None,
        *,
        times: Tensor | Sequence[float] = (0.0, 1.0),
        features: int = 16,
        embedding: int = 16,
        context: int = 0,
        contraction: str | bool | None = None,
    ) -> None:
        super().__init__()
        if hidden is None:
            hidden = (64, 64) if dim <= LARGE else (2, 128, 2)
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must name at least one width >= 1: found {tuple(hidden)}")
        times = torch.as_tensor(times).detach().clone()
        if times.dim() != 1 or len(times) < 2 or not bool((times.diff() > 0).all()):
            raise ValueError(
                f"times must be an increasing grid of shape (T,): found shape {tuple(times.shape)}"
            )
        if contraction not in (None, False, True, "diagonal", "full"):
            raise ValueError(
                f'contraction must be "diagonal", "full" or None: found {contraction!r}'
            )
        if contraction is True or (contraction == "full" and dim == 1):
            contraction = "diagonal"
        self.dim, self.contraction = dim, contraction or None
        if len(times) > 2:
            features = min(features, len(times) // 2)
        else:
            embedding = 0
        self.register_buffer("times", times)
        # A parameter, so that it is kept wherever the weights that go with it are.
        self.state_loc = nn.Parameter(torch.zeros(dim)) if dim <= LARGE else None
        self.register_buffer("state_scale", torch.ones(dim))
        self.register_buffer(
            "frequencies", math.pi * torch.arange(1.0, features + 1.0), persistent=False
        )
        size = 2 * features + 1 + embedding
        self.embedding = nn.Parameter(torch.zeros(len(times) - 1, embedding)) if embedding else None
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in zip([dim, *hidden[:-1]], hidden, strict=True)
        )
        self.biases = nn.ModuleList(nn.Linear(size, b) for b in hidden)
        self.context = nn.Linear(context, hidden[0], bias=False) if context else None
        self.last = nn.Linear(hidden[-1], outputs_of(dim, self.contraction))
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        if self.contraction:
            damping = torch.full((self.last.out_features,), DAMPING)
            damping[:dim] = 1.0
            self.register_buffer("damping", damping)
        self._on_own_grid: tuple[Tensor, int, Tensor] | None = None

    def time_features(self, t: Tensor) -> Tensor:
        """The features of times, which the biases are linear in.

        :param t: Times of shape ``(..., 1)``.
        :returns: Features of shape ``(..., number of features)``.
        """
        starts = self.times[:-1]
        if (
            torch.is_inference_mode_enabled()
            or self.embedding is None
            or not (
                t.numel() == len(starts)
                and t.device.type == "cpu"
                and torch.equal(t.flatten(), starts)
            )
        ):
            return self._features(t)
        # On the control's own grid, the features that are not learned are kept.
        known = self._on_own_grid
        if known is None or known[0] is not self.times or known[1] != self.times._version:
            fixed = torch.cat(self._parts(starts.unsqueeze(-1))[:-1], -1).detach()
            known = self._on_own_grid = (self.times, self.times._version, fixed)
        return torch.cat([known[2], self.embedding], -1).reshape(*t.shape[:-1], -1)

    def _features(self, t: Tensor) -> Tensor:
        return torch.cat(self._parts(t), -1)

    def _parts(self, t: Tensor) -> list[Tensor]:
        tau = (t - self.times[0]) / (self.times[-1] - self.times[0])
        angle = tau * self.frequencies
        features = [tau, angle.sin(), angle.cos()]
        if self.embedding is not None:
            starts = self.times[:-1]
            right = torch.searchsorted(starts, t.squeeze(-1).contiguous())
            right = right.clamp(1, len(starts) - 1)
            left = right - 1
            start, end = starts[left].unsqueeze(-1), starts[right].unsqueeze(-1)
            weight = ((t - start) / (end - start)).clamp(0, 1)
            features.append(torch.lerp(self.embedding[left], self.embedding[right], weight))
        return features

    @torch.no_grad()
    def take_units(self, states: Tensor) -> None:
        """Standardise the input: centre the state at the median of ``states``, and rescale it where
        the spread is not between 1/5 and 5.

        The guide calls this method once, with paths of the prior that come near the data. Without
        it, states around 20 or of size 1000 would saturate the first layer, and states of size
        0.001 would hardly affect it. A spread near 1 is not changed, because the posterior is
        narrower than the prior by an unknown factor.

        :param states: Typical states, of shape ``(..., dim)``.
        """
        rows = states.reshape(-1, self.dim)
        rows = rows[torch.isfinite(rows).all(-1)]
        if not len(rows) or self.state_loc is None:
            return
        low, loc, high = torch.quantile(rows, rows.new_tensor([0.16, 0.5, 0.84]), dim=0)
        spread = (high - low) / 2
        self.state_loc.copy_(loc)
        spread = torch.where(spread > 0, spread, 1.0)
        self.state_scale.copy_(torch.ones_like(spread).clamp(spread / 5, 5 * spread))

    def _weights(self) -> list[Any]:
        first, *others = (layer.weight for layer in list[Any](self.layers))
        return [first / self.state_scale, *others]

    def _origin(self) -> Tensor | float:
        """The bias of the first layer that centres states at ``state_loc``."""
        if self.state_loc is None:
            return 0.0
        first: Any = self.layers[0]
        return -first.weight @ (self.state_loc / self.state_scale)

    def _last(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.last.weight, self.last.bias
        if not self.contraction:
            return weight, bias
        return weight * self.damping.unsqueeze(-1), bias * self.damping

    def forward(self, t: Tensor, z: Tensor, context: Tensor | None = None) -> Output:
        """The control at times ``t`` and states ``z``.

        :param t: Times, which broadcast against ``z[..., :1]``.
        :param z: States of shape ``(..., dim)``.
        :param context: The additional input, of shape ``(..., context)``.
        :returns: u, of the shape of ``z``; with a contraction the pair ``(u, contraction)``, where
            the contraction has the shape of ``z`` (``"diagonal"``) or ``(..., dim, dim)``.
        """
        out = network(z, self._weights(), self._biases(t, context), self._last())
        u, contraction = split_control(out, self.dim, self.contraction)
        return u if contraction is None else (u, contraction)

    def _biases(self, t: Tensor, context: Tensor | None) -> list[Tensor]:
        features = self.time_features(t)
        biases = [bias(features) for bias in self.biases]
        biases[0] = biases[0] + self._origin()
        if self.context is not None and context is not None:
            biases[0] = biases[0] + self.context(context)
        return biases

    def on_grid(self, t: Tensor, context: Tensor | None = None) -> GridNetwork | None:
        """The control on a whole grid, with all that depends on time computed ahead.

        :param t: The times of the steps, time first.
        :param context: The additional input, as in :meth:`forward`.
        :returns: The control as one network per step. None if a subclass overrides ``forward`` or
            the module has hooks: paths then call the module at every step.
        """
        if type(self).forward is not MLPControl.forward or has_hooks(self):
            return None
        n, layers, inputs = len(t), list[Any](self.biases), list[Tensor]()
        if t.numel() == n:  # one grid for all
            features = self.time_features(t).reshape(n, -1)
            biases = [bias(features) for bias in layers]
            weights = [bias.weight[:, :0] for bias in layers]
        else:
            *fixed, learned = self._parts(t)
            inputs = [torch.cat(fixed, -1), learned]
            biases = [bias.bias.expand(n, -1) for bias in layers]
            weights = [bias.weight for bias in layers]
        biases[0] = biases[0] + self._origin()
        if self.context is not None and context is not None:
            context = context.reshape((1,) * (t.dim() - context.dim()) + context.shape)
            inputs.append(context.expand(n, *context.shape[1:]))
            weights[0] = torch.cat([weights[0], self.context.weight], 1)
        grid = GridNetwork(self._weights(), biases, self._last(), self.contraction)
        if inputs:
            grid.context, grid.context_weights = inputs, weights
        return grid
