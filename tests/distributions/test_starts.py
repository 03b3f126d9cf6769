"""Laws of a start that are made of parts."""

import copy

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import biject_to

from pyro_sde.distributions.starts import PartlyFixed, SideBySide, join_starts, side_by_side

F64 = torch.float64


def normal(*shape):
    return dist.Normal(torch.linspace(-1, 1, shape[-1]).expand(shape), 0.5).to_event(1)


def gamma(*shape):
    return dist.Gamma(torch.full(shape, 2.0), 3.0).to_event(1)


def uniform(*shape):
    low = torch.linspace(1, 2, shape[-1])
    return dist.Uniform(low.expand(shape), low + 2).to_event(1)


def full(d):
    return dist.MultivariateNormal(torch.ones(d), torch.eye(d) + 0.5)


PARTS = {
    "two": lambda: [gamma(2), uniform(1)],
    "batches": lambda: [gamma(3, 1), full(2), dist.LogNormal(torch.zeros(2, 1, 2), 1).to_event(1)],
    "reals": lambda: [full(2), normal(3)],
}
every_kind = pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())


@every_kind
def test_side_by_side(parts):
    laws = parts()
    law = SideBySide(laws)
    x = law.sample((4,))
    assert x.shape == (4, *law.batch_shape, *law.event_shape) and not x.requires_grad
    pieces = x.split([p.event_shape[0] for p in laws], -1)
    log_prob = sum(p.log_prob(v) for p, v in zip(laws, pieces, strict=True))
    torch.testing.assert_close(law.log_prob(x), log_prob)
    for moment in ("mean", "stddev", "variance"):
        found = side_by_side(getattr(p, moment) for p in laws)
        torch.testing.assert_close(getattr(law, moment), found)
    grown = law.expand((5, *law.batch_shape))
    y = grown.sample()
    assert y.shape == (5, *law.batch_shape, *law.event_shape)
    torch.testing.assert_close(grown.log_prob(y), law.log_prob(y))
    assert torch.equal(copy.deepcopy(law).log_prob(x), law.log_prob(x))


@every_kind
def test_support_of_laws_side_by_side(parts):
    law = SideBySide(parts())
    x = law.sample((4,))
    inside = law.support.check(x)
    assert inside.shape == (4, *law.batch_shape) and inside.all()
    transform = biject_to(law.support)
    free = transform.inv(x)
    torch.testing.assert_close(transform(free), x)
    jacobian = transform.log_abs_det_jacobian(free, x)
    assert jacobian.shape == inside.shape
    if parts is not PARTS["reals"]:
        assert not law.support.check(-x).any()
    else:
        assert (jacobian == 0).all() and law.support.check(-x).all()


def test_a_support_that_mixes_entries_is_refused():
    law = SideBySide([normal(2), dist.Dirichlet(torch.ones(3))])
    assert law.sample().shape == (5,)
    with pytest.raises(NotImplementedError, match="a Dirichlet, say"):
        _ = law.support


def test_gradients_of_draws():
    loc = torch.zeros(2, requires_grad=True)
    law = SideBySide([dist.Normal(loc, 1.0).to_event(1), gamma(1)])
    (slope,) = torch.autograd.grad(law.rsample((3,)).sum(), loc)
    assert slope.tolist() == [3.0, 3.0]
    fixed = torch.zeros(3, requires_grad=True)
    start = PartlyFixed(dist.Normal(loc, 1.0).to_event(1), fixed, (True, False, True))
    slopes = torch.autograd.grad(start.rsample((3,)).sum(), (loc, fixed))
    assert slopes[0].tolist() == [3.0, 3.0] and slopes[1].tolist() == [0.0, 3.0, 0.0]


def partly(law=None, batch=()):
    fixed = torch.tensor([7.0, 0.5, 7.0, -1.5]).expand(*batch, 4)
    return PartlyFixed(law or gamma(2), fixed, (True, False, True, False))


@pytest.mark.parametrize(
    "make", [gamma, full, lambda d: normal(3, d)], ids=["gamma", "full", "batch"]
)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_partly_fixed(make, batch):
    law = make(2)
    start = partly(law, batch)
    x = start.sample((5,))
    assert start.batch_shape == torch.broadcast_shapes(batch, law.batch_shape)
    assert x.shape == (5, *start.batch_shape, 4)
    assert (x[..., 1] == 0.5).all() and (x[..., 3] == -1.5).all()
    assert x[..., 0].unique().numel() == x[..., 0].numel()
    torch.testing.assert_close(start.drawn(x), x[..., ::2])
    log_prob = law.log_prob(x[..., ::2])
    torch.testing.assert_close(start.log_prob(x), log_prob)
    torch.testing.assert_close(start.mean[..., ::2], law.mean.expand(*start.batch_shape, 2))
    torch.testing.assert_close(start.stddev[..., ::2], law.stddev.expand(*start.batch_shape, 2))
    assert (start.mean[..., 3] == -1.5).all() and (start.stddev[..., 1::2] == 0).all()
    torch.testing.assert_close(start.variance, start.stddev.square())
    grown = start.expand((2, *start.batch_shape))
    assert grown.sample().shape == (2, *start.batch_shape, 4)
    other = start.with_law(dist.Normal(torch.zeros(2), 1.0).to_event(1))
    assert torch.equal(other.fixed, start.fixed) and other.is_drawn == start.is_drawn


def test_the_density_is_zero_where_the_fixed_entries_are_others():
    start = partly()
    x = start.sample((3,))
    assert torch.isfinite(start.log_prob(x)).all()
    x[1, 3] += 1e-3
    assert torch.isinf(start.log_prob(x)).tolist() == [False, True, False]
    x = start.sample()
    x[1] = x[1] * (1 + 1e-15)  # a rounding
    assert torch.isfinite(start.log_prob(x))
    # Single precision knows the fixed entries to seven digits, and that is enough.
    third = PartlyFixed(normal(1), torch.tensor([1 / 3, 0.0]), (False, True))
    assert torch.isfinite(third.log_prob(third.sample().float()))


def test_join_starts():
    point, law = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), normal(1)
    assert torch.equal(join_starts([point, torch.zeros(1)])[1], torch.tensor([3.0, 4.0, 0.0]))
    assert join_starts([gamma(2)]).event_shape == (2,)
    joined = join_starts([law, point, gamma(1)])
    assert joined.batch_shape == (2,) and joined.is_drawn == (True, False, False, True)
    again = join_starts([joined, torch.zeros(1), SideBySide([gamma(1), uniform(1)]), joined])
    assert [type(p.base_dist).__name__ for p in again.law.parts] == [
        *("Normal", "Gamma", "Gamma", "Uniform", "Normal", "Gamma")
    ]
    drawn = (True, False, False, True)
    assert again.is_drawn == (*drawn, False, True, True, *drawn)
    x = again.sample((3,))
    pieces = x[..., :4], x[..., 5:6], x[..., 6:7], x[..., 7:]
    laws = joined, gamma(1), uniform(1), joined
    log_prob = sum(p.log_prob(v) for p, v in zip(laws, pieces, strict=True))
    torch.testing.assert_close(again.log_prob(x), log_prob)


def test_precision_is_promoted():
    for a, b in ((torch.float32, F64), (F64, torch.float32)):
        law = dist.Normal(torch.zeros(1, dtype=a), torch.ones(1, dtype=a)).to_event(1)
        x = join_starts([law, torch.full((1,), 1 / 3, dtype=b)]).sample()
        assert x.dtype == F64
