"""Data in one precision, defaults in the other: it works, or the error says what to do."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, select, time_grid
from pyro_sde.distributions import OrnsteinUhlenbeck, SDEPath
from pyro_sde.guides.encoders import SummaryEncoder
from pyro_sde.nn import NeuralDrift, SDEBlock

SINGLE, DOUBLE = torch.float32, torch.float64
PAIRS = [(SINGLE, DOUBLE), (DOUBLE, SINGLE), (SINGLE, SINGLE), (DOUBLE, DOUBLE)]
ENCODERS = {
    "none": lambda: None,
    "gru": lambda: GRUEncoder(1, 4, 3),
    "summary": lambda: SummaryEncoder(1, 4, 3, length=4),
}


def model(times, values, latent=False):
    grid = time_grid(0.0, 1.0, dt=0.3, include=times)
    scale = torch.tensor(0.75)
    if latent:  # the first latent is of the default precision, whatever the data are
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3)).unsqueeze(-1)
    with pyro.plate("series", len(times)):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, scale, grid))
        pyro.sample("y", dist.Normal(select(z, grid, times), 0.5).to_event(2), obs=values)


def data(times_as, values_as):
    times = torch.tensor([[0.1, 0.4, 0.5, 0.9], [0.2, 0.3, 0.6, 0.8]], dtype=DOUBLE)
    values = times.sin().unsqueeze(-1)
    return times.to(times_as), values.to(values_as)


@pytest.mark.parametrize("which", ["times", "values", "both"])
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("default, other", PAIRS)
def test_data_of_another_precision(default, other, encoder, which):
    """An untrained guide is the prior: in double precision its loss is one number, but for the
    rounding of the data; with a latent scale everything has gradients of its own precision."""

    def loss(default, args, latent):
        torch.set_default_dtype(default)
        pyro.clear_param_store()
        observations = lambda times, values, latent: (times, values)  # noqa: E731
        made = ENCODERS[encoder]()
        guide = AutoSDE(
            model, encoder=made, observations=observations if made is not None else None
        )
        guide.setup(*args, latent)
        pyro.set_rng_seed(0)
        result = TraceSDE_ELBO().differentiable_loss(model, guide, *args, latent)
        result.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in guide.parameters())
        return result.item(), guide(*args, latent)["z"].dtype

    args = data(other if which != "values" else default, other if which != "times" else default)
    found, dtype = loss(default, args, False)
    assert dtype == torch.promote_types(default, args[0].dtype)
    if dtype == DOUBLE:
        assert found == pytest.approx(loss(DOUBLE, data(DOUBLE, DOUBLE), False)[0], rel=1e-5)
    loss(default, args, True)


class Learned(PyroModule):
    def __init__(self):
        super().__init__()
        self.drift = NeuralDrift(1)

    def forward(self, times):
        pyro.sample("z", SDEPath(self.drift, lambda t, z: 1.0, torch.zeros(1), times))


class Network(PyroModule):
    def __init__(self):
        super().__init__()
        self.block = SDEBlock(nn.Linear(1, 1), steps=2)

    def forward(self, x):
        return self.block(x)


@pytest.mark.parametrize("memory", ["graph", "recompute"])
def test_a_network_of_another_precision(memory):
    torch.set_default_dtype(SINGLE)
    times, net = torch.linspace(0, 1, 4, dtype=DOUBLE), Learned()
    with pytest.raises(ValueError, match=r"states of torch\.float64.*Use one dtype"):
        AutoSDE(net)(times)
    path = SDEPath(net.drift, lambda t, z: 1.0, torch.zeros(1), times, memory=memory)
    with pytest.raises(ValueError, match=r"times being torch\.float64.*network\.double\(\)"):
        path.sample()
    assert AutoSDE(net)(times.float())["z"].dtype == SINGLE
    assert AutoSDE(net.double(), name="double")(times)["z"].dtype == DOUBLE


def test_other_errors_of_a_step_stay_what_they_are():
    def broken(t, z):
        raise RuntimeError("no such luck")

    path = SDEPath(broken, lambda t, z: 1.0, torch.zeros(1), torch.linspace(0, 1, 4))
    with pytest.raises(RuntimeError, match="no such luck"):
        path.sample()


def test_a_block_of_another_precision():
    torch.set_default_dtype(SINGLE)
    net = Network()
    with pytest.raises(ValueError, match=r"h is torch\.float64, the weights torch\.float32"):
        net(torch.zeros(2, 1, dtype=DOUBLE))
    assert net.double()(torch.zeros(2, 1, dtype=DOUBLE)).dtype == DOUBLE
