"""Forecasts: predictions of observations at other times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ._arrays import as_arguments, as_mask, as_numbers, in_dtype
from ._checks import check_whole
from ._threads import one_thread
from .distributions.wrapping import unwrap
from .guides import AutoSDE
from .guides.amortisation import arguments_of
from .guides.encoders import as_observations
from .metrics.forecasts import interval
from .predictive import Predictive
from .times import contains, select

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True)
class Forecast:
    """The result of :func:`forecast`: samples of the observations at ``times``.

    Example::

        >>> import torch
        >>> samples = torch.linspace(-2.0, 2.0, 41).unsqueeze(-1) * torch.tensor([1.0, 2.0])
        >>> ahead = Forecast(times=torch.tensor([1.0, 2.0]), samples=samples, paths={})
        >>> ahead.quantile(0.75)
        tensor([1., 2.])
        >>> lower, upper = ahead.interval(0.9)
        >>> bool((lower < ahead.mean).all() and (ahead.mean < upper).all())
        True
    """

    times: Tensor
    """The predicted times, of shape ``(m,)`` or ``(series, m)``."""
    samples: Tensor
    """Samples of the observations, in the shape that the model gives them, samples first."""
    paths: dict[str, Tensor]
    """The latent paths at these times, by site, for paths whose grid contains the times."""

    @property
    def mean(self) -> Tensor:
        """The mean of the samples."""
        return self.samples.mean(0)

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles over the samples.

        :param q: A number between 0 and 1, or a sequence of them.
        :returns: A tensor of the shape of one sample, after one dimension for a sequence ``q``.
        """
        return self.samples.quantile(self.samples.new_tensor(q), dim=0)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval of the samples, see :func:`~pyro_sde.metrics.interval`.

        :param level: The probability of the interval, between 0 and 1.
        :returns: Its lower and upper end, two tensors of the shape of one sample.
        """
        return interval(self.samples, level)


@one_thread("forecast")
@torch.no_grad()
def forecast(
    model: Callable,
    guide: AutoSDE,
    data: Sequence[Any] | Mapping[str, Any],
    times: Tensor,
    num_samples: int = 100,
    *,
    site: str | None = None,
    parallel: bool | None = None,
    **changes: Any,
) -> Forecast:
    """Predict what would be observed at ``times``, given the data.

    Up to the last observation of a series its paths follow the posterior, which interpolates
    between the data. After the last observation they follow the prior SDE.

    The model is run on the data's times followed by ``times``, without values. So it must have
    arguments called ``times`` and ``values`` (and ``mask``, where there is one), draw the
    observations where ``values`` is None, and make its grid from the times, unless ``changes`` has
    another grid.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_sde import AutoSDE, forecast, time_grid
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> def model(times, values=None):
        ...     grid = time_grid(0.0, float(times.max()), dt=0.5, include=times)
        ...     prior = OrnsteinUhlenbeck.scalar(1.0, 0.0, 1.0, grid)
        ...     z = pyro.sample("z", prior)
        ...     with pyro.plate("observations", len(times)):
        ...         pyro.sample("y", dist.Normal(prior.at(z, times), 0.1), obs=values)
        >>> known = torch.tensor([0.5, 1.0]), torch.tensor([0.2, 0.4])
        >>> guide = AutoSDE(model)  # to be trained on what is known
        >>> ahead = forecast(model, guide, known, torch.linspace(2.0, 4.0, 5), num_samples=50)
        >>> ahead.samples.shape, ahead.paths["z"].shape
        (torch.Size([50, 5]), torch.Size([50, 5]))
        >>> lower, upper = ahead.interval(0.9)

    :param model: The model that the guide was made for.
    :param guide: A trained :class:`AutoSDE`. With an encoder the series may be new ones.
    :param data: The arguments of the model, a tuple or a dict.
    :param times: When to predict: shape ``(m,)``, or ``(series, m)``.
    :param num_samples: How many samples.
    :param site: The name of the site to predict, if several are observed.
    :param parallel: Whether to draw them at once; by default, where the model allows it.
    :param changes: Arguments of the model that differ from those in ``data``, a grid, say.
    :returns: The :class:`Forecast`.
    """
    if not isinstance(guide, AutoSDE):
        raise TypeError(f"guide must be an AutoSDE, found {type(guide).__name__}")
    check_whole("num_samples", num_samples, 1)
    args, kwargs = as_arguments(dict(data) if isinstance(data, Mapping) else tuple(data))
    named = arguments_of(model, args, kwargs)
    if named.get("times") is None or named.get("values") is None:
        raise ValueError(
            "forecast() needs a model with arguments called times and values, and data for both: "
            f"found {[name for name, v in named.items() if v is not None]}"
        )
    guide.setup(*args, **kwargs)
    old, values = as_numbers(named["times"], "times"), as_numbers(named["values"], "values")
    if guide.encoder is None:
        given = as_observations(old, values, named.get("mask"))
    else:
        given = guide._read(args, kwargs).clean()  # the guide may have a view of its own
    times = in_dtype(as_numbers(times, "times"), old.dtype, "times").to(old.device)
    if not times.numel() or not times.dim():
        raise ValueError(f"times must have shape (m,) or (series, m): found {tuple(times.shape)}")
    if not bool(torch.isfinite(times).all()):
        raise ValueError("times must be finite: drop the missing ones")
    times = times.expand(*old.shape[:-1], times.shape[-1])
    m = times.shape[-1]
    named.update(times=torch.cat([old, times], -1), values=None, **changes)
    if named.get("mask") is not None:
        mask = as_mask(named["mask"], zeros_and_ones=True)
        mask = mask if mask.dim() == values.dim() else mask.unsqueeze(-1)
        mask = mask.expand_as(values)  # as a model finds it after fill_missing(values, mask)
        shape = (*old.shape[:-1], m, *values.shape[old.dim() :])
        named["mask"] = torch.cat([mask, mask.new_ones(shape)], old.dim() - 1)
    with guide.given(given):
        with torch.no_grad():
            trace = poutine.trace(guide).get_trace(**named)
        site = site or _observed_site(trace, guide)
        sites = (site, *guide.path_sites)
        draw = Predictive(guide, num_samples=num_samples, return_sites=sites, parallel=parallel)
        samples = draw(**named)
    time_dim = old.dim() - 1 - values.dim()
    predicted = samples[site]
    expected = list(values.shape)
    expected[time_dim] = named["times"].shape[-1]
    if list(predicted.shape[-values.dim() :]) != expected:
        raise ValueError(
            f"site {site!r} has shape {tuple(predicted.shape[1:])}, where the values would have "
            f"{tuple(expected)}: its times must lie along the same dimension, and a plate that "
            "subsamples must keep all series when there are no values"
        )
    paths = {}
    for name in guide.path_sites:
        wrapped: Any = unwrap(trace.nodes[name]["fn"])
        grid = wrapped.path.times
        if contains(grid, times):  # a model may interpolate a path between the times of its grid
            x = samples[name].unsqueeze(-1) if wrapped.is_scalar else samples[name]
            shared = max(times.dim() + 2 - x.dim(), 0)  # a path that the series share
            x = select(x.reshape(num_samples, *(1,) * shared, *x.shape[1:]), grid, times)
            paths[name] = x.squeeze(-1) if wrapped.is_scalar else x
    return Forecast(times, predicted.narrow(time_dim, old.shape[-1], m), paths)


def _observed_site(trace: Any, guide: AutoSDE) -> str:
    names = [
        name
        for name, node in trace.nodes.items()
        if node["type"] == "sample"
        and not node["is_observed"]
        and not site_is_subsample(node)
        and not guide._is_latent(name)
    ]
    if len(names) != 1:
        raise ValueError(
            f"without values the model draws {names or 'nothing'}: say which site to predict, "
            "site=..., or let the model draw what it observed (obs=None)"
        )
    return names[0]
