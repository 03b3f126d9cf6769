"""Scores of predictive draws against observations, which may be masked."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._arrays import as_mask, as_numbers

__all__ = ["CalibrationCurve", "calibration_curve", "coverage", "crps", "interval"]


class CalibrationCurve(NamedTuple):
    """Share of the observations below quantiles of their forecast, at K levels.

    Example::

        >>> import torch
        >>> curve = CalibrationCurve(torch.tensor([0.1, 0.9]), torch.tensor([0.2, 0.8]), 50)
        >>> curve.share - curve.level  # too narrow: both tails are heavier than forecast
        tensor([ 0.1000, -0.1000])
    """

    level: Tensor
    """Nominal probabilities of lying below the quantiles, of shape ``(K,)``."""
    share: Tensor
    """Observed shares below the quantiles, of shape ``(K,)``."""
    count: int  # type: ignore[assignment]
    """Number of observations. (It hides the method ``tuple.count``.)"""


def crps(samples: Tensor, observed: Tensor, mask: Tensor | None = None) -> float:
    r"""The continuous ranked probability score (CRPS), averaged over the observations.

    .. math:: E|X - y| - \tfrac12 E|X - X'|

    Here :math:`X, X'` are independent draws of the prediction of y. The score has the units of y,
    and for a point prediction it is the absolute error. The second mean is over pairs of distinct
    draws, so the score is unbiased for any number of draws m. (torchmetrics includes pairs of a
    draw with itself, which adds :math:`E|X - X'| / 2m`, and needs memory in proportion to the
    square of m.)

    Example::

        >>> crps(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0]))  # (0 + 2) / 2 - 2 / 2
        0.0

    :param samples: Predictive draws of shape ``(m, *observed.shape)``, at least two, which include
        the noise of the observations, as those of ``Predictive`` do.
    :param observed: The observations, of any shape.
    :param mask: True where a value was observed, of the shape of ``observed`` or of all but its
        last dimension. Other entries of ``samples`` and ``observed`` are ignored.
    :returns: The score; lower is better.
    """
    x, y = _selected(samples, observed, mask)
    m = x.shape[0]
    if m < 2:
        raise ValueError(f"samples has {m} draw: the score needs at least 2 to know the spread")
    # In order, draw i (from 1) is the larger of i - 1 pairs and the smaller of m - i.
    error = (x - y).sort(0).values
    weight = torch.arange(1 - m, m, 2, dtype=x.dtype, device=x.device)
    spread = torch.tensordot(weight, error, 1) / (m * (m - 1))
    return (error.abs().mean(0) - spread).mean().item()


def coverage(
    samples: Tensor, observed: Tensor, level: float = 0.9, mask: Tensor | None = None
) -> float:
    """The share of observations inside the central :func:`interval` of their predictive draws.

    For a calibrated prediction it is ``level``, up to the noise of a finite number of observations.

    Example::

        >>> draws = torch.linspace(-1, 1, 19).unsqueeze(-1).expand(19, 4)
        >>> coverage(draws, torch.tensor([-2.0, -0.5, 0.0, 0.9]))
        0.75

    :param samples: Predictive draws of shape ``(m, *observed.shape)``, noise included.
    :param observed: The observations, of any shape.
    :param level: The probability of the interval, between 0 and 1.
    :param mask: True where a value was observed, as in :func:`crps`.
    :returns: The share, from 0 to 1.
    """
    x, y = _selected(samples, observed, mask)
    lower, upper = interval(x, level)
    return ((lower <= y) & (y <= upper)).double().mean().item()


def calibration_curve(
    samples: Tensor, observed: Tensor, bins: int = 20, mask: Tensor | None = None
) -> CalibrationCurve:
    """Nominal probability of the quantiles of a forecast, against the share of what was observed.

    Under a calibrated forecast a share p of the observations lies below the quantile of level p.
    The quantiles are draws in order: of m draws, number k has the level k / (m + 1), as in
    :func:`interval`. An observation that equals some of its draws, as counts do, is shared among
    the ranks that it may have.

    Example::

        >>> draws = torch.linspace(-1, 1, 9).unsqueeze(-1).expand(9, 5)
        >>> curve = calibration_curve(draws, torch.tensor([-3.0, -2.0, 0.1, 2.0, 3.0]), bins=5)
        >>> [(round(p, 1), round(q, 1)) for p, q in zip(curve.level.tolist(), curve.share.tolist())]
        [(0.2, 0.4), (0.4, 0.4), (0.6, 0.6), (0.8, 0.6)]

    :param samples: Predictive draws of shape ``(m, *observed.shape)``, noise included.
    :param observed: What was observed, of any shape.
    :param bins: The curve has ``bins - 1`` levels, as evenly spaced as m draws allow, and no more
        than m.
    :param mask: True where it was observed, as in :func:`crps`.
    :returns: Levels and shares in float64, and the number of observations.
    """
    if bins < 2:
        raise ValueError(f"bins must be at least 2: found {bins}")
    x, y = _selected(samples, observed, mask)
    m = x.shape[0]
    if m < 1:
        raise ValueError("samples has 0 draws: pass at least 1")
    parts = min(bins, m + 1)
    rank = (torch.arange(1, parts, device=x.device) * (m + 1) / parts).round()
    below, ties = (x < y).sum(0), (x == y).sum(0)
    inside = (rank.unsqueeze(-1) - below) / (ties + 1)
    share = inside.clamp(0.0, 1.0).double().mean(-1)
    return CalibrationCurve(rank.double() / (m + 1), share, y.numel())


def interval(samples: Tensor, level: float = 0.9) -> tuple[Tensor, Tensor]:
    """The central interval that contains a further draw with probability ``level``.

    A further draw falls into each of the m + 1 gaps of m draws with the same probability. So the
    ends are draw number ``(m + 1) (1 - level) / 2`` from below and from above, interpolated between
    draws. The usual sample quantiles would make the interval too narrow: with 100 draws and a level
    of 0.9 it would contain only 0.88.

    Example::

        >>> interval(torch.arange(1.0, 40.0), 0.9)
        (tensor(2.), tensor(38.))

    :param samples: Draws of shape ``(m, ...)``, at least ``2 / (1 - level) - 1`` of them.
    :param level: The probability of the interval, between 0 and 1.
    :returns: Its lower and upper end, two tensors of shape ``samples.shape[1:]``.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1: found {level}")
    samples = samples.detach()
    m = samples.shape[0]
    place = (m + 1) * (1 - level) / 2 - 1
    place = round(place) if math.isclose(place, round(place), abs_tol=1e-9) else place
    if place < 0:
        raise ValueError(
            f"samples has {m} draws, too few for a level of {level:g}: pass at least "
            f"{math.ceil(2 / (1 - level) - 1 - 1e-9)}"
        )
    _refuse_nonfinite(samples, "samples")
    ordered = samples.sort(0).values
    i, part = int(place), place - int(place)
    ends = []
    for rows in (ordered, ordered.flip(0)):
        ends.append(torch.lerp(rows[i], rows[min(i + 1, m - 1)], part))
    return ends[0], ends[1]


