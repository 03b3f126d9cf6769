"""What one of two processes computes, for test_distributed.py: models, noise, one worker."""

from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from unittest import mock

import distributed as example
import pyro
import pyro.distributions as dist
import torch
import torch.distributed as processes
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributed import mini_batches, place, seed_rank
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.nn import SDEBlock

from .guides.models import GRID

WORLD, SIZE, BATCH = 2, 12, 8
PATIENCE = 100  # seconds until a process that hangs is given up
CASES = ["series", "sdebnn", "recompute", "reversible", "mixed"]


class Lean(example.Network):
    """The same network, its steps redone in the backward pass."""

    def __init__(self, size, memory):
        super().__init__(size)
        options = {"memory": memory}
        if memory == "reversible":
            options["method"] = "reversible_heun"
        self.block = SDEBlock(nn.Linear(3, 3), augment=2, steps=4, **options)


class Mixed(PyroModule):
    """Series with embeddings of their own, a local latent, and two global ones upstream."""

    def __init__(self, size):
        super().__init__()
        self.size, self.decay = size, nn.Parameter(torch.tensor(0.3))

    def plate(self, rows, y):
        return pyro.plate("series", self.size, subsample=rows)

    def forward(self, rows, y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        with self.plate(rows, y):
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0).expand((1,)).to_event(1))
            rate = self.decay.exp()
            z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, scale.unsqueeze(-1), GRID))
            law = dist.Normal(z[..., [2, 4, -1], 0] + shift, noise)
            pyro.sample("y", law.to_event(1), obs=y)


def problem(case):
    """Data, model, a guide that is not at its start, and the options of the ELBO."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    options = {"max_plate_nesting": 1}
    if case == "series":
        data = example.Series.simulate(SIZE)
        model, guide = example.build("series", SIZE)
        guide.setup(*data)
    elif case == "mixed":
        data = torch.arange(SIZE), torch.randn(SIZE, 3)
        model = Mixed(SIZE)
        guide = AutoSDE(model, other_guide=partial(AutoNormal, create_plates=model.plate)).setup(
            *data
        )
    else:
        data = example.Network.simulate(SIZE)
        model = example.Network(SIZE) if case == "sdebnn" else Lean(SIZE, case)
        guide = AutoSDE(model, contraction=True).setup(*data)
        options = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 1}
    with torch.no_grad():
        for p in guide.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return data, model, guide, TraceSDE_ELBO(**options)


@contextmanager
def noise_of(series):
    """Every series draws the noise that belongs to it, in whatever batch it is; what is drawn
    without series (``series`` empty, or another shape) is the same everywhere."""
    calls = 0

    def draw(*shape, dtype=None, device=None):
        nonlocal calls
        calls += 1
        shape = torch.Size(shape[0] if len(shape) == 1 else shape)

        def of(number, size):
            generator = torch.Generator().manual_seed(1000 * calls + number)
            return torch.empty(size).normal_(generator=generator)

        if len(series) and len(shape) > 1 and shape[-2] == len(series):
            row = shape[:-2] + shape[-1:]
            return torch.stack([of(int(i), row) for i in series], -2)
        return of(999, shape)

    with (
        mock.patch.object(torch, "randn", draw),
        mock.patch("torch.distributions.normal._standard_normal", draw),
    ):
        yield


def rows_of(case, rows):
    return rows if case in ("series", "mixed") else ()


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def worker(rank, folder):
    """All that the tests want to know from one rank, in a file of its own."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    processes.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE),
    )
    found = {"place": tuple(place()), "seed": seed_rank(5)}
    for case in CASES:
        data, model, guide, elbo = problem(case)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)  # rank 0's are to win
        module = elbo(model, guide)
        wrapped = DistributedDataParallel(module)
        rows = next(mini_batches(SIZE, BATCH, seed=3))
        part = [x[rows] for x in data]
        with noise_of(rows_of(case, rows)):
            loss = wrapped(*part)
        loss.backward()
        found[case] = {"rows": rows, "loss": loss.item(), "gradients": gradients(module)}
        seed = seed_rank(5)
        module.zero_grad()
        loss = wrapped(*part)
        path = guide.trace.nodes["block.w" if "block.w" in guide.trace.nodes else "z"]["value"]
        loss.backward()
        found[case]["own noise"] = {
            "seed": seed,
            "loss": loss.item(),
            "gradients": gradients(module),
            "path": path.detach(),
        }
        optimiser = torch.optim.Adam(module.parameters(), 0.01)
        for rows in islice(mini_batches(SIZE, BATCH), 5):
            optimiser.zero_grad()
            wrapped(*(x[rows] for x in data)).backward()
            optimiser.step()
        found[case]["trained"] = module.state_dict()
    torch.save(found, f"{folder}/{rank}.pt")
    processes.destroy_process_group()
