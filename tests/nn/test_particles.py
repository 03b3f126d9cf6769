"""Many particles at once are a loop over particles, whatever the shapes."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.nn import PyroModule

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock
from pyro_sde.solvers import METHODS

from ..guides.models import shaken
from .nets import FIELDS, Chain, TimeField, draw, mlp, run_with

P = 3


def particles(model, plates, size=P):
    """``model`` as a vectorised ELBO runs it, with room for so many plates."""
    return pyro.plate("num_particles_vectorized", size, dim=-1 - plates)(model)


def assert_loop(model, h, draws, *args, size=P):
    """Each entry of ``h`` is what ``model`` returns on that entry of every draw alone."""
    assert len(h) == size
    for i, got in enumerate(h):
        one = {name: w[i].reshape(w.shape[-2:]) for name, w in draws.items()}
        expected = run_with(model, one, *args)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(h[0], h[1])


@pytest.mark.parametrize("plates", [0, 1, 2])
@pytest.mark.parametrize("name", FIELDS)
def test_one_block(name, plates):
    """Also with as many data as particles, and with one datum."""
    make, rest = FIELDS[name]
    for method, augment, batch in itertools.product(METHODS, (0, 1), (1, P, 4)):
        block = SDEBlock(make(2 + augment), steps=3, scale=0.5, method=method, augment=augment)
        x = torch.randn(batch, 2, *rest)
        h, draws = draw(particles(block, plates), x)
        assert draws["w"].shape == (P, *[1] * plates, 4, block.dim)
        assert h.shape == (P, batch, 2 + augment, *rest)
        assert_loop(block, h, draws, x)


@pytest.mark.parametrize("batch", [P, 4])
@pytest.mark.parametrize("plates", [0, 1, 2])
@pytest.mark.parametrize("name", FIELDS)
def test_two_blocks(name, plates, batch):
    """The second block gets an h that has particles already: one path each, no product."""
    make, rest = FIELDS[name]
    a = SDEBlock(make(2), steps=3, scale=0.5)
    b = SDEBlock(make(3), steps=4, scale=0.5, augment=1, method="midpoint")

    class Both(PyroModule):
        def __init__(self):
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x):
            return self.b(self.a(x))

    both, x = Both(), torch.randn(batch, 2, *rest)
    h, draws = draw(particles(both, plates), x)
    assert h.shape == (P, batch, 3, *rest)
    assert_loop(both, h, draws, x)


@pytest.mark.parametrize("batch", [P, 4])
def test_two_blocks_and_two_plates_in_an_elbo(batch):
    """The expected loss is of each particle alone."""

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.a, self.b = SDEBlock(mlp(), steps=3), SDEBlock(mlp(), steps=3)

        def forward(self, x, y):
            h = self.b(self.a(x))
            with pyro.plate("data", len(x), dim=-2), pyro.plate("outputs", 2, dim=-1):
                pyro.sample("y", dist.Normal(h, 0.3), obs=y)

    model, x, y = Model(), torch.randn(batch, 2), torch.randn(batch, 2)
    guide = shaken(model, x, y)
    assert_elbo_is_a_mean(model, guide, x, y, plates=2)


@pytest.mark.parametrize("initial, contraction", [("point", True), ("normal", False)])
@pytest.mark.parametrize("batch", [P, 4])
@pytest.mark.parametrize("name", FIELDS)
def test_the_vectorised_elbo(name, batch, initial, contraction):
    make, rest = FIELDS[name]
    model = Chain(
        a=SDEBlock(make(2), steps=3, initial=initial),
        b=SDEBlock(make(2), steps=3, method="heun", initial=initial),
    )
    x = torch.randn(batch, 2, *rest)
    y = torch.randn(batch, 2, *rest)
    guide = shaken(model, x, y, contraction=contraction)
    assert_elbo_is_a_mean(model, guide, x, y, plates=1)


def assert_elbo_is_a_mean(model, guide, x, y, plates):
    """Of log q(w) - log p(w) - log p(y | w), taken particle by particle outside of any plate."""
    elbo = TraceSDE_ELBO(
        path_estimator="full",
        num_particles=P,
        vectorize_particles=True,
        max_plate_nesting=plates,
    )
    loss = elbo.loss(model, guide, x, y)
    _, guide_trace = guide.get_traces()
    draws = {name: guide_trace.nodes[name]["value"] for name in ("a.w", "b.w")}
    losses = []
    for i in range(P):
        one = {name: w[i].reshape(w.shape[-2:]) for name, w in draws.items()}
        trace = poutine.trace(poutine.condition(model, data=one)).get_trace(x, y)
        losses.append(-trace.log_prob_sum())
        for name, w in one.items():
            q = guide.get_posterior(name, trace.nodes[name]["fn"])
            losses[-1] += q.log_prob(w)
    expected = sum(losses).item() / P
    assert abs(loss - expected) < 1e-10 * (1 + abs(expected))


@pytest.mark.parametrize("initial", ["point", "normal"])
def test_a_guide_that_meets_particles_first(initial):
    """Its parameters are the same as if it had been set up without them."""
    model = Chain(a=SDEBlock(mlp(), steps=3, initial=initial))
    x = torch.randn(P, 2)
    first, setup = AutoSDE(model, name="first"), AutoSDE(model, name="setup").setup(x, x)
    elbo = TraceSDE_ELBO(num_particles=P, vectorize_particles=True, max_plate_nesting=1)
    elbo.loss(model, first, x, x)
    shapes = {name: p.shape for name, p in setup.named_parameters()}
    assert {name: p.shape for name, p in first.named_parameters()} == shapes


def test_h_that_has_particles_from_elsewhere():
    """From a latent upstream, as many particles as data."""

    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.block = SDEBlock(mlp(), steps=3, scale=0.5)

        def forward(self, x):
            shift = pyro.sample("shift", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            return self.block(x + (shift if shift.dim() > 1 else shift.unsqueeze(0)))

    model, x = Model(), torch.randn(P, 2)
    h, draws = draw(particles(model, 1), x)
    assert h.shape == (P, P, 2)
    for i in range(P):
        one = {"shift": draws["shift"][i, 0], "block.w": draws["block.w"][i, 0]}
        torch.testing.assert_close(h[i], run_with(model, one, x), rtol=1e-12, atol=1e-12)


def test_event_dim_tells_sequences_from_particles():
    """A linear field on sequences: (batch, length, features), as many of each as particles."""
    x = torch.randn(P, P, 2)
    block = SDEBlock(mlp(), steps=3, scale=0.5, event_dim=2)
    h, draws = draw(particles(block, 1), x)
    assert h.shape == (P, P, P, 2)
    assert_loop(block, h, draws, x)
    block = SDEBlock(mlp(), steps=3)
    with pytest.raises(ValueError, match=r"particles of shape \(3,\).*pass event_dim="):
        particles(block, 1)(torch.randn(4, P, 2))
    assert block(torch.randn(4, P, 2)).shape == (4, P, 2)


def test_particles_of_particles():
    """Two dimensions of particles, one of them from a plate of one's own."""
    block = SDEBlock(TimeField(), steps=3, scale=0.5)
    x = torch.randn(4, 2)
    h, draws = draw(pyro.plate("chains", 2, dim=-3)(particles(block, 1)), x)
    assert h.shape == (2, P, 4, 2) and draws["w"].shape == (2, P, 1, 4, block.dim)
    again = torch.stack([run_with(block, {"w": w}, x) for w in draws["w"]])
    torch.testing.assert_close(h, again, rtol=1e-12, atol=1e-12)
    flat = [run_with(block, {"w": w}, x) for w in draws["w"].flatten(0, 2)]
    torch.testing.assert_close(h.flatten(0, 1), torch.stack(flat), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, P])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", FIELDS)
