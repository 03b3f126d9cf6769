"""What is trained in the tests: parameters in the store and in modules, paths in a plate."""

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import OrnsteinUhlenbeck

GRID = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
N = 7
DATA = (
    torch.arange(N),
    torch.linspace(-1.0, 2.0, N, dtype=torch.float64) + torch.arange(N, dtype=torch.float64) % 2,
)


def functional(index: Tensor, y: Tensor) -> None:
    """A constrained parameter with a random start, a global latent, a path for each series."""
    noise = pyro.param(
        "noise", lambda: 0.2 + 0.1 * torch.rand(()), constraint=dist.constraints.positive
    )
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("series", N, subsample=index):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID))
        pyro.sample("y", dist.Normal(shift + z[..., -1, 0], noise), obs=y)


class Modular(PyroModule):
    """Parameters of two kinds and a buffer that counts, which every step changes; of the two
    layers only one is used in a step of two particles, and moves by its momentum in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PyroModule[nn.ModuleList]([PyroModule[nn.Linear](1, 1) for _ in range(2)])
        self.noise = PyroParam(torch.tensor(0.3), constraint=dist.constraints.positive)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, index: Tensor, y: Tensor) -> None:
        with pyro.plate("series", N, subsample=index):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID))
            self.calls += 1
            x = [layer(z[..., -1, :])[..., 0] for layer in self.layers][int(self.calls) // 2 % 2]
            pyro.sample("y", dist.Normal(x, self.noise), obs=y)


def make(kind: str) -> tuple:
    """A model, its guide and an ELBO, always the same, in an empty store."""
    pyro.clear_param_store()
    pyro.set_rng_seed(11)
    model = functional if kind == "functional" else Modular()
    return model, AutoSDE(model), TraceSDE_ELBO(num_particles=2)


def values(model: object = None) -> dict[str, Tensor]:
    """All parameters, and what else a model has."""
    found = {k: v.detach().clone() for k, v in pyro.get_param_store().items()}
    if isinstance(model, Modular):
        found["calls"] = model.calls.clone()
    return found


def assert_identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
