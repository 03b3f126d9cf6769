"""Encoders, which compute the context of each series' posterior from its observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from .._arrays import as_mask, as_numbers
from .._ops.gathered_mlp import gathered_mlp
from .._ops.gru import run_gru

__all__ = ["Encoding", "GRUEncoder", "SummaryEncoder", "as_observations", "shaped"]


class Encoding(NamedTuple):
    """The encoding of S series: two functions of time."""

    start: Callable[[Tensor], Tensor]
    """Maps the time t_0, of shape ``()`` or ``(S,)``, to features of the start, ``(S, hidden)``."""
    context: Callable[[Tensor], Tensor]
    """Maps times of shape ``(..., S or 1)`` to contexts of shape ``(..., S, context)``."""


class Observations(NamedTuple):
    """Times ``(S, n)``, values ``(S, n, obs_dim)`` and a mask, True where a value was observed."""

    times: Tensor
    values: Tensor
    mask: Tensor

    @property
    def rows(self) -> Tensor:
        """True where any value of a row was observed, of shape ``(S, n)``."""
        return self.mask.any(-1)

    def clean(self) -> Observations:
        """A copy with zeros where no value was observed, and NaN counted as not observed."""
        mask = self.mask & ~self.values.isnan()
        return Observations(self.times, torch.where(mask, self.values, 0.0), mask)

    def to(self, like: Tensor) -> Observations:
        """Times and values in the dtype of ``like``, on its device."""
        mask = self.mask.to(like.device)
        return Observations(self.times.to(like), self.values.to(like), mask)

    def last(self) -> Tensor:
        """The time of each series' last observation."""
        return self.times.masked_fill(~self.rows, -torch.inf).amax(-1)


def as_observations(times: Any, values: Any, mask: Any = None) -> Observations:
    """The :class:`Observations` of these arguments, with NaN counted as not observed."""
    return shaped(times, values, mask).clean()


def shaped(times: Any, values: Any, mask: Any = None) -> Observations:
    """The :class:`Observations` of these arguments, without a copy.

    A single series needs no dimension of series. Observations of one dimension, and the mask, need
    no dimension of values. The mask may be missing.
    """
    times, values = as_numbers(times, "times"), as_numbers(values, "values")
    if times.dim() == 1:
        times, values = times.unsqueeze(0), values.unsqueeze(0)
        mask = None if mask is None else as_mask(mask, zeros_and_ones=True).unsqueeze(0)
    if values.dim() == 2:
        values = values.unsqueeze(-1)
    found = {"times": tuple(times.shape), "values": tuple(values.shape)}
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=values.device).expand_as(values)
    else:
        mask = as_mask(mask, zeros_and_ones=True)
        found["mask"] = tuple(mask.shape)
        mask = mask.unsqueeze(-1) if mask.dim() == 2 else mask
    if (
        times.dim() != 2
        or values.dim() != 3
        or not (
            times.shape == values.shape[:2] == mask.shape[:2]
            and mask.shape[2:] in ((1,), values.shape[2:])
        )
    ):
        raise ValueError(
            "observations must be times (series, n), values (series, n, obs_dim) and a mask "
            f"(series, n) or (series, n, obs_dim): found shapes {found}"
        )
    return Observations(times, values, mask.expand_as(values))


ROUNDING = torch.finfo(torch.float32).eps


