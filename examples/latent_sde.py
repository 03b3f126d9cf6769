"""A latent SDE with any likelihood: an Ornstein-Uhlenbeck prior, irregular observations.

The same model and guide serve heavy-tailed values, counts and categories; only the likelihood
changes. The number at the end is the gap between the ELBO and the exact log evidence (in one
dimension quadrature can compute it); the figure shows the posterior beside the exact one.
"""

import argparse
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from common import EXACT, exact_filter, parser, plt, quantiles, save, train
from pyro.infer import Predictive
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO, datasets, select, time_grid
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.plotting import plot_band, plot_paths

RATE, SCALE, END = 1.0, 1.2, 3.0
LEVELS = [0.05, 0.5, 0.95]


def categorical(z: Tensor) -> dist.Distribution:
    return dist.Categorical(logits=torch.stack([-2 * z, torch.full_like(z, 0.5), 2 * z], -1))


# name: (likelihood of the state, column of the data, what the lower panel shows)
LIKELIHOODS: dict[str, tuple[Callable[[Tensor], dist.Distribution], str, str]] = {
    "laplace": (lambda z: dist.Laplace(z, 0.15), "value", "value"),
    "cauchy": (lambda z: dist.Cauchy(z, 0.1), "value", "value"),
    "student-t": (lambda z: dist.StudentT(2.0, z, 0.1), "value", "value"),
    "poisson": (lambda z: dist.Poisson((1.5 + z).exp()), "count", "rate"),
    "categorical": (categorical, "category", "probability"),
}


def main(args: argparse.Namespace) -> float:
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    likelihood, column, _ = LIKELIHOODS[args.likelihood]
    data = datasets.load("irregular")
    t_obs, y = data["t"], data[column]
    grid = time_grid(0.0, END, dt=args.dt, include=t_obs)

    def model(y: Tensor | None = None) -> None:
        z = pyro.sample("z", OrnsteinUhlenbeck(RATE, 0.0, SCALE, grid))
        with pyro.plate("obs", len(t_obs)):
            x = select(z, grid, t_obs)[..., 0]
            pyro.sample("y", likelihood(x), obs=y)

    guide = AutoSDE(model)
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args, y)

    def transition(dt: float) -> tuple[float, float, float]:
        decay = math.exp(-RATE * dt)
        return decay, 0.0, SCALE * math.sqrt((1 - decay**2) / (2 * RATE))

    def log_likelihood(z: Tensor) -> Tensor:
        return likelihood(z.expand(-1, len(y))).log_prob(y)

    start = (0.0, SCALE / math.sqrt(2 * RATE))
    exact, states, marginals = exact_filter(start, transition, t_obs, 0.0, log_likelihood)
    final = TraceSDE_ELBO(num_particles=2000, vectorize_particles=True)
    with torch.no_grad():
        bound = -final.loss(model, guide, y)
    gap = exact - bound
    print(f"likelihood {args.likelihood}: log evidence {exact:.3f}, ELBO {bound:.3f}, ", end="")
    print(f"gap {gap:.3f} nat")
    paths = Predictive(guide, num_samples=1000, parallel=True, return_sites=["z"])(y)["z"]
    figure(args, grid, paths.reshape(1000, -1), t_obs, y, quantiles(states, marginals, LEVELS))
    return gap


def figure(
    args: argparse.Namespace, grid: Tensor, paths: Tensor, t_obs: Tensor, y: Tensor, exact: Tensor
) -> None:
    likelihood, _, label = LIKELIHOODS[args.likelihood]
    heights = {"height_ratios": [2, 1]}
    fig, (top, low) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, layout="constrained", gridspec_kw=heights
    )
    errors = torch.stack([exact[1] - exact[0], exact[2] - exact[1]])
    exactly = {"fmt": "o", "ms": 3, "lw": 1, "color": EXACT, "label": "exact, 90 %", "zorder": 3}
    top.errorbar(t_obs, exact[1], errors, **exactly)
    plot_paths(grid, paths, max_paths=8, label=None, ax=top)
    plot_band(grid, paths, [0.9], ax=top).set(xlabel="", ylabel="latent state z")
    fig.suptitle(f"Latent SDE, {args.likelihood} likelihood", fontsize=11)
    if label == "probability":
        shades = ["#8e6c8a", "#d9a441", "#3a7d44"]
        probs = likelihood(paths).probs.mean(0)
        for k, shade in enumerate(shades):
            low.plot(grid, probs[:, k], color=shade, label=f"class {k}")
            seen = t_obs[y == k]
            low.plot(seen, torch.full_like(seen, 1.06), "|", color=shade, ms=9, mew=2)
        low.set_ylim(0, 1.12)
        low.legend(frameon=False, ncol=3, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    else:
        shown = likelihood(paths).mean if label == "rate" else paths
        plot_band(grid, shown, [0.9], data=(t_obs, y), label=label, ax=low)
    low.set(xlabel="time", ylabel=label)
    low.spines[["top", "right"]].set_visible(False)
    save(fig, args, f"latent_sde_{args.likelihood}.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1000)
    p.add_argument("--likelihood", choices=LIKELIHOODS, default="laplace")
    p.add_argument("--dt", type=float, default=0.1, help="longest step of the grid")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
