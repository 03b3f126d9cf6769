"""What checkpoints cost: the training of the README with one every hundred steps, and without.

Pairs of trainings take turns, and the one that comes first alternates, so that a busy machine
slows both alike. The ratio is the median over the pairs, of the processor's time and of the time
that has passed, which includes waiting for the disk. More than the bound of the processor's time,
and the program ends with an error.

Run: python benchmarks/checkpoint_cost.py
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_sde import AutoSDE, fit, time_grid
from pyro_sde.distributions import OrnsteinUhlenbeck

TIMES = torch.tensor([0.2, 0.9, 1.0, 2.5])
VALUES = torch.tensor([0.3, -0.8, -0.6, 1.2])


def model(times: Tensor, values: Tensor) -> None:
    rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5))
    grid = time_grid(0.0, float(times.max()), dt=0.1, include=times)
    prior = OrnsteinUhlenbeck.scalar(rate, 0.0, 1.0, grid)
    z = pyro.sample("z", prior)
    with pyro.plate("observations", len(times)):
        pyro.sample("y", dist.Laplace(prior.at(z, times), 0.1), obs=values)


def train(steps: int, save_every: int, path: Path | None) -> tuple[float, float]:
    """The processor's seconds, and the seconds that have passed."""
    pyro.clear_param_store()
    guide = AutoSDE(model)
    saving = {} if path is None else {"checkpoint": path, "save_every": save_every}
    options = {"steps": steps, "seed": 0, "match": False, "progress": False}
    work, clock = time.process_time(), time.perf_counter()
    fit(model, guide, (TIMES, VALUES), **options, **saving)
    return time.process_time() - work, time.perf_counter() - clock


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        train(min(args.steps, 20), args.save_every, None)  # what is done once a process
        for k in range(args.repeats):
            paths = [None, Path(folder) / f"{k}.pt"][:: 1 if k % 2 else -1]
            found = {p is None: train(args.steps, args.save_every, p) for p in paths}
            ratios.append([a / b for a, b in zip(found[False], found[True], strict=True)])
        size = (Path(folder) / "0.pt").stat().st_size
    print(f"{args.steps} steps, a checkpoint of {size / 1024:.0f} KiB every {args.save_every}: ")
    result = {}
    for name, x in zip(("processor", "clock"), zip(*ratios, strict=True), strict=True):
        low, middle, high = statistics.quantiles(x, n=4)
        result[name] = middle
        print(f"{name}: {middle:.4f} times the training without, quartiles {low:.4f}, {high:.4f}")
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    p.add_argument("--repeats", type=int, default=15, help="pairs of trainings")
    p.add_argument("--bound", type=float, default=1.02, help="of the ratio of processor times")
    return p.parse_args(argv)


if __name__ == "__main__":
    arguments = parse()
    if not main(arguments)["processor"] <= arguments.bound:
        sys.exit(f"checkpoints cost more than {100 * (arguments.bound - 1):g} %")
