"""Who races to the evidence: AutoSDE with contraction and without, and torchsde.

All have the control network of AutoSDE (64, 64, with its features and embedding of time), start at
a learned Normal, and take steps of Adam on the mean of as many paths, its rate falling alike.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import pyro
import torch
import torchsde
from ou_evidence import END, Case, exact, optimum
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.optim.lr_scheduler import LambdaLR

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO, time_grid
from pyro_sde.distributions import ControlledPath

__all__ = ["CONTRACTION", "LADDER", "PLAIN", "TORCHSDE", "AutoRacer", "TorchsdeRacer", "racer"]

CONTRACTION, PLAIN, TORCHSDE = "contraction", "plain", "torchsde"
LADDER = tuple(60 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))


class Falling:
    """Adam whose rate is lr / (1 + steps / half): where the noise of the gradient does not vanish,
    a constant one keeps the bound away from its best."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, half: float) -> None:
        self.adam = torch.optim.Adam(parameters, lr=lr)
        self.schedule = LambdaLR(self.adam, lambda steps: 1 / (1 + steps / half))

    def step(self, loss: Callable[[], Tensor]) -> None:
        self.adam.zero_grad()
        loss().backward()
        self.adam.step()
        self.schedule.step()


class AutoRacer:
    """AutoSDE with its defaults, "stl".

    :param grid: Where its path has states.
    """

    def __init__(
        self, case: Case, grid: Tensor, contraction: bool, paths: int, *rate: float
    ) -> None:
        pyro.clear_param_store()
        self.case, self.steps, self.paths, self.calls = case, len(grid) - 1, paths, 0
        self.model = case.model(grid)
        self.guide = AutoSDE(self.model, contraction=contraction).setup(case.y)
        self.elbo = TraceSDE_ELBO(
            num_particles=paths, vectorize_particles=True, max_plate_nesting=1
        )
        self.optim = Falling(self.guide.parameters(), *rate)

    def step(self) -> None:
        self.optim.step(lambda: self.elbo.differentiable_loss(self.model, self.guide, self.case.y))
        self.calls += self.steps  # the martingale of "stl" needs no second one


class TorchsdeRacer(nn.Module):
    """A latent SDE by sdeint with logqp, Euler steps, tuned: the Brownian motion is told of dt, no
    step is left over, and what the control knows of the grid is computed once per path.

    Its discretised process is that of a path with Euler steps: ``model`` and ``guide``, which judge
    it, in the place of a mean over torchsde's paths that would need many more of them.
    """

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, case: Case, grid: Tensor, paths: int, *rate: float) -> None:
        super().__init__()
        self.case, self.grid, self.paths, self.calls = case, grid, paths, 0
        self.steps, self.prior_sd = len(grid) - 1, math.sqrt(0.5 / case.rate)
        self.dt = END / self.steps
        self.net = MLPControl(1, times=grid)
        self.shift, self.log_scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.optim = Falling(self.parameters(), *rate)
        # In double precision: torchsde adds up its steps.
        self.ts = torch.cat([torch.tensor([0.0, END]), case.t]).double().unique()
        self.seen = torch.searchsorted(self.ts, case.t.double())
        self.model = case.model(grid, euler=True)

    # torchsde's names: posterior drift, prior drift, diffusion.
    def f(self, t: Tensor, z: Tensor) -> Tensor:
        self.calls += 1
        return self.control.at(round(float(t) / self.dt), z) - self.case.rate * z

    def h(self, t: Tensor, z: Tensor) -> Tensor:
        return -self.case.rate * z

    def g(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.ones_like(z)

    def start(self) -> Normal:
        return Normal(self.prior_sd * self.shift, self.prior_sd * self.log_scale.exp())

    def loss(self) -> Tensor:
        case, start = self.case, self.start()
        prior = Normal(torch.zeros(1), self.prior_sd)
        self.control = self.net.on_grid(self.grid[:-1, None])
        bm = torchsde.BrownianInterval(0.0, END, size=(self.paths, 2), dt=self.dt)
        # Longer by a little, or rounding leaves something for one step more.
        options = {"dt": self.dt * (1 + 1e-9), "bm": bm, "method": "euler", "logqp": True}
        zs, kl = torchsde.sdeint(self, start.rsample((self.paths,)), self.ts, **options)
        fit = Normal(zs[self.seen, :, 0], case.noise).log_prob(case.y.unsqueeze(-1))
        return (kl.sum(0) - fit.sum(0)).mean() + kl_divergence(start, prior).squeeze()

    def step(self) -> None:
        self.optim.step(self.loss)

    def guide(self, y: Tensor) -> Tensor:
        prior = self.case.prior(self.grid, euler=True)
        start = self.start().to_event(1)
        return pyro.sample("z", ControlledPath(prior, self.net, initial=start))


def needed(case: Case, euler: bool, tolerance: float) -> Tensor:
    """The coarsest grid of the ladder whose best bound is near the evidence, as on all finer ones:
    that of Euler's chain may pass it on the way. The finest, if none is near."""
    evidence, found = exact(case)[0], case.grid(LADDER[-1])
    for steps in reversed(LADDER):
        grid = case.grid(steps)
        if abs(evidence - optimum(grid, case, euler)) > tolerance:
            break
        found = grid
    return found


def racer(
    name: str, case: Case, paths: int, rate: tuple[float, float], tolerance: float
) -> AutoRacer | TorchsdeRacer:
    """A contestant on the grid that it needs, in the default precision.

    :param case: In double precision.
    :param rate: See :class:`Falling`.
    :param tolerance: Nats from the evidence of the best bound on the grid.
    """
    if name == CONTRACTION:  # exact on any grid: one step from each observation to the next
        grid = time_grid(0.0, END, dt=END, include=case.t)
    else:
        grid = needed(case, name == TORCHSDE, tolerance)
    dtype = torch.get_default_dtype()
    case, grid = dataclasses.replace(case, t=case.t.to(dtype), y=case.y.to(dtype)), grid.to(dtype)
    if name == TORCHSDE:
        return TorchsdeRacer(case, grid, paths, *rate)
    return AutoRacer(case, grid, name == CONTRACTION, paths, *rate)
