"""How wide the posteriors of the examples should be: NUTS on the same models, on the same grids.

A path is a sample site like any other, so that Pyro's NUTS takes the models of lynx_hare.py and
coal_mining.py as they are, 84 and 58 latent numbers. It is too slow to be the way to train, and
tells what the guide's intervals are worth. Of each latent: mean, 90 % interval, effective sample
size, and R-hat of the chains. With --guides, AutoSDE(model) is trained by fit with its defaults, 16
particles and 1500 steps, on so many seeds: the width of its 90 % interval over that of NUTS, by the
ELBO alone and after fit has matched the latents to weighted draws.

Run: python benchmarks/nuts_reference.py lynx_hare --guides 3
     python benchmarks/nuts_reference.py coal_mining
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.autoguide import init_to_value
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO, fit, time_grid
from pyro_sde.training import match_latents

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import coal_mining
import lynx_hare

LEVELS = torch.tensor([0.05, 0.95])
STEPS, PARTICLES, SAMPLES = 1500, 16, 10_000


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


def lynx() -> tuple[Callable, Tensor, dict[str, Tensor], Callable]:
    """The model, its data, where the chains begin, and from draws to the numbers that are shown."""
    years, pelts = lynx_hare.load()
    grid = time_grid(years[0], years[-1], dt=0.5)
    measured = (pelts / lynx_hare.UNITS).log()
    z = measured.repeat_interleave(2, 0)[:-1]
    z[1::2] = (measured[1:] + measured[:-1]) / 2
    values = {name: torch.tensor(0.6) for name in lynx_hare.ODE} | {"z": z}
    values |= {name: torch.tensor(0.15) for name in lynx_hare.NOISES}

    def shown(draws: dict[str, Tensor]) -> dict[str, Tensor]:
        names = (*lynx_hare.ODE, *lynx_hare.NOISES)
        return {k: draws[k] * lynx_hare.THOUSANDS.get(k, 1.0) for k in names}

    return lynx_hare.make_model(grid, years), pelts, values, shown


def coal() -> tuple[Callable, Tensor, dict[str, Tensor], Callable]:
    grid = time_grid(0.0, coal_mining.END - coal_mining.START, dt=2.0)
    values = {"scale": torch.tensor(0.15), "z": torch.full((len(grid), 1), 0.5)}

    def shown(draws: dict[str, Tensor]) -> dict[str, Tensor]:
        rates = draws["z"][..., 0].exp()
        periods = coal_mining.PERIODS.items()
        counts = {name: coal_mining.a_year(rates, grid, a, b) for name, (a, b) in periods}
        return {"scale": draws["scale"], **counts}

    return coal_mining.make_model(grid), coal_mining.load(), values, shown


def of_guide(model: Callable, guide: AutoSDE, data: Tensor) -> dict[str, Tensor]:
    draw = Predictive(guide, num_samples=SAMPLES, parallel=True)
    with torch.no_grad():
        draws = draw(data)
    paths = {k: draws[k].reshape(SAMPLES, *draws[k].shape[-2:]) for k in guide.path_sites}
    return {k: x.reshape(SAMPLES) for k, x in draws.items() if k in guide.other_sites} | paths


def main(args: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    model, data, values, shown = {"lynx_hare": lynx, "coal_mining": coal}[args.example]()
    table, widths = {}, {}
    for name, x in shown(draw(model, data, values, args)).items():
        low, high = torch.quantile(x.flatten(), LEVELS).tolist()
        size, hat = effective_sample_size(x).item(), split_gelman_rubin(x).item()
        table[name], widths[name] = [x.mean().item(), low, high, size, hat], high - low
        print(f"{name:13s}{x.mean():.3f} ({low:.3f} to {high:.3f})  n {size:.0f}  R-hat {hat:.3f}")

    def compare(what: str, guide: AutoSDE) -> None:
        ratios = []
        for name, x in shown(of_guide(model, guide, data)).items():
            low, high = torch.quantile(x, LEVELS).tolist()
            ratios.append(f"{name} {(high - low) / widths[name]:.2f}")
        print(f"{what}: width over that of NUTS: {', '.join(ratios)}", flush=True)

    elbo = TraceSDE_ELBO(num_particles=PARTICLES, vectorize_particles=True)
    for seed in range(args.guides):
        pyro.clear_param_store()
        guide = AutoSDE(model)
        fit(model, guide, data, steps=args.steps, elbo=elbo, seed=seed, match=False, progress=False)
        compare(f"seed {seed}, by the ELBO alone", guide)
        match_latents(model, guide, data)
        compare(f"seed {seed}, by default", guide)
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
    parser.add_argument("--guides", type=int, default=0, help="compare so many trained guides")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the training of each")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
