"""Matching the law of the latents that are not paths to weighted draws, after training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoContinuous
from torch import Tensor, nn
from tqdm.auto import tqdm

from .._buffers import keep_buffers
from .._threads import one_thread
from ..diagnostics.reweighting import smooth_weights
from ..diagnostics.weighted_draws import Problem, check_at_once, draw_traces
from ..guides import AutoSDE

__all__ = ["Matching", "match", "match_latents"]

CALLS, MIN_DRAWS = 50, 2000
"""How often a round runs the model, each time on up to 1000 draws, and its fewest draws."""
ROUNDS = 3
SMALL = 0.005
"""Nats. A round that gains less than this is the last one."""
MAX_K_HAT = 1.0
"""Weights with a heavier tail have no mean."""
ITERATIONS = 60
DELAY = 1.0
"""Seconds after which a round shows its progress."""
WIDER = 0.7
"""Draws are of a law that is wider than q by a factor of 1 + 0.7 / sqrt(d), with d latent numbers:
draws that are too narrow have hardly any in the tails of the posterior, and these with all the
weight. The root keeps what that costs in effective draws about the same for every d."""


@dataclass(frozen=True)
class Matching:
    """The result of :func:`match_latents`.

    Example::

        >>> print(Matching(rounds=2, gain=0.12, k_hat=0.4, widths={"rate": 1.1, "scale": 0.98}))
        latents: matched to weighted draws; widths over those of training: rate 1.10, scale 0.98
    """

    rounds: int
    """The number of rounds that changed the guide."""
    gain: float
    """By how many nats the law of the latents came closer to the posterior, over all rounds."""
    k_hat: float
    """The tail of the weights of the last draws; see :func:`~pyro_sde.diagnostics.importance`."""
    widths: dict[str, float]
    """By which factor matching changed the standard deviation of each latent, in unconstrained
    space: the geometric mean over the elements of the latent."""
    reason: str = ""
    """Why the guide was not changed; empty if it was."""

    def __str__(self) -> str:
        if not self.rounds:
            return f"latents: not matched to weighted draws, because {self.reason}"
        widths = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(self.widths.items()))
        return f"latents: matched to weighted draws; widths over those of training: {widths}"


@one_thread("match_latents")
def match_latents(
    model: Callable, guide: Callable, *args: Any, progress: bool = False, **kwargs: Any
) -> Matching:
    r"""Match the law q of the latents that are not paths to importance-weighted draws of the guide.

    For draws :math:`(z_i, \theta_i)` of paths and other latents, it maximises

    .. math:: \sum_i w_i \log q(\theta_i), \qquad w_i \propto p(x, z_i, \theta_i) / q(z_i, \theta_i)

    The ELBO makes a posterior too narrow wherever its family cannot follow the exact one: where
    the control of the path is worse at some rates, these rates are drawn less often. Weighting
    corrects that, unless a few draws have nearly all of the weight. The matched q minimises the
    other KL, :math:`\mathrm{KL}(p(\theta \mid x)\|q(\theta))`, so its widths and correlations
    are those of the posterior. The ELBO, which is the bound of the evidence, falls a little: by 0.2
    nat where seven latents became wider by a fifth. The control of the path is not changed.

    Each round makes new draws, of a law that is a little wider than q, because posterior tails
    that are hardly ever drawn would count too little. It fits q to half of them by L-BFGS, and
    keeps the result if it is better on the other half. The rounds end when there is no gain. They
    always use the same random numbers, and leave the random state as it was.

    ``fit`` calls this function at its end. The guide is not changed where the weights have no mean
    or where draws cannot be vectorised; :attr:`Matching.reason` then says why. A guide whose other
    latents have no joint density (AutoNormal) is an error.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_sde import AutoSDE, fit
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> pyro.clear_param_store()
        >>> def model(y):
        ...     rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5)).unsqueeze(-1)
        ...     z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, 1.0, torch.linspace(0, 1, 9)))
        ...     pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)
        >>> guide, y = AutoSDE(model), torch.tensor(1.0)
        >>> history = fit(model, guide, y, steps=50, match=False, progress=False, seed=0)
        >>> list(match_latents(model, guide, y).widths)
        ['rate']

    :param model: The model.
    :param guide: Its trained guide.
    :param args: Arguments of both: all of the data.
    :param progress: Whether to show a progress bar in rounds of more than a second.
    :param kwargs: Keyword arguments of both.
    :returns: A :class:`Matching`, which says how the guide was changed, or why it was not.
    """
    return match(model, guide, args, kwargs, progress)


def match(model: Callable, guide: Callable, args: tuple, kwargs: dict, progress: bool) -> Matching:
    """As :func:`match_latents`, with any names of the model's arguments."""
    rest = _joint_guide(guide)
    if rest is None:
        raise TypeError(
            "match_latents needs an AutoSDE whose other latents have a joint density, as they have "
            f"by default up to 128 numbers: found {_describe(guide)}"
        )
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices), keep_buffers(model, guide):
        torch.manual_seed(0)
        return _match(model, guide, rest, args, kwargs, progress)


def has_joint_latents(guide: Any) -> bool:
    """Whether the guide has latents that :func:`match_latents` could match."""
    return _joint_guide(guide) is not None


def _joint_guide(guide: Any) -> AutoContinuous | None:
    guide = poutine.unwrap(guide)
    rest = getattr(guide, "rest", None) if isinstance(guide, AutoSDE) else None
    return rest if isinstance(rest, AutoContinuous) else None


