"""Trainings that diverge, each in a way of its own.

Every training saves checkpoints and ends in ``Diverged``, which must carry the step, the norm of
the last gradient, the parameter to look at, and a checkpoint. From that checkpoint training goes on
with a sane learning rate, and must gain at least half of what one gains that never diverged.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn
from tqdm import tqdm, trange

from pyro_sde import AutoSDE, GRUEncoder, History, TraceSDE_ELBO, fit
from pyro_sde.diagnostics import ExplosionWarning
from pyro_sde.distributions import SDEPath
from pyro_sde.training import Diverged, RejectedWarning
from pyro_sde.training.divergence import first_not_finite

COUNT = 100
BOUNDS = {"other errors": 0, "details missing": 0, "failed to go on": 0}
SERIES, POINTS, STEPS, SANE = 8, 4, 40, 0.02
HUGE = 1e25  # its square overflows in single precision


class Fault:
    """What spoils a tensor at one place of model or guide, from one evaluation on.

    :param place: The place; nothing is spoilt if it is empty.
    :param spoil: What happens to the tensor.
    :param left: How many evaluations are left as they are.
    """

    def __init__(
        self, place: str = "", spoil: Callable[[Tensor], Tensor] = torch.clone, left: int = 0
    ) -> None:
        self.place, self.spoil, self.left = place, spoil, left

    def tick(self) -> None:
        self.left -= torch.is_grad_enabled()

    def __call__(self, place: str, x: Tensor) -> Tensor:
        return self.spoil(x) if place == self.place and self.left < 0 else x


class Model(PyroModule):
    """Series of a double well. What tilts the variance has no constraint, but must not be large."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.growth = nn.Parameter(torch.tensor(0.5))
        self.tilt = nn.Parameter(torch.zeros(1, 1))
        self.noise = PyroParam(torch.tensor(0.5), constraints.positive)

    def drift(self, t: Tensor, z: Tensor) -> Tensor:
        return self.fault("drift", self.growth * z - 2 * z.tanh())

    def forward(self, times: Tensor, values: Tensor) -> None:
        self.fault.tick()
        grid = torch.linspace(0.0, 2.0, 2 * POINTS + 1)
        scale = torch.linalg.cholesky(0.5 + 0.001 * self.tilt).squeeze(-1)
        start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
        with pyro.plate("series", SERIES, subsample_size=len(values)):
            z = pyro.sample("z", SDEPath(self.drift, scale, start, grid))
            x = self.fault("likelihood", z[..., 2::2, :])
            pyro.sample("y", dist.Normal(x, self.noise).to_event(2), obs=values)


class Encoder(GRUEncoder):
    fault: Fault

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        return found._replace(context=lambda t: self.fault("guide", found.context(t)))


class LeapingAdam(torch.optim.Adam):
    """Adam, one step of which sends the last element of a parameter to another value."""

    def __init__(self, params: Any, to: float = 0.0, at: float = math.inf, **options: Any) -> None:
        super().__init__(params, **options)
        self.to, self.left = to, at

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.left -= 1
        if self.left == 0:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.view(-1)[-1] = self.to
        return result


Options = dict[str, Any]


@dataclass
class Way:
    """One way to diverge.

    :param bad: From a power of ten between 0 and 1 to the options of ``fit`` that are bad.
    :param place: Where the fault is, or the end of the name of the parameter that leaps.
    :param spoil: What a fault does there.
    :param leap: Whether it is a parameter that leaps.
    :param sane: The options with which training goes on.
    """

    bad: Callable[[float], Options] = lambda _: {"lr": SANE}
    place: str = ""
    spoil: Callable[[Tensor], Tensor] = torch.clone
    leap: bool = False
    sane: Callable[[], Options] = lambda: {"lr": SANE}


def _rate(low: float, high: float) -> Way:
    return Way(lambda x: {"lr": 10 ** (low + x * (high - low)), "schedule": "constant"})


def _own(make: Callable[[Options], Any], sane: float, **options: float) -> Way:
    def optim(lr: float) -> Options:
        return {"optim": make({"lr": lr, **options})}

    return Way(lambda x: optim(10 ** (2 + 6 * x)), sane=lambda: optim(sane))


def _leap(name: str, to: float) -> Way:
    def optim(at: float) -> Options:
        def options(param_name: str) -> Options:
            return {"lr": SANE, "to": to, "at": at if param_name.endswith(name) else math.inf}

        return {"optim": pyro.optim.PyroOptim(LeapingAdam, options)}

    return Way(lambda x: optim(1 + int(STEPS * x / 2)), name, leap=True, sane=_never_leap)


def _never_leap() -> Options:
    return {"optim": pyro.optim.PyroOptim(LeapingAdam, {"lr": SANE})}


WAYS: dict[str, Way] = {
    "a large learning rate": _rate(1, 4),
    "a huge learning rate": _rate(4, 30),
    "plain gradient descent": _own(pyro.optim.SGD, 1e-3),
    "momentum": _own(pyro.optim.SGD, 1e-4, momentum=0.9),
    "an optimiser that clips": _own(pyro.optim.ClippedAdam, SANE),
    "NaN in the drift": Way(place="drift", spoil=lambda x: x * math.nan),
    "infinity in the drift": Way(place="drift", spoil=lambda x: x + math.inf),
    "a drift that explodes": Way(place="drift", spoil=lambda x: x + x.abs().exp().exp()),
    "NaN in the likelihood": Way(place="likelihood", spoil=lambda x: x * math.nan),
    "infinity in the likelihood": Way(place="likelihood", spoil=lambda x: x - math.inf),
    "a likelihood that overflows": Way(place="likelihood", spoil=lambda x: x * HUGE),
    "NaN in the guide": Way(place="guide", spoil=lambda x: x * math.nan),
    "infinity in the guide": Way(place="guide", spoil=lambda x: x + math.inf),
    "a gradient that is NaN": Way(place="likelihood", spoil=lambda x: x + (0 * x).sqrt()),
    "a gradient that overflows": Way(
        place="likelihood", spoil=lambda x: x + (HUGE * x - (HUGE * x).detach())
    ),
    "noise that underflows": _leap("noise", -1e3),
    "noise that overflows": _leap("noise", 1e3),
    "a variance below zero": _leap("tilt", -1e4),
    "a parameter that becomes NaN": _leap("growth", math.nan),
    "a parameter that becomes infinite": _leap("growth", -math.inf),
    "a growth that explodes": _leap("growth", 1e4),
    "a contraction that underflows": _leap("last.bias", -1e4),
    "a contraction that is zero": _leap("last.bias", -1e38),
    "a contraction that overflows": _leap("last.bias", 1e4),
}


