"""Girsanov's two terms: their sum, their mean, their gradients, their shape."""

import pytest
import torch

from pyro_sde import girsanov
from pyro_sde.distributions import ControlledPath

from .problems import Problem, every_process


@every_process
@pytest.mark.parametrize("contraction", [False, True])
def test_girsanov_is_the_log_ratio(process, contraction):
    """The two terms sum to log q - log p of any path, drawn from q or not."""
    problem = Problem(process, "normal", "plain", contraction)
    prior = problem.make()
    q = ControlledPath(prior, problem.control, contraction=contraction).expand((4,))
    for value in (q.rsample(), q.rsample().clone(), prior.expand((4,)).rsample()):
        for p in (prior, problem.make()):
            terms = girsanov(q, p, value)
            assert terms.quadratic.shape == terms.martingale.shape == (4,)
            assert (terms.quadratic >= 0).all()
            torch.testing.assert_close(
                terms.quadratic + terms.martingale,
                q.log_prob(value) - p.log_prob(value),
                rtol=1e-9,
                atol=1e-9,
            )


def test_martingale_has_mean_zero_under_q():
    problem = Problem("double_well", "normal", "plain", contraction=True)
    q = ControlledPath(problem.make(), problem.control, contraction=True)
    with torch.no_grad():
        m = girsanov(q, problem.make(), q.sample((50_000,))).martingale
    assert abs(m.mean()) < 5 * m.std() / 50_000**0.5


def test_a_path_drawn_without_gradients_is_scored_with_them():
    """A draw made under no_grad knows no gradients: it must not be used where they are wanted."""
    problem = Problem("ou", "normal", "plain")
    q = ControlledPath(problem.make(), problem.control)
    with torch.no_grad():
        value = q.rsample()
    for p in (q.prior, problem.make()):
        terms = girsanov(q, p, value)
        fresh = girsanov(q, p, value.clone())
        for a, b in zip(terms, fresh, strict=True):
            slopes = [
                torch.autograd.grad(x, list(problem.net.parameters()), retain_graph=True)
                for x in (a, b)
            ]
            torch.testing.assert_close(*slopes)


def test_terms_have_the_batch_shape_of_the_site():
    problem = Problem("ou", "normal", "plain")
    prior = problem.make().expand((4, 3))
    q = ControlledPath(prior, problem.control)
    value = q.sample()
    plain, event = girsanov(q, prior, value), girsanov(q.to_event(1), prior.to_event(1), value)
    mask = torch.tensor([True, False, True])
    masked = girsanov(q.mask(mask), prior.mask(mask), value)
    for a, b, c in zip(plain, event, masked, strict=True):
        assert a.shape == (4, 3) and b.shape == (4,)
        torch.testing.assert_close(a.sum(-1), b)
        torch.testing.assert_close(a * mask, c)