class _Encoder(nn.Module):
    """The base of the encoders, which standardises the data.

    :param obs_dim: The dimension of an observation.
    :param hidden: The width of all layers.
    :param context: The size of the context that a control reads.
    """

    loc: Tensor
    scale: Tensor
    gap: Tensor

    def __init__(self, obs_dim: int, hidden: int = 64, context: int = 16) -> None:
        super().__init__()
        for name, size in (("obs_dim", obs_dim), ("hidden", hidden), ("context", context)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1: found {size!r}")
        self.obs_dim, self.hidden, self.context = obs_dim, hidden, context
        self.register_buffer("loc", torch.zeros(obs_dim))
        self.register_buffer("scale", torch.ones(obs_dim))
        self.register_buffer("gap", torch.ones(()))

    @torch.no_grad()
    def take_units(self, observations: Observations) -> None:
        """Standardise values by the mean and spread of these, and times by their mean gap.

        The guide calls this method once, with the data of its first call.

        :param observations: The observations of all series.
        """
        times, values, mask = observations
        self._check(values)
        count = mask.sum((0, 1)).clamp(min=1)
        self.loc.copy_(values.sum((0, 1)) / count)
        spread = (torch.where(mask, values - self.loc, 0.0).square().sum((0, 1)) / count).sqrt()
        # A dimension that is constant but for rounding would be noise in units of its spread.
        constant = spread <= ROUNDING * torch.maximum(spread.max(), self.loc.abs())
        self.scale.copy_(torch.where(constant, 1.0, spread))
        rows = observations.rows
        first = times.masked_fill(~rows, torch.inf).amin(-1)
        gaps = (rows.sum(-1) - 1).clamp(min=0).sum()
        if int(gaps):
            self.gap.copy_((observations.last() - first)[rows.any(-1)].sum() / gaps)

    def _check(self, values: Tensor) -> None:
        if values.shape[-1] != self.obs_dim:
            raise ValueError(
                f"the encoder was built for observations of obs_dim={self.obs_dim}: found values "
                f"of shape {tuple(values.shape)}"
            )

    def _inputs(self, observations: Observations) -> Tensor:
        """Standardised values, zero where missing, and the mask."""
        _, values, mask = observations
        self._check(values)
        values = torch.where(mask, (values - self.loc) / self.scale, 0.0)
        return torch.cat([values, mask.to(values.dtype)], -1)

    def extra_repr(self) -> str:
        return f"obs_dim={self.obs_dim}, hidden={self.hidden}, context={self.context}"


GAPS = 8
"""The number of features of the time until an observation."""


def _waiting(gap: Tensor) -> Tensor:
    """Features of the time ``gap`` until an observation, in units of the mean gap."""
    half_lives = 2.0 ** torch.arange(-4, GAPS - 5, device=gap.device, dtype=gap.dtype)
    gap = gap.unsqueeze(-1)
    return torch.cat([gap / (1 + gap), torch.exp(-gap / half_lives)], -1)


def _add_product_(start: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add the output of a linear layer to ``start``, in place, without a tensor for the output."""
    # With a contiguous transpose, autograd computes the gradient by a product with many columns.
    return start.addmm_(x.to(start), weight.t().contiguous().to(start))


class GRUEncoder(_Encoder):
    """An encoder that reads the observations of a series backwards in time, with a gated recurrent
    unit.

    The context at time t summarises all that was observed after t. It is computed from the next
    observation, the time until it, and the state of the recurrent unit after it has read that
    observation. After the last observation the context is constant. The features at :math:`t_0`
    determine :math:`q(z_0)`. Missing values, missing rows and padding have no influence.

    Example::

        >>> import torch
        >>> encoder = GRUEncoder(obs_dim=1, context=8)  # for AutoSDE(model, encoder=encoder)
        >>> times, values = torch.tensor([[0.5, 1.0]]), torch.tensor([[[2.0], [3.0]]])
        >>> about = encoder(times, values, mask=torch.tensor([[[True], [True]]]))
        >>> context = about.context(torch.tensor([[0.2], [1.5], [1.7]]))
        >>> context.shape  # at three times, of one series
        torch.Size([3, 1, 8])
        >>> bool((context[0] == context[1]).any()), bool((context[1] == context[2]).all())
        (False, True)

    :param obs_dim: The dimension of an observation.
    :param hidden: The width of all layers.
    :param context: The size of the context that a control reads.
    """

    def __init__(self, obs_dim: int, hidden: int = 64, context: int = 16) -> None:
        super().__init__(obs_dim, hidden, context)
        self.gru = nn.GRU(2 * obs_dim + GAPS + 1, hidden, batch_first=True)
        self.row = nn.Linear(hidden + 2 * obs_dim + 1, hidden)
        self.wait = nn.Linear(GAPS, hidden, bias=False)
        self.out = nn.Linear(hidden, context)
        self.first = nn.Linear(hidden, hidden)

    def forward(self, times: Tensor, values: Tensor, mask: Tensor) -> Encoding:
        """Encode S series.

        :param times: Times of shape ``(S, n)``.
        :param values: Values of shape ``(S, n, obs_dim)``.
        :param mask: True where a value was observed, of the shape of ``values``.
        :returns: Two functions of time: ``start`` gives features of the start, of shape
            ``(S, hidden)``, and ``context`` gives contexts of shape ``(..., S, context)``.
        """
        observations = Observations(times, values, mask).to(self.loc)
        times, rows, inputs = observations.times, observations.rows, self._inputs(observations)
        # Last observation first; missing rows come after all others, where nothing reads them.
        late = times.masked_fill(~rows, -torch.inf)
        order = late.argsort(dim=-1, descending=True, stable=True)
        late, rows = late.gather(-1, order), rows.gather(-1, order)
        inputs = torch.take_along_dim(inputs, order.unsqueeze(-1), 1)
        gap = pad(late[:, :-1] - late[:, 1:], (1, 0)).masked_fill(~rows, 0.0)
        is_last = torch.zeros_like(gap)
        is_last[:, 0] = 1
        gap = _waiting(gap / self.gap) * (1 - is_last).unsqueeze(-1)
        reads = torch.cat([inputs, gap, is_last.unsqueeze(-1)], -1)
        states = run_gru(self.gru, reads.transpose(0, 1))
        # Row 0: nothing is ahead.
        ahead = pad(pad(inputs.transpose(0, 1), (0, 1), value=1.0), (0, 0, 0, 0, 1, 0))
        of_states, of_ahead = self.row.weight.split([self.hidden, ahead.shape[-1]], 1)
        known = linear(states.flatten(0, 1), of_states, self.row.bias)
        known = _add_product_(known, ahead.flatten(0, 1), of_ahead)
        when = pad(late, (1, 0), value=torch.inf).t()
        series = torch.arange(len(times), device=late.device)

        def evaluate(layer: nn.Linear, t: Tensor, inclusive: bool = False) -> Tensor:
            """``layer`` applied to the features at times of shape (..., S or 1)."""
            t = t.expand(*t.shape[:-1], len(times))
            at = t.to(late).reshape(-1, len(times))
            # The number of observations after t is the row of the next one.
            index = torch.searchsorted(-late, -at.t().contiguous(), right=inclusive).t()
            gap = torch.where(index > 0, when.gather(0, index) - at, torch.zeros_like(at))
            waiting = _waiting(gap / self.gap) * (index > 0).unsqueeze(-1)
            row = (len(times) * index + series).flatten()
            weights = (self.wait.weight, layer.weight, layer.bias)
            out = gathered_mlp(known, row, waiting.flatten(0, 1), *weights)
            return out.reshape(*t.shape, -1)

        def context(t: Tensor) -> Tensor:
            return evaluate(self.out, t)

        def start(t: Tensor) -> Tensor:
            return torch.tanh(evaluate(self.first, t, inclusive=True))

        return Encoding(start, context)


class SummaryEncoder(_Encoder):
    """An encoder that reads a fixed number of observations, with the same context at all times.

    It is meant for posteriors that are computed from a short prefix of each series: the posterior
    SDE then forecasts the rest.

    Example::

        >>> import torch
        >>> encoder = SummaryEncoder(obs_dim=1, context=8, length=3)
        >>> values, mask = torch.randn(5, 3, 1), torch.ones(5, 3, 1, dtype=torch.bool)
        >>> about = encoder(torch.tensor([0.0, 0.1, 0.2]).expand(5, 3), values, mask)
        >>> context = about.context(torch.tensor([[0.2], [0.7]]))
        >>> context.shape, bool((context[0] == context[1]).all())
        (torch.Size([2, 5, 8]), True)

    :param obs_dim: The dimension of an observation.
    :param hidden: The width of all layers.
    :param context: The size of the context that a control reads.
    :param length: The number of observations, n.
    """

    def __init__(self, obs_dim: int, hidden: int = 64, context: int = 16, length: int = 1) -> None:
        super().__init__(obs_dim, hidden, context)
        self.length = length
        self.read = nn.Sequential(nn.Linear(2 * obs_dim * length, hidden), nn.Tanh())
        self.out = nn.Linear(hidden, context)
        self.first = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh())

    def forward(self, times: Tensor, values: Tensor, mask: Tensor) -> Encoding:
        """Encode S series.

        :param times: Times of shape ``(S, length)``.
        :param values: Values of shape ``(S, length, obs_dim)``.
        :param mask: True where a value was observed, of the shape of ``values``.
        :returns: Two functions of time: ``start`` gives features of the start, of shape
            ``(S, hidden)``, and ``context`` gives contexts of shape ``(..., S, context)``.
        """
        if times.shape[1] != self.length:
            raise ValueError(
                f"the encoder reads length={self.length} observations of each series: found "
                f"{times.shape[1]}; select these with AutoSDE(..., observations=)"
            )
        observations = Observations(times, values, mask).to(self.loc)
        h = self.read(self._inputs(observations).flatten(1))
        context = self.out(h)
        return Encoding(
            lambda t: self.first(h), lambda t: context.expand(*t.shape[:-1], *context.shape)
        )
