"""No setting outlives its scope, whoever enters it, in whichever order it is left."""

import contextlib
import threading

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.poutine.runtime import _PYRO_STACK

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, anneal_kl, tolerance
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.infer import record_parts
from pyro_sde.infer.elbo_terms import current_terms
from pyro_sde.nn.block import SDEBlock, _solvers
from pyro_sde.simulation.tolerance import current_tolerance

GRID = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
SCOPES = {
    "tolerance": (lambda: tolerance(rtol=0.1), current_tolerance),
    "record_parts": (record_parts, current_terms),
    "solved_by": (lambda: SDEBlock.solved_by(lambda block, h: h), lambda: _solvers.current),
    "anneal_kl": (lambda: anneal_kl(0.5), lambda: _PYRO_STACK[-1] if _PYRO_STACK else None),
}
every_scope = pytest.mark.parametrize("name", SCOPES)


def in_thread(f):
    """The result of ``f`` in another thread, or its error."""
    result = []

    def run():
        try:
            result.append(f())
        except Exception as e:
            result.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return result[0]


@every_scope
def test_left_by_an_exception(name):
    make, current = SCOPES[name]
    with make():
        outer = current()
        with contextlib.suppress(ZeroDivisionError), make():
            assert current() is not outer
            raise ZeroDivisionError
        assert current() is outer
    assert current() is None


@every_scope
def test_left_in_another_order(name):
    """As two generators leave them that are closed as they were begun."""
    make, current = SCOPES[name]

    def inside():
        with make():
            yield

    first, second = inside(), inside()
    next(first)
    one = current()
    next(second)
    two = current()
    assert one is not two
    first.close()
    assert current() is two
    second.close()
    assert current() is None


@every_scope
def test_left_by_a_generator_that_is_forgotten(name):
    make, current = SCOPES[name]

    def inside():
        with make():
            yield

    with make():
        outer = current()
        begun = inside()
        next(begun)
        del begun
        assert current() is outer
    assert current() is None


@every_scope
def test_two_threads(name):
    """Each leaves before the other one that was there first."""
    make, current = SCOPES[name]
    entered, left = threading.Event(), threading.Event()

    def second():
        with make():
            entered.set()
            assert left.wait(60)
        return "left"

    result = []
    thread = threading.Thread(target=lambda: result.append(second()))
    with make():
        thread.start()
        assert entered.wait(60)
    left.set()
    thread.join(60)
    assert result == ["left"] and current() is None


def test_one_tolerance_in_two_threads():
    """The same object, entered by both."""
    shared = tolerance(rtol=0.1)
    entered, left = threading.Event(), threading.Event()
    path = OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID)

    def second():
        with shared:
            entered.set()
            assert left.wait(60)
            path.sample()
        return current_tolerance()

    result = []
    thread = threading.Thread(target=lambda: result.append(second()))
    with shared:
        thread.start()
        assert entered.wait(60)
        path.sample()
    assert current_tolerance() is None
    left.set()
    thread.join(60)
    assert result == [None] and len(shared.solves) == 2 and not shared._refined


@pytest.mark.parametrize("name", ["tolerance", "record_parts", "solved_by"])
def test_another_thread_is_outside(name):
    make, current = SCOPES[name]
    with make():
        assert in_thread(current) is None


def model(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def guide(y):
    pyro.sample("x", dist.Normal(2.0, 0.5))


@pytest.mark.parametrize("ELBO", [Trace_ELBO, TraceSDE_ELBO])
def test_the_weight_of_another_thread_is_1(ELBO):
    def loss():
        torch.manual_seed(0)
        return ELBO().loss(model, guide, torch.tensor(1.0))

    expected = loss()
    with anneal_kl(0.1):
        assert in_thread(loss) == expected
        assert loss() < expected
    assert loss() == expected


def test_a_training_that_fails_leaves_nothing():
    def fails(y):
        model(y)
        raise ZeroDivisionError

    svi = SVI(fails, guide, pyro.optim.Adam({}), TraceSDE_ELBO())
    with pytest.raises(ZeroDivisionError), anneal_kl(0.1), record_parts():
        svi.step(torch.tensor(1.0))
    assert not _PYRO_STACK and current_terms() is None


def test_observations_that_a_guide_is_given_for_a_while():
    def series(times, values):
        with pyro.plate("series", len(times)):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            pyro.sample("y", dist.Normal(z, 0.5).to_event(2), obs=values)

    times = GRID.expand(2, 5)
    guide = AutoSDE(series, encoder=GRUEncoder(1)).setup(times, torch.randn(2, 5, 1))
    with guide.given((times, torch.zeros(2, 5, 1))):
        outer = guide._given
        with contextlib.suppress(ZeroDivisionError), guide.given((times, torch.ones(2, 5, 1))):
            assert guide._given.values.eq(1).all()
            raise ZeroDivisionError
        assert guide._given is outer
    assert guide._given is None


def test_a_backward_pass_in_another_thread():
    """What a gradient needs was noted in the forward pass, as it must be for threads of torch."""
    scale = torch.tensor(0.7, requires_grad=True)
    grads = []
    for run in (lambda f: f(), in_thread):
        for memory in ("graph", "recompute"):
            pyro.set_rng_seed(0)
            with tolerance(rtol=0.1):
                value = OrnsteinUhlenbeck(1.0, 0.0, scale, GRID, 0.0, memory).rsample().sum()
            value = value + OrnsteinUhlenbeck(1.0, 0.0, scale, GRID, 0.0, memory).rsample().sum()
            grads.append(run(lambda value=value: torch.autograd.grad(value, scale)[0]))
    torch.testing.assert_close(grads[2:], grads[:2], rtol=0, atol=0)
    torch.testing.assert_close(grads[0], grads[1])