def test_predictive(name, parallel, size):
    """Draws of the guide, and the outputs on them, in parallel and one after another."""
    make, rest = FIELDS[name]
    model = Chain(a=SDEBlock(make(2), steps=3), b=SDEBlock(make(2), steps=3))
    x = torch.randn(P, 2, *rest)
    guide = shaken(model, x, x)
    sites = ("a.w", "b.w", "y", "_RETURN")
    predictive = Predictive(
        model, guide=guide, num_samples=size, parallel=parallel, return_sites=sites
    )
    out = predictive(x)
    assert out["y"].shape == (size, P, 2, *rest) and out["_RETURN"].shape == out["y"].shape
    for i in range(size):
        one = {k: out[k][i].reshape(out[k].shape[-2:]) for k in ("a.w", "b.w")}
        expected = run_with(model, one, x)
        torch.testing.assert_close(out["_RETURN"][i], expected, rtol=1e-12, atol=1e-12)


def test_predictive_on_samples_that_were_saved():
    """Stacked draws of shape (samples, T, D), without the plate's dimension."""
    model = Chain(a=SDEBlock(mlp(), steps=3, scale=0.5))
    x = torch.randn(P, 2)
    w = torch.stack([draw(model, x)[1]["a.w"] for _ in range(P)])
    for parallel in (False, True):
        out = Predictive(model, {"a.w": w}, parallel=parallel, return_sites=("_RETURN",))(x)
        assert_loop(model, out["_RETURN"], {"a.w": w}, x)
