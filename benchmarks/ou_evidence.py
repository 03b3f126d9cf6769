"""Nats between the bound and the exact log evidence, over seeds.

An Ornstein-Uhlenbeck prior (rate 1, scale 1, stationary start) and four Gaussian observations with
noise 0.3. Everything about it is known: evidence and posterior from the Gaussian process, the
optimal control from the backward Kalman filter. AutoSDE with its defaults takes 1000 Adam steps.

Run: python benchmarks/ou_evidence.py
"""

import argparse
import dataclasses
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor
from tqdm import trange

from pyro_sde import AutoSDE, TraceSDE_ELBO, select, time_grid
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck, PathDistribution, SDEPath

T_OBS = torch.tensor([0.5, 1.0, 2.0, 2.75], dtype=torch.float64)
Y = torch.tensor([1.0, -0.5, 2.0, 0.3], dtype=torch.float64)
NOISE, END = 0.3, 3.0


@dataclasses.dataclass(frozen=True)
class Case:
    """dz = -rate z dt + dB over [0, 3] from its stationary law, seen at times ``t`` under Gaussian
    noise; by default the one above."""

    t: Tensor = T_OBS
    y: Tensor = Y
    noise: float = NOISE
    rate: float = 1.0

    def marginal(self) -> tuple[Tensor, Tensor]:
        """Covariances of the states at the observations, and of what is observed there."""
        K = torch.exp(-self.rate * (self.t.unsqueeze(-1) - self.t).abs()) / (2 * self.rate)
        return K, K + self.noise**2 * torch.eye(len(self.t), dtype=K.dtype)

    def grid(self, steps: int) -> Tensor:
        grid = time_grid(0.0, END, dt=END / steps, include=self.t)
        assert len(grid) == steps + 1
        return grid

    def prior(self, grid: Tensor, euler: bool = False) -> PathDistribution:
        """By exact transitions, or by those of Euler."""
        exact = OrnsteinUhlenbeck(self.rate, 0.0, 1.0, grid)
        if not euler:
            return exact
        return SDEPath(lambda t, z: -self.rate * z, 1.0, exact.initial, grid)

    def model(self, grid: Tensor, euler: bool = False) -> Callable[[Tensor], None]:
        def model(y: Tensor) -> None:
            z = pyro.sample("z", self.prior(grid, euler))
            with pyro.plate("obs", len(self.t)):
                x = select(z, grid, self.t, plate_dim=-1)[..., 0]
                pyro.sample("y", dist.Normal(x, self.noise), obs=y)

        return model


FOUR = Case()


def exact(case: Case = FOUR) -> tuple[float, Tensor, Tensor]:
    """Log evidence, and posterior means and standard deviations at the observations."""
    K, S = case.marginal()
    evidence = dist.MultivariateNormal(torch.zeros_like(case.y), S).log_prob(case.y)
    mean = K @ torch.linalg.solve(S, case.y)
    sd = (K - K @ torch.linalg.solve(S, K)).diagonal().sqrt()
    return evidence.item(), mean, sd


def problem(steps: int) -> tuple[Tensor, Callable]:
    grid = FOUR.grid(steps)
    return grid, FOUR.model(grid)


