"""Derivatives in forward mode, at a rate of zero too; and what validate_args decides.

Forward mode (torch.func.jvp, torch.autograd.forward_ad) is compared with reverse mode, and both
with a central difference in float64, whose error at steps of 1e-5 is below 1e-7.
"""

import pytest
import torch
from pyro.distributions import Normal
from torch.autograd import forward_ad
from torch.distributions import Distribution

from pyro_sde import MLPControl
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.infer.girsanov import path_divergence

# torch's own forward mode needs it, when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

TIMES = torch.tensor([0.0, 0.1, 0.25, 0.6, 1.0], dtype=torch.float64)
START = torch.tensor([0.5], dtype=torch.float64)
Z = torch.tensor([[0.5], [0.7], [0.1], [-0.4], [0.3]], dtype=torch.float64)
RATES = (0.0, 1e-9, 1e-3, 1.0, -0.5)


def process(rate, **options):
    return OrnsteinUhlenbeck(rate, 0.2, 0.7, TIMES, START, **options)


def wave(t, z):
    return torch.sin(2 * z) + t


def network():
    torch.manual_seed(2)
    control = MLPControl(1, (3,), times=TIMES, features=1, embedding=1)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return control


def drawn(rate, control=None, **options):
    path = process(rate, **options)
    if control is not None:
        path = ControlledPath(path, control)
    torch.manual_seed(1)
    return path.rsample((3,)).square().sum()


def divergence(rate, estimator, control=wave):
    p = process(rate)
    q = ControlledPath(p, control)
    torch.manual_seed(1)
    return path_divergence(q, p, q.rsample((3,)), estimator).sum()


FUNCTIONS = {
    "log_prob": lambda r: process(r).log_prob(Z),
    "variance": lambda r: process(r).variance.sum(),
    "variance, random start": lambda r: OrnsteinUhlenbeck(
        r, 0.2, 0.7, TIMES, Normal(0.0, 1.0)
    ).variance.sum(),
    "mean": lambda r: process(r).mean.sum(),
    "transition": lambda r: process(r).transition(TIMES[:1], TIMES[1:2], Z)[1].sum(),
    "rsample": drawn,
    "rsample, pushed": lambda r: drawn(r, wave),
    "log_prob, pushed": lambda r: ControlledPath(process(r), wave).log_prob(Z),
    "of the grid": lambda h: OrnsteinUhlenbeck(
        torch.zeros(()), 0.2, 0.7, TIMES * (1 + 0.1 * h), START
    ).log_prob(Z),
}


def one(x):
    return torch.ones_like(x)


def func_jvp(f, x):
    return torch.func.jvp(f, (x,), (one(x),))[1]


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, one(x)))).tangent


def dual_without_graph(f, x):
    with torch.no_grad():
        return dual(f, x)


FORWARD = (func_jvp, dual, dual_without_graph)


def reverse(f, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def twice_reverse(f, x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(g, x)[0]


def difference(f, x, h=1e-5):
    return (f(x + h) - f(x - h)) / (2 * h)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode(name, rate):
    f, x = FUNCTIONS[name], torch.tensor(rate)
    expected = reverse(f, x)
    torch.testing.assert_close(expected, difference(f, x), rtol=1e-6, atol=1e-6)
    for forward in FORWARD:
        torch.testing.assert_close(forward(f, x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name, rate):
    """Forward over forward, forward over reverse, and reverse over forward."""
    f, x = FUNCTIONS[name], torch.tensor(rate)
    expected = twice_reverse(f, x)
    slope = difference(lambda y: reverse(f, y), x)
    torch.testing.assert_close(expected, slope, rtol=1e-6, atol=1e-6)
    for found in (
        func_jvp(lambda y: func_jvp(f, y), x),
        func_jvp(torch.func.grad(f), x),
        torch.func.grad(lambda y: func_jvp(f, y))(x),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("forward", FORWARD)
def test_paths_that_are_one_operation_or_keep_little(forward, rate):
    """They agree with reverse mode, or say that they have no forward mode."""
    x = torch.tensor(rate)
    for f in (
        lambda r: drawn(r, network()),
        lambda r: drawn(r, memory="recompute"),
        lambda r: drawn(r, network(), memory="recompute"),
    ):
        try:
            found = forward(f, x)
        except (NotImplementedError, RuntimeError):
            continue
        torch.testing.assert_close(found, reverse(f, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
@pytest.mark.parametrize("forward", FORWARD)
def test_divergences(forward, estimator, rate):
    """Of "stl", which stops the gradient in reverse mode, an error that names it will do."""

    def f(r):
        return divergence(r, estimator)

    x = torch.tensor(rate)
    try:
        found = forward(f, x)
    except RuntimeError as e:
        assert estimator == "stl" and "stl" in str(e), e
        return
    torch.testing.assert_close(found, reverse(f, x), rtol=1e-9, atol=1e-9)


@pytest.fixture
def restore_validation():
    yield
    Distribution.set_default_validate_args(True)


def sde(scale, **options):
    return SDEPath(lambda t, z: -z, scale, START, TIMES, **options)


MAKE = {
    "OU": lambda s, **o: OrnsteinUhlenbeck(1.0, 0.0, s, TIMES, START, **o),
    "OU, stationary start": lambda s, **o: OrnsteinUhlenbeck(1.0, 0.0, s, TIMES, **o),
    "Brownian motion": lambda s, **o: BrownianMotion(s, TIMES, START, **o),
    "SDEPath": sde,
    "geometric": lambda s, **o: GeometricBrownianMotion(s, TIMES, 1.0, **o),
}
BAD = {
    "negative": -0.5,
    "zero": 0.0,
    "infinite": float("inf"),
    "NaN": float("nan"),
    "a tensor": torch.tensor([-0.5], dtype=torch.float64),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", MAKE)
def test_validate_args_is_false(name, bad):
    """Nothing is checked, as everywhere in torch: NUTS, for one, takes it for a wall."""
    path = MAKE[name](BAD[bad], validate_args=False)
    assert path.event_shape == (5, 1)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", MAKE)
def test_validate_args_is_true(name, bad, restore_validation):
    """Even where the default is not to check."""
    for default in (True, False):
        Distribution.set_default_validate_args(default)
        with pytest.raises(ValueError, match=r"scale"):
            MAKE[name](BAD[bad], validate_args=True)
    MAKE[name](BAD[bad])  # the default


@pytest.mark.parametrize("name", MAKE)
def test_draws_and_densities_are_checked_as_the_process_is(name, restore_validation):
    """A path of another start has no density: an error, or minus infinity."""
    value = torch.zeros(5, 1) + 3
    for default in (True, False):
        Distribution.set_default_validate_args(default)
        if name == "OU, stationary start":
            continue  # any start has a density
        assert MAKE[name](0.5, validate_args=False).log_prob(value) == -float("inf")
        with pytest.raises(ValueError, match="starts"):
            MAKE[name](0.5, validate_args=True).log_prob(value)
