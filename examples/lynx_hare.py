"""Lynx and hare: a Lotka-Volterra SDE whose rates have posteriors, on 21 years of pelts.

In logarithms of the populations, x of the hares and y of the lynx,

    dx = (alpha - beta e^y) dt + s_1 dB_1,    dy = (delta e^x - gamma) dt + s_2 dB_2

All rates, diffusions and the error of the counts are latents. The numbers: how many counts lie in
the 90 % band of the posterior predictive, in years held out too, and the rates beside those of the
ODE (B. Carpenter, 2018). Beside NUTS: benchmarks/nuts_reference.py.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import EXACT, INK, OTHER, POSTERIOR, finish, parser, plt, save, train
from pyro.infer import Predictive
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO, datasets, select, time_grid
from pyro_sde.distributions import SDEPath
from pyro_sde.metrics import coverage
from pyro_sde.plotting import plot_band

# Thousands of hares and lynx in one unit of the model: makes all rates of the order of one a year.
UNITS = torch.tensor([30.0, 20.0])
ODE = {"alpha": 0.55, "beta": 0.028, "gamma": 0.80, "delta": 0.024}  # pelts in thousands
THOUSANDS = {"beta": 1 / UNITS[1], "delta": 1 / UNITS[0]}  # makes such rates of the model's
RATE_UNITS = {"beta": "per year, thousand lynx", "delta": "per year, thousand hares"}
NOISES = ("s_1", "s_2", "error")
LEVELS = torch.tensor([0.05, 0.5, 0.95])
SAMPLES = 2000


def load() -> tuple[Tensor, Tensor]:
    data = datasets.load("hudson_bay_lynx_hare")
    return data["year"], torch.stack([data["hare_thousands"], data["lynx_thousands"]], -1)


def make_model(grid: Tensor, years: Tensor) -> Callable[..., None]:
    half = float(grid[1] - grid[0]) / 2  # the grid is equidistant

    def model(pelts: Tensor | None = None) -> None:
        alpha, beta, gamma, delta = (pyro.sample(k, dist.LogNormal(-0.5, 0.7)) for k in ODE)
        noise = dist.LogNormal(math.log(0.15), 0.5)
        s_1, s_2, error = (pyro.sample(k, noise) for k in NOISES)
        pairs = ((alpha, -gamma), (-beta, delta), (s_1, s_2))
        growth, contact, g = (torch.stack(pair, -1) for pair in pairs)

        def field(z: Tensor) -> Tensor:
            # At 12 units, four times the largest count, growth saturates: draws cannot overflow.
            return growth + contact * z.clamp(max=2.5).exp().flip(-1)

        def drift(t: Tensor, z: Tensor) -> Tensor:
            # The midpoint rule: steps of Euler's leave the orbit outwards, and the rates adapt.
            return field(z + half * field(z))

        start = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        z = pyro.sample("z", SDEPath(drift, g, start, grid))
        loc = select(z, grid, years if pelts is None else years[: len(pelts)]) + UNITS.log()
        law = dist.LogNormal(loc, error.unsqueeze(-1).unsqueeze(-1)).to_event(2)
        pyro.sample("pelts", law, obs=pelts)

    return model


def fit(args: argparse.Namespace, years: Tensor, pelts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The grid and draws from the posterior given the first ``len(pelts)`` of the years."""
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    grid = time_grid(years[0], years[-1], dt=1 / args.steps)
    model = make_model(grid, years)
    guide = AutoSDE(model)
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args, pelts, clip=10.0)
    elbo.num_particles = SAMPLES
    with torch.no_grad():
        print(f"{len(pelts)} years: ELBO {-elbo.loss(model, guide, pelts):.2f}")
    predictive = Predictive(model, guide=guide, num_samples=SAMPLES, parallel=True)
    return grid, {k: v.squeeze() * THOUSANDS.get(k, 1.0) for k, v in predictive().items()}


