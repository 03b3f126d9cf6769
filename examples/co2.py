"""Forecasts of a real series with gaps: weekly CO2 at Mauna Loa, 1958 to 2001.

The latent path is what a climatologist would name: a level that grows and wanders, its rate of
growth, which returns to a mean slowly, and the amplitudes of a yearly cycle. It lives on a coarse
grid; the weeks between are interpolated. The last years are held out: the number is the share of
their weeks inside the 90 % band, beside that of "as in the same week of the last known year, plus
growth".
"""

import argparse
import csv
import math

import pyro
import pyro.distributions as dist
import torch
from common import EXACT, INK, POSTERIOR, parser, plt, save, train
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO, datasets, fill_missing, forecast
from pyro_sde.distributions import SDEPath
from pyro_sde.metrics import coverage, crps, interval
from pyro_sde.plotting import plot_band

START, WEEK = 1958.0, 7 / 365.25
STEP = 0.25  # of the latent path, in years
ORIGIN, GROWTH = 315.0, 1.3  # a straight line to measure the level from, in ppm and ppm a year
HARMONICS = 3
DIM = 2 + 2 * HARMONICS
LEVELS = [0.05, 0.5, 0.95]


def load() -> tuple[Tensor, Tensor]:
    """Years since 1958, subtracted before they are rounded to single precision, and ppm."""
    with open(datasets.path("co2_weekly")) as file:
        rows = list(csv.DictReader(file))
    t = torch.tensor([float(r["t_year"]) - START for r in rows])
    y = torch.tensor([float(r["co2_ppmv"] or "nan") for r in rows])
    return t, y


def expected(z: Tensor, grid: Tensor, times: Tensor) -> Tensor:
    """Level and cycle at given times, from the path on its grid."""
    right = torch.searchsorted(grid, times).clamp(1, len(grid) - 1)
    weight = (times - grid[right - 1]) / STEP
    x = torch.lerp(z[..., right - 1, :], z[..., right, :], weight.unsqueeze(-1))
    angle = 2 * math.pi * times.unsqueeze(-1) * torch.arange(1, HARMONICS + 1)
    cycle = (x[..., 2:] * torch.cat([angle.cos(), angle.sin()], -1)).sum(-1)
    return ORIGIN + GROWTH * times + x[..., 0] + cycle


def model(times: Tensor, values: Tensor | None = None) -> None:
    values, mask = fill_missing(values)
    grid = STEP * torch.arange(math.ceil(float(times.max()) / STEP) + 1)
    # How far level, growth and amplitudes wander in a year: wide around what is plausible.
    typical = torch.tensor([0.5, 0.1] + [0.05] * (DIM - 2))
    scale = pyro.sample("scale", dist.LogNormal(typical.log(), 0.5).to_event(1))
    rate = pyro.sample("rate", dist.LogNormal(math.log(0.1), 0.5)).unsqueeze(-1)
    noise = pyro.sample("noise", dist.LogNormal(math.log(0.3), 0.5))

    def drift(t: Tensor, z: Tensor) -> Tensor:
        growth = z[..., 1:2]
        return torch.cat([growth, -rate * growth, torch.zeros_like(z[..., 2:])], -1)

    width = torch.tensor([2.0, 0.7] + [2.0] * (DIM - 2))
    start = dist.Normal(torch.zeros(DIM), width).to_event(1)
    z = pyro.sample("z", SDEPath(drift, scale, start, grid))
    likelihood = dist.Normal(expected(z, grid, times).unsqueeze(-1), noise[..., None, None])
    pyro.sample("y", likelihood.mask(mask).to_event(2), obs=values)


def seasonal_naive(y: Tensor, first: int) -> Tensor:
    """Draws for the weeks from ``first`` on: the same week of the last known year and the mean
    growth, with the errors that this rule made before, as many years ahead."""
    past, draws = y[:first], []
    growth = torch.nanmean(past[52:] - past[:-52])
    for i in range(first, len(y)):
        years = 1 + int((i - first) * WEEK)
        lag = round(years / WEEK)
        errors = past[lag:] - past[:-lag] - years * growth
        errors = errors[~errors.isnan()].quantile(torch.linspace(0.0025, 0.9975, 200))
        draws.append(y[i - lag] + years * growth + errors)
    return torch.stack(draws, -1)


def main(args: argparse.Namespace) -> dict[str, float]:
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    t, y = load()
    first = int((t < t[-1] - args.years).sum())
    known = t[:first], y[:first].unsqueeze(-1)
    guide = AutoSDE(model)
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args, *known, anneal=args.iterations // 4, clip=10.0)

    ahead = forecast(model, guide, known, t[first:], args.samples, parallel=True)
    draws = {"latent SDE": ahead.samples[..., 0], "seasonal naive": seasonal_naive(y, first)}
    future, scores = y[first:], {}
    print(f"{int(y.isnan().sum())} of {len(y)} weeks blank; {len(future)} weeks held out")
    for name, x in draws.items():
        inside, score = coverage(x, future, 0.9), crps(x, future)
        lower, upper = interval(x, 0.9)
        width = (upper - lower).mean().item()
        scores |= {f"{name}, coverage": inside, f"{name}, CRPS": score, f"{name}, width": width}
        print(f"{name:>14}: CRPS {score:.3f} ppm, 90 % interval holds {inside:.1%}, ", end="")
        print(f"mean width {width:.2f} ppm")
    path = guide.quantiles(LEVELS, *known, num_samples=args.samples, parallel=True)["z"]
    final = TraceSDE_ELBO(num_particles=args.samples, vectorize_particles=True)
    with torch.no_grad():
        scores["ELBO"] = -final.loss(model, guide, *known)
    print(f"ELBO {scores['ELBO']:.1f}")
    figure(args, t + START, y, first, draws, path.reshape(3, -1, DIM))
    return scores


def figure(
    args: argparse.Namespace, t: Tensor, y: Tensor, first: int, draws: dict, path: Tensor
) -> None:
    fig, (top, low) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained")
    shown = slice(first - 260, first)
    top.plot(t[shown], y[shown], ".", ms=2, color=INK, label="known")
    top.plot(t[first:], y[first:], ".", ms=3, color=EXACT, label="held out", zorder=3)
    for (name, x), color in zip(draws.items(), (POSTERIOR, "#d9822b"), strict=True):
        plot_band(t[first:], x, [0.9], median=False, color=color, label=name, ax=top)
    top.set(xlabel="", ylabel="CO2, ppm")
    grid, growth = START + STEP * torch.arange(path.shape[1]), GROWTH + path[..., 1]
    low.fill_between(grid, growth[0], growth[2], color=POSTERIOR, alpha=0.3, label="90 %")
    low.plot(grid, growth[1], color=POSTERIOR, label="rate of growth, posterior median")
    blank = t[y.isnan()]
    marks = {"color": EXACT, "label": "weeks without a measurement"}
    low.plot(blank, torch.full_like(blank, growth.min()), "|", **marks)
    low.set(xlabel="year", ylabel="ppm a year")
    low.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    low.spines[["top", "right"]].set_visible(False)
    save(fig, args, "co2.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=800, particles=16)
    p.add_argument("--years", type=float, default=3.0, help="years held out")
    p.add_argument("--samples", type=int, default=500, help="draws of the forecast")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