def _describe(guide: Any) -> str:
    guide = poutine.unwrap(guide)
    if not isinstance(guide, AutoSDE):
        return f"a {type(guide).__name__}"
    if not hasattr(guide, "rest"):
        return "no other latents, or a guide that was never called"
    return f"{type(guide.rest).__name__} of {list(guide.other_sites)}"


def _match(
    model: Callable,
    guide: Any,
    rest: AutoContinuous,
    args: tuple,
    kwargs: dict,
    progress: bool,
) -> Matching:
    k_hat = float("nan")
    try:
        problem = Problem.of(model, guide, args, kwargs)
        if CALLS * problem.chunk < MIN_DRAWS:
            return Matching(0, 0.0, k_hat, {}, "the model is large")
        check_at_once(problem)
        widening, log_weights, x = _first_draws(problem, rest)
        k_hat = smooth_weights(log_weights)[1]
    except Exception as e:  # whatever a model raises on shapes that it was not written for
        return Matching(0, 0.0, k_hat, {}, f"draws cannot be vectorised ({e})")
    if not k_hat < MAX_K_HAT:
        return Matching(0, 0.0, k_hat, {}, f"k-hat is {k_hat:.2f}: train longer")
    before, trained = x.std(0), _copies(rest)
    rounds, total = 0, 0.0
    try:
        while rounds < ROUNDS:
            gain = _fit_to(rest, *_draw(problem, rest, CALLS, widening, progress))
            if gain <= 0:
                break
            rounds, total = rounds + 1, total + gain
            if gain < SMALL:
                break
        log_weights, x = _draw(problem, rest, 1, widening)
    except (ValueError, ArithmeticError, RuntimeError) as e:
        # Tails may become so long that a few of very many draws overflow, which a model refuses.
        _put(rest, trained)
        return Matching(0, 0.0, k_hat, {}, f"a matched law has draws out of range ({e})")
    if not rounds:
        return Matching(0, 0.0, k_hat, {}, "weighted draws agree with the guide")
    ratios = (x.std(0) / before).log().cpu()
    widths, first = {}, 0
    for name, shape in rest._unconstrained_shapes.items():
        widths[name] = float(ratios[first : first + shape.numel()].mean().exp())
        first += shape.numel()
    return Matching(rounds, total, smooth_weights(log_weights)[1], widths)


def _parameters(rest: AutoContinuous) -> list[nn.Parameter]:
    return [p for p in rest.parameters() if p.requires_grad]


def _copies(rest: AutoContinuous) -> list[Tensor]:
    return [p.detach().clone() for p in _parameters(rest)]


@torch.no_grad()
def _put(rest: AutoContinuous, values: list[Tensor]) -> None:
    for p, value in zip(_parameters(rest), values, strict=True):
        p.copy_(value)


def _first_draws(problem: Problem, rest: AutoContinuous) -> tuple[float, Tensor, Tensor]:
    """By how much to widen the law of the latents for the draws, and the first of them."""
    widening = 1 + WIDER / math.sqrt(rest.latent_dim)
    try:
        return (widening, *_draw(problem, rest, 1, widening))
    except (ValueError, ArithmeticError, RuntimeError):  # the model refuses what is far out
        return (1.0, *_draw(problem, rest, 1, 1.0))


@torch.no_grad()
def _draw(
    problem: Problem, rest: AutoContinuous, calls: int, widening: float, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Log weights of draws, and the latents in unconstrained space.

    :param widening: The factor of the standard deviations of the latents for these draws.
    """
    found, law = [], _copies(rest)
    try:
        if isinstance(getattr(rest, "scale", None), Tensor):
            rest.scale = rest.scale * widening
        show: Any = {"desc": "matching", "leave": False, "delay": DELAY, "disable": not progress}
        for _ in tqdm(range(calls), **show):
            _, guide_trace, log_weights = draw_traces(problem, problem.chunk)
            joint: Any = guide_trace.nodes[f"_{rest._pyro_name}_latent"]
            found.append((log_weights.sum(1), joint["value"].reshape(problem.chunk, -1)))
    finally:
        _put(rest, law)
    log_weights, x = (torch.cat(parts) for parts in zip(*found, strict=True))
    return log_weights, x


def _fit_to(rest: AutoContinuous, log_weights: Tensor, x: Tensor) -> float:
    """Fit the law of the latents to half of the draws. Where the other half gains by it, fit the
    law to all draws; otherwise restore it.

    :returns: The gain in nats, 0 where the law was restored.
    """
    parameters, before = _parameters(rest), _copies(rest)
    half = len(x) // 2
    unseen = _Objective(rest, log_weights[half:], x[half:])
    gain = 0.0
    try:
        with torch.no_grad():
            old = unseen()
        _maximise(_Objective(rest, log_weights[:half], x[:half]), parameters)
        with torch.no_grad():
            gain = float(unseen() - old)
        if gain > 0:
            _maximise(_Objective(rest, log_weights, x), parameters)
    except BaseException:
        gain = 0.0
        raise
    finally:
        if not gain > 0:
            _put(rest, before)
    return max(gain, 0.0)


class _Objective:
    """The mean log density of weighted draws."""

    def __init__(self, rest: AutoContinuous, log_weights: Tensor, x: Tensor) -> None:
        self.rest, self.x = rest, x
        self.weights = smooth_weights(log_weights)[0].exp().to(x)

    def __call__(self) -> Tensor:
        return (self.weights * self.rest.get_posterior().log_prob(self.x)).sum()


def _maximise(objective: _Objective, parameters: list[nn.Parameter]) -> None:
    optimiser = torch.optim.LBFGS(parameters, max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -objective()
        loss.backward()
        return loss

    optimiser.step(closure)
    optimiser.zero_grad()
