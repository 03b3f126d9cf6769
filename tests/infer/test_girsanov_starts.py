"""The divergence of the starts of two paths, for every pair of laws."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_sde.distributions import BrownianMotion, ControlledPath
from pyro_sde.distributions.starts import PartlyFixed, SideBySide
from pyro_sde.infer.girsanov import path_divergence

TIMES = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
FIXED = torch.tensor([0.3, 0.0, -0.2], dtype=torch.float64)
DRAWN = (False, True, False)


def normal(a, b):
    return dist.Normal(a + torch.arange(3.0), b * torch.tensor([1.0, 0.5, 2.0])).to_event(1)


def multivariate(a, b):
    lower = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.7, 0.0], [-0.3, 0.2, 0.5]])
    return dist.MultivariateNormal(a + torch.zeros(3), scale_tril=b * lower)


def log_normal(a, b):
    return dist.LogNormal(a + torch.zeros(3), b).to_event(1)


def gamma(a, b):
    return dist.Gamma(1 + a.exp() + torch.arange(3.0), b).to_event(1)


def uniform(a, b):
    return dist.Uniform(-a - torch.ones(3), b + 1).to_event(1)


def dirichlet(a, b):
    return dist.Dirichlet(torch.stack([1 + a, 2 + b, a + b + 1]))


def side_by_side(a, b):
    part = dist.MultivariateNormal(a + torch.zeros(2), b * torch.eye(2))
    return SideBySide([dist.Gamma(1 + b.unsqueeze(-1), 2.0).to_event(1), part])


def simplex_beside_normal(a, b):
    point = dist.Dirichlet(torch.stack([1 + a, 2 + b]))
    return SideBySide([point, dist.Normal(a.unsqueeze(-1), b).to_event(1)])


def partly_fixed(a, b):
    return PartlyFixed(dist.Normal(a.unsqueeze(-1), b).to_event(1), FIXED, DRAWN)


def partly_fixed_positive(a, b):
    return PartlyFixed(dist.Gamma(1 + a.unsqueeze(-1), b).to_event(1), FIXED, DRAWN)


def transformed(a, b):
    """What AutoSDE learns for a positive start."""
    return dist.TransformedDistribution(multivariate(a, b), [dist.transforms.ExpTransform()])


# A law of the guide, and those of the model whose support holds its draws.
PAIRS = [
    *[(q, p) for q in (normal, multivariate) for p in (normal, multivariate)],
    *[(q, p) for q in (log_normal, gamma, transformed) for p in (log_normal, gamma, transformed)],
    *[(q, p) for q in (log_normal, gamma, dirichlet) for p in (normal, multivariate)],
    *[(q, side_by_side) for q in (side_by_side, log_normal, transformed, gamma)],
    *[(dirichlet, dirichlet), (dirichlet, gamma), (uniform, uniform), (uniform, normal)],
    (simplex_beside_normal, simplex_beside_normal),
    *[(partly_fixed, partly_fixed), (partly_fixed_positive, partly_fixed)],
    *[(partly_fixed_positive, partly_fixed_positive), (partly_fixed, multivariate)],
]
every_pair = pytest.mark.parametrize(
    ("q", "p"), PAIRS, ids=[f"{q.__name__}-{p.__name__}" for q, p in PAIRS]
)


def of_guide():
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, 0.8)]


def of_model():
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.5, 1.2)]


def pair(q, p, theta, phi):
    prior = BrownianMotion(1.0, TIMES, p(*phi))
    return ControlledPath(prior, lambda t, z: torch.zeros_like(z), q(*theta)), prior


def parts(law, z0):
    """The density that counts, and where: that of what is drawn."""
    return (law.law, z0[..., 1:2]) if isinstance(law, PartlyFixed) else (law, z0)


@every_pair
def test_full_is_the_difference_of_densities(q, p):
    theta, phi = of_guide(), of_model()
    found = []
    for explicit in (False, True):
        torch.manual_seed(1)
        guide, prior = pair(q, p, theta, phi)
        z = guide.rsample((6,))
        z0 = z[:, 0]
        value = path_divergence(guide, prior, z, "full")
        if explicit:
            value = guide.initial.log_prob(z0) - prior.initial.log_prob(z0)
        found.append([value, *torch.autograd.grad(value.sum(), theta + phi, allow_unused=True)])
    assert torch.isfinite(found[0][0]).all()
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@every_pair
def test_kl_is_that_of_torch(q, p):
    guide, prior = pair(q, p, of_guide(), of_model())
    z = guide.rsample((6,))
    value = path_divergence(guide, prior, z, "kl")
    (law_q, z0), (law_p, _) = parts(guide.initial, z[:, 0]), parts(prior.initial, z[:, 0])
    if isinstance(prior.initial, PartlyFixed) != isinstance(guide.initial, PartlyFixed):
        law_q, z0 = guide.initial, z[:, 0]
    if isinstance(law_q, dist.Independent) and isinstance(law_q.base_dist, dist.Normal):
        loc, scale = law_q.base_dist.loc, law_q.base_dist.scale
        if isinstance(law_p, dist.MultivariateNormal):
            law_q = dist.MultivariateNormal(loc, scale_tril=scale.diag_embed())
    elif isinstance(law_q, dist.MultivariateNormal) and isinstance(law_p, dist.Independent):
        loc, scale = law_p.base_dist.loc, law_p.base_dist.scale
        law_p = dist.MultivariateNormal(loc, scale_tril=scale.diag_embed())
    try:
        expected = kl_divergence(law_q, law_p).expand(6)
    except NotImplementedError:
        expected = law_q.log_prob(z0) - law_p.log_prob(z0)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


@every_pair
def test_stl_has_the_value_of_full_and_its_mean_gradient(q, p):
    theta, phi = of_guide(), of_model()
    torch.manual_seed(2)
    n, means = 20_000, {}
    for estimator in ("full", "stl"):
        guide, prior = pair(q, p, theta, phi)
        torch.manual_seed(3)
        z = guide.rsample((20, n // 20))
        value = path_divergence(guide, prior, z, estimator)
        rows = [torch.autograd.grad(v.mean(), theta, retain_graph=True) for v in value]
        slopes = torch.stack([torch.stack(row) for row in rows])
        means[estimator] = value.detach(), slopes.mean(0), slopes.std(0) / 20**0.5
    (value, a, da), (other, b, db) = means["full"], means["stl"]
    torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-9)
    # Errors of 20 batches are Student's: 5.5 is one in 10,000. They vanish where q is flat.
    assert ((a - b).abs() <= 5.5 * (da**2 + db**2).sqrt() + 1e-9).all(), (a, b, da, db)


def test_stl_vanishes_at_the_prior():
    """The gradient of a guide that is the prior is zero, not only on average."""
    for law in (normal, multivariate, side_by_side, log_normal, partly_fixed, gamma, dirichlet):
        theta = of_guide()
        guide, prior = pair(law, law, theta, of_guide())
        value = path_divergence(guide, prior, guide.rsample((5,)), "stl")
        for slope in torch.autograd.grad(value.sum(), theta):
            assert slope.abs() < 1e-9, law.__name__


@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
def test_fixed_entries_that_differ_are_refused(estimator):
    prior = BrownianMotion(1.0, TIMES, partly_fixed(*of_model()))
    law = prior.initial.law
    zeros = lambda t, z: torch.zeros_like(z)  # noqa: E731
    for start in (
        PartlyFixed(law, FIXED + 0.1, DRAWN),
        PartlyFixed(law, FIXED, (True, False, False)),
        normal(*of_guide()),
        FIXED + torch.tensor([0.0, 5.0, 1e-3]),
    ):
        guide = ControlledPath(prior, zeros, start)
        with pytest.raises(ValueError, match="start at different points, where they are fixed"):
            path_divergence(guide, prior, guide.rsample(), estimator)
    # A point is a start, if it agrees where the prior is fixed, and has no entropy.
    guide = ControlledPath(prior, zeros, FIXED + torch.tensor([0.0, 5.0, 0.0]))
    value = path_divergence(guide, prior, guide.rsample(), estimator)
    torch.testing.assert_close(value, -law.log_prob(torch.tensor([5.0])))
