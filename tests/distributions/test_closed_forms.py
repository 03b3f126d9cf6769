"""Processes against what is known of them in closed form, and against a peer."""

import math

import pyro.distributions as dist
import pytest
import torch
import torchsde
from torch.distributions.transforms import AffineTransform, ExpTransform, SigmoidTransform

from pyro_sde.distributions import (
    BrownianMotion,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.distributions.parameters import phi

IRREGULAR = torch.tensor([0.0, 0.013, 0.4, 0.41, 1.7, 5.0], dtype=torch.float64)


def ou_covariance(rate, scale, times):
    gap = (times.unsqueeze(-1) - times).abs()
    return scale**2 / (2 * rate) * torch.exp(-rate * gap)


@pytest.mark.parametrize("rate", [0.05, 1.0, 20.0])
def test_ou_is_the_gaussian_process(rate):
    """Joint density at irregular times: the MultivariateNormal of the kernel, to 1e-9."""
    path = OrnsteinUhlenbeck(rate, 0.3, 0.7, IRREGULAR)
    exact = dist.MultivariateNormal(torch.full((6,), 0.3), ou_covariance(rate, 0.7, IRREGULAR))
    value = path.sample((100,))
    torch.testing.assert_close(
        path.log_prob(value), exact.log_prob(value[..., 0]), rtol=1e-9, atol=1e-9
    )


def test_ou_sampled_covariance():
    """Every entry of the sampled mean and covariance within 5 standard errors."""
    n = 50_000
    path = OrnsteinUhlenbeck(0.9, -0.5, 1.1, IRREGULAR)
    cov = ou_covariance(0.9, 1.1, IRREGULAR)
    x = path.sample((n,))[..., 0]
    assert ((x.mean(0) + 0.5).abs() < 5 * (cov.diagonal() / n).sqrt()).all()
    var = cov.diagonal()
    error = ((cov.square() + var.unsqueeze(-1) * var) / n).sqrt()
    assert ((torch.cov(x.T) - cov).abs() < 5 * error).all()


@pytest.mark.parametrize("rate", [0.0, 1e-12, 1e-6])
def test_ou_of_vanishing_rate_is_brownian_motion(rate):
    """The difference is of order rate * T; the gradient through the rate stays finite."""
    rate = torch.tensor(rate, requires_grad=True)
    slow = OrnsteinUhlenbeck(rate, 0.0, 0.7, IRREGULAR, initial=torch.zeros(1))
    still = BrownianMotion(0.7, IRREGULAR, torch.zeros(1))
    value = still.sample((10,))
    torch.testing.assert_close(
        slow.log_prob(value), still.log_prob(value), rtol=0, atol=100 * rate.item() + 1e-12
    )
    torch.testing.assert_close(slow.variance, still.variance, rtol=1e-4, atol=1e-12)
    (gradient,) = torch.autograd.grad(slow.log_prob(value).sum(), rate)
    h = 1e-4
    ends = [
        OrnsteinUhlenbeck(rate.item() + s, 0.0, 0.7, IRREGULAR, initial=torch.zeros(1))
        .log_prob(value)
        .sum()
        for s in (-h, h)
    ]
    # Central differences: error of order h**2 times a third derivative of order 100.
    assert gradient.item() == pytest.approx(((ends[1] - ends[0]) / (2 * h)).item(), abs=1e-4)


def test_ou_is_stable_on_a_coarse_grid():
    """rate * dt = 50, where Euler-Maruyama explodes: the stationary law at every time."""
    path = OrnsteinUhlenbeck(50.0, 2.0, 3.0, torch.arange(200.0))
    x = path.sample((2000,))
    n = x.numel()
    var = 9.0 / 100.0
    assert abs(x.mean() - 2.0) < 5 * math.sqrt(var / n)
    assert abs(x.var() - var) < 5 * var * math.sqrt(2 / n)


def test_gbm_has_lognormal_moments():
    n = 100_000
    path = GeometricBrownianMotion(0.3, torch.linspace(0.0, 2.0, 5), 2.0, drift=0.1)
    t = path.base_dist.times
    mean = 2 * torch.exp(0.1 * t)
    var = mean.square() * torch.expm1(0.09 * t)
    torch.testing.assert_close(path.mean[:, 0], mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(path.variance[:, 0], var, rtol=1e-12, atol=0)
    x = path.sample((n,))[..., 0]
    assert (x > 0).all()
    assert ((x.mean(0) - mean).abs() <= 5 * (var / n).sqrt() + 1e-12).all()
    # The variance of a sample variance, from the lognormal's fourth central moment.
    w = torch.exp(0.09 * t)
    kurtosis = w**4 + 2 * w**3 + 3 * w**2 - 3
    assert ((x.var(0) - var).abs() <= 5 * var * ((kurtosis - 1) / n).sqrt() + 1e-12).all()
    final = dist.LogNormal(math.log(2) + (0.1 - 0.045) * 2, 0.3 * math.sqrt(2))
    edges = torch.tensor([1.5, 2.0, 2.5, 3.0])
    p = final.cdf(edges)
    assert ((x[:, -1:] < edges).double().mean(0) - p).abs().le(5 * (p * (1 - p) / n).sqrt()).all()


def test_gbm_with_a_random_start():
    start = dist.LogNormal(torch.zeros(2), 0.5).to_event(1)
    path = GeometricBrownianMotion(0.3, torch.linspace(0.0, 1.0, 3), start, drift=-0.2)
    n = 100_000
    x = path.sample((n,))
    assert x.shape == (n, 3, 2)
    assert ((x.mean(0) - path.mean).abs() < 5 * (path.variance / n).sqrt()).all()
    assert (x.var(0) / path.variance - 1).abs().max() < 0.1
    assert path.expand((4,)).sample().shape == (4, 3, 2)
    assert path.expand((4,)).mean.shape == (4, 3, 2)


@pytest.mark.parametrize(
    "transform", [ExpTransform(), SigmoidTransform(), AffineTransform(1.0, -2.0)]
)
def test_transformed_path_density(transform):
    """A path under a bijection: the base density and the Jacobian of every entry."""
    base = OrnsteinUhlenbeck(1.0, 0.0, 0.5, IRREGULAR)
    path = dist.TransformedDistribution(base, [transform])
    x = path.sample((3,))
    z = transform.inv(x)
    jacobian = transform.log_abs_det_jacobian(z, x).sum((-1, -2))
    torch.testing.assert_close(path.log_prob(x), base.log_prob(z) - jacobian)


class _GivenNoise(torchsde.BaseBrownian):
    """The Brownian increments of a path of ours, for torchsde to use."""

    def __init__(self, times, increments):
        super().__init__()
        self.times, self.increments = times.tolist(), increments

    def __call__(self, ta, tb=None, return_U=False, return_A=False):
        i = min(range(len(self.times)), key=lambda k: abs(self.times[k] - float(ta)))
        return self.increments[i]

    dtype = property(lambda self: self.increments.dtype)
    device = property(lambda self: self.increments.device)
    shape = property(lambda self: self.increments.shape[1:])
    levy_area_approximation = "none"

    def __repr__(self):
        return "given"


def test_sde_path_equals_torchsde_euler():
    """The same Euler-Maruyama steps as torchsde's, on the same noise."""

    class Peer(torch.nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def f(self, t, z):
            return torch.sin(z) - t

        def g(self, t, z):
            return 0.5 + 0.1 * z.square()

    sde, times = Peer(), torch.linspace(0.0, 1.0, 9)
    path = SDEPath(sde.f, sde.g, torch.zeros(3, 2), times)
    value = path.sample()
    z = value.movedim(-2, 0)
    increments = torch.stack(
        [
            (z[i + 1] - z[i] - sde.f(times[i], z[i]) * 0.125) / sde.g(times[i], z[i])
            for i in range(8)
        ]
    )
    theirs = torchsde.sdeint(
        sde, z[0], times, bm=_GivenNoise(times, increments), dt=0.125, method="euler"
    )
    torch.testing.assert_close(theirs, z, rtol=1e-9, atol=1e-9)
    # and that noise is Brownian: 48 increments of variance dt.
    assert abs(increments.square().mean().item() / 0.125 - 1) < 5 * math.sqrt(2 / 48)


def test_steps_follow_a_grid_that_is_written_to():
    """What is remembered of a grid is forgotten when it changes, and checked anew."""
    times = torch.linspace(0, 1, 5)
    before = OrnsteinUhlenbeck(1.0, 0.3, 0.5, times).linear_steps()
    times *= 2
    for rate, loc, scale in ((1.0, 0.3, 0.5), (2.0, 0.3, 0.5)):
        found = OrnsteinUhlenbeck(rate, loc, scale, times).linear_steps()
        fresh = OrnsteinUhlenbeck(rate, loc, scale, times.clone()).linear_steps()
        for a, b, c in zip(found[:3], fresh[:3], before[:3], strict=True):
            assert torch.equal(a, b) and not torch.equal(a, c)
    wide = OrnsteinUhlenbeck(2.0, 0.3, 0.5, times, torch.zeros(2, 3, 1))
    assert [a.dim() for a in wide.linear_steps()[:3]] == [4, 4, 4]  # steps, batch, dimension
    assert [a.dim() for a in OrnsteinUhlenbeck(2.0, 0.3, 0.5, times).linear_steps()[:3]] == [
        2,
        2,
        2,
    ]
    times[2] = 9.0
    with pytest.raises(ValueError, match="times must increase strictly"):
        OrnsteinUhlenbeck(1.0, 0.3, 0.5, times)


def test_a_constant_diffusion_is_that_of_a_function():
    times = torch.tensor([0.0, 0.1, 0.4])
    drift = lambda t, z: -z  # noqa: E731
    z = torch.randn(4, 2, 3, 3)
    for g in (0.5, 2, torch.tensor(0.5), torch.tensor([0.5, 1.0, 2.0]), torch.rand(2, 3)):
        path = SDEPath(drift, g, torch.zeros(3), times)
        assert path.batch_shape == torch.as_tensor(g).shape[:-1]
        same = SDEPath(
            drift, lambda t, z, g=g: g, torch.zeros(3).expand(*path.batch_shape, 3), times
        )
        z[..., 0, :] = 0.0
        torch.testing.assert_close(path.log_prob(z), same.log_prob(z))
        found = (x.coefficients(times[0], z[..., 1, :]) for x in (path, same))
        torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="scale must be positive: found -1"):
        SDEPath(drift, -1.0, torch.zeros(3), times)


def test_the_quotient_that_is_smooth_through_zero():
    """Value and derivative of (1 - exp(-x)) / x, against 20 terms of their series."""
    for x in (0.0, 1e-9, 3e-3, -3e-3, 9.99e-3, -9.99e-3, 0.0101, 0.5, -0.5):
        exact = sum((-x) ** k / math.factorial(k + 1) for k in range(20))
        slope = -sum(k * (-x) ** (k - 1) / math.factorial(k + 1) for k in range(1, 20))
        point = torch.tensor(x, requires_grad=True)
        value = phi(point)
        assert value.item() == pytest.approx(exact, rel=4e-16)
        # Above 1e-2 the derivative of the quotient loses two digits.
        (found,) = torch.autograd.grad(value, point)
        assert found.item() == pytest.approx(slope, rel=1e-13)
