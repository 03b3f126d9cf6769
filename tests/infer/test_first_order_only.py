"""Derivatives of a path's divergence: "stl" has first ones only and says so; torch.func has all.

What is stopped in the martingale has no second derivative, and no forward mode: a number there
would be wrong. "full" and "kl" have both.
"""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.func import functional_call

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.infer.girsanov import path_divergence
from pyro_sde.nn import NeuralDrift

TIMES = torch.tensor([0.0, 0.1, 0.25, 0.6, 1.0], dtype=torch.float64)
START = torch.tensor([0.3, -0.2], dtype=torch.float64)


def leaves(*values):
    return [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values]


def network(contraction=False):
    control = MLPControl(2, (3,), times=TIMES, features=1, embedding=1, contraction=contraction)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return control


def normal(loc, scale):
    return dist.Normal(loc, scale).to_event(1)


def prior(start=START, **options):
    return OrnsteinUhlenbeck(1.3, 0.2, 0.7, TIMES, start, **options)


def mlp():
    control, p = network(), prior()
    return list(control.parameters()), lambda: (ControlledPath(p, control), p)


def mlp_with_contraction():
    control, p = network(True), prior()
    return list(control.parameters()), lambda: (ControlledPath(p, control, contraction=True), p)


def mlp_on_a_neural_drift():
    control, p = network(), SDEPath(NeuralDrift(2, (3,)).requires_grad_(False), 0.6, START, TIMES)
    return list(control.parameters()), lambda: (ControlledPath(p, control), p)


def function():
    a, p = leaves([0.8, -0.5])[0], prior()
    return [a], lambda: (ControlledPath(p, lambda t, z: torch.sin(a * z) + t), p)


def function_with_contraction():
    a, p = leaves([0.8, -0.5])[0], prior()

    def control(t, z):
        return torch.sin(a * z) + t, 0.3 * torch.cos(a * z)

    return [a], lambda: (ControlledPath(p, control, contraction=True), p)


def another_prior_of_the_same_law():
    """Model and guide built apart."""
    a = leaves([0.8, -0.5])[0]
    return [a], lambda: (ControlledPath(prior(), lambda t, z: torch.sin(a * z)), prior())


def two_laws():
    a = leaves([0.8, -0.5])[0]
    p = SDEPath(lambda t, z: -z, lambda t, z: 0.5 + 0.1 * z * z, START, TIMES)

    def guide():
        return SDEPath(lambda t, z: torch.sin(a * z), lambda t, z: 0.5 + 0.1 * z * z, START, TIMES)

    return [a], lambda: (guide(), p)


def normal_start():
    loc, scale = leaves([0.1, 0.2], [0.4, 0.6])
    p = BrownianMotion(0.7, TIMES, normal(torch.zeros(2), torch.ones(2)))

    def pair():
        return ControlledPath(p, lambda t, z: torch.zeros_like(z), normal(loc, scale)), p

    return [loc, scale], pair


def other_start():
    """Not a Normal: its density is stopped in another way."""
    loc, scale = leaves([0.1, 0.2], [0.4, 0.6])
    p = BrownianMotion(0.7, TIMES, normal(torch.zeros(2), torch.ones(2)))

    def pair():
        start = dist.StudentT(5.0, loc, scale).to_event(1)
        return ControlledPath(p, lambda t, z: torch.zeros_like(z), start), p

    return [loc, scale], pair


def transformed():
    a = leaves([0.8])[0]
    p = GeometricBrownianMotion(0.5, TIMES, 1.0)

    def pair():
        q = ControlledPath(p.base_dist, lambda t, z: torch.sin(a * z) + 1)
        return dist.TransformedDistribution(q, p.transforms), p

    return [a], pair


PAIRS = {
    f.__name__: f
    for f in (
        mlp,
        mlp_with_contraction,
        mlp_on_a_neural_drift,
        function,
        function_with_contraction,
        another_prior_of_the_same_law,
        two_laws,
        normal_start,
        other_start,
        transformed,
    )
}


def divergence(pair, estimator, again=False):
    q, p = pair()
    torch.manual_seed(1)
    z = q.rsample((3,))
    if again:
        z = z.clone()  # a path of which nobody knows how it was drawn
    return path_divergence(q, p, z, estimator).sum()


def products(loss, parameters, directions):
    """The product of the second derivatives with a direction."""
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    along = sum((g * v).sum() for g, v in zip(first, directions, strict=True))
    second = torch.autograd.grad(along, parameters, allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g for g, p in zip(second, parameters, strict=True)
    ]


def assert_refused(error):
    """It says what has no second derivative, and what to use."""
    for word in ("stl", "first", "full", "kl"):
        assert word in str(error.value), error.value


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_stl_has_first_derivatives_only(name, again):
    parameters, pair = PAIRS[name]()
    directions = [torch.randn_like(p) for p in parameters]
    with pytest.raises(RuntimeError) as error:
        products(divergence(pair, "stl", again), parameters, directions)
    assert_refused(error)


