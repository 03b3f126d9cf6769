"""A latent SDE with any likelihood: an Ornstein-Uhlenbeck prior, irregular observations.

The same model and guide serve heavy-tailed values, counts and categories; only the likelihood
changes. The number at the end is the gap between the ELBO and the exact log evidence (in one
dimension quadrature can compute it); the figure shows the posterior beside the exact one, and, for
values, beside that of a Normal likelihood, which an outlier among the data misleads.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import (
    EXACT,
    OTHER,
    POSTERIOR,
    THIRD,
    exact_filter,
    finish,
    parser,
    plt,
    quantiles,
    save,
    train,
)
from pyro.infer import Predictive
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO, datasets, select, time_grid
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.plotting import plot_band, plot_paths

RATE, SCALE, END = 1.0, 1.2, 3.0
NORMAL_SD = 0.15 * math.sqrt(2)  # that of the Laplace likelihood
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


def normal_posterior(grid: Tensor, t_obs: Tensor, y: Tensor, sd: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the same prior given Normal observations, in closed form."""

    def covariance(s: Tensor, t: Tensor) -> Tensor:
        return SCALE**2 / (2 * RATE) * (-RATE * (s.unsqueeze(-1) - t).abs()).double().exp()

    cross = covariance(grid, t_obs)
    seen = covariance(t_obs, t_obs) + sd**2 * torch.eye(len(y))
    mean = cross @ torch.linalg.solve(seen, y.double())
    explained = (cross * torch.linalg.solve(seen, cross.T).T).sum(-1)
    return mean, (SCALE**2 / (2 * RATE) - explained).sqrt()


def figure(
    args: argparse.Namespace, grid: Tensor, paths: Tensor, t_obs: Tensor, y: Tensor, exact: Tensor
) -> None:
    likelihood, _, label = LIKELIHOODS[args.likelihood]
    heights = {"height_ratios": [1.2, 1]}
    fig, (top, low) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, layout="constrained", gridspec_kw=heights
    )
    fig.suptitle(f"Latent SDE with a {args.likelihood.capitalize()} likelihood", fontsize=12)
    if label == "value":
        outlier(top, args.likelihood.capitalize(), grid, paths, t_obs, y)
    elif label == "probability":
        probs = likelihood(paths).probs.mean(0)
        for k, shade in enumerate((POSTERIOR, OTHER, THIRD)):
            top.plot(grid, probs[:, k], color=shade, label=f"class {k}, posterior mean")
            seen = t_obs[y == k]
            top.plot(seen, torch.full_like(seen, 1.06), "|", color=shade, ms=9, mew=2)
        top.set_ylim(0, 1.12)
        finish(top)
    else:
        plot_band(grid, likelihood(paths).mean, [0.9], data=(t_obs, y), label=label, ax=top)
    top.set(xlabel="", ylabel=f"observed {label}" if label == "value" else label)
    top.spines[["top", "right"]].set_visible(False)
    errors = torch.stack([exact[1] - exact[0], exact[2] - exact[1]])
    exactly = {"fmt": "o", "ms": 3, "lw": 1, "color": EXACT, "zorder": 3}
    low.errorbar(t_obs, exact[1], errors, label="exact posterior, 90 %", **exactly)
    plot_paths(grid, paths, max_paths=8, label=None, ax=low)
    plot_band(grid, paths, [0.9], ax=low).set(xlabel="time", ylabel="latent state z")
    save(fig, args, f"latent_sde_{args.likelihood}.png")


def outlier(ax: Any, name: str, grid: Tensor, paths: Tensor, t_obs: Tensor, y: Tensor) -> None:
    """The data, and the posterior beside that under a Normal likelihood, which must believe it."""
    mean, sd = normal_posterior(grid, t_obs, y, NORMAL_SD)
    label = f"Normal likelihood (sd {NORMAL_SD:.2f}), median, 90 %"
    ax.plot(grid, mean, "--", color=OTHER, lw=1.8, label=label, zorder=2.5)
    ax.plot(grid, torch.stack([mean - 1.645 * sd, mean + 1.645 * sd], 1), ":", color=OTHER, lw=1.2)
    plot_band(grid, paths, [0.9], label=f"{name} likelihood", data=(t_obs, y), ax=ax)
    median = paths.median(0).values
    at = torch.stack([(grid - t).abs().argmin() for t in t_obs])
    far = int((y - median[at]).abs().argmax())
    t, value, i = t_obs[far], y[far], at[far]
    ax.plot(t, value, "o", ms=13, mfc="none", mec=EXACT, mew=1.5)
    text = (
        f"outlier at {value:.1f}: the {name} likelihood ignores it (median {median[i]:.1f}),\n"
        f"a Normal likelihood follows it (median {mean[i]:.1f})"
    )
    ax.annotate(
        text, (float(t), float(value)), (16, -3), textcoords="offset points", fontsize=9,
        color=EXACT,
    )  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1000)
    p.add_argument("--likelihood", choices=LIKELIHOODS, default="laplace")
    p.add_argument("--dt", type=float, default=0.1, help="longest step of the grid")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
