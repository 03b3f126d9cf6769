"""A posterior with two modes: figure 3 of Xu et al. (2022).

An Ornstein-Uhlenbeck prior with drift -0.1 z, diffusion sqrt(2) and z_0 ~ N(0, 3^2); two Cauchy
observations, +5 and -5, of the same end point. A neural control steers the paths apart. The number
is the total variation distance between the learned law of the end point and the exact one.
"""

import argparse
import math

import pyro
import pyro.distributions as dist
import torch
from common import EXACT, OTHER, POSTERIOR, finish, parser, plt, save, train
from pyro.infer import Predictive
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO, time_grid
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.plotting import plot_paths

END, RATE, SCALE = 3.0, 0.1, math.sqrt(2)
Y = torch.tensor([5.0, -5.0])


def exact_density(z: Tensor) -> tuple[Tensor, float]:
    """Law of the end point on a grid of states, by quadrature, and the log evidence."""
    decay = math.exp(-2 * RATE * END)
    var = 9 * decay + SCALE**2 * (1 - decay) / (2 * RATE)
    log_p = dist.Normal(0.0, math.sqrt(var)).log_prob(z)
    log_p = log_p + dist.Cauchy(z.unsqueeze(-1), 1.0).log_prob(Y).sum(-1)
    evidence = torch.logsumexp(log_p, 0) + torch.log(z[1] - z[0])
    return (log_p - evidence).exp(), evidence.item()


def total_variation(samples: Tensor, bins: int = 120, width: float = 15.0) -> float:
    """Half the L1 distance between a histogram of ``samples`` and the exact bin probabilities."""
    fine = torch.linspace(-width, width, 100 * bins + 1, dtype=torch.float64)
    density, _ = exact_density(fine)
    cdf = torch.cumulative_trapezoid(density, fine)
    exact = torch.cat([cdf[99::100][:1], cdf[99::100].diff()])
    seen = torch.histc(samples.double(), bins, -width, width) / samples.numel()
    outside = 1 - seen.sum()
    return 0.5 * ((seen - exact).abs().sum() + outside).item()


def main(args: argparse.Namespace) -> float:
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    grid = time_grid(0.0, END, dt=END / args.steps)

    def model() -> None:
        start = dist.Normal(0.0, 3.0)
        z = pyro.sample("z", OrnsteinUhlenbeck(RATE, 0.0, SCALE, grid, initial=start))
        end = z[..., -1, :]
        pyro.sample("y", dist.Cauchy(end.expand(end.shape[:-1] + (2,)), 1.0).to_event(1), obs=Y)

    guide = AutoSDE(model)
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args)

    draw = Predictive(guide, num_samples=args.samples, parallel=True, return_sites=["z"])
    paths = draw()["z"].reshape(args.samples, -1)
    tv = total_variation(paths[:, -1])
    _, evidence = exact_density(torch.linspace(-15, 15, 3001, dtype=torch.float64))
    final = TraceSDE_ELBO(num_particles=args.samples // 10, vectorize_particles=True)
    with torch.no_grad():
        bound = -final.loss(model, guide)
    print(f"log evidence {evidence:.3f}, ELBO {bound:.3f}")
    print(f"total variation at T: {tv:.4f}")

    figure(args, grid, paths, tv)
    return tv


def figure(args: argparse.Namespace, grid: Tensor, paths: Tensor, tv: float) -> None:
    """Paths and the law of their ends on one axis of states, coloured by the nearer observation."""
    fig, (left, right) = plt.subplots(
        1, 2, figsize=(9, 4.4), sharey=True, layout="constrained", width_ratios=[1.6, 1]
    )
    fig.suptitle(f"Two Cauchy observations of z(T), T = {END:g}: the posterior has two modes")
    fine = torch.linspace(-12, 12, 2401, dtype=torch.float64)
    bins = {"bins": 96, "range": (-12, 12), "orientation": "horizontal"}
    each = 96 / 24 / len(paths)  # makes a density of counts
    for y, color in zip(Y.tolist(), (POSTERIOR, OTHER), strict=True):
        mode = paths[paths[:, -1].sign() == math.copysign(1.0, y)]
        share = f"paths that end near {y:+g} ({len(mode) / len(paths):.0%})"
        if len(mode):
            plot_paths(grid, mode, max_paths=30, color=color, label=share, ax=left)
        weights = {"weights": torch.full((len(mode),), each)}
        right.hist(mode[:, -1], color=color, alpha=0.5, label=f"z(T), {y:+g}", **weights, **bins)
    left.plot([END, END], Y, "o", ms=7, color=EXACT, label="observations", clip_on=False, zorder=3)
    left.set(xlim=(0, END), ylim=(-12, 12))
    finish(left, ncols=2, xlabel="time t", ylabel="state z")
    start = {"weights": torch.full((len(paths),), each), "histtype": "step"}
    right.hist(paths[:, 0], color="0.4", label="z(0)", **start, **bins)
    right.plot(exact_density(fine)[0], fine, color=EXACT, label="z(T), exact")
    finish(right, ncols=2, xlabel=f"density (total variation at T: {tv:.3f})")
    save(fig, args, "multimodal.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1500)
    p.add_argument("--steps", type=int, default=100, help="steps of time")
    p.add_argument("--samples", type=int, default=100_000, help="paths for the histogram")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
