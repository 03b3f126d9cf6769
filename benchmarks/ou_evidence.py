"""Nats between the bound and the exact log evidence, over seeds.

An Ornstein-Uhlenbeck prior (rate 1, scale 1, stationary start) and four Gaussian observations with
noise 0.3. Everything about it is known: evidence and posterior from the Gaussian process, the
optimal control from the backward Kalman filter. AutoSDE with its defaults takes 1000 Adam steps.

Run: python benchmarks/ou_evidence.py
"""

import argparse
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor
from tqdm import trange

from pyro_sde import AutoSDE, TraceSDE_ELBO, select, time_grid
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck

T_OBS = torch.tensor([0.5, 1.0, 2.0, 2.75], dtype=torch.float64)
Y = torch.tensor([1.0, -0.5, 2.0, 0.3], dtype=torch.float64)
NOISE = 0.3


def exact() -> tuple[float, Tensor, Tensor]:
    """Log evidence, and posterior means and standard deviations at the observations."""
    K = 0.5 * torch.exp(-(T_OBS.unsqueeze(-1) - T_OBS).abs())
    S = K + NOISE**2 * torch.eye(4)
    evidence = dist.MultivariateNormal(torch.zeros(4), S).log_prob(Y)
    mean = K @ torch.linalg.solve(S, Y)
    sd = (K - K @ torch.linalg.solve(S, K)).diagonal().sqrt()
    return evidence.item(), mean, sd


def problem(steps: int) -> tuple[Tensor, Callable]:
    grid = time_grid(0.0, 3.0, dt=3.0 / steps, include=T_OBS)
    assert len(grid) == steps + 1

    def model(y: Tensor) -> None:
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid))
        with pyro.plate("obs", len(T_OBS)):
            x = select(z, grid, T_OBS, plate_dim=-1)[..., 0]
            pyro.sample("y", dist.Normal(x, NOISE), obs=y)

    return grid, model


def bound(model: Callable, guide: Callable, n: int = 20_000) -> tuple[float, float]:
    """The ELBO and its standard error."""
    elbo = TraceSDE_ELBO(num_particles=1000, vectorize_particles=True, max_plate_nesting=2)
    with torch.no_grad():
        values = -torch.tensor([elbo.loss(model, guide, Y) for _ in range(n // 1000)])
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item()


def optimal_guide(grid: Tensor) -> Callable:
    """The posterior SDE: u* = s d/dz log p(y after t | z_t = z) = b(t) - a(t) z."""
    a, b = torch.zeros(()), torch.zeros(())
    gains = []
    for i in range(len(grid) - 2, -1, -1):
        hit = (T_OBS == grid[i + 1]).nonzero()
        if len(hit):
            a, b = a + 1 / NOISE**2, b + Y[hit[0, 0]] / NOISE**2
        dt = grid[i + 1] - grid[i]
        decay, var = torch.exp(-dt), 0.5 * (1 - torch.exp(-2 * dt))
        a, b = decay.square() * a / (1 + var * a), decay * b / (1 + var * a)
        gains.append((a, b))
    gains.reverse()
    table = torch.tensor(gains)

    def control(t: Tensor, z: Tensor) -> Tensor:
        a, b = table[torch.searchsorted(grid, t.contiguous())].unbind(-1)
        return b - a * z

    start = dist.Normal(b / (2 + a), (1 / (2 + a)).sqrt()).expand((1,)).to_event(1)
    prior = OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid)
    return lambda y: pyro.sample("z", ControlledPath(prior, control, initial=start))


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
