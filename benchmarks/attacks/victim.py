"""A small training that is attacked: parameters, buffers and the param store."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn

from pyro_sde import AutoSDE, History, TraceSDE_ELBO, fit
from pyro_sde.distributions import SDEPath

DATA = torch.tensor([0.3, -0.2, 0.5])


class Model(PyroModule):
    """A learned drift, a constrained parameter in the store, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(1.0))
        self.noise = PyroParam(torch.tensor(0.3), constraint=dist.constraints.positive)
        self.register_buffer("calls", torch.tensor(0))

    def drift(self, t: Tensor, z: Tensor) -> Tensor:
        return -self.rate * z

    def forward(self, y: Tensor) -> None:
        self.calls += 1
        loc = pyro.param("loc", lambda: 0.1 * torch.rand(1))
        grid = torch.linspace(0.0, 1.0, len(y) + 1)
        start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
        z = pyro.sample("z", SDEPath(self.drift, 0.5, start, grid))
        pyro.sample("y", dist.Normal(loc + z[..., 1:, 0], self.noise).to_event(1), obs=y)


class Victim:
    """A model and its guide, made anew in an empty param store."""

    def __init__(self) -> None:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        self.model = Model()
        self.guide = AutoSDE(self.model)

    def train(self, path: str | os.PathLike | None, steps: int, **options: Any) -> History:
        """Train with a checkpoint after every step, or go on from it."""
        options = {"save_every": 1, "lr": 1e-3, "schedule": "constant", **options}
        options |= {"elbo": TraceSDE_ELBO(), "match": False, "progress": False}
        return fit(self.model, self.guide, DATA, steps=steps, checkpoint=path, **options)

    def state(self) -> dict[str, Tensor]:
        """Copies of all that a checkpoint might change."""
        store = pyro.get_param_store()
        found = {f"store {k}": v.detach() for k, v in store.items()}
        found |= {f"model {k}": v for k, v in self.model.state_dict().items()}
        found |= {f"guide {k}": v for k, v in self.guide.state_dict().items()}
        found |= {"random": torch.get_rng_state(), "Python": torch.tensor(random.getstate()[1])}
        found["NumPy"] = torch.tensor(np.random.get_state()[1].astype(np.int64))
        return {k: v.clone() for k, v in found.items()}


def are_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(x, b[k]) for k, x in a.items())


def checkpoint(path: Path, steps: int = 3) -> bytes:
    """The content of a checkpoint that ``fit`` has written."""
    Victim().train(path, steps)
    return path.read_bytes()
