"""One path that is observed three times, and a guide for it."""

import pyro
import pyro.distributions as dist
import torch

from pyro_sde import select, time_grid
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck

T_OBS = torch.tensor([0.3, 0.5, 1.0], dtype=torch.float64)
GRID = time_grid(0.0, 1.0, dt=0.1, include=T_OBS)
Y = torch.tensor([0.4, -0.2, 1.1], dtype=torch.float64)


def prior():
    return OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID)


def model(y=None):
    z = pyro.sample("z", prior())
    with pyro.plate("obs", len(T_OBS)):
        x = select(z, GRID, T_OBS, plate_dim=-1)[..., 0]
        return pyro.sample("y", dist.Normal(x, 0.3), obs=y)


def guide(y=None):
    gain = pyro.param("gain", torch.tensor(0.5))
    pyro.sample("z", ControlledPath(prior(), lambda t, z: gain * (0.5 - z)))
