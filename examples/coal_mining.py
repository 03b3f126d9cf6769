"""The rate of British coal mining disasters, 1851 to 1962, from the dates of 191 of them.

The dates are a Poisson process in continuous time, without bins: its log rate is a Brownian path
whose scale is a latent too. The numbers: the ELBO beside the largest log likelihood of a constant
rate, and how far the rescaled times are from uniform (Kolmogorov-Smirnov), again for both.
"""

import argparse
import csv
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from common import EXACT, INK, POSTERIOR, parser, plt, save, train
from pyro.infer import Predictive
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO, datasets, time_grid
from pyro_sde.distributions import BrownianMotion, PoissonProcess
from pyro_sde.plotting import plot_band

START, END = 1851, 1963
PERIODS = {"1851 to 1879": (1851, 1880), "1880 to 1899": (1880, 1900), "from 1900": (1900, 1963)}
LEVELS = torch.tensor([0.05, 0.5, 0.95])


def load() -> Tensor:
    """Years since the start, subtracted before they are rounded to single precision."""
    with open(datasets.path("coal_disasters")) as file:
        return torch.tensor([float(r["t_year"]) - START for r in csv.DictReader(file)])


def make_model(grid: Tensor) -> Callable[..., None]:
    def model(events: Tensor | None = None) -> None:
        # A standard deviation of 0.05 to 0.5 after a year, in logarithms.
        scale = pyro.sample("scale", dist.LogNormal(math.log(0.15), 0.7))
        start = dist.Normal(0.0, 1.0)
        z = pyro.sample("z", BrownianMotion(scale.unsqueeze(-1), grid, start))
        pyro.sample("events", PoissonProcess(z[..., 0].exp(), grid), obs=events)

    return model


def a_year(rates: Tensor, grid: Tensor, begin: int, end: int) -> Tensor:
    """The mean rate from one year until another."""
    edges = torch.tensor([begin - START, end - START], dtype=grid.dtype)
    return PoissonProcess(rates, grid).cumulative(edges).diff().squeeze(-1) / (end - begin)


def rescaled(process: PoissonProcess, events: Tensor) -> tuple[Tensor, float]:
    """The share of the rate's integral before each event, uniform if the rate is right, and
    sqrt(n) times its distance from uniform: above 1.36 in one case of twenty for a rate known
    beforehand, smaller for one that was fitted to the events."""
    u = (process.cumulative(events) / process.total).sort().values
    n = len(u)
    steps = torch.arange(n + 1) / n
    return u, math.sqrt(n) * float(torch.maximum(steps[1:] - u, u - steps[:-1]).max())


def main(args: argparse.Namespace) -> dict[str, float]:
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    events = load()
    grid = time_grid(0.0, END - START, dt=args.dt)
    model = make_model(grid)
    guide = AutoSDE(model)
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args, events, clip=10.0)

    final = TraceSDE_ELBO(num_particles=2000, vectorize_particles=True)
    with torch.no_grad():
        bound = -final.loss(model, guide, events)
    draw = Predictive(guide, num_samples=2000, parallel=True, return_sites=["z", "scale"])(events)
    rates = draw["z"].reshape(2000, -1).exp()
    mean = PoissonProcess(rates.mean(0), grid)
    flat = PoissonProcess(torch.full_like(grid, len(events) / (END - START)), grid)
    constant = float(flat.log_prob(events))
    u, distance = rescaled(mean, events)
    u_flat, distance_flat = rescaled(flat, events)
    result = {"ELBO": bound, "constant rate": constant}
    result |= {"KS": distance, "KS constant": distance_flat}
    print(f"ELBO {bound:.2f}, largest log likelihood of a constant rate {constant:.2f}")
    print(f"sqrt(n) KS of the rescaled times: {distance:.2f}, constant rate {distance_flat:.2f}")
    for name, (a, b) in PERIODS.items():
        each = a_year(rates, grid, a, b)
        raw = ((events >= a - START) & (events < b - START)).sum().item() / (b - a)
        low, high = torch.quantile(each, LEVELS[[0, 2]]).tolist()
        print(f"{name}: {each.mean():.2f} a year ({low:.2f} to {high:.2f}), counted {raw:.2f}")
        result |= {name: each.mean().item(), f"{name}, counted": raw}
    low, middle, high = torch.quantile(draw["scale"], LEVELS).tolist()
    print(f"scale of the log rate after a year: {middle:.3f} ({low:.3f} to {high:.3f})")
    figure(args, grid, rates, events, [("constant rate", u_flat, "0.6"), ("SDE", u, POSTERIOR)])
    return result


def figure(
    args: argparse.Namespace,
    grid: Tensor,
    rates: Tensor,
    events: Tensor,
    laws: list[tuple[str, Tensor, str]],
) -> None:
    fig, (ax, right) = plt.subplots(
        1, 2, figsize=(11, 4), layout="constrained", gridspec_kw={"width_ratios": [2.4, 1]}
    )
    counts = torch.histc(events, (END - START) // 4, 0, END - START) / 4
    edges = torch.arange(START, END + 1, 4)
    ax.stairs(counts.numpy(), edges, fill=True, color="0.9", label="counts of 4 years, a year")
    rug = torch.full_like(events, -0.15)
    ax.plot(START + events, rug, "|", color=INK, ms=7, mew=0.6, label="disasters")
    plot_band(START + grid, rates, [0.9], label="rate", ax=ax)
    ax.set(xlabel="year", ylabel="disasters a year", xlim=(START, END))
    ax.set_title("191 coal mining disasters as a Poisson process", fontsize=11, pad=22)
    share = torch.arange(1, len(events) + 1) / len(events)
    right.plot([0, 1], [0, 1], color=EXACT, lw=1, label="uniform")
    for name, u, colour in laws:
        right.step(u, share, where="post", color=colour, lw=1.4, label=name)
    right.set(xlabel="rescaled time", ylabel="share of the events", xlim=(0, 1), ylim=(0, 1))
    right.set_title("rescaled times", fontsize=11)
    right.legend(frameon=False, fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
    save(fig, args, "coal_mining.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=600)
    p.add_argument("--dt", type=float, default=2.0, help="longest step of the grid, in years")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