def bound(model: Callable, guide: Callable, n: int = 20_000, y: Tensor = Y) -> tuple[float, float]:
    """The ELBO and its standard error."""
    elbo = TraceSDE_ELBO(num_particles=1000, vectorize_particles=True, max_plate_nesting=1)
    values = []
    with torch.no_grad():
        for _ in range(n // 1000):
            for p, q in elbo._get_traces(model, guide, (y,), {}):
                ratio = q.nodes["z"]["log_prob"].flatten()
                values.append(p.nodes["y"]["log_prob"].sum(-1) - ratio)
    value = torch.cat(values)
    return value.mean().item(), (value.std() / math.sqrt(len(value))).item()


def optimal_guide(
    grid: Tensor, case: Case = FOUR, *, of_grid: bool = False, euler: bool = False
) -> Callable:
    """The posterior SDE: u* = s d/dz log p(y after t | z_t = z) = b(t) - a(t) z.

    :param of_grid: The control that is best with the noise of these steps: see ``optimum``.
    """
    a, b = solve(grid, case, euler)[0].unbind(-1)
    dt, decay, scale = _steps(grid, case, euler)
    push = scale / (decay * dt.sqrt()) if of_grid else torch.ones_like(dt)

    def control(t: Tensor, z: Tensor) -> Tensor:
        i = torch.searchsorted(grid, t.contiguous())
        return push[i] * (b[i] - a[i] * z)

    precision = 2 * case.rate + a[0]
    start = dist.Normal(b[0] / precision, precision.rsqrt()).expand((1,)).to_event(1)
    prior = case.prior(grid, euler)
    return lambda y: pyro.sample("z", ControlledPath(prior, control, initial=start))


def solve(grid: Tensor, case: Case = FOUR, euler: bool = False) -> tuple[Tensor, float, float]:
    """The backward Kalman filter.

    :returns: a and b of log p(y after t_i | z) = b z - a z^2 / 2 + ... for all t_i but the last;
        the log evidence; and the nats that a posterior with the noise of the prior must lose of it.
    """
    a, b, c, lost = (torch.zeros((), dtype=grid.dtype) for _ in range(4))
    gains = []
    _, decays, scales = _steps(grid, case, euler)
    for end, d, s in zip(grid[1:].flip(0), decays.flip(0), scales.flip(0), strict=True):
        for y in case.y[case.t == end]:
            a, b = a + case.noise**-2, b + y * case.noise**-2
            c = c + dist.Normal(y, case.noise).log_prob(torch.zeros_like(y))
        # max over v of E[b z' - a z'^2 / 2] - v^2 / 2 for z' = d z + s v + s eps has a s^2 where
        # log E exp has log(1 + a s^2), and is the same else.
        x = a * s.square()
        c = c + 0.5 * (b * s).square() / (1 + x) - 0.5 * x.log1p()
        lost = lost + 0.5 * (x - x.log1p())
        a, b = d.square() * a / (1 + x), d * b / (1 + x)
        gains.append(torch.stack([a, b]))
    prior = 2 * case.rate
    evidence = c + 0.5 * b.square() / (prior + a) - 0.5 * (a / prior).log1p()
    return torch.stack(gains[::-1]), evidence.item(), lost.item()


def optimum(grid: Tensor, case: Case = FOUR, euler: bool = False) -> float:
    """The largest bound on this grid without contraction. With it, that is the evidence."""
    _, evidence, lost = solve(grid, case, euler)
    return evidence - lost


def _steps(grid: Tensor, case: Case, euler: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dt, decay and scale of each."""
    dt = grid.diff()
    if euler:
        return dt, 1 - case.rate * dt, dt.sqrt()
    var = -torch.expm1(-2 * case.rate * dt) / (2 * case.rate)
    return dt, torch.exp(-case.rate * dt), var.sqrt()


def train(model: Callable, contraction: bool, iterations: int) -> AutoSDE:
    guide = AutoSDE(model, contraction=contraction)
    elbo = TraceSDE_ELBO(num_particles=32, vectorize_particles=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-2}), elbo)
    for _ in trange(iterations, desc="training", unit="step", leave=False):
        svi.step(Y)
    return guide


def main(args: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    evidence, _, _ = exact()
    print(f"exact log evidence {evidence:.4f}; gaps in nats, standard error in brackets")
    gaps: dict[str, list[float]] = {}

    def report(name: str, model: Callable, guide: Callable) -> None:
        value, error = bound(model, guide, args.samples)
        gaps.setdefault(name, []).append(evidence - value)
        print(f"{name:36s} {evidence - value:.4f} ({error:.4f})")

    for steps in (60, 120, 240, 480):
        grid, model = problem(steps)
        report(f"optimal control, {steps} steps", model, optimal_guide(grid))
        print(f"{'  the best without contraction, exact':36s} {evidence - optimum(grid):.4f}")
    for seed in range(args.seeds):
        for steps, contraction in ((120, False), (12, True)):
            pyro.set_rng_seed(seed)
            pyro.clear_param_store()
            _, model = problem(steps)
            name = f"AutoSDE, {steps} steps" + (", contraction" if contraction else "")
            report(name, model, train(model, contraction, args.iterations))
    return gaps


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=20_000, help="paths for each bound")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
