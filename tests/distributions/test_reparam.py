"""Pyro's strategies of reparametrisation leave a path as it is: it is no location-scale family."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.reparam import AutoReparam, MinimalReparam

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    PathDistribution,
    SDEPath,
)

TIMES = torch.tensor([0.0, 0.1, 0.25, 0.6, 1.0], dtype=torch.float64)
STRATEGIES = {
    "learned": lambda: AutoReparam(),
    "decentered": lambda: AutoReparam(centered=0.0),
    "half": lambda: AutoReparam(centered=0.5),
    "minimal": lambda: MinimalReparam(),
}


def ou(x, **options):
    return OrnsteinUhlenbeck(1.3, x.unsqueeze(-1), 0.7, TIMES, **options)


PATHS = {
    "OU": ou,
    "OU, fixed start": lambda x: ou(x, initial=torch.ones(1)),
    "OU, mask": lambda x: ou(x).mask(torch.tensor(True)),
    "OU, exponential": lambda x: dist.TransformedDistribution(
        ou(x), [dist.transforms.ExpTransform()]
    ),
    "OU, pushed": lambda x: ControlledPath(ou(x), lambda t, z: -z),
    "Brownian motion": lambda x: BrownianMotion(0.7, TIMES, x.unsqueeze(-1)),
    "geometric": lambda x: GeometricBrownianMotion(0.7, TIMES, x.exp().unsqueeze(-1)),
    "SDEPath": lambda x: SDEPath(lambda t, z: -z, 0.7, x.unsqueeze(-1), TIMES),
}


def is_path(fn):
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, PathDistribution)


def model_of(make, plated=False):
    """A latent that is reparametrised, a path that depends on it, and an observation."""

    def model(y=None):
        x = pyro.sample("x", dist.Normal(0.3, 0.5))
        if plated:
            with pyro.plate("series", 3, dim=-1):
                s = pyro.sample("s", dist.Normal(x, 0.5))
                z = pyro.sample("z", make(s))
                return pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=y)
        z = pyro.sample("z", make(x))
        return pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=y)

    return model


@pytest.mark.parametrize("plated", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PATHS)
def test_the_path_is_left_as_it_is(name, strategy, plated):
    make = PATHS[name]
    y = torch.tensor([0.4, -0.2, 0.1]) if plated else torch.tensor(0.4)
    model = STRATEGIES[strategy]()(model_of(make, plated))
    trace = pyro.poutine.trace(model).get_trace(y)
    trace.compute_log_prob()
    sites = {k: s for k, s in trace.nodes.items() if s["type"] == "sample"}
    assert ("x_decentered" in sites) == (strategy != "minimal")
    assert torch.isfinite(trace.log_prob_sum())
    # A path under a transform is drawn before it is transformed; nothing else happens to it.
    moved = strategy != "minimal" and "z_base" in sites
    path = sites["z_base" if moved else "z"]
    assert is_path(path["fn"]) and not path["is_observed"]
    assert not any(k.startswith(("z_decentered", "z_base_decentered")) for k in sites)
    assert not [k for k in pyro.get_param_store() if k.startswith("z")]
    expected = make(sites["s" if plated else "x"]["value"])
    expected = expected.base_dist if moved else expected
    torch.testing.assert_close(path["log_prob"], expected.log_prob(path["value"]))


@pytest.mark.parametrize("plated", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_trains_and_predicts(strategy, plated):
    y = torch.tensor([0.4, -0.2, 0.1]) if plated else torch.tensor(0.4)
    model = STRATEGIES[strategy]()(model_of(ou, plated))
    guide = AutoSDE(model)
    elbo = TraceSDE_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-2}), elbo)
    for _ in range(3):
        assert torch.isfinite(torch.tensor(svi.step(y)))
    assert guide.path_sites == ("z",)
    draws = Predictive(model, guide=guide, num_samples=4, return_sites=("z", "y"))()
    assert draws["z"].isfinite().all() and draws["z"].shape[-2:] == (5, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_is_the_elbo_of_pyro(strategy):
    """With a strategy too, on the same draw."""
    y = torch.tensor(0.4)
    model = STRATEGIES[strategy]()(model_of(ou))
    guide = AutoSDE(model).setup(y)
    losses = []
    for elbo in (Trace_ELBO(), TraceSDE_ELBO(path_estimator="full")):
        pyro.set_rng_seed(3)
        losses.append(elbo.loss(model, guide, y))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
