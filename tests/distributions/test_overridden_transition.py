"""A subclass that overrides ``transition`` is that process: what its parent knows does not apply.

Drawn paths are tested by their residuals, (z' - mean) / scale with the mean and scale of the
subclass, which are standard normal: ten thousand a step, and five standard errors of their mean or
variance are a failure.
"""

import math
import shutil

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO, tolerance
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    PathDistribution,
    SDEPath,
)
from pyro_sde.infer.girsanov import path_divergence
from pyro_sde.nn import NeuralDrift
from pyro_sde.solvers.torchsde import sample

from ..cases import Net, assert_same, loss_and_gradients

TIMES = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.6, 1.0], dtype=torch.float64)
START = torch.tensor([0.3, -0.2], dtype=torch.float64)
A, S = 0.5, 0.8
N = 5000
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))), reason="there is no C++ compiler"
)


class Bend:
    """Another mean, and noise that depends on the state: a mixin."""

    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * scale


class Growth:
    """dz = a z dt + s z dB, whatever process this is mixed into."""

    def transition(self, t, dt, z):
        return z + A * z * dt, S * z * dt.sqrt()


class Damp:
    """A pull to the origin besides; the noise is as before, for the KL to be finite."""

    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean - 3 * z * dt, scale


def mixed(mixin, parent):
    return type(f"Mixed{parent.__name__}", (mixin, parent), {})


class OwnOU(OrnsteinUhlenbeck):
    """The same as with the mixin, in the class itself."""

    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * scale


class OwnMotion(BrownianMotion):
    def transition(self, t, dt, z):
        return z + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * dt.sqrt()


class OwnSDE(SDEPath):
    def transition(self, t, dt, z):
        return z + 2 * torch.sin(3 * z) * dt, (1.5 + 0.5 * torch.cos(z)) * dt.sqrt()


class Heir(OwnOU):
    """Its transition is its parent's, and so not its grandparent's."""


class Decay(PathDistribution):
    """A process with all that Contributing asks for."""

    def transition(self, t, dt, z):
        return (1 - dt) * z, 0.5 * dt.sqrt().expand_as(z)

    def coefficients(self, t, z):
        return -z, torch.full_like(z, 0.5)

    def kernel(self):
        decay, shift, scale = self.affine()
        return lambda i, z: (shift[i] + decay[i] * z, scale[i].expand_as(z))

    def affine(self):
        _, dt = self.step_times(0)
        return 1 - dt, torch.zeros_like(dt), 0.5 * dt.sqrt()


class Faster(Decay):
    """It says what SDE it is, too."""

    def transition(self, t, dt, z):
        return (1 - 2 * dt) * z, 0.9 * dt.sqrt().expand_as(z)

    def coefficients(self, t, z):
        return -2 * z, torch.full_like(z, 0.9)


def neural_drift():
    torch.manual_seed(5)
    return NeuralDrift(2, (4,), time=True).requires_grad_(False)


MixedOU, MixedMotion, MixedSDE = (
    mixed(Bend, c) for c in (OrnsteinUhlenbeck, BrownianMotion, SDEPath)
)
PATHS = {
    "OU": lambda **m: OwnOU(1.3, 0.2, 0.7, TIMES, START, **m),
    "OU, mixin": lambda **m: MixedOU(1.3, 0.2, 0.7, TIMES, START, **m),
    "OU, heir": lambda **m: Heir(1.3, 0.2, 0.7, TIMES, START, **m),
    "OU, stationary start": lambda **m: OwnOU(1.3, torch.zeros(2), 0.7, TIMES, **m),
    "Brownian motion": lambda **m: OwnMotion(0.7, TIMES, START, 0.4, **m),
    "Brownian motion, mixin": lambda **m: MixedMotion(0.7, TIMES, START, 0.4, **m),
    "SDEPath": lambda **m: OwnSDE(lambda t, z: -z, lambda t, z: 0.5 + z * z, START, TIMES, **m),
    "SDEPath, network": lambda **m: OwnSDE(neural_drift(), 0.6, START, TIMES, **m),
    "SDEPath, mixin": lambda **m: MixedSDE(neural_drift(), 0.6, START, TIMES, **m),
    "own process": lambda **m: mixed(Bend, Decay)(TIMES, START, **m),
    "own process, SDE": lambda **m: Faster(TIMES, START, **m),
}
MEMORY = ("graph", "recompute")


def control_of(contraction=False):
    """An MLPControl, not at zero."""
    torch.manual_seed(1)
    control = MLPControl(2, (4,), times=TIMES, features=2, embedding=2, contraction=contraction)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return control


def assert_drawn(transition, z):
    """That ``z`` was drawn by this transition."""
    z = z.detach().movedim(-2, 0)
    t, dt = (x.reshape((-1,) + (1,) * (z.dim() - 1)) for x in (TIMES[:-1], TIMES.diff()))
    with torch.no_grad():
        mean, scale = transition(t, dt, z[:-1])
    for r in ((z[1:] - mean) / scale).unbind(0):  # of each step
        n = r.numel()
        assert abs(r.mean()) < 5 / math.sqrt(n), r.mean()
        assert abs(r.var() - 1) < 5 * math.sqrt(2 / n), r.var()


def pushed(path, control):
    """The transition of a path that a control pushes, from that of the path."""

    def transition(t, dt, z):
        mean, scale = path.transition(t, dt, z)
        out = control(t, z)
        u, log_c = out if isinstance(out, tuple) else (out, torch.zeros_like(out))
        return mean + scale * dt.sqrt() * u, scale * log_c.exp()

    return transition


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
@pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")
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


MixedDamped = mixed(Damp, ControlledPath)


class Damped(ControlledPath):
    def transition(self, t, dt, z):
        mean, scale = super().transition(t, dt, z)
        return mean - 3 * z * dt, scale


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
