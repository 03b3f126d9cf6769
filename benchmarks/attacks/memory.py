"""Ten thousand SVI steps: does memory stay flat?

A latent SDE with a learned drift, a latent scale that all series share, an encoder, and a plate
that subsamples, trained by SVI with TraceSDE_ELBO. Resident memory is read a hundred times, the
live tensors and Python objects are counted ten times. The growth is that of a least squares line
from the first tenth of the steps, when everything has been allocated once, to the last.
"""

import gc
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

COUNT = 10_000
BOUNDS = {"growth in MB": 4.0, "more tensors": 0}
SERIES, POINTS, BATCH = 64, 8, 16


class Model(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.drift = NeuralDrift(2, (16,))

    def forward(self, times: Tensor, values: Tensor) -> None:
        scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.3)).unsqueeze(-1)
        start = dist.Normal(torch.zeros(2), 1.0).to_event(1)
        with pyro.plate("series", SERIES, subsample_size=BATCH) as index:
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


def attack(count: int, seed: int) -> dict[str, float]:
    """Train for ``count`` steps, at least ten."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    gaps = 0.05 + torch.rand(SERIES, POINTS)
    times, values = gaps.cumsum(-1), torch.randn(SERIES, POINTS, 1).cumsum(1)
    model = Model()
    guide = AutoSDE(model, encoder=GRUEncoder(1, hidden=16, context=4))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), TraceSDE_ELBO())
    steps: list[int] = []
    memory: list[float] = []
    first, every, counts = count // 10, max(1, count // 100), []
    for i in trange(count + 1, desc="memory", unit="step", mininterval=1.0):
        if i >= first and i % every == 0:
            steps.append(i)
            memory.append(resident())
        if i and i % first == 0:
            counts.append(alive())
        svi.step(times, values)
    return {
        "steps": count,
        "MB at first": memory[0],
        "MB at last": memory[-1],
        "growth in MB": slope(steps, memory) * (steps[-1] - steps[0]),
        "tensors": counts[-1][0],
        "more tensors": counts[-1][0] - counts[0][0],
        "objects": counts[-1][1],
        "more objects": counts[-1][1] - counts[0][1],
    }
