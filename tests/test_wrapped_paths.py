"""Paths under bijections, masks and plates are found, and trained, as paths."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from torch.distributions.transforms import AffineTransform, ExpTransform, SigmoidTransform

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import ControlledPath, GeometricBrownianMotion

from .cases import assert_same, loss_and_gradients
from .one_path import GRID, prior


@pytest.mark.parametrize("transform", [ExpTransform(), SigmoidTransform(), AffineTransform(1, -2)])
@pytest.mark.parametrize("estimator", ["full", "kl", "stl"])
def test_a_path_under_a_bijection_is_a_path(transform, estimator):
    """Guide, ELBO and Predictive see through it: same loss as with the bijection in the model."""

    def outside(y):
        x = pyro.sample("z", dist.TransformedDistribution(prior(), [transform]))
        pyro.sample("y", dist.Normal(x[..., -1, 0], 0.3), obs=y)

    def inside(y):
        x = transform(pyro.sample("z", prior()))
        pyro.sample("y", dist.Normal(x[..., -1, 0], 0.3), obs=y)

    y = torch.tensor(0.6)
    elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=0)
    results = []
    for m in (outside, inside):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        q = AutoSDE(m).setup(y)
        _shake(q)
        results.append(loss_and_gradients(elbo, m, q, y))
        draws = Predictive(m, guide=q, num_samples=3)(y)
        assert m is inside or all(transform.codomain.check(draws["z"]).flatten())
    assert_same(*results)

    def by_hand(y):
        gain = pyro.param("gain", torch.tensor(0.5))
        q = ControlledPath(prior(), lambda t, z: gain * (0.5 - z))
        pyro.sample("z", dist.TransformedDistribution(q, [transform]))

    if estimator == "full":
        assert_same(
            loss_and_gradients(elbo, outside, by_hand, y),
            loss_and_gradients(Trace_ELBO(max_plate_nesting=0), outside, by_hand, y),
        )


def _shake(module):
    """Move every parameter away from its start, the same way each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))


def test_geometric_brownian_motion_site():
    def price(y):
        x = pyro.sample("x", GeometricBrownianMotion(0.3, GRID, 2.0, drift=0.1))
        pyro.sample("y", dist.Normal(x[..., -1, 0], 0.1), obs=y)

    y = torch.tensor(3.0)
    q = AutoSDE(price)
    svi = SVI(
        price,
        q,
        pyro.optim.Adam({"lr": 0.02}),
        TraceSDE_ELBO(num_particles=8, vectorize_particles=True),
    )
    losses = torch.tensor([svi.step(y) for _ in range(60)])
    assert losses[-10:].mean() < losses[:10].mean() - 1
    assert (q(y)["x"] > 0).all()
    full = TraceSDE_ELBO(path_estimator="full", max_plate_nesting=0)
    stock = Trace_ELBO(max_plate_nesting=0)
    assert_same(loss_and_gradients(full, price, q, y), loss_and_gradients(stock, price, q, y))


def test_learned_transforms_in_a_chain():
    """Two bijections with parameters of their own: "full" is still stock, gradients and all."""

    def price():
        loc = pyro.param("loc", torch.tensor(0.3))
        scale = pyro.param("width", torch.tensor(-0.8))
        return dist.TransformedDistribution(prior(), [AffineTransform(loc, scale), ExpTransform()])

    def m(y):
        pyro.sample("y", dist.Normal(pyro.sample("z", price())[..., -1, 0], 0.3), obs=y)

    y = torch.tensor(0.6)
    q = AutoSDE(m).setup(y)
    _shake(q)
    full = loss_and_gradients(TraceSDE_ELBO(path_estimator="full", max_plate_nesting=0), m, q, y)
    assert_same(full, loss_and_gradients(Trace_ELBO(max_plate_nesting=0), m, q, y))
    assert full[1]["loc"] != 0 and full[1]["width"] != 0


@pytest.mark.parametrize("wrap", ["mask", "to_event", "expand"])
def test_wrapped_paths_are_found(wrap):
    keep = torch.tensor([True, False, True])
    y = torch.tensor([0.5, 0.1, -0.3])

    def path():
        p = prior().expand((3,))
        return {"mask": p.mask(keep), "to_event": p.to_event(1), "expand": p}[wrap]

    def m(y):
        if wrap == "to_event":
            z = pyro.sample("z", path())
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3).to_event(1), obs=y)
        else:
            with pyro.plate("series", 3):
                z = pyro.sample("z", path())
                pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3).mask(keep), obs=y)

    q = AutoSDE(m).setup(y)
    _shake(q)
    options = {"max_plate_nesting": 1}
    full = loss_and_gradients(TraceSDE_ELBO(path_estimator="full", **options), m, q, y)
    assert_same(full, loss_and_gradients(Trace_ELBO(**options), m, q, y))
    if wrap == "mask":
        # What is masked has no influence at all: its embedding gets no gradient.
        for estimator in ("full", "kl", "stl"):
            elbo = TraceSDE_ELBO(path_estimator=estimator, **options)
            _, grads = loss_and_gradients(elbo, m, q, y)
            e = grads["AutoSDE.paths.z.embedding"]
            assert (e[1] == 0).all() and (e[0] != 0).any()
