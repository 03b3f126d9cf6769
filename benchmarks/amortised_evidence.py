"""How near one guide with an encoder comes to the exact posteriors of many series.

An Ornstein-Uhlenbeck prior under Gaussian noise, 3 to 10 observations of each of 200 series at
random times, where evidence and posterior are known exactly; and 200 series that the guide has not
seen.

Run: python benchmarks/amortised_evidence.py
"""

import argparse
import math

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor
from tqdm import trange

from pyro_sde import (
    AutoSDE,
    GRUEncoder,
    Series,
    TraceSDE_ELBO,
    fill_missing,
    pad_series,
    select,
    series_grid,
)
from pyro_sde.distributions import OrnsteinUhlenbeck

NOISE, END = 0.3, 3.0


def grid_of(times: Tensor, dt: float) -> Tensor:
    return series_grid(times, dt=dt, start=0.0, end=max(END, float(times.max())))


def model(
    times: Tensor,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    values, mask = fill_missing(values, mask)
    grid = grid_of(times, 0.25) if grid is None else grid
    with pyro.plate("series", len(times)):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid))
        y = dist.Normal(select(z, grid, times), NOISE).mask(mask).to_event(2)
        return pyro.sample("y", y, obs=values)


def covariance(s: Tensor, t: Tensor) -> Tensor:
    """Of the prior, between its states at two sets of times."""
    return 0.5 * (-(s.unsqueeze(-1) - t).abs()).exp()


def law(t: Tensor) -> dist.MultivariateNormal:
    """Of what is observed at times t."""
    noise = NOISE**2 * torch.eye(len(t))
    return dist.MultivariateNormal(torch.zeros(len(t)), covariance(t, t) + noise)


def simulate(series: int, later: Tensor) -> tuple[Series, Tensor]:
    """Series of different lengths, and what would be observed of each at times ``later``."""
    pairs, future = [], []
    for _ in range(series):
        n = int(torch.randint(3, 11, ()))
        t = (END * torch.rand(n)).sort().values
        y = law(torch.cat([t, later])).sample()
        pairs.append((t, y[:n]))
        future.append(y[n:])
    return pad_series(pairs), torch.stack(future)


def exact(batch: Series) -> tuple[Tensor, Tensor]:
    """The log evidence of each series, and the posterior means at its observations."""
    evidence, means = [], []
    for t, y, m in zip(*batch, strict=True):
        t, y = t[m[:, 0]], y[m]
        evidence.append(law(t).log_prob(y))
        means.append(covariance(t, t) @ torch.linalg.solve(law(t).covariance_matrix, y))
    return torch.stack(evidence), torch.cat(means)


def fit(batch: Series, grid: Tensor, contraction: bool, steps: int, lr: float = 1e-2) -> AutoSDE:
    guide = AutoSDE(model, encoder=GRUEncoder(1), contraction=contraction)
    settings = {"optimizer": torch.optim.Adam, "optim_args": {"lr": lr}}
    optim = pyro.optim.OneCycleLR({**settings, "max_lr": lr, "total_steps": steps + 1})
    svi = SVI(model, guide, optim, TraceSDE_ELBO())
    for _ in trange(steps, desc="training", unit="step", mininterval=1):
        svi.step(*batch, grid)
        optim.step()
    return guide


@torch.no_grad()
def bounds(guide: AutoSDE, batch: Series, grid: Tensor, samples: int) -> Tensor:
    """The mean ELBO of each series."""
    total = torch.zeros(len(batch.times))
    for _ in range(samples):
        (p, q), *_ = TraceSDE_ELBO()._get_traces(model, guide, (*batch, grid), {})
        total += p.nodes["y"]["log_prob"] - q.nodes["z"]["log_prob"]
    return total / samples


@torch.no_grad()
def correlation(guide: AutoSDE, batch: Series, grid: Tensor, samples: int) -> float:
    """Of the posterior means at the observations with the exact ones."""
    draws = [select(guide(*batch, grid)["z"], grid, batch.times) for _ in range(samples)]
    found = torch.stack(draws).mean(0)[batch.mask]
    return torch.corrcoef(torch.stack([found, exact(batch)[1]]))[0, 1].item()


def per_observation(gap: Tensor, count: Tensor) -> tuple[float, float]:
    """Of series with so many observations: the mean of one of these, and its standard error."""
    mean = gap.sum() / count.sum()
    return mean.item(), ((gap - mean * count).norm() / count.sum()).item()


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    batches = {
        name: simulate(args.series, torch.zeros(0))[0] for name in ("trained on", "held out")
    }
    grids = {name: grid_of(batch.times, args.dt) for name, batch in batches.items()}
    guide = fit(*(d["trained on"] for d in (batches, grids)), args.contraction, args.iterations)
    result, errors = {}, []
    print(f"{grids['held out'].shape[-1] - 1} steps, contraction {args.contraction}")
    for name, batch in batches.items():
        gap = exact(batch)[0] - bounds(guide, batch, grids[name], args.samples)
        result[name], error = per_observation(gap, batch.mask.sum((1, 2)))
        errors.append(error)
        r = correlation(guide, batch, grids[name], args.samples)
        print(f"{name}: {result[name]:.3f} nat an observation below the evidence, ", end="")
        print(f"correlation of the posterior means {r:.4f}")
    worse = result["held out"] - result["trained on"]
    print(f"held out less trained on: {worse:+.4f}, standard error {math.hypot(*errors):.4f}")
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--series", type=int, default=200)
    p.add_argument("--dt", type=float, default=0.25, help="the longest step of a grid")
    p.add_argument("--no-contraction", dest="contraction", action="store_false")
    p.add_argument("--iterations", type=int, default=600)
    p.add_argument("--samples", type=int, default=50)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
