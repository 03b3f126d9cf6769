"""A model whose shapes combine every draw with every other one: few draws show that, and many are
never made, which would fill the memory."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sde import AutoSDE, Predictive, fit
from pyro_sde.diagnostics import importance
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.times import FEW

TIMES = torch.linspace(0.0, 1.0, 12)


class Recorded(dist.Normal):
    """A likelihood that records how many draws there are for each observation."""

    numbers: list[int] = []  # noqa: RUF012

    def log_prob(self, value):
        found = super().log_prob(value)
        self.numbers.append(found.numel() // 11)
        return found


def model(y=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0)).unsqueeze(-1)
    prior = OrnsteinUhlenbeck.scalar(1.0, 0.0, 1.0, TIMES)
    z = pyro.sample("z", prior)
    with pyro.plate("observations", 11):
        pyro.sample("y", Recorded(prior.at(z, TIMES[1:]) + mean, 0.5), obs=y)


@pytest.mark.parametrize("what", ["fit", "importance", "median", "predictive"])
def test_they_are_never_many(what):
    pyro.clear_param_store()
    Recorded.numbers.clear()
    y = torch.zeros(11)
    guide = AutoSDE(model)
    if what == "fit":
        fit(model, guide, y, steps=2, seed=0, progress=False)
    guide.setup(y)
    if what == "importance":
        importance(model, guide, y, num_samples=100)
    elif what == "median":
        assert guide.median(y, num_samples=100)["z"].shape == (12,)
    elif what == "predictive":
        assert Predictive(model, guide=guide, num_samples=100)(y)["z"].shape == (100, 12)
    assert max(Recorded.numbers) == FEW**2
