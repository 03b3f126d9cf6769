"""One ELBO in many programs: pyro_sde, a bare PyTorch loop, torchsde."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torchsde
from elbo_problem import NOISE, RATE, SCALE, Control, Problem, Y
from torch import Tensor, nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import OrnsteinUhlenbeck

__all__ = ["BARE", "TUNED", "Latent", "contestants"]

BARE, TUNED = "bare PyTorch loop", "torchsde, tuned"


class Latent(nn.Module):
    """The problem for torchsde; and its losses in all programs, of one control.

    :param control: What pyro_sde trains; the others train ``net``, the same function.
    """

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem, times = problem, problem.times()
        self.net = Control(problem.dim, problem.width)
        self.control = self.net.as_mlp(times) if problem.control == "mlp" else self.net
        self.register_buffer("times", times)
        self.dt = 1 / problem.steps

    # torchsde's names: posterior drift, prior drift, diffusion.
    def f(self, t: Tensor, z: Tensor) -> Tensor:
        return SCALE * self.net(t, z) - RATE * z

    def h(self, t: Tensor, z: Tensor) -> Tensor:
        return -RATE * z

    def g(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.full_like(z, SCALE)

    def model(self) -> None:
        p = self.problem
        with pyro.plate("series", p.series) if p.series > 1 else nullcontext():
            start = torch.zeros(p.dim)
            z = pyro.sample("z", OrnsteinUhlenbeck(RATE, 0.0, SCALE, self.times, initial=start))
            z = z[..., 1:, :] if p.everywhere else z[..., -1:, :]
            pyro.sample("y", dist.Normal(z, NOISE).to_event(2), obs=torch.tensor(Y))

    def ours(self, estimator: str, **options: Any) -> Callable[[], Tensor]:
        """:param options: Those of AutoSDE."""
        p = self.problem
        elbo = TraceSDE_ELBO(
            path_estimator=estimator,
            num_particles=p.particles,
            vectorize_particles=p.particles > 1,
            max_plate_nesting=1 + (p.series > 1),
        )
        guide = AutoSDE(self.model, control=self.control, **options)
        return lambda: elbo.differentiable_loss(self.model, guide)

    def bare(
        self, noise: Tensor | None = None, exact: bool = True, martingale: bool = False
    ) -> Tensor:
        """By hand, with all that does not depend on the state outside of the loop.

        :param noise: Standard normal, of shape (steps, batch, dim); drawn by default.
        :param exact: The exact steps of the prior, which are ours; or those of Euler.
        :param martingale: Both terms of the log ratio, as "full"; or the first alone, as "kl".
        """
        p, dt = self.problem, self.dt
        if noise is None:
            noise = torch.randn(p.steps, p.batch, p.dim)
        decay, scale = 1 - RATE * dt, SCALE * math.sqrt(dt)
        if exact:
            decay = math.exp(-RATE * dt)
            scale = SCALE * math.sqrt((1 - decay**2) / (2 * RATE))
        push, kicks = scale * math.sqrt(dt), (scale * noise).unbind(0)
        if p.control == "mlp":
            control = self.net.by_step(self.times[:-1])
        else:
            control = lambda i, z: self.net(self.times[i], z)  # noqa: E731
        z, zs, us = torch.zeros(p.batch, p.dim), [], []
        for i, kick in enumerate(kicks):
            u = control(i, z)
            z = kick.add(z, alpha=decay).add(u, alpha=push)
            us.append(u)
            zs.append(z)
        u = torch.stack(us)
        kl = 0.5 * dt * u.square().sum()
        if martingale:
            kl = kl + math.sqrt(dt) * (u * noise).sum()
        return p.loss(kl, torch.stack(zs) if p.everywhere else z)

    def torchsde(self, hint: bool, adjoint: bool = False, noise: Tensor | None = None) -> Tensor:
        """By sdeint, or sdeint_adjoint, with logqp.

        :param hint: Tell the Brownian motion of dt, and see to it that no step is left over.
        """
        p = self.problem
        solve = torchsde.sdeint_adjoint if adjoint else torchsde.sdeint
        start, options = torch.zeros(p.batch, p.dim), self._options(hint, noise)
        zs, kl = solve(self, start, logqp=True, **options)
        return p.loss(kl.sum(), zs[1:])

    def torchsde_by_hand(self, noise: Tensor | None = None) -> Tensor:
        """By sdeint without its logqp: the KL is a coordinate that we write."""
        p = self.problem
        y, options = torch.zeros(p.batch, p.dim + 1), self._options(True, noise)
        y = torchsde.sdeint(Augmented(self), y, **options)[1:]
        return p.loss(y[-1, :, -1].sum(), y[..., :-1])

    def _options(self, hint: bool, noise: Tensor | None) -> dict[str, Any]:
        p, dt = self.problem, self.dt
        ts = self.times if p.everywhere else self.times[[0, -1]]
        options: dict[str, Any] = {"ts": ts, "dt": dt, "method": "euler"}
        if not hint:
            return options
        # Longer by a little, or rounding leaves something for one step more. That one is so short
        # that, without a hint, the Brownian motion gets ready for a million such.
        options["dt"] = dt * (1 + 1e-5)
        if noise is not None:
            return options | {"bm": Given(noise, dt)}
        size = (p.batch, p.dim + 1)
        return options | {"bm": torchsde.BrownianInterval(0.0, 1.0, size=size, dt=dt)}


class Augmented:
    """[z, kl] as one state of torchsde."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, latent: Latent) -> None:
        p = latent.problem
        self.net = latent.net
        self.scale = torch.cat([torch.full((p.dim,), SCALE), torch.zeros(1)])

    def f_and_g_prod(self, t: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        z = y[:, :-1]
        u = self.net(t, z)
        kl = 0.5 * u.square().sum(-1, keepdim=True)
        return torch.cat([SCALE * u - RATE * z, kl], -1), self.scale * noise


class Given:
    """A Brownian motion for torchsde whose increments are known."""

    levy_area_approximation = "none"

    def __init__(self, noise: Tensor, dt: float) -> None:
        self.increments = math.sqrt(dt) * nn.functional.pad(noise, (0, 1))
        self.shape, self.dt = self.increments.shape[1:], dt

    def __call__(self, start: Any, end: Any, **_: Any) -> Tensor:
        return self.increments[round(float(start) / self.dt)]


ESTIMATORS = ("kl", "full", "stl")


def contestants(latent: Latent, compile: bool = False) -> dict[str, Callable[[], Tensor]]:
    """Losses by name. A loss of the same name is of the same program at every size.

    :param compile: Ours compiled, too.
    """
    pyro.clear_param_store()  # every size has a guide with the same names
    ours = {f'pyro_sde, "{name}"': latent.ours(name) for name in ESTIMATORS}
    if compile:
        ours |= {f'pyro_sde, "{k}", compiled': latent.ours(k, compile=True) for k in ESTIMATORS}
    return {
        BARE: latent.bare,
        **ours,
        "torchsde, as its examples": lambda: latent.torchsde(hint=False),
        TUNED: lambda: latent.torchsde(hint=True),
        "torchsde, tuned, KL by hand": latent.torchsde_by_hand,
        "torchsde, adjoint": lambda: latent.torchsde(hint=False, adjoint=True),
        "torchsde, adjoint, tuned": lambda: latent.torchsde(hint=True, adjoint=True),
    }
