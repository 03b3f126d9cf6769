"""A path that is one operation equals the same path step by step."""

import itertools

import pytest
import torch
from pyro.distributions import Normal
from torch import nn

from pyro_sde import MLPControl
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    OrnsteinUhlenbeck,
    SDEPath,
    at_once,
)
from pyro_sde.distributions.fused import FusedDraw
from pyro_sde.distributions.path import Draw
from pyro_sde.infer.girsanov import path_divergence
from pyro_sde.nn import NeuralDiffusion, NeuralDrift

GRID = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.6, 1.0], dtype=torch.float64)
ESTIMATORS = ("kl", "full", "stl")


class ByStep:
    """The same control, of which a path does not know what it is made of."""

    def __init__(self, control):
        self.control = control

    def __call__(self, *args):
        return self.control(*args)

    def on_grid(self, t):
        steps = self.control.on_grid(t)
        return lambda i, z: steps(i, z)


class WithContext:
    def __init__(self, control, context):
        self.control, self.context = control, context

    def __call__(self, t, z):
        return self.control(t, z, self.context)

    def on_grid(self, t):
        return self.control.on_grid(t, self.context)


def leaf(*shape):
    return (0.5 + torch.rand(shape)).requires_grad_()


def control_of(dim, **options):
    control = MLPControl(dim, options.pop("hidden", (5, 6)), times=GRID, **options)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return control


def ou(dim, batch=(), times=GRID):
    rate, loc, scale, start = leaf(*batch, 1), leaf(dim), leaf(*batch, dim), leaf(dim)
    return [rate, loc, scale, start], lambda: OrnsteinUhlenbeck(rate, loc, scale, times, start)


def ou_random_start(dim, batch=(), times=GRID):
    rate, loc, scale = leaf(), leaf(), leaf(dim)
    return [rate, loc, scale], lambda: OrnsteinUhlenbeck(rate, loc, scale, times).expand(batch)


def brownian(dim, batch=(), times=GRID):
    scale, drift, mean = leaf(), leaf(*batch, dim), leaf(dim)
    return [scale, drift, mean], lambda: BrownianMotion(
        scale, times, Normal(mean, 0.3).to_event(1), drift
    )


def neural(dim, batch=(), times=GRID, hidden=(4, 3), time=True, units=nn.Softplus):
    """A drift that is learned, with noise that is learned, the same in all states."""
    drift = NeuralDrift(dim, hidden, time=time, activation=units)
    diffusion, start = NeuralDiffusion(dim, 0), leaf(*batch, dim)
    inputs = [*drift.parameters(), *diffusion.parameters(), start]
    return inputs, lambda: SDEPath(drift, diffusion, start, times)


def neural_and_constant(dim, batch=(), times=GRID):
    drift, scale, start = NeuralDrift(dim, (4,), activation=nn.Tanh), leaf(*batch, dim), leaf(dim)
    return [*drift.parameters(), scale, start], lambda: SDEPath(drift, scale, start, times)


def loss_of(prior, control, contraction, estimator, shape):
    p = prior()
    q = ControlledPath(p, control, contraction=contraction)
    torch.manual_seed(3)
    z = q.rsample(shape)
    term = path_divergence(q, p, z, estimator)
    weights = torch.linspace(1, 2, z[0].numel() if z.dim() > 2 else z.numel())
    return q, (z.sin() * weights.reshape(z.shape[-2:] if z.dim() < 3 else z.shape[1:])), term


