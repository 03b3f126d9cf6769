"""A subclass that overrides ``transition`` is that process: what its parent knows does not apply.

Drawn paths are tested by their residuals, (z' - mean) / scale with the mean and scale of the
subclass, which are standard normal: ten thousand a step, and five standard errors of their mean or
variance are a failure.
"""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_sde import AutoSDE, TraceSDE_ELBO, tolerance
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.interop.torchsde import sample

from ..cases import assert_same, loss_and_gradients, needs_compiler
from .overridden import (
    MEMORY,
    PATHS,
    A,
    Faster,
    Growth,
    N,
    S,
    assert_drawn,
    control_of,
    mixed,
    pushed,
)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", PATHS)
def test_alone(name, memory):
    path = PATHS[name](memory=memory)
    assert_drawn(path.transition, path.sample((N,)))
    assert_drawn(path.transition, path.expand((2,)).rsample((N // 2,)))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("name", PATHS)
def test_pushed_by_a_control(name, contraction, memory):
    path, control = PATHS[name](memory=memory), control_of(contraction)
    q = ControlledPath(path, control, contraction=contraction)
    with torch.no_grad():
        assert_drawn(pushed(path, control), q.sample((N,)))
    assert_drawn(pushed(path, control), q.rsample((N,)))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", PATHS)
def test_in_a_guide(name, memory):
    path, control = PATHS[name](memory=memory), control_of()

    def model():
        return pyro.sample("z", path)

    guide = AutoSDE(model, control=control).setup()
    with pyro.plate("particles", N, dim=-1):
        z = guide()["z"]
    assert_drawn(pushed(path, control), z)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", PATHS)
def test_full_is_the_elbo_of_pyro(name, memory):
    """Value and gradient, on the same draw."""
    path, control = PATHS[name](memory=memory), control_of()

    def model():
        z = pyro.sample("z", path)
        pyro.sample("y", dist.Cauchy(z[..., -1, 0], 0.2), obs=torch.tensor(0.7))

    def guide():
        pyro.module("control", control)
        pyro.sample("z", ControlledPath(path, control))

    full = TraceSDE_ELBO(path_estimator="full")
    assert_same(
        loss_and_gradients(full, model, guide), loss_and_gradients(Trace_ELBO(), model, guide)
    )


@needs_compiler
@pytest.mark.filterwarnings(
    "ignore", "error::RuntimeWarning", "ignore:Guards may run slower on Python 3.13.0"
)
@pytest.mark.parametrize("name", ["OU", "Brownian motion"])
def test_compiled(name):
    path, control = PATHS[name](), control_of()
    with torch.no_grad():
        z = ControlledPath(path, control, compile=True).sample((N,))
    assert_drawn(pushed(path, control), z)


class Solvable(Growth, OrnsteinUhlenbeck):
    """And it says so."""

    def coefficients(self, t, z):
        return A * z, S * z


COARSE = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
GROWTHS = {
    "OU": lambda: mixed(Growth, OrnsteinUhlenbeck)(2.0, 0.5, 0.3, COARSE, torch.ones(1)),
    "Brownian motion": lambda: mixed(Growth, BrownianMotion)(0.3, COARSE, torch.ones(1), -1.0),
    "SDEPath": lambda: mixed(Growth, SDEPath)(
        lambda t, z: -z, lambda t, z: 0.3, torch.ones(1), COARSE
    ),
}


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("push", [False, True])
def test_with_a_tolerance(name, push):
    """The solution on one Brownian path B is exp((a - s^2 / 2) t + s B), at strong order 1. A
    control of u = 1 adds s to a."""
    paths = [GROWTHS[name](), BrownianMotion(1.0, COARSE, torch.zeros(1))]
    if push:
        paths[0] = ControlledPath(paths[0], lambda t, z: torch.ones_like(z))
    values, counts = [], []
    for path in paths:
        pyro.set_rng_seed(0)  # which decides the noise, whatever the process
        with tolerance(rtol=1e-2, atol=1e-2) as solved:
            values.append(path.sample((64,)))
        counts.append(solved.solves[0].steps)
    z, b = values
    exact = ((A + S * push - S * S / 2) * COARSE.unsqueeze(-1) + S * b).exp()
    error = (z - exact).square().mean().sqrt()
    assert error < 0.1, error
    assert counts[0] < 300, counts  # hundreds to thousands at order 1/2


@pytest.mark.parametrize("method", ["euler", "srk", "midpoint"])
@pytest.mark.parametrize("name", PATHS)
def test_the_sde_of_the_parent_is_not_solved(name, method):
    path = PATHS[name]()
    own = ControlledPath(path, lambda t, z: torch.ones_like(z))
    up = dist.TransformedDistribution(path, [dist.transforms.ExpTransform()])
    for law in (path, own, up, path.expand((2,))):
        if isinstance(path, Faster):  # it says what SDE it is
            assert sample(law, (3,), method=method).isfinite().all()
        else:
            with pytest.raises(NotImplementedError, match="SDE"):
                sample(law, (3,), method=method)


@pytest.mark.parametrize("method", ["euler", "srk", "midpoint", "heun"])
def test_coefficients_of_its_own_are_solved(method):
    n, law = 1000, GeometricBrownianMotion(S, COARSE, 1.0, A)
    path = Solvable(2.0, 0.5, 0.3, COARSE, torch.ones(1))
    torch.manual_seed(0)
    with torch.no_grad():
        z = sample(path, (n,), method=method, dt=1 / 32)
    error = law.variance[1:].sqrt() / math.sqrt(n)
    # 4.5 standard errors, and a weak error of first order in steps of 1/32.
    assert ((z.mean(0) - law.mean)[1:].abs() < 4.5 * error + 0.03).all(), (z.mean(0), law.mean)


@pytest.mark.parametrize("name", PATHS)
def test_moments_of_the_parent_are_not_given(name):
    """Unless they are those of the subclass they are not known, as is usual in torch."""
    path = PATHS[name](memory="recompute")
    z = path.sample((N,))
    assert_drawn(path.transition, z)
    for moment, found in (("mean", z.mean(0)), ("variance", z.var(0))):
        try:
            said = getattr(path, moment)
        except NotImplementedError:
            continue
        torch.testing.assert_close(found, said, rtol=0.1, atol=0.1)
