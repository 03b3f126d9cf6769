"""What checkpoints cost: the training of the README with one every hundred steps, and without.

Three trainings take turns, in another order each time: one with checkpoints and two without, so
that a busy machine slows all alike. The ratio is the median over the rounds, of the processor's
time and of the time that has passed, which includes waiting for the disk. The ratio of the two
without says how far the machine is to be trusted. If the processor's time exceeds the bound, the
program ends with an error.

Run: python benchmarks/checkpoint_cost.py
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from tqdm import trange

from pyro_sde import AutoSDE, fit, time_grid
from pyro_sde.distributions import OrnsteinUhlenbeck

WITH, WITHOUT, AGAIN = "with checkpoints", "without", "without again"
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
    gc.collect()  # what the training before has left
    work, clock = time.process_time(), time.perf_counter()
    fit(model, guide, (TIMES, VALUES), **options, **saving)
    return time.process_time() - work, time.perf_counter() - clock


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        train(min(args.steps, 20), args.save_every, None)  # what is done once a process
        for k in trange(args.repeats, desc="rounds", mininterval=1.0):
            paths = {WITH: Path(folder) / f"{k}.pt", WITHOUT: None, AGAIN: None}
            order = list(paths)[k % 3 :] + list(paths)[: k % 3]
            found = {name: train(args.steps, args.save_every, paths[name]) for name in order}
            for i, kind in enumerate(("processor", "clock")):
                with_, without, again = (found[name][i] for name in paths)
                ratios.setdefault(kind, []).append(2 * with_ / (without + again))
                ratios.setdefault(f"{kind}, {AGAIN}", []).append(without / again)
        size = (Path(folder) / "0.pt").stat().st_size
    print(f"{args.steps} steps, a checkpoint of {size / 1024:.0f} KiB every {args.save_every}:")
    for name, x in ratios.items():
        error = 1.25 * statistics.stdev(x) / len(x) ** 0.5  # of the median of normal numbers
        print(f"{name}: {statistics.median(x):.4f} times, standard error {error:.4f}")
    return {name: statistics.median(x) for name, x in ratios.items()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    p.add_argument("--repeats", type=int, default=40, help="rounds of three trainings")
    p.add_argument("--bound", type=float, default=1.02, help="of the ratio of processor times")
    return p.parse_args(argv)


if __name__ == "__main__":
    arguments = parse()
    if not main(arguments)["processor"] <= arguments.bound:
        sys.exit(f"checkpoints cost more than {100 * (arguments.bound - 1):g} %")