def check(prior, inputs, control, contraction, estimator, shape=()):
    found = []
    for c, kind in ((control, FusedDraw), (ByStep(control), Draw)):
        q, z, term = loss_of(prior, c, contraction, estimator, shape)
        assert isinstance(q._origin.last, kind)
        loss = z.sum() + (term * torch.linspace(1, 3, term.numel()).reshape(term.shape)).sum()
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        found.append([z, term, *(torch.zeros(()) if g is None else g for g in grads)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert all(g.abs().max() > 0 for g in found[0][2:])


@pytest.mark.parametrize("process", [ou, ou_random_start, brownian, neural, neural_and_constant])
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dim", [1, 3])
def test_equals_its_steps(process, contraction, estimator, dim):
    control = control_of(dim, contraction=contraction)
    for shape, batch in itertools.product([(), (4,), (2, 3)], [(), (2,)]):
        parameters, prior = process(dim, batch)
        inputs = [*parameters, *control.parameters()]
        check(prior, inputs, control, contraction, estimator, shape)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("hidden", [(4,), (3, 2, 4)])
@pytest.mark.parametrize("block, path", [(1, 10**6), (30, 10**6), (10**6, 1), (10**6, 12)])
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("process", [ou, neural])
def test_any_depth_and_any_block(estimator, hidden, block, path, contraction, process, monkeypatch):
    monkeypatch.setattr(at_once, "BLOCK", block)
    monkeypatch.setattr(at_once, "PATH", path)
    monkeypatch.setattr(at_once, "SMALL", path)
    for dim in (1, 2, 5):
        control = control_of(dim, hidden=hidden, contraction=contraction)
        parameters, prior = process(dim)
        check(prior, [*parameters, *control.parameters()], control, contraction, estimator, (3,))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("process", [ou, neural, neural_and_constant])
def test_a_grid_for_each_series_and_gradients_by_the_times(estimator, process):
    times = torch.stack([GRID, 1.5 * GRID]).requires_grad_()
    control = control_of(2)
    parameters, prior = process(2, (2,), times)
    for shape in ((), (3,)):
        inputs = [times, *parameters, *control.parameters()]
        check(prior, inputs, control, None, estimator, shape)


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize(
    "size, shape",
    [((4,), ()), ((2, 4), ()), ((2, 4), (3,)), ((5, 2, 4), ()), ((5, 1, 2, 4), (3,))],
)
@pytest.mark.parametrize("times", [GRID, torch.stack([GRID, 1.5 * GRID])])
@pytest.mark.parametrize("process", [ou, neural])
def test_a_context_of_each_element_and_of_time(contraction, size, shape, times, process):
    """Of shape (5, ...) it differs from step to step."""
    control = control_of(2, context=4, contraction=contraction)
    context = leaf(*size)
    parameters, prior = process(2, (2,), times)
    inputs = [context, *parameters, *control.parameters()]
    check(prior, inputs, WithContext(control, context), contraction, "stl", shape)


@pytest.mark.parametrize("process", [ou, neural])
def test_gradients_by_some_inputs_only(process):
    control = control_of(3)
    parameters, prior = process(3)
    for needed in (parameters[:1], parameters[3:], [control.last.weight], [control.embedding]):
        for x in (*parameters, *control.parameters()):
            x.requires_grad_(any(x is y for y in needed))
        for estimator in ESTIMATORS:
            check(prior, needed, control, None, estimator, (2,))


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("dim", [2, 7])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_gradients(contraction, dim, estimator):
    """No units are kept then."""
    control = control_of(dim, contraction=contraction)
    _, prior = ou(dim)
    with torch.no_grad():
        found = [
            loss_of(prior, c, contraction, estimator, (4,))[1:] for c in (control, ByStep(control))
        ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_a_loss_of_the_divergence_alone(contraction, estimator, dim):
    """Then nothing but the control reads the states."""
    control = control_of(dim, contraction=contraction)
    _, prior = ou(dim)
    found = []
    for c in (control, ByStep(control)):
        term = loss_of(prior, c, contraction, estimator, (3,))[2]
        found.append(torch.autograd.grad(term.sum(), list(control.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("hidden, paths", [((2,), 2), ((4, 9), 3)])
def test_many_outputs_of_few_units_are_not_kept(hidden, paths):
    """Of a path's size are states and noise; outputs, if many units make them."""
    dim, saved = 50, []

    def pack(x):
        saved.append(x.untyped_storage())
        return x

    control = control_of(dim, hidden=hidden)
    prior = OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID, torch.zeros(dim))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q = ControlledPath(prior, control)
        loss = path_divergence(q, prior, q.rsample((3,)), "stl").sum()
    assert loss.requires_grad
    sizes = {s.data_ptr(): s.nbytes() // 8 for s in saved}
    assert sum(n >= 3 * dim * (len(GRID) - 1) for n in sizes.values()) == paths


def test_a_backward_pass_leaves_what_it_needs_for_another():
    for dim in (1, 2, 7):
        control = control_of(dim)
        parameters, prior = ou(dim)
        _, z, term = loss_of(prior, control, None, "stl", (3,))
        loss, inputs = z.sum() + term.sum(), [*parameters, *control.parameters()]
        once, twice = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
        for a, b in zip(once, twice, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("estimator", ["kl", "full"])
@pytest.mark.parametrize("process", [ou, neural])
def test_gradients_of_gradients(dim, contraction, estimator, process):
    control = control_of(dim, contraction=contraction)
    parameters, prior = process(dim)
    inputs = [*parameters, *control.parameters()]
    found = []
    for c in (control, ByStep(control)):
        _, z, term = loss_of(prior, c, contraction, estimator, (2,))
        first = torch.autograd.grad(z.sum() + term.sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("contraction", [False, True])
def test_gradients_of_gradients_by_what_is_known(contraction):
    """A grid for each series, and a context."""
    times = torch.stack([GRID, 1.5 * GRID])
    control, context = control_of(2, context=4, contraction=contraction), leaf(5, 2, 4)
    parameters, prior = neural(2, (2,), times)
    inputs = [context, *parameters, *control.parameters()]
    found = []
    for c in (WithContext(control, context), ByStep(WithContext(control, context))):
        _, z, term = loss_of(prior, c, contraction, "full", ())
        first = torch.autograd.grad(z.sum() + term.sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_what_is_not_one_operation_goes_by_steps():
    control, contracting = control_of(2), control_of(2, contraction=True)
    _, prior = ou(2)

    def kind(*args):
        q = ControlledPath(prior(), *args)
        q.rsample()
        return type(q._origin.last)

    log_c = lambda t, z: -z.square()  # noqa: E731
    assert kind(control, None) is kind(contracting, None, True) is FusedDraw
    assert kind(control, None, log_c) is Draw


class Bent(NeuralDrift):
    def forward(self, t, z):
        return super().forward(t, z) - z**3


class Noisier(NeuralDiffusion):
    def forward(self, t, z):
        return super().forward(t, z) + z.abs()


class OnAGridOfItsOwn(nn.Linear):
    def forward(self, t, z):
        return super().forward(z)

    def on_grid(self, t):
        return "something else"


def hooked(module):
    module.register_forward_hook(lambda module, args, out: 2 * out)
    return module


@pytest.mark.parametrize(
    "drift, diffusion",
    [
        (lambda t, z: -z, NeuralDiffusion(2, 0)),
        (NeuralDrift(2, (4,)), NeuralDiffusion(2, 3)),
        (NeuralDrift(2, (4,)), lambda t, z: 0.5),
        (NeuralDrift(2, (4,)), Noisier(2, 0)),
        (NeuralDrift(2, (4,)), hooked(NeuralDiffusion(2, 0))),
        (NeuralDrift(2, (4,), activation=nn.ReLU), 0.5),
        (NeuralDrift(2, (4,), activation=lambda: nn.Softplus(beta=2)), 0.5),
        (Bent(2, (4,)), 0.5),
        (OnAGridOfItsOwn(2, 2), 0.5),
        (hooked(NeuralDrift(2, (4,))), 0.5),
    ],
)
def test_a_prior_that_is_more_than_layers_goes_by_steps(drift, diffusion):
    drift, diffusion = (f.double() if isinstance(f, nn.Module) else f for f in (drift, diffusion))
    q = ControlledPath(SDEPath(drift, diffusion, torch.zeros(2), GRID), control_of(2))
    q.rsample()
    assert type(q._origin.last) is Draw


def test_inside_of_torch_func():
    """A custom operation has no rule for forward derivatives."""
    control = control_of(2)

    def end(start):
        p = OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID, start, validate_args=False)
        torch.manual_seed(0)
        return ControlledPath(p, control, validate_args=False).rsample()[-1].sum()

    start, h = torch.tensor([0.3, -0.2]), torch.tensor([1e-6, 0.0])
    difference = (end(start + h) - end(start - h)) / 2e-6
    found = torch.func.grad(end)(start)[0]
    torch.testing.assert_close(found, difference, rtol=1e-6, atol=1e-6)


def test_refusals():
    _, prior = ou(2)
    with pytest.raises(ValueError, match=r"must return a pair \(u, log c\), found Tensor"):
        ControlledPath(prior(), control_of(2), contraction=True).rsample()
    with pytest.raises(ValueError, match=r"control.* returned shape"):
        net = control_of(2)
        net.last = torch.nn.Linear(6, 3)
        ControlledPath(prior(), net).rsample()
    with pytest.raises(ValueError, match=r"drift.* returned shape"):
        drift = NeuralDrift(2, (4,)).double()
        drift.net[-1] = nn.Linear(4, 1).double()
        ControlledPath(SDEPath(drift, 0.5, torch.zeros(2), GRID), control_of(2)).rsample()
    with pytest.raises(ValueError, match=r"the drift of ControlledPath .* at t=0,"):
        drift = NeuralDrift(2, (4,)).double()
        with torch.no_grad():
            drift.net[-1].bias[1] = torch.nan
        ControlledPath(SDEPath(drift, 0.5, torch.zeros(2), GRID), control_of(2)).rsample()
    broken = control_of(2)
    with torch.no_grad():
        broken.last.bias[1] = torch.nan
    with pytest.raises(ValueError, match=r"the control of ControlledPath .* at t=0,"):
        ControlledPath(prior(), broken).rsample()
    shrinking = control_of(2, contraction=True)
    with torch.no_grad():
        shrinking.last.bias[2:] = -2000.0
    with pytest.raises(ValueError, match="scale of ControlledPath must be positive: found 0 at"):
        ControlledPath(prior(), shrinking, contraction=True).rsample()
