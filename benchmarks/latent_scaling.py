"""How a gradient step of an amortised latent SDE grows: in series, in steps and in dimensions.

The model is the usual one: a learned drift, one path for each series on a grid of its own
observation times, an encoder that reads them, and Gaussian observations of the first coordinate.
One thing grows at a time, the others stay as they are; in every round each size takes a step in
turn, so that all of them meet the same machine. The exponent is the slope of a straight line
through log(time) against log(size), of all sizes: 1 is linear growth, less is better.

With --epochs the same model trains on many series in mini-batches, chosen by a plate that
subsamples and, again, handed to the model: loss and resident memory as training goes on. Memory
must not grow.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from common import exponent
from memory import peak_memory

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO
from pyro_sde.distributions import OrnsteinUhlenbeck, SDEPath
from pyro_sde.nn import NeuralDrift
from pyro_sde.training import keep_memory

# What grows, and what stays as it is. Steps twice: those of many series need tensors so large that
# the system's allocator gives them back and asks for them anew in every step, which costs as well.
PARTS = [
    ("series", {"steps": 20, "dim": 8}),
    ("steps", {"series": 64, "dim": 8}),
    ("steps", {"series": 256, "dim": 8}),
    ("dim", {"series": 512, "steps": 20}),
]


class Model(nn.Module):
    """A latent SDE in ``dim`` dimensions, observed at every point of its grid but the first.

    :param batch: How many series the plate chooses; by default all that it is given.
    :param total: How many series there are, if the model is given a mini-batch of them.
    """

    def __init__(self, dim: int, batch: int | None = None, total: int | None = None) -> None:
        super().__init__()
        self.drift, self.decoder = NeuralDrift(dim, (64,)), nn.Linear(dim, 1)
        self.dim, self.batch, self.total = dim, batch, total

    def forward(self, times: Tensor, values: Tensor) -> None:
        pyro.module("model", self)
        start = dist.Normal(times.new_zeros(self.dim), 1.0).to_event(1)
        given = torch.arange(len(times)) if self.total else None
        with pyro.plate("series", self.total or len(times), self.batch, subsample=given) as index:
            if self.batch:
                times, values = times[index], values[index]
            grid = nn.functional.pad(times, (1, 0))
            z = pyro.sample("z", SDEPath(self.drift, 0.5, start, grid))
            mean = self.decoder(z[..., 1:, :])
            pyro.sample("y", dist.Normal(mean, 0.3).to_event(2), obs=values)


def simulate(series: int, steps: int) -> tuple[Tensor, Tensor]:
    """An Ornstein-Uhlenbeck process at irregular times, the first after zero, with noise."""
    gaps = 0.1 + torch.rand(series, steps)
    times = 5.0 * gaps.cumsum(-1) / gaps.sum(-1, keepdim=True)
    path = OrnsteinUhlenbeck(1.0, 0.0, 1.0, nn.functional.pad(times, (1, 0))).sample()
    return times, path[:, 1:] + 0.3 * torch.randn(series, steps, 1)


def gradient_step(series: int, steps: int, dim: int) -> Callable[[], float]:
    """A function that takes one gradient and returns its seconds."""
    data, model, elbo = simulate(series, steps), Model(dim), TraceSDE_ELBO()
    guide = AutoSDE(model, encoder=GRUEncoder(1)).setup(*data)

    def step() -> float:
        model.zero_grad()
        guide.zero_grad()
        pyro.clear_param_store()  # every size has a guide with the same names
        start = time.process_time()
        elbo.differentiable_loss(model, guide, *data).backward()
        return time.process_time() - start

    return step


def scaling(args: argparse.Namespace) -> dict[str, dict]:
    cases = {
        (part, size): gradient_step(**{name: size}, **others)
        for part, (name, others) in enumerate(PARTS)
        for size in getattr(args, name)
    }
    times: dict[tuple, list[float]] = {case: [] for case in cases}
    for i in tqdm(range(args.repeats + 1), desc="rounds"):
        for case, step in cases.items():
            seconds = step()
            if i:
                times[case].append(seconds)
    results: dict[str, dict] = {}
    for part, (name, others) in enumerate(PARTS):
        sizes = getattr(args, name)
        seconds = [statistics.median(times[part, size]) for size in sizes]
        title = f"{name} ({', '.join(f'{k} {v}' for k, v in others.items())})"
        print(title)
        for i, (size, s) in enumerate(zip(sizes, seconds, strict=True)):
            ratio = f", x {s / seconds[i - 1]:.2f} for x {size / sizes[i - 1]:g}" if i else ""
            print(f"  {size:6d} {1000 * s:8.1f} ms{ratio}")
        power = exponent(sizes, seconds) if len(sizes) > 1 else math.nan
        print(f"  time grows with the power {power:.2f} of {name}")
        results[title] = {"seconds": seconds, "exponent": power}
    return results


def resident_memory() -> float:
    """Now, in MB; the peak where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_memory()
    (line,) = [x for x in status.read_text().splitlines() if x.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def batches(data: tuple[Tensor, Tensor], batch: int, chosen_by_plate: bool) -> Iterator[tuple]:
    """The arguments of an epoch's steps."""
    order = torch.randperm(len(data[0]))
    for index in order.split(batch):
        yield data if chosen_by_plate else tuple(x[index] for x in data)


def train(args: argparse.Namespace, chosen_by_plate: bool) -> list[tuple[float, float]]:
    """Loss an observation and resident memory, every so many steps."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    total, n = args.train
    data = simulate(total, n)
    options = {"batch": args.batch} if chosen_by_plate else {"total": total}
    model = Model(8, **options)
    guide = AutoSDE(model, encoder=GRUEncoder(1))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 3e-3}), TraceSDE_ELBO())
    who = "chosen by the plate" if chosen_by_plate else "given to the model"
    print(f"{total} series of {n} points, mini-batches of {args.batch} {who}")
    found, losses, start = [], [], time.perf_counter()
    for epoch in range(args.epochs):
        for given in tqdm(batches(data, args.batch, chosen_by_plate), desc=f"epoch {epoch + 1}"):
            losses.append(svi.step(*given) / (total * n))
            if len(losses) % args.every == 0:
                loss = statistics.fmean(losses[-args.every :])
                found.append((loss, resident_memory()))
                print(
                    f"  step {len(losses):5d}: loss {loss:7.3f}, resident {found[-1][1]:5.0f} MB, "
                    f"peak {peak_memory():5.0f} MB, {time.perf_counter() - start:5.0f} s",
                    flush=True,
                )
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--series", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096])
    p.add_argument("--steps", nargs="+", type=int, default=[50, 100, 200, 400, 800])
    p.add_argument("--dim", nargs="+", type=int, default=[32, 64, 128, 256, 512])
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--keep-memory", action="store_true", help="pyro_sde.training.keep_memory()")
    p.add_argument("--epochs", type=int, default=0, help="train in mini-batches instead")
    p.add_argument("--train", nargs=2, type=int, default=[10_000, 100], help="series, points")
    p.add_argument("--batch", type=int, default=100)
    p.add_argument("--every", type=int, default=25, help="steps between two lines")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, dict]:
    if args.keep_memory and not keep_memory():
        print("--keep-memory: this system has no such switch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pyro.clear_param_store()
    if not args.epochs:
        return scaling(args)
    return {
        name: {"loss": [x for x, _ in found], "megabytes": [x for _, x in found]}
        for name, plate in (("plate", True), ("given", False))
        for found in [train(args, plate)]
    }


if __name__ == "__main__":
    main(parse())
