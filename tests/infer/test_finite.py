"""A loss that is not finite is refused before it has gradients, with the site and the time."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck
from pyro_sde.infer import NonFiniteLoss

TIMES = torch.linspace(0.0, 1.0, 5)


def model(y):
    prior = OrnsteinUhlenbeck.scalar(1.0, 0.0, 1.0, TIMES)
    z = pyro.sample("z", prior)
    with pyro.plate("data", 2):
        end = prior.at(z, TIMES[-2:])
        near = dist.Uniform(end - 1e-6, end + 1e-6, validate_args=False)
        pyro.sample("y", near, obs=y)


def step(model, y, elbo):
    pyro.clear_param_store()
    guide = AutoSDE(model)
    guide(y)
    before = {k: p.detach().clone() for k, p in guide.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Encountered (NaN|inf)")
        try:
            SVI(model, guide, Adam({"lr": 0.1}), elbo).step(y)
        finally:
            assert all(torch.equal(p, before[k]) for k, p in guide.named_parameters())


@pytest.mark.parametrize("kind", [TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])
@pytest.mark.parametrize("vectorized", [False, True])
def test_an_impossible_observation_names_its_site(kind, vectorized):
    elbo = kind(num_particles=2, vectorize_particles=vectorized, max_plate_nesting=1)
    with pytest.raises(NonFiniteLoss, match=r"became inf: the log density of site 'y' is -inf"):
        step(model, torch.tensor([0.3, 0.4]), elbo)


def test_a_control_that_overflows_names_the_time():
    prior = BrownianMotion(1.0, TIMES, 0.0)

    def model():
        pyro.sample("z", prior)

    def guide():
        size = pyro.param("size", torch.tensor(1e200))
        pyro.sample("z", ControlledPath(prior, lambda t, z: size * (t > 0.4) + 0 * z))

    pyro.clear_param_store()
    with pytest.raises(NonFiniteLoss, match=r"the KL of the path 'z' is not finite from t = 0\.5"):
        SVI(model, guide, Adam({"lr": 0.1}), TraceSDE_ELBO()).step()
    assert pyro.param("size").item() == 1e200


def test_a_value_without_gradients_is_as_pyro_gives_it():
    pyro.clear_param_store()
    y, guide = torch.tensor([0.3, 0.4]), AutoSDE(model)
    assert TraceSDE_ELBO().loss(model, guide, y) == math.inf
