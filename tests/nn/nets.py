"""The fields and networks that blocks are tested on, and the solver written out by hand."""

import copy

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule
from pyro.poutine.util import prune_subsample_sites
from torch import nn
from torch.nn.utils import vector_to_parameters

from pyro_sde.nn import ConcatConv2d, ConcatLinear, ConvField

X = torch.tensor([[1.0, -0.5], [0.3, 0.8], [-1.2, 0.1], [0.4, 0.4]], dtype=torch.float64)
Y = torch.tensor([[0.5, -0.2], [0.1, 1.0], [2.0, -1.0], [0.0, 0.3]], dtype=torch.float64)


def mlp(dim=2, hidden=3):
    return nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))


class TimeField(nn.Module):
    """A field of (t, h)."""

    def __init__(self, dim=2, hidden=3):
        super().__init__()
        self.first, self.last = ConcatLinear(dim, hidden), ConcatLinear(hidden, dim)

    def forward(self, t, h):
        return self.last(t, torch.tanh(self.first(t, h)))


# What makes a field for a number of channels, and the rest of the shape of one input.
FIELDS = {
    "linear": (mlp, ()),
    "time": (TimeField, ()),
    "conv": (lambda channels: ConvField(channels, hidden=2), (3, 4)),
    "concat conv": (lambda channels: ConcatConv2d(channels, channels, 3, padding=1), (3, 2)),
}


class Chain(PyroModule):
    """Blocks in a row with Gaussian data of the shape of h, all channels seen; h is returned."""

    def __init__(self, **blocks):
        super().__init__()
        self.order = list(blocks)
        for name, block in blocks.items():
            setattr(self, name, block)

    def forward(self, x, y=None, index=None):
        index = torch.arange(len(x)) if index is None else index
        h = x[index]
        for name in self.order:
            h = getattr(self, name)(h)
        event_dim = getattr(self, self.order[0]).event_dim
        with pyro.plate("data", len(x), subsample=index):
            obs = None if y is None else y[index]
            pyro.sample("y", dist.Normal(h, 0.3).to_event(event_dim), obs=obs)
        return h


def run_with(model, data, *args):
    """What ``model`` returns on the given values of its sites."""
    return poutine.condition(model, data=data)(*args)


def draw(model, *args):
    """What ``model`` returns, and its draws by name."""
    trace = prune_subsample_sites(poutine.trace(model).get_trace(*args))
    draws = {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    return trace.nodes["_RETURN"]["value"], draws


def with_weights(field):
    """``field`` as a function of (t, h, w), w put into the parameters of a copy."""
    field = copy.deepcopy(field)
    free = [p for p in field.parameters() if p.requires_grad]
    timed = isinstance(field, (TimeField, ConvField, ConcatConv2d))

    def call(t, h, w):
        vector_to_parameters(w, free)
        return field(t, h) if timed else field(h)

    return call


@torch.no_grad()
def by_hand(field, h, w, method="euler"):
    """The solution at 1 with the weights ``w``, of shape (T, D), on an even grid."""
    f, n = with_weights(field), len(w) - 1
    other = h
    for i in range(n):
        if method == "reversible_heun":
            k = f(i / n, other, w[i])
            other = 2 * h - other + k / n
            h = h + (k + f((i + 1) / n, other, w[i + 1])) / 2 / n
            continue
        k = f(i / n, h, w[i])
        if method == "heun":
            k = (k + f((i + 1) / n, h + k / n, w[i + 1])) / 2
        elif method == "midpoint":
            k = f((i + 0.5) / n, h + k / n / 2, (w[i] + w[i + 1]) / 2)
        elif method == "rk4":
            middle = (w[i] + w[i + 1]) / 2
            b = f((i + 0.5) / n, h + k / n / 2, middle)
            c = f((i + 0.5) / n, h + b / n / 2, middle)
            k = (k + 2 * b + 2 * c + f((i + 1) / n, h + c / n, w[i + 1])) / 6
        h = h + k / n
    return h
