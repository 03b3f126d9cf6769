"""Poisson processes: events in continuous time, at a rate that a latent path may drive."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import broadcast_shapes
from .parameters import check_times

__all__ = ["PoissonProcess"]


class PoissonProcess(TorchDistribution):
    r"""The times of independent events at a rate :math:`\lambda(t)`, a Poisson process with density

    .. math:: \log p(t_1, \dots, t_n) = \sum_i \log \lambda(t_i) - \int_{t_0}^{t_N} \lambda(t)\,dt

    The rate is given on a grid and is linear between its times, so the trapezoid rule computes the
    integral exactly. Events need not be on the grid.

    A value has shape ``(..., n)``: the times of the events of each series, in any order, padded
    with NaN where series have different numbers of events. A series of NaN alone has no event. Hide
    a series that was not observed by ``.mask()``. Draws are sorted, with NaN last. ``Predictive``
    needs draws of one width, and so ``max_events``.

    Example::

        >>> grid = torch.linspace(0.0, 2.0, 5)
        >>> process = PoissonProcess(torch.full((5,), 3.0), grid)
        >>> process.log_prob(torch.tensor([0.3, 1.7, torch.nan]))  # 2 log 3 - 3 * 2
        tensor(-3.8028)

    In a model with a latent path ``z`` on ``grid``::

        pyro.sample("events", PoissonProcess(z[..., 0].exp(), grid), obs=event_times)

    :param rate: Events per unit of time at the times of the grid, positive, of shape ``(..., T)``.
    :param times: The grid, strictly increasing, of shape ``(T,)`` or ``(..., T)``. Its first and
        last times are the ends of the window in which events are observed.
    :param max_events: The width of a draw; a draw with more events is an error. By default a draw
        is as wide as its longest series (``event_shape`` is then ``(-1,)``).
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 1)
    takes_nan = True

    def __init__(
        self,
        rate: Tensor,
        times: Tensor,
        max_events: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        times, rate = check_times(times), torch.as_tensor(rate)
        dtype = torch.promote_types(rate.dtype, times.dtype)
        self.rate, self.times, self.max_events = rate.to(dtype), times.to(dtype), max_events
        found = f"found rate {tuple(rate.shape)} and times {tuple(times.shape)}"
        if rate.dim() == 0 or rate.shape[-1] != times.shape[-1]:
            raise ValueError(
                f"rate must have one value for each of the {times.shape[-1]} times, in its last "
                f"dimension: {found}; for a path z of shape (..., T, D) pass z[..., 0]"
            )
        try:
            batch_shape = broadcast_shapes(rate.shape[:-1], times.shape[:-1])
        except RuntimeError as e:
            raise ValueError(f"rate and times must broadcast together: {found}") from e
        event_shape = torch.Size((-1 if max_events is None else max_events,))
        super().__init__(batch_shape, event_shape, validate_args)
        if self._validate_args:
            self._check_rate()

    def expand(self, batch_shape: Any, _instance: Any = None) -> PoissonProcess:
        """The same process with a larger batch shape.

        :param batch_shape: The new batch shape, to which the old one can be expanded.
        :returns: The expanded distribution.
        """
        # The rate broadcasts from the right: nothing else has to be expanded.
        new = self._get_checked_instance(PoissonProcess, _instance)
        new.__dict__.update(self.__dict__)
        new._batch_shape = torch.Size(batch_shape)
        return new

    @property
    def total(self) -> Tensor:
        """The expected number of events, of the batch shape: the integral of the rate."""
        return torch.trapezoid(self.rate, self.times).expand(self.batch_shape)

    def intensity(self, t: Tensor) -> Tensor:
        """The rate at any times of the window.

        :param t: Times of shape ``(..., n)``.
        :returns: Rates of shape ``(..., n)``, NaN where the time is NaN.
        """
        i, w, _ = self._locate(t)
        return torch.lerp(_take(self.rate, i), _take(self.rate, i + 1), w)

    def cumulative(self, t: Tensor) -> Tensor:
        """The expected number of events from the start of the window to ``t``.

        By the time-rescaling theorem the values at the events are a Poisson process of rate 1.
        Divided by :attr:`total` they are uniform, which is a check of the model.

        :param t: Times of shape ``(..., n)``.
        :returns: Expected numbers of shape ``(..., n)``.
        """
        i, w, h = self._locate(t)
        r, slope = _take(self.rate, i), _take(self.rate.diff(), i)
        return _take(self._knots(), i) + h * w * (r + 0.5 * slope * w)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density of events.

        :param value: Event times of shape ``(..., n)``, padded with NaN.
        :returns: Log densities of shape ``sample_shape + batch_shape``.
        """
        value = value.to(self.times.dtype)
        if self._validate_args:
            self._check_events(value)
        seen = ~value.isnan()
        # NaN must not enter the graph: its gradient would survive the mask.
        t = torch.where(seen, value, self.times[..., :1])
        log_rate = torch.where(seen, self.intensity(t).log(), 0.0)
        return log_rate.sum(-1) - self.total

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw events: their number is Poisson, and given the number they are independent, with a
        density in proportion to the rate.

        :param sample_shape: The shape of the sample.
        :returns: Sorted event times of shape ``sample_shape + batch_shape + (n,)``, padded with
            NaN, where n is ``max_events`` or the largest number of events, and at least 2.
        """
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.batch_shape
            counts = torch.poisson(self.total.expand(shape))
            most = int(counts.max()) if counts.numel() else 0
            width = max(most, 2)  # Predictive would repeat one event to fill a wider place
            if self.max_events is not None:
                width = self.max_events
                if most > width:
                    raise ValueError(
                        f"a draw has {most} events, more than max_events={width}: raise it (the "
                        f"expected number is {float(self.total.max()):.4g}), or leave it out"
                    )
            u = torch.rand((*shape, width), dtype=self.rate.dtype, device=self.rate.device)
            t = self._invert(u * self.total.unsqueeze(-1))
            empty = torch.arange(width, device=t.device) >= counts.unsqueeze(-1)
            t = t.masked_fill(empty, torch.inf).sort(-1).values
            return t.masked_fill(t.isinf(), torch.nan)

    def _knots(self) -> Tensor:
        areas = torch.cumulative_trapezoid(self.rate, self.times)
        return torch.nn.functional.pad(areas, (1, 0))

    def _locate(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The number of the step that contains each time, the position of the time in that step (0
        to 1), and the length of the step."""
        i = _search(self.times, t)
        start = _take(self.times, i)
        h = _take(self.times, i + 1) - start
        return i, (t - start) / h, h

    def _invert(self, area: Tensor) -> Tensor:
        knots = self._knots()
        i = _search(knots, area)
        rest = (area - _take(knots, i)).clamp(min=0)
        start, r = _take(self.times, i), _take(self.rate, i)
        h = _take(self.times, i + 1) - start
        slope = (_take(self.rate, i + 1) - r) / h
        # The root of r s + slope s^2 / 2 = rest that does not cancel where the slope is small.
        s = 2 * rest / (r + (r.square() + 2 * slope * rest).clamp(min=0).sqrt())
        return start + torch.minimum(s, h)

    def _check_rate(self) -> None:
        rate = self.rate.detach()
        bad = ~((rate > 0) & rate.isfinite())
        if bool(bad.any()):
            at = bad.nonzero()[0].tolist()
            raise ValueError(
                f"rate must be positive and finite: found rate{at}="
                f"{rate[tuple(at)].item():g}; pass the path through exp or softplus, and bound it "
                "where the result overflows"
            )

    def _check_events(self, value: Tensor) -> None:
        if value.dim() == 0:
            raise ValueError("the value of a PoissonProcess has shape (..., n): found a scalar")
        try:
            shape = broadcast_shapes(value.shape[:-1], self.batch_shape)
        except RuntimeError as e:
            raise ValueError(
                f"events of shape {tuple(value.shape)}, one row a series, do not broadcast "
                f"against batch_shape {tuple(self.batch_shape)}"
            ) from e
        t = value.detach().expand(shape + value.shape[-1:])
        first, last = self.times[..., :1], self.times[..., -1:]
        outside = (t < first) | (t > last)
        if bool(outside.any()):
            at = outside.nonzero()[0].tolist()
            window = self.times.expand(*shape, -1)[tuple(at[:-1])]
            raise ValueError(
                f"event {at} at t={t[tuple(at)].item():g} is outside the grid's window "
                f"[{window[0].item():g}, {window[-1].item():g}] ({int(outside.sum())} in all); "
                "widen the grid, or drop the events outside of it"
            )


def _search(edges: Tensor, x: Tensor) -> Tensor:
    """The number of the interval of increasing ``edges`` (..., T) that contains ``x`` (..., n)."""
    edges, x = edges.detach(), x.detach()
    if edges.dim() > 1:
        batch = broadcast_shapes(edges.shape[:-1], x.shape[:-1])
        edges, x = edges.expand(*batch, edges.shape[-1]), x.expand(*batch, x.shape[-1])
    i = torch.searchsorted(edges.contiguous(), x.contiguous(), right=True) - 1
    return i.clamp(0, edges.shape[-1] - 2)


def _take(x: Tensor, i: Tensor) -> Tensor:
    """The entries ``i`` (..., n) of the last dimension of ``x`` (..., T)."""
    if x.dim() == 1:
        return x[i]
    batch = broadcast_shapes(x.shape[:-1], i.shape[:-1])
    return x.expand(*batch, x.shape[-1]).gather(-1, i.expand(*batch, i.shape[-1]))
