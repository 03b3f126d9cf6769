"""Blocks in every memory mode, and inside of a tolerance."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from pyro.nn import PyroModule
from torch import nn

from pyro_sde import AutoSDE, TraceSDE_ELBO, tolerance
from pyro_sde.infer.girsanov import ESTIMATORS
from pyro_sde.nn import SDEBlock

MODES = [
    ("euler", "recompute"),
    ("rk4", "recompute"),
    ("reversible_heun", "recompute"),
    ("reversible_heun", "reversible"),
]
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
Y = X.sum(-1).sin()


class Net(PyroModule):
    """Two blocks, a convolution's and a linear one's."""

    def __init__(self, dtype=torch.float64, steps=4, **options):
        super().__init__()
        conv = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1)
        )
        linear = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.image = SDEBlock(conv.to(dtype), steps=steps, scale=0.3, **options)
        self.block = SDEBlock(linear.to(dtype), augment=1, steps=steps, scale=0.3, **options)
        self.head = nn.Linear(3, 1).to(dtype)

    def forward(self, x, y=None):
        h = self.image(x.reshape(*x.shape, 1, 1).expand(*x.shape, 3, 3)).mean((-1, -2))
        mean = pyro.deterministic("mean", self.head(self.block(h)).squeeze(-1))
        with pyro.plate("data", mean.shape[-1]):
            pyro.sample("y", dist.Normal(mean, 0.2), obs=y)
        return mean


def build(dtype=torch.float64, **options):
    torch.manual_seed(0)
    pyro.clear_param_store()
    net = Net(dtype, **options)
    guide = AutoSDE(net).setup(X.to(dtype), Y.to(dtype))
    for p in guide.parameters():
        nn.init.normal_(p, 0.0, 0.3)
    return net, guide


def loss_and_gradients(estimator, dtype=torch.float64, particles=1, **options):
    net, guide = build(dtype, **options)
    elbo = TraceSDE_ELBO(
        path_estimator=estimator, num_particles=particles, vectorize_particles=particles > 1
    )
    torch.manual_seed(1)
    loss = elbo.differentiable_loss(net, guide, X.to(dtype), Y.to(dtype))
    parameters = [*net.parameters(), *guide.parameters()]
    return loss.item(), torch.autograd.grad(loss, parameters)


def gap(a, b):
    """The norm of the difference relative to the norm, of the worst parameter."""
    return max(float((x - y).norm() / y.norm().clamp(min=1e-9)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("method", "memory"), MODES)
def test_the_gradient_is_the_graphs(method, memory, estimator, particles):
    a = loss_and_gradients(estimator, particles=particles, method=method, memory=memory)
    b = loss_and_gradients(estimator, particles=particles, method=method)
    assert a[0] == pytest.approx(b[0], rel=1e-12)
    assert gap(a[1], b[1]) < 1e-10


def test_reversible_in_single_precision_over_100_steps():
    options = {"dtype": torch.float32, "method": "reversible_heun", "steps": 100}
    a = loss_and_gradients("stl", memory="reversible", **options)
    b = loss_and_gradients("stl", **options)
    assert a[0] == pytest.approx(b[0], rel=1e-5)
    assert gap(a[1], b[1]) < 1e-3


def predict(tol, seed=0, **options):
    net, guide = build()
    pyro.set_rng_seed(seed)
    draw = Predictive(net, guide=guide, num_samples=2, return_sites=["mean"], **options)
    with torch.no_grad(), tolerance(rtol=tol, atol=tol) as solved:
        return draw(X)["mean"].reshape(2, 6), solved


def test_tightening_the_tolerance_converges():
    """Every sample by itself, weights and hidden units together, on one seed."""
    reference, _ = predict(3e-3)
    counts = []
    for tol in (3e-1, 1e-1, 3e-2):
        found, solved = predict(tol)
        error = (found - reference).square().mean(-1).sqrt()
        assert (error < 10 * tol).all(), (tol, error)
        counts.append(solved.evaluations)
    assert counts[0] <= counts[1] < counts[2]
    assert reference.std(0).max() > 0.01  # two different paths
    assert not torch.allclose(predict(1e-1, seed=1)[0], predict(1e-1)[0])
    assert torch.equal(predict(1e-1)[0], predict(1e-1)[0])


def test_a_vectorised_prediction():
    """All particles in one solution with common steps."""
    found, solved = predict(1e-2, parallel=True)
    assert found.shape == (2, 6) and (found.std(0) > 1e-4).all()
    loop, slower = predict(1e-2)
    assert len(solved.solves) < len(slower.solves)
    assert (found - loop).abs().max() < 2  # other draws of the same function


def test_steps_may_be_longer_than_the_grids():
    """At a loose tolerance the whole depth is one step and its two halves."""
    torch.manual_seed(0)
    block = SDEBlock(nn.Linear(2, 2), steps=7, scale=0.3)
    with torch.no_grad(), tolerance(rtol=1e3, atol=1e3) as solved:
        trace = pyro.poutine.trace(block).get_trace(X)
    assert [s.evaluations for s in solved.solves] == [3 * 7, 5]
    assert solved.solves[1].steps == 2
    assert trace.nodes["_RETURN"]["value"].shape == X.shape


def test_the_field_is_what_is_counted():
    net, guide = build()
    calls = []
    for block in (net.image, net.block):
        block.skeleton.field.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad(), tolerance(rtol=1e-2) as solved:
        guide(X)
    assert [s.kind for s in solved.solves] == ["path", "block"] * 2
    blocks = [s for s in solved.solves if s.kind == "block"]
    assert sum(s.evaluations for s in blocks) == len(calls)


def test_each_draw_has_its_own_noise():
    """Weights that were drawn before others are solved on the noise that they were drawn with."""
    net, guide = build()
    found = []
    for more in (0, 2):
        pyro.set_rng_seed(0)
        with torch.no_grad(), tolerance(rtol=0.1, atol=0.1):
            first = guide(X)
            others = [guide(X) for _ in range(more)]
            found.append(pyro.poutine.condition(net, first)(X))
            for other in others:
                assert not torch.equal(pyro.poutine.condition(net, other)(X), found[0])
    assert torch.equal(found[0], found[1])


def test_weights_from_elsewhere_are_refused():
    net, guide = build()
    with torch.no_grad():
        weights = guide(X)
        with (
            tolerance(rtol=1e-2),
            pytest.raises(ValueError, match=r"were not drawn inside of this tolerance\(rtol=0\.01"),
        ):
            pyro.poutine.condition(net, weights)(X)


def test_a_block_in_closed_form():
    """dh/dt = b_t, one bias under OU without noise to speak of: h(1) = b (1 - 1/e)."""

    class Push(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.tensor([2.0]))

        def forward(self, h):
            return self.b.expand_as(h)

    block = SDEBlock(Push(), scale=1e-9, steps=2)
    for tol in (1e-2, 1e-4, 1e-6):
        with torch.no_grad(), tolerance(rtol=tol, atol=tol):
            h = block(torch.zeros(3, 1))
        assert (h - 2 * (1 - torch.tensor(-1.0).exp())).abs().max() < 10 * tol
