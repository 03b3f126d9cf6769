"""The models that guides are tested on."""

import pyro
import pyro.distributions as dist
import torch

from pyro_sde import (
    AutoSDE,
    select,
    time_grid,
)
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck

T_OBS = torch.tensor([0.3, 0.5, 1.0], dtype=torch.float64)
GRID = time_grid(0.0, 1.0, dt=0.2, include=T_OBS)
Y = torch.tensor([0.4, -0.2, 1.1], dtype=torch.float64)
SERIES = torch.tensor([[0.4, -0.2, 1.1], [0.1, 0.3, 0.2], [2.0, 1.0, 0.0], [-1.0, -1.5, -2.0]])
SERIES = SERIES.double()


def simple(y=None):
    z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID))
    pyro.sample("y", dist.Normal(select(z, GRID, T_OBS)[..., 0], 0.3).to_event(1), obs=y)


def mixed(y=None):
    """Latents upstream of a path and beside it, and a second path."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    rate = pyro.sample("dyn.rate", dist.Gamma(2.0, 2.0))
    z = pyro.sample("z", OrnsteinUhlenbeck(rate.unsqueeze(-1), 0.0, scale.unsqueeze(-1), GRID))
    b = pyro.sample("trend", BrownianMotion(scale.unsqueeze(-1), GRID, torch.zeros(1)))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    x = select(z + b, GRID, T_OBS)[..., 0]
    pyro.sample("y", dist.Normal(x, noise.unsqueeze(-1)).to_event(1), obs=y)


def series(y, batch=None):
    """Paths in a plate that may be subsampled, with a local and a global latent."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("series", len(SERIES), subsample_size=batch, dim=-1) as index:
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, scale.unsqueeze(-1), GRID))
        x = select(z, GRID, T_OBS)[..., 0] + shift.unsqueeze(-1)
        pyro.sample("y", dist.Normal(x, 0.3).to_event(1), obs=y[index])


MODELS = {"simple": (simple, Y), "mixed": (mixed, Y), "series": (series, SERIES)}


def shaken(model, *args, **options):
    """A guide that is not at its start."""
    guide = AutoSDE(model, **options).setup(*args)
    with torch.no_grad():
        for p in guide.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return guide
