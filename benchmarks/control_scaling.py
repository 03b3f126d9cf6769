"""Cost and memory of inferring many weights: one loss and gradient from 1e3 to 1e6 of them.

The bottleneck control (2-128-2) of an SDEBlock whose field is one layer of that many weights, so
that the network itself costs next to nothing. Every size runs in a process of its own; memory is
what that process needs at its peak above the smallest one. The exponents are those of a power law
fitted to all sizes, and to the largest ones alone, a tenth of the largest and more.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from common import exponent
from memory import peak_memory

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock
from pyro_sde.training import keep_memory

SIZES = [10**3, 10**4, 10**5, 2 * 10**5, 5 * 10**5, 10**6]


class Sparse(nn.Module):
    """dh/dt is one number, the mean of all weights: the cheapest use of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(size))

    def forward(self, h: Tensor) -> Tensor:
        return self.w.mean() * torch.tanh(h)


class Net(PyroModule):
    def __init__(self, size: int, steps: int) -> None:
        super().__init__()
        self.block = SDEBlock(Sparse(size), steps=steps)

    def forward(self, x: Tensor, y: Tensor) -> None:
        h = self.block(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(h[..., 0], 1.0), obs=y)


def measure(size: int, args: argparse.Namespace) -> dict[str, float]:
    if args.keep_memory and not keep_memory():
        print("--keep-memory: this system has no such switch", file=sys.stderr)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net(size, args.steps)
    x, y = torch.randn(4, 1), torch.randn(4)
    guide = AutoSDE(net).setup(x, y)
    elbo = TraceSDE_ELBO(path_estimator=args.estimator)
    seconds = []
    for _ in range(args.repeats + 1):
        start = time.process_time()
        elbo.differentiable_loss(net, guide, x, y).backward()
        seconds.append(time.process_time() - start)
    return {
        "parameters": sum(p.numel() for p in guide.parameters()),
        "seconds": statistics.median(seconds[1:]),
        "megabytes": peak_memory(),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--rounds", type=int, default=3, help="of all sizes; the median counts")
    p.add_argument("--estimator", choices=["stl", "full", "kl"], default="stl")
    p.add_argument("--keep-memory", action="store_true", help="pyro_sde.training.keep_memory()")
    p.add_argument("--one", type=int, help=argparse.SUPPRESS)
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> dict[int, dict[str, float]]:
    if args.one is not None:
        print(json.dumps(measure(args.one, args)))
        return {}
    options = ["--steps", args.steps, "--repeats", args.repeats, "--estimator", args.estimator]
    options += ["--keep-memory"] if args.keep_memory else []
    results = {}
    print(
        f"{args.steps} steps, {args.estimator}\n  weights  parameters      ms   MB above the first"
    )
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in args.sizes}
    for size in args.rounds * args.sizes:  # all sizes in turn: the machine may change its pace
        command = [sys.executable, __file__, "--one", size, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        runs[size].append(json.loads(done.stdout))
    for size, rs in runs.items():
        results[size] = r = {key: statistics.median(x[key] for x in rs) for key in rs[0]}
        above = r["megabytes"] - results[args.sizes[0]]["megabytes"]
        print(f"{size:9d} {r['parameters']:11.0f} {1000 * r['seconds']:7.1f} {above:8.0f}")
    for sizes in (args.sizes, [size for size in args.sizes if 10 * size >= args.sizes[-1]]):
        power = exponent(sizes, (results[size]["seconds"] for size in sizes))
        print(f"from {sizes[0]} to {sizes[-1]}: time grows with the power {power:.2f}")
    return results


if __name__ == "__main__":
    main(parse())
