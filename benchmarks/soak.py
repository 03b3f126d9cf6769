"""Ten thousand SVI steps: does memory stay flat?

A latent SDE with a learned drift, a latent scale that all series share, an encoder, and a plate
that subsamples, trained by SVI with TraceSDE_ELBO. Resident memory is read every hundred steps,
the live tensors and Python objects are counted ten times. The growth is that of a least squares
line from the first tenth of the steps, when everything has been allocated once, to the last; more
than the bound, or more tensors at the end than then, and the program ends with an error.
"""

import argparse
import gc
import sys
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule
from torch import Tensor
from tqdm import trange

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO
from pyro_sde.distributions import SDEPath
from pyro_sde.nn import NeuralDrift

SERIES, POINTS = 64, 8


class Model(PyroModule):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.drift, self.batch = NeuralDrift(2, (16,)), batch

    def forward(self, times: Tensor, values: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.3)).unsqueeze(-1)
        start = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        with pyro.plate("series", SERIES, subsample_size=self.batch) as index:
            path = SDEPath(self.drift, scale, start, times[index])
            z = pyro.sample("z", path)
            pyro.sample("y", dist.Normal(z[..., :1], 0.3).to_event(2), obs=values[index])


def resident() -> float:
    """Megabytes that this process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status: this needs Linux")


def alive() -> tuple[int, int]:
    """How many tensors and objects there are that Python's collector knows."""
    gc.collect()
    objects = gc.get_objects()
    return sum(issubclass(type(x), Tensor) for x in objects), len(objects)


def slope(x: list[int], y: list[float]) -> float:
    a, b = (torch.tensor(v, dtype=torch.float64) for v in (x, y))
    a = a - a.mean()
    return float((a * b).sum() / a.square().sum())


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    gaps = 0.05 + torch.rand(SERIES, POINTS)
    times, values = gaps.cumsum(-1), torch.randn(SERIES, POINTS, 1).cumsum(1)
    model = Model(args.batch)
    guide = AutoSDE(model, encoder=GRUEncoder(1, hidden=16, context=4))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), TraceSDE_ELBO())
    steps: list[int] = []
    memory: list[float] = []
    first, counts = args.steps // 10, []
    for i in trange(args.steps + 1, desc="steps", mininterval=1.0):
        if i >= first and i % args.every == 0:
            steps.append(i)
            memory.append(resident())
        if i and i % first == 0:
            counts.append(alive())
        svi.step(times, values)
    growth = slope(steps, memory) * (steps[-1] - steps[0])
    result = {
        "megabytes at first": memory[0],
        "megabytes at last": memory[-1],
        "growth": growth,
        "tensors": counts[-1][0] - counts[0][0],
        "objects": counts[-1][1] - counts[0][1],
    }
    print(f"resident memory from step {steps[0]} to {steps[-1]}: ", end="")
    print(f"{memory[0]:.1f} to {memory[-1]:.1f} MB, growth of the line {growth:.2f} MB")
    print(f"live tensors {counts[0][0]} to {counts[-1][0]}, ", end="")
    print(f"objects {counts[0][1]} to {counts[-1][1]}")
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--steps", type=int, default=10_000)
    p.add_argument("--every", type=int, default=100, help="steps between two readings of memory")
    p.add_argument("--batch", type=int, default=16, help="series in a mini-batch")
    p.add_argument("--bound", type=float, default=4.0, help="megabytes that memory may grow")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args(argv)


def is_flat(result: dict[str, float], bound: float) -> bool:
    return result["growth"] <= bound and result["tensors"] <= 0


if __name__ == "__main__":
    arguments = parse()
    if not is_flat(main(arguments), arguments.bound):
        sys.exit(f"memory grows: more than {arguments.bound:g} MB, or tensors are left behind")
