"""Series with times of their own, a model of them, and a guide that reads them."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, fill_missing, select, series_grid
from pyro_sde.distributions import OrnsteinUhlenbeck

S, N, D = 5, 4, 2
NAN = float("nan")


def data(series=S):
    """Series with times of their own, rows that are padding, and entries that are missing."""
    times = torch.rand(series, N).sort(-1).values
    values = torch.randn(series, N, D)
    mask = torch.ones(series, N, D, dtype=torch.bool)
    mask[0, 2:] = False  # two rows of padding
    mask[1, 1] = False  # a row in the middle
    mask[2, 3, 0] = False  # one of two dimensions
    return times, values, mask, series_grid(times, dt=0.2, start=0.0, end=1.0)


def model(times, values=None, mask=None, grid=None, memory="graph"):
    values, mask = fill_missing(values, mask)
    with pyro.plate("series", len(times)):
        start = dist.Normal(torch.zeros(D), 1.0).to_event(1)
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.8, grid, start, memory))
        y = dist.Normal(select(z, grid, times), 0.3).mask(mask).to_event(2)
        return pyro.sample("y", y, obs=values)


class Plain(nn.Module):
    """A control without preparations."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, D)

    def forward(self, t, z, context):
        return self.last(context) - z


def shaken(fn=model, args=None, seed=1, encoder=None, **options):
    """A guide with an encoder, away from its start."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = GRUEncoder(D, hidden=8, context=4) if encoder is None else encoder
        guide = AutoSDE(fn, encoder=encoder, **options)
        torch.manual_seed(seed)
        guide.setup(*args)
        with torch.no_grad():
            for p in guide.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return guide


def loss_and_gradients(fn, guide, args, **elbo):
    torch.manual_seed(7)
    loss = TraceSDE_ELBO(**elbo).differentiable_loss(fn, guide, *args)
    guide.zero_grad()
    loss.backward()
    named = guide.named_parameters()
    return loss.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def assert_same(a, b, tol=0.0):
    (loss, gradients), (other, others) = a, b
    assert (loss - other).abs() <= tol * loss.abs()
    assert gradients.keys() == others.keys()
    for name, g in gradients.items():
        assert g.isfinite().all() and (g - others[name]).abs().max() <= tol * (1 + g.abs().max())
