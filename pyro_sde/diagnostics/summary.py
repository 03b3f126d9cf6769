"""The summary of a guide: its sites, grids and parameters, and its KL by site and time."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.params.param_store import normalize_param_name

from ..distributions.wrapping import unwrap
from ..infer import ElboTerms, PathTerms
from .explosion import ExplosionWarning, explosion
from .importance import importance_line
from .importance_check import ImportanceCheck
from .parts import elbo_parts
from .table import table

__all__ = ["SiteSummary", "Summary", "summarise"]

CHECK_SAMPLES, CHECK_SECONDS = 4000, 5.0
"""The number of draws of the importance check, and its time limit."""


@dataclass(frozen=True)
class SiteSummary:
    """One sample site."""

    name: str
    role: str
    """``"path"``, ``"latent"`` or ``"observed"``."""
    kind: str
    """The name of the model's distribution."""
    batch: tuple[int, ...]
    """Its batch shape."""
    event: tuple[int, ...]
    """Its event shape."""
    steps: int = 0
    """The number of steps of a path. Each step evaluates drift and control once."""
    start: float = 0.0
    """The first time of the grid."""
    end: float = 0.0
    """The last time of the grid."""
    smallest: float = 0.0
    """The shortest step."""
    largest: float = 0.0
    """The longest step."""


@dataclass(frozen=True)
class Summary:
    """The result of ``guide.summary()``. Print it, or read its fields.

    Example::

        >>> import pyro, torch
        >>> from pyro_sde import AutoSDE
        >>> from pyro_sde.distributions import BrownianMotion
        >>> def model():
        ...     pyro.sample("z", BrownianMotion(1.0, torch.linspace(0.0, 1.0, 11), 0.0))
        >>> summary = AutoSDE(model).setup().summary()
        >>> summary.evaluations, [len(span) for span in summary.kl_by_time("z")]
        (10, [3, 3, 3, 3])
    """

    name: str
    """The name of the guide."""
    sites: tuple[SiteSummary, ...]
    """The sample sites of the model, in order."""
    parameters: dict[str, tuple[int, ...]]
    """The name and shape of every parameter that the ELBO trains, in the guide and the model."""
    parts: ElboTerms
    """The terms of the ELBO."""
    draws: int
    """How many draws the terms are averaged over."""
    bins: int
    """The number of equal spans of time in which the KL of a path is shown."""
    importance: ImportanceCheck | None
    """The importance check of the guide; None, if it could not be made."""
    importance_line: str
    """The importance check in one line, or the reason why it could not be made."""

    @property
    def total(self) -> int:
        """The number of parameters."""
        return sum(torch.Size(shape).numel() for shape in self.parameters.values())

    @property
    def evaluations(self) -> int:
        """The steps of all paths: how often controls are evaluated for one draw."""
        return sum(site.steps for site in self.sites)

    def kl_by_time(self, site: str) -> list[tuple[float, float, float]]:
        """The KL of a path in equal spans of time.

        Where a path has a batch of grids, each step counts at its mean time.

        :param site: The name of the path site.
        :returns: A list of ``(start, end, nats)``, one entry for each span. It is empty where the
            KL of single steps is not known (``memory="recompute"``).
        """
        return _by_time(self.parts.paths[site], self.bins)

    def __str__(self) -> str:
        return "\n\n".join(self._tables())

    __repr__ = __str__

    def _tables(self) -> Iterable[str]:
        head = ["site", "role", "distribution", "batch", "event", "steps", "from", "to", "dt"]
        yield table(self.name, head, [self._site(s) for s in self.sites])
        rows = [[k, str(v), f"{torch.Size(v).numel():,}"] for k, v in self.parameters.items()]
        title = f"{self.total:,} parameters"
        yield table(title, ["parameter", "shape", "number"], rows)
        rows = []
        for name, kl in self.parts.kl.items():
            path = self.parts.paths.get(name)
            rows.append([name, f"{kl:.4g}", "" if path is None else f"{path.start:.4g}"])
            for a, b, nats in [] if path is None else self.kl_by_time(name):
                rows.append([f"  {a:.4g} to {b:.4g}", f"{nats:.4g}", ""])
        kl, data = sum(self.parts.kl.values()), sum(self.parts.log_likelihood.values())
        title = (
            f"ELBO {self.parts.elbo:.5g} = log likelihood {data:.5g} - KL {kl:.5g}\n"
            f"{self.draws} draws, {self.evaluations} evaluations of controls each"
        )
        yield table(title, ["KL of", "nats", "of its start"], rows)
        yield self.importance_line

    @staticmethod
    def _site(s: SiteSummary) -> list[str]:
        row = [s.name, s.role, s.kind, str(s.batch), str(s.event)]
        if not s.steps:
            return [*row, "", "", "", ""]
        dt = f"{s.smallest:.3g}"
        if s.largest - s.smallest > 1e-3 * s.smallest:
            dt += f" to {s.largest:.3g}"
        return [*row, str(s.steps), f"{s.start:.4g}", f"{s.end:.4g}", dt]


def summarise(guide: Any, args: tuple, kwargs: dict, num_particles: int, bins: int) -> Summary:
    """The summary of a guide on these arguments; the random state is not changed."""
    if bins < 1:
        raise ValueError(f"bins must be at least 1: found {bins}")
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        with poutine.trace(param_only=True) as capture:
            parts = elbo_parts(guide.model, guide, *args, num_particles=num_particles, **kwargs)
        model_trace, _ = guide.get_traces()
        check = importance_line(guide.model, guide, args, kwargs, CHECK_SAMPLES, CHECK_SECONDS)
    nodes: dict[str, Any] = dict(capture.trace.nodes)
    parameters = {
        normalize_param_name(name): tuple(site["value"].unconstrained().shape)
        for name, site in nodes.items()
    }
    sites = [_site(n, s) for n, s in model_trace.nodes.items() if s["type"] == "sample"]
    message = explosion(parts)
    if message is not None:
        warnings.warn(message, ExplosionWarning, stacklevel=3)
    return Summary(guide._pyro_name, tuple(sites), parameters, parts, num_particles, bins, *check)


def _site(name: str, site: Any) -> SiteSummary:
    wrapped = unwrap(site["fn"])
    shapes = tuple(site["fn"].batch_shape), tuple(site["fn"].event_shape)
    role = "observed" if site["is_observed"] else "latent"
    if wrapped is None:
        return SiteSummary(name, role, _kind(site["fn"]), *shapes)
    times = wrapped.path.times
    dt = times.diff()
    return SiteSummary(
        name,
        role if site["is_observed"] else "path",
        type(wrapped.path).__name__,
        *shapes,
        dt.shape[-1],
        *(float(x) for x in (times.min(), times.max(), dt.min(), dt.max())),
    )


def _kind(fn: Any) -> str:
    while type(fn).__name__ in ("Independent", "ExpandedDistribution", "MaskedDistribution"):
        fn = fn.base_dist
    return type(fn).__name__


def _by_time(path: PathTerms, bins: int) -> list[tuple[float, float, float]]:
    if path.steps is None:
        return []
    times = path.times.reshape(-1, path.times.shape[-1]).mean(0)
    edges = torch.linspace(float(times[0]), float(times[-1]), bins + 1, dtype=torch.float64)
    middle = ((times[1:] + times[:-1]) / 2).double()
    index = (torch.bucketize(middle, edges.to(middle.device)) - 1).clamp(0, bins - 1)
    nats = torch.zeros(bins, dtype=torch.float64, device=middle.device)
    nats.index_add_(0, index, path.steps.double())
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), nats.tolist(), strict=True))