@dataclass
class Run:
    """What became of one training.

    :param way: The way to diverge.
    :param outcome: "diverged", "survived", or another error.
    :param missing: The details of ``Diverged`` that are missing or wrong.
    :param failed: Why going on from the checkpoint has failed; empty if it has not.
    """

    way: str
    outcome: str
    missing: list[str] = field(default_factory=list)
    failed: str = ""


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    times = torch.linspace(0.5, 2.0, POINTS).expand(SERIES, POINTS).contiguous()
    return times, 1.0 + 0.3 * torch.randn(SERIES, POINTS, 1, generator=generator)


class Problem:
    """A model and its guide, and what all trainings of them have in common."""

    def __init__(self, fault: Fault, seed: int = 0) -> None:
        pyro.set_rng_seed(seed)
        self.model, encoder = Model(fault), Encoder(1, hidden=8, context=4)
        encoder.fault = fault
        self.guide = AutoSDE(self.model, encoder=encoder, contraction=True)

    def fit(self, **options: Any) -> History:
        elbo = TraceSDE_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
        options = {"elbo": elbo, "match": False, "progress": False} | options
        with warnings.catch_warnings():
            for kind in (ExplosionWarning, RejectedWarning):
                warnings.simplefilter("ignore", kind)
            warnings.filterwarnings("ignore", r"Encountered (NaN|\+inf)")
            return fit(self.model, self.guide, _data(), **options)


def _end(history: History) -> float:
    return statistics.median(history.elbo[-10:])


@cache
def healthy(sane: Callable[[], Options], **options: Any) -> tuple[float, float]:
    """The ELBO at the start and at the end of a training that does not diverge."""
    pyro.clear_param_store()
    history = Problem(Fault()).fit(steps=2 * STEPS, seed=0, **options, **sane())
    return statistics.median(history.elbo[:5]), _end(history)


def play(way: str, seed: int) -> Run:
    """One training that diverges, and one that goes on from its checkpoint.

    :param way: A key of :data:`WAYS`.
    :param seed: The seed of all that is random in it.
    """
    r, how = random.Random(f"{way} {seed}"), WAYS[way]
    common: Options = {"seed": seed, "batch_size": r.choice([None, 4]), "keep": r.randint(1, 3)}
    common |= {"clip": r.choice([None, None, 10.0]), "anneal": r.choice([0, 5])}
    common |= {"save_every": r.randint(1, 7), "max_rejected": r.choice([0, 0, 3])}
    start, end = healthy(how.sane, batch_size=common["batch_size"], clip=common["clip"])
    pyro.clear_param_store()
    fault = Fault(how.place, how.spoil, r.randint(3, STEPS))
    problem = Problem(fault, seed)
    with tempfile.TemporaryDirectory() as folder:
        common["checkpoint"] = path = Path(folder) / "run.pt"
        try:
            problem.fit(steps=STEPS, **common | how.bad(r.random()))
        except Diverged as e:
            run = Run(way, "diverged", _missing(e, path, how))
        except Exception as e:
            return Run(way, _said(e))
        else:
            return Run(way, "survived")
        if r.random() < 0.5:  # as in a process of its own
            pyro.clear_param_store()
            problem = Problem(Fault(), seed)
        fault.place = ""
        try:
            again = problem.fit(steps=2 * STEPS, resume=True, **common | how.sane())
        except Exception as e:
            run.failed = _said(e)
            return run
    if not _end(again) - start >= 0.5 * (end - start):
        run.failed = f"the ELBO went from {start:.4g} to {_end(again):.4g}, instead of {end:.4g}"
    name = first_not_finite({k: p.detach() for k, p in pyro.get_param_store().items()})
    run.failed = run.failed if name is None else f"{name} is not finite"
    return run


def _said(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e)[:200]}"


def _missing(e: Diverged, path: Path, how: Way) -> list[str]:
    names = set(pyro.get_param_store().keys())
    wanted = how.place if how.leap else ""
    is_there = {
        "step": e.step >= 1,
        "norm": math.isfinite(e.norm),
        "parameter": e.parameter in names and str(e.parameter).endswith(wanted),
        "checkpoint": e.checkpoint == path and path.is_file(),
    }
    return [name for name, found in is_there.items() if not found]


def attack(count: int, seed: int) -> dict[str, int]:
    """Train ``count`` times, in all ways in turn."""
    found = dict.fromkeys(("diverged", "survived", *BOUNDS), 0)
    for k in trange(count, desc="divergence", unit="training", mininterval=1.0):
        run = play(list(WAYS)[k % len(WAYS)], seed + k)
        found[run.outcome if run.outcome in found else "other errors"] += 1
        found["details missing"] += bool(run.missing)
        found["failed to go on"] += bool(run.failed)
        if run.missing or run.failed or run.outcome not in found:
            tqdm.write(str(run), file=sys.stderr)
    return found