def main(args: argparse.Namespace) -> dict[str, float]:
    years, pelts = load()
    known = len(years) - args.holdout
    grid, draws = fit(args, years, pelts)
    _, past = fit(args, years, pelts[:known])
    forecast, future = past["pelts"][:, known:], pelts[known:]
    fitted, ahead = coverage(draws["pelts"], pelts), coverage(forecast, future)
    off = (
        torch.stack([forecast.median(0).values, pelts[known - 1].expand_as(future)]) / future
    ).log()
    error, still = off.square().mean((1, 2)).sqrt().tolist()
    result = {"coverage": fitted, "forecast": ahead, "RMSE": error, "RMSE, last value": still}
    print(f"in the 90 % band: {fitted:.0%} of all counts, {ahead:.0%} of those held out")
    print(f"error of the forecast, in logarithms: {error:.2f}; of the last value kept {still:.2f}")
    for name in (*ODE, *NOISES):
        low, _, high = torch.quantile(draws[name], LEVELS).tolist()
        result[name] = draws[name].mean().item()
        print(f"{name:5} {result[name]:.3f} ({low:.3f} to {high:.3f})", end="")
        print(f", of the ODE {ODE[name]}" if name in ODE else "")
    figure(args, grid, draws, past["pelts"])
    return result


def figure(args: argparse.Namespace, grid: Tensor, draws: dict[str, Tensor], past: Tensor) -> None:
    """Left, the fit to all years; right, what was foreseen without the last of them; the rates."""
    years, pelts = load()
    known = len(years) - args.holdout
    fig = plt.figure(figsize=(10, 7.4), layout="constrained")
    fig.suptitle("Lotka-Volterra SDE on the pelts of Hudson Bay")
    series, rates = fig.subfigures(2, 1, height_ratios=[2.6, 1])
    axes = series.subplots(2, 2, sharex="col", sharey="row", width_ratios=[1.3, 1])
    data: dict[str, Any] = {"ms": 3.5, "color": INK, "label": "data"}
    for k, (name, (ax, ahead)) in enumerate(zip(("hares", "lynx"), axes, strict=True)):
        column: dict[str, Any] = {"dim": k, "median": False, "ax": ax}
        plot_band(years, draws["pelts"], [0.9], label="counts", color="0.5", **column)
        plot_band(grid, UNITS * draws["z"].exp(), [0.9], label="population", **column)
        ax.plot(years, pelts[:, k], "o", **data)
        later, style = slice(known - 1, None), {"label": "forecast", "color": OTHER}
        plot_band(years[later], past[:, later], [0.9], dim=k, ax=ahead, **style)
        ahead.plot(years[known - 5 : known], pelts[known - 5 : known, k], "o", **data)
        ahead.plot(years[known:], pelts[known:, k], "o", ms=4, color=EXACT, label="held out")
        finish(ax, ncols=2, xlabel="year" * k, ylabel=f"thousand {name}")
        finish(ahead, ncols=2, xlabel="year" * k, ylabel="")
        ax.set(xticks=range(1900, 1921, 5), ylim=(0, None))
        ahead.set(xticks=range(int(years[known]) - 5, 1921, 2))
    axes[0, 0].set_title(f"fit to all {len(years)} years", fontsize=11, pad=34)
    axes[0, 1].set_title(f"counts forecast from the first {known} years", fontsize=11, pad=34)
    panels = rates.subplots(1, len(ODE))
    for ax, (name, published) in zip(panels, ODE.items(), strict=True):
        ax.hist(draws[name], bins=40, density=True, color=POSTERIOR, alpha=0.5, label="posterior")
        ax.axvline(published, color=EXACT, lw=1.4, label="ODE (Carpenter, 2018)")
        finish(ax, ncols=1, xlabel=rf"$\{name}$, " + RATE_UNITS.get(name, "per year"))
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
    for ax in (*axes[1], *panels[1:]):
        ax.get_legend().remove()
    save(fig, args, "lynx_hare.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1500, particles=16, lr=2e-2)
    p.add_argument("--steps", type=int, default=2, help="steps a year")
    p.add_argument("--holdout", type=int, default=5, help="years at the end to forecast")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
