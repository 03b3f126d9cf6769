"""Gradient variance of the three estimators over training: figure 4 of Xu et al. (2022).

A Brownian prior, y = cos(2 pi t) with noise 0.1 at ten points in [0.4, 0.6] and [0.8, 1]. The
guide is written by hand: the model's path pushed by a network. It is trained with "stl", and every
so often the variance of the gradient under each estimator is measured at the same parameters. The
number is how many times noisier "kl" and "full" are at the end.
"""

import argparse
import math

import pyro
import pyro.distributions as dist
import torch
from common import parser, plt, save, train
from torch import Tensor

from pyro_sde import MLPControl, TraceSDE_ELBO, select, time_grid
from pyro_sde.diagnostics import gradient_variance
from pyro_sde.distributions import BrownianMotion, ControlledPath

ESTIMATORS = {"kl": "#d9a441", "full": "#8e6c8a", "stl": "#2f6db3"}
T_OBS = torch.cat([torch.linspace(0.4, 0.6, 5), torch.linspace(0.8, 1.0, 5)])


def main(args: argparse.Namespace) -> dict[str, float]:
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    grid = time_grid(0.0, 1.0, dt=1.0 / args.steps, include=T_OBS)
    y = torch.cos(2 * math.pi * T_OBS)
    net = MLPControl(1, times=grid)

    def prior() -> BrownianMotion:
        return BrownianMotion(1.0, grid, dist.Normal(0.0, 1.0))

    def model(y: Tensor) -> None:
        z = pyro.sample("z", prior())
        x = select(z, grid, T_OBS)[..., 0]
        pyro.sample("y", dist.Normal(x, 0.1).to_event(1), obs=y)

    def guide(y: Tensor) -> None:
        pyro.module("control", net)
        loc = pyro.param("loc", torch.zeros(1))
        scale = pyro.param("scale", torch.ones(1), constraint=dist.constraints.positive)
        start = dist.Normal(loc, scale).to_event(1)
        pyro.sample("z", ControlledPath(prior(), net, initial=start))

    checkpoints: list[int] = []
    history: dict[str, list[float]] = {name: [] for name in ESTIMATORS}

    def measure(i: int) -> None:
        if i % max(1, args.iterations // args.checkpoints) and i != args.iterations:
            return
        checkpoints.append(i)
        for name in ESTIMATORS:
            elbo = TraceSDE_ELBO(path_estimator=name, max_plate_nesting=0)
            result = gradient_variance(elbo, model, guide, y, num_samples=args.samples)
            history[name].append(result.mean)

    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args, y, each=measure)
    measure(args.iterations)

    ratios = {name: history[name][-1] / history["stl"][-1] for name in ("kl", "full")}
    print("gradient variance at the end: ", end="")
    print(", ".join(f"{name} {history[name][-1]:.3g}" for name in ESTIMATORS))
    print(f'"kl" is {ratios["kl"]:.1f} times, "full" {ratios["full"]:.1f} times "stl"')

    fig, ax = plt.subplots(figsize=(6.4, 4))
    for name, color in ESTIMATORS.items():
        ax.plot(checkpoints, history[name], "o-", ms=3, color=color, label=f'"{name}"')
    ax.set(yscale="log", xlabel="iteration", ylabel="mean variance of the gradient, one path")
    ax.set_title("Gradient variance along one training run", fontsize=11)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    save(fig, args, "gradient_variance.png")
    return ratios


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1000)
    p.add_argument("--steps", type=int, default=100, help="steps of time")
    p.add_argument("--checkpoints", type=int, default=10, help="how often to measure")
    p.add_argument("--samples", type=int, default=50, help="gradients for each variance")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
