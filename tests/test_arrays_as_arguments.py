"""What fit takes as data, all functions take that are called with the arguments of a model."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sde import AutoSDE, Predictive, TraceSDE_ELBO, fit, time_grid
from pyro_sde.diagnostics import importance
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.training import match_latents

TIMES, VALUES = np.linspace(0.1, 2.0, 8), np.sin(np.linspace(0.1, 2.0, 8))


def model(times, values=None):
    assert times.dtype == torch.float32
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    prior = OrnsteinUhlenbeck.scalar(1.0, mean, 1.0, time_grid(0.0, 2.0, dt=0.5, include=times))
    z = pyro.sample("z", prior)
    with pyro.plate("observations", len(times)):
        pyro.sample("y", dist.Normal(prior.at(z, times), 0.1), obs=values)


def results(times, values):
    """What each function makes of the data, in numbers."""
    pyro.clear_param_store()
    guide = AutoSDE(model)
    history = fit(model, guide, (times, values), steps=3, seed=0, match=False, progress=False)
    yield "fit", history.elbo
    yield "guide", guide(times, values)["mean"]
    yield "median", guide.median(times, values, num_samples=5)["z"]
    yield "named", guide.median(times=times, values=values, num_samples=5)["z"]
    yield "predictive", Predictive(model, guide=guide, num_samples=2)(times)["y"]
    yield "summary", guide.summary(times, values, num_particles=2).parts.elbo
    yield "importance", importance(model, guide, times, values, num_samples=50).log_evidence.value
    yield "matching", match_latents(model, guide, times, values).k_hat
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    other = AutoSDE(model)
    yield "setup", other.setup(times, values).median(times, values, num_samples=5)["z"]
    svi = SVI(model, other, pyro.optim.Adam({"lr": 0.01}), TraceSDE_ELBO())
    yield "step", svi.step(times, values)


@pytest.fixture
def single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("kind", ["arrays", "columns"])
def test_they_are_the_tensors(kind):
    table = {"times": TIMES, "values": VALUES}
    if kind == "columns":
        table = pytest.importorskip("pandas").DataFrame(table)
    given = list(results(table["times"], table["values"]))
    expected = results(torch.tensor(TIMES).float(), torch.tensor(VALUES).float())
    for (name, a), (_, b) in zip(given, expected, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), name
