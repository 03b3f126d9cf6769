"""A subclass of ControlledPath that overrides ``transition`` is that process."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_sde import TraceSDE_ELBO, tolerance
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.infer.girsanov import path_divergence
from pyro_sde.interop.torchsde import sample

from ..cases import Net, assert_same, loss_and_gradients
from .overridden import (
    MEMORY,
    START,
    TIMES,
    Damp,
    N,
    assert_drawn,
    control_of,
    mixed,
    neural_drift,
    pushed,
)


class Damped(ControlledPath):
    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean - 3 * z * dt, scale


MixedDamped = mixed(Damp, ControlledPath)
COARSE = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)


def controls(is_network, contraction=False):
    """An MLPControl, or a function; and its parameters."""
    if is_network:
        net = control_of(contraction)
        return net, net
    net = Net(2, 2 if contraction else 1)
    return net, (lambda t, z: tuple(net(t, z).chunk(2, -1))) if contraction else net.forward


PRIORS = {
    "OU": lambda memory: OrnsteinUhlenbeck(1.3, 0.2, 0.7, TIMES, START, memory),
    "SDEPath": lambda memory: SDEPath(neural_drift(), 0.6, START, TIMES, memory),
}


@pytest.mark.parametrize("kind", [Damped, MixedDamped])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("is_network", [False, True])
def test_a_controlled_path(kind, memory, prior, contraction, is_network):
    """It draws from its own transition, and "full" is the ELBO of Pyro on the same draw, whether
    model and guide share the prior or not."""
    net, control = controls(is_network, contraction)
    p = PRIORS[prior](memory)

    def expected(t, dt, z):
        mean, scale = pushed(p, control)(t, dt, z)
        return mean - 3 * z * dt, scale

    q = kind(p, control, contraction=contraction)
    with torch.no_grad():
        assert_drawn(expected, q.sample((N,)))
    assert_drawn(expected, q.rsample((N,)))

    def model():
        z = pyro.sample("z", p)
        pyro.sample("y", dist.Cauchy(z[..., -1, 0], 0.2), obs=torch.tensor(0.7))

    for own in (p, PRIORS[prior](memory)):

        def guide(own=own):
            pyro.module("control", net)
            pyro.sample("z", kind(own, control, contraction=contraction))

        full = TraceSDE_ELBO(path_estimator="full")
        assert_same(
            loss_and_gradients(full, model, guide), loss_and_gradients(Trace_ELBO(), model, guide)
        )
    with pytest.raises((NotImplementedError, ValueError), match="SDE"):
        sample(q, (3,), method="euler")


@pytest.mark.parametrize("estimator", ["full", "kl", "stl"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("is_network", [False, True])
def test_estimators_of_a_controlled_path(is_network, memory, estimator):
    """On noise of 0.6 the pull of 3 z is a control of 5 z: loss and gradient are those of that."""
    p = PRIORS["SDEPath"](memory)
    net, control = controls(is_network)
    results = []
    for q in (Damped(p, control), ControlledPath(p, lambda t, z: control(t, z) - 5 * z)):
        torch.manual_seed(2)
        loss = path_divergence(q, p, q.rsample((3,)), estimator).sum()
        results.append((loss, *torch.autograd.grad(loss, [*net.parameters()])))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [Damped, MixedDamped])
def test_a_controlled_path_with_a_tolerance(kind):
    """A drift of u - 3 z and fixed noise: the law is that of an Ornstein-Uhlenbeck process."""
    motion = BrownianMotion(0.7, COARSE, torch.ones(1))
    path = kind(motion, lambda t, z: torch.ones_like(z))
    law = OrnsteinUhlenbeck(3.0, 0.7 / 3, 0.7, COARSE, torch.ones(1))
    n = 4000
    pyro.set_rng_seed(0)
    with tolerance(rtol=1e-2, atol=1e-2):
        z = path.sample((n,))
    error = law.variance[1:].sqrt() / math.sqrt(n)
    assert ((z.mean(0) - law.mean)[1:].abs() < 4.5 * error + 0.01).all()
    assert ((z.var(0)[1:] / law.variance[1:] - 1).abs() < 4.5 * math.sqrt(2 / n) + 0.02).all()
