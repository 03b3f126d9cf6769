"""How wide the posteriors of the examples should be: NUTS on the same models, on the same grids.

A path is a sample site like any other, so that Pyro's NUTS takes the models of lynx_hare.py and
coal_mining.py as they are, 84 and 58 latent numbers. It is too slow to be the way to train, and
tells what the guide's intervals are worth. Of each latent: mean, 90 % interval, effective sample
size, and R-hat of the chains.

Run: python benchmarks/nuts_reference.py lynx_hare
     python benchmarks/nuts_reference.py coal_mining
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import init_to_value
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from pyro_sde import time_grid

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import coal_mining
import lynx_hare

LEVELS = torch.tensor([0.05, 0.95])


def draw(model: Callable, data: Tensor, values: dict[str, Tensor], args: argparse.Namespace):
    """Draws of all chains, (chains, draws, ...) each. Chains run one after the other."""
    chains = []
    for chain in range(args.chains):
        pyro.set_rng_seed(args.seed + chain)
        kernel = NUTS(model, init_strategy=init_to_value(values=values), max_tree_depth=8)
        mcmc = MCMC(kernel, num_samples=args.draws, warmup_steps=args.warmup)
        mcmc.run(data)
        chains.append(mcmc.get_samples())
    return {name: torch.stack([c[name] for c in chains]) for name in chains[0]}


def lynx(args: argparse.Namespace) -> dict[str, Tensor]:
    years, pelts = lynx_hare.load()
    grid = time_grid(years[0], years[-1], dt=0.5)
    measured = (pelts / lynx_hare.UNITS).log()
    z = measured.repeat_interleave(2, 0)[:-1]
    z[1::2] = (measured[1:] + measured[:-1]) / 2
    values = {name: torch.tensor(0.6) for name in lynx_hare.ODE} | {"z": z}
    values |= {name: torch.tensor(0.15) for name in lynx_hare.NOISES}
    draws = draw(lynx_hare.make_model(grid, years), pelts, values, args)
    del draws["z"]
    return {k: v * lynx_hare.THOUSANDS.get(k, 1.0) for k, v in draws.items()}


def coal(args: argparse.Namespace) -> dict[str, Tensor]:
    grid = time_grid(0.0, coal_mining.END - coal_mining.START, dt=2.0)
    values = {"scale": torch.tensor(0.15), "z": torch.full((len(grid), 1), 0.5)}
    draws = draw(coal_mining.make_model(grid), coal_mining.load(), values, args)
    rates = draws.pop("z")[..., 0].exp()
    for name, (a, b) in coal_mining.PERIODS.items():
        draws[name] = coal_mining.a_year(rates, grid, a, b)
    return draws


def main(args: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    table = {}
    for name, x in {"lynx_hare": lynx, "coal_mining": coal}[args.example](args).items():
        low, high = torch.quantile(x.flatten(), LEVELS).tolist()
        size, hat = effective_sample_size(x).item(), split_gelman_rubin(x).item()
        table[name] = [x.mean().item(), low, high, size, hat]
        print(f"{name:13s}{x.mean():.3f} ({low:.3f} to {high:.3f})  n {size:.0f}  R-hat {hat:.3f}")
    return table


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example", choices=["lynx_hare", "coal_mining"])
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--draws", type=int, default=500, help="of each chain")
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