def _selected(samples: Tensor, observed: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draws of shape ``(m, k)`` and the k observations, in float64."""
    samples = as_numbers(samples, "samples").detach()
    observed = as_numbers(observed, "observed").detach()
    observed = observed.to(samples.device)
    shape = tuple(observed.shape)
    if samples.dim() == 0 or tuple(samples.shape[1:]) != shape:
        raise ValueError(
            f"samples must have shape (m, *observed.shape), (m, {', '.join(map(str, shape))}): "
            f"found {tuple(samples.shape)}"
        )
    if mask is None:
        x, y = samples.flatten(1) if shape else samples.unsqueeze(-1), observed.flatten()
    else:
        mask = as_mask(mask)
        if tuple(mask.shape) not in (shape, shape[:-1]):
            raise ValueError(
                f"mask must have the shape of observed, {shape}, or of all but its last "
                f"dimension: found {tuple(mask.shape)}"
            )
        mask = mask.to(samples.device)
        x, y = samples[:, mask].flatten(1), observed[mask].flatten()
    if not y.numel():
        raise ValueError("no value was observed: pass at least one observation that is not masked")
    x, y = x.double(), y.double()
    _refuse_nonfinite(x, "samples")
    _refuse_nonfinite(y, "observed")
    return x, y


def _refuse_nonfinite(entries: Tensor, name: str) -> None:
    bad = int((~torch.isfinite(entries)).sum())
    if bad:
        raise ValueError(
            f"{name} has {bad} of {entries.numel()} entries not finite: mask values that were not "
            "observed, and check whether the model diverged"
        )
