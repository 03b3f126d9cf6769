"""Which sites are latent is decided by a run with data, and by no other."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Importance, Predictive, Trace_ELBO

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from pyro_sde.distributions import BrownianMotion

from .models import MODELS, Y, mixed, simple

GRID = torch.linspace(0.0, 1.0, 6)
ONE = torch.tensor(1.0)

every_elbo = pytest.mark.parametrize("ELBO", [Trace_ELBO, TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])
CALLS = {
    "Predictive": lambda model, guide: Predictive(model, guide=guide, num_samples=2)(),
    "parallel": lambda model, guide: Predictive(model, guide=guide, num_samples=2, parallel=True)(),
    "Importance": lambda model, guide: Importance(model, guide, num_samples=2).run(),
    "call": lambda model, guide: guide(),
    "setup": lambda model, guide: guide.setup(),
    "median": lambda model, guide: guide.median(num_samples=2),
    "ELBO": lambda model, guide: TraceSDE_ELBO().loss(model, guide),
    "stock ELBO": lambda model, guide: Trace_ELBO().loss(model, guide),
}


def two(a=None, b=None):
    """One path, seen twice."""
    z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
    pyro.sample("a", dist.Normal(z[..., 2, 0], 0.1), obs=a)
    pyro.sample("b", dist.Normal(z[..., -1, 0], 0.1), obs=b)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("model", [simple, mixed])
def test_a_first_call_without_data_is_refused(call, model):
    guide = AutoSDE(model)
    with pytest.raises(ValueError, match=r"observes nothing.*'y', 'z'.*guide\.setup\("):
        CALLS[call](model, guide)
    assert guide.path_sites == () and list(guide.parameters()) == []
    guide.setup(Y)  # what was refused has left nothing behind
    assert "y" not in guide.other_sites
    assert Predictive(model, guide=guide, num_samples=2)()["y"].shape[-1] == len(Y)


def test_a_refused_call_does_not_change_what_is_learned():
    losses = []
    for refused in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoSDE(simple)
        if refused:
            with pytest.raises(ValueError, match="observes nothing"):
                guide()
            pyro.set_rng_seed(0)
        svi = SVI(simple, guide, pyro.optim.Adam({"lr": 0.01}), TraceSDE_ELBO())
        losses.append([svi.step(Y) for _ in range(3)])
    assert losses[0] == losses[1]


def test_what_is_known_without_arguments_is_data():
    """Conditioning, a factor, or a closure over the data; and a path alone has none to miss."""

    def factor():
        z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("likelihood", -((z[..., -1, 0] - x) ** 2))

    def alone():
        z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
        pyro.deterministic("end", z[..., -1, 0])

    assert AutoSDE(factor, name="a").setup().other_sites == ("x",)
    given = poutine.condition(two, data={"a": ONE})
    assert AutoSDE(given, name="b").setup().other_sites == ("b",)
    assert AutoSDE(alone, name="c").setup().path_sites == ("z",)

    def not_quite_alone():  # what is computed is no data
        alone()
        pyro.sample("y", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="observes nothing"):
        AutoSDE(not_quite_alone).setup()


@every_elbo
def test_data_for_a_latent_are_refused(ELBO):
    """Of one site of two: the other was there when the guide was set up."""
    guide = AutoSDE(two).setup(ONE)
    assert guide.other_sites == ("b",)
    assert ELBO().loss(two, guide, ONE) < 1e6
    message = "site 'b' is observed now.*clear_param_store.*guide.setup"
    with pytest.raises(ValueError, match=message):
        ELBO().loss(two, guide, ONE, ONE)
    with pytest.raises(ValueError, match=message):
        Predictive(two, guide=guide, num_samples=2)(ONE, ONE)
    pyro.clear_param_store()
    guide = AutoSDE(two).setup(ONE, ONE)  # what the message says
    assert ELBO().loss(two, guide, ONE, ONE) < 1e6


def test_data_for_a_path_are_refused():
    def model(path=None):
        pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)), obs=path)

    guide = AutoSDE(model).setup()
    with pytest.raises(ValueError, match="site 'z' is observed now"):
        TraceSDE_ELBO().loss(model, guide, torch.zeros(6, 1))


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
@pytest.mark.parametrize("ELBO", [TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])
def test_data_that_are_missing_later_are_refused_by_the_elbo(ELBO):
    """And drawn from the model wherever else."""
    guide = AutoSDE(two).setup(ONE, ONE)
    with pytest.raises(ValueError, match="site 'b' of the model has neither data nor"):
        ELBO().loss(two, guide, ONE)
    draws = Predictive(two, guide=guide, num_samples=3)(ONE)
    assert draws["b"].shape == (3,)


@pytest.mark.parametrize("name", MODELS)
def test_the_first_step_decides_as_setup_does(name):
    model, y = MODELS[name]
    first, setup = AutoSDE(model, name="first"), AutoSDE(model, name="setup").setup(y)
    TraceSDE_ELBO().loss(model, first, y)
    assert (first.path_sites, first.other_sites) == (setup.path_sites, setup.other_sites)
