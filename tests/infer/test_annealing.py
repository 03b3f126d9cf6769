"""The weight of the KL."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_sde import (
    AutoSDE,
    TraceMeanFieldSDE_ELBO,
    TraceSDE_ELBO,
    anneal_kl,
    kl_weight,
)
from tests.guides.models import SERIES, Y, mixed, series, shaken


def losses(elbo, model, guide, args, weight=None):
    torch.manual_seed(3)
    if weight is None:
        return elbo.differentiable_loss(model, guide, *args)
    with anneal_kl(weight):
        return elbo.differentiable_loss(model, guide, *args)


@pytest.mark.parametrize("ELBO", [TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])
@pytest.mark.parametrize(("model", "args"), [(mixed, (Y,)), (series, (SERIES, 2))])
def test_the_kl_counts_so_many_times(ELBO, model, args):
    """Linear in the weight, the same at 1, and without the KL at 0 the likelihood alone."""
    guide, elbo = shaken(model, *args), ELBO()
    full = losses(elbo, model, guide, args)
    torch.testing.assert_close(losses(elbo, model, guide, args, 1.0), full, rtol=0, atol=0)
    half, tenth = (losses(elbo, model, guide, args, w) for w in (0.5, 0.1))
    kl = (full - half) / 0.5
    assert kl > 0
    torch.testing.assert_close(full - tenth, 0.9 * kl)
    torch.manual_seed(3)
    (p, _), *_ = elbo._get_traces(model, guide, args, {})
    torch.testing.assert_close(full - kl, -p.nodes["y"]["log_prob_sum"])


@pytest.mark.parametrize("ELBO", [Trace_ELBO, TraceMeanField_ELBO])
def test_ordinary_models_too(ELBO):
    def model(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("taste", -x.square())
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide, y = AutoNormal(model), torch.tensor(2.0)
    guide(y)
    full, half = (losses(ELBO(), model, guide, (y,), w) for w in (1.0, 0.5))
    torch.manual_seed(3)
    x = guide(y)["x"]
    likelihood = dist.Normal(x, 1.0).log_prob(y) - x.square()  # a factor is no prior
    torch.testing.assert_close(2 * half - full, -likelihood)


def test_the_schedule_ends_at_the_elbo():
    assert kl_weight(0, 0) == 1.0
    assert [kl_weight(i, 10, 0.5) for i in (10, 11, 10**6)] == [1.0, 1.0, 1.0]
    rising = [kl_weight(i, 10) for i in range(11)]
    assert rising == sorted(rising) and rising[0] == 0.01
    with pytest.raises(ValueError, match="start must be above 0"):
        kl_weight(0, 10, 0.0)
    with pytest.raises(ValueError, match="weight must be positive: found 0"):
        anneal_kl(0)


def test_nothing_is_left_behind():
    """After a step inside, one outside is that of the ELBO."""
    guide = AutoSDE(mixed)
    svi = SVI(mixed, guide, pyro.optim.Adam({"lr": 0.0}), TraceSDE_ELBO())
    torch.manual_seed(3)
    before = svi.step(Y)
    with anneal_kl(0.1):
        svi.step(Y)
    torch.manual_seed(3)
    assert svi.step(Y) == before