@pytest.mark.parametrize("name", PAIRS)
def test_stl_has_first_derivatives(name):
    """As often as one likes."""
    parameters, pair = PAIRS[name]()
    loss = divergence(pair, "stl")
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), first)
    assert max(g.abs().max() for g in first) > 1e-3


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("estimator", ["full", "kl"])
@pytest.mark.parametrize("name", PAIRS)
def test_full_and_kl_have_second_derivatives(name, estimator, again):
    """Against central differences of the gradient on the same noise."""
    parameters, pair = PAIRS[name]()
    directions = [torch.randn_like(p) for p in parameters]
    found = products(divergence(pair, estimator, again), parameters, directions)
    h, ends = 1e-5, []
    for sign in (1, -1):
        for p, v in zip(parameters, directions, strict=True):
            p.data.add_(sign * h * v)
        ends.append(torch.autograd.grad(divergence(pair, estimator, again), parameters))
        for p, v in zip(parameters, directions, strict=True):
            p.data.sub_(sign * h * v)
    for a, up, down in zip(found, *ends, strict=True):
        torch.testing.assert_close(a, (up - down) / (2 * h), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory", ["graph", "recompute"])
def test_in_an_elbo(memory):
    """The loss of TraceSDE_ELBO, whose default is "stl"."""

    def model():
        z = pyro.sample("z", prior(memory=memory))
        pyro.sample("y", dist.Cauchy(z[..., -1, 0], 0.2), obs=torch.tensor(0.7))

    guide = AutoSDE(model).setup()
    parameters = list(guide.parameters())
    for p in parameters:
        nn.init.normal_(p, std=0.3)
    directions = [torch.randn_like(p) for p in parameters]
    loss = TraceSDE_ELBO().differentiable_loss(model, guide)
    with pytest.raises(RuntimeError) as error:
        products(loss, parameters, directions)
    if memory == "graph":  # else it is said that nothing has second derivatives there
        assert_refused(error)


def build(theta, control=None, start=None):
    """A pair of laws of the same fixed start, all of it inside of the function."""
    p = prior(theta["start"] if start is None else start)
    p = OrnsteinUhlenbeck(theta["rate"], 0.2, 0.7, TIMES, p.initial)
    if control is None:
        return ControlledPath(p, lambda t, z: torch.sin(theta["a"] * z) + t), p
    weights = {k: v for k, v in theta.items() if k not in ("rate", "start", "a")}
    return ControlledPath(p, lambda t, z: functional_call(control, weights, (t, z))), p


def inputs(is_network):
    rate, start, a = leaves(1.3, [0.3, -0.2], [0.8, -0.5])
    control = network() if is_network else None
    weights = dict(control.named_parameters()) if is_network else {"a": a}
    return {"rate": rate, "start": start, **weights}, control


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("is_network", [False, True])
@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
def test_func_grad(estimator, is_network, is_learned):
    """torch.func.grad over building both laws, drawing, and comparing, is ordinary autograd."""
    theta, control = inputs(is_network)
    start = None if is_learned else START

    def f(theta):
        return divergence(lambda: build(theta, control, start), estimator)

    gradients = torch.autograd.grad(f(theta), list(theta.values()), allow_unused=True)
    found = torch.func.grad(f)({k: v.detach() for k, v in theta.items()})
    for (name, p), g in zip(theta.items(), gradients, strict=True):
        g = torch.zeros_like(p) if g is None else g
        torch.testing.assert_close(found[name], g, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
def test_func_grad_of_a_control_alone(estimator):
    """The prior is built outside; the control is an MLPControl as it stands."""
    control, p = network(), prior()
    theta = dict(control.named_parameters())

    def f(theta):
        q = ControlledPath(p, lambda t, z: functional_call(control, theta, (t, z)))
        return divergence(lambda: (q, p), estimator)

    gradients = torch.autograd.grad(f(theta), list(theta.values()))
    found = torch.func.grad(f)({k: v.detach() for k, v in theta.items()})
    for name, g in zip(theta, gradients, strict=True):
        torch.testing.assert_close(found[name], g, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
def test_func_grad_twice(estimator):
    a = torch.tensor([0.8, -0.5])
    p = prior()

    def f(a):
        q = ControlledPath(p, lambda t, z: torch.sin(a * z) + t)
        return divergence(lambda: (q, p), estimator)

    def second(a):
        return torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(a)

    if estimator == "stl":
        with pytest.raises(RuntimeError) as error:
            second(a)
        assert_refused(error)
        return
    b = a.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(b), b, create_graph=True)
    (expected,) = torch.autograd.grad(g.sum(), b)
    torch.testing.assert_close(second(a), expected, rtol=1e-9, atol=1e-9)


def test_another_start_is_refused_inside_of_func_too():
    def f(start):
        p, q = prior(start), ControlledPath(prior(start + 1), lambda t, z: torch.zeros_like(z))
        return divergence(lambda: (q, p), "kl")

    for grad in (torch.func.grad(f), f):
        with pytest.raises(ValueError, match="does not start there"):
            grad(START.clone())
