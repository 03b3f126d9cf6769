"""A warning of steps that are too long for the drift, and no false alarm."""

import warnings

import pyro
import pytest
import torch

from pyro_sde import AutoSDE, tolerance
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck, SDEPath
from pyro_sde.simulation import checks

from ..cases import PROCESSES

GRID = torch.linspace(0.0, 1.0, 21, dtype=torch.float64)


@pytest.fixture(autouse=True)
def nothing_was_drawn(monkeypatch):
    monkeypatch.setattr(checks, "_draws", {})


def contracting(*rates, times=GRID):
    rate = torch.tensor(rates, dtype=times.dtype)
    return SDEPath(lambda t, z: -rate * z, 1.0, torch.zeros(len(rates)).to(times), times)


def silent(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return draw()


def test_steps_that_overshoot_are_warned_of_once():
    p = contracting(200.0)
    found = r"rate of about 200: a step of 0.05 overshoots, to -9 times.*"
    with pytest.warns(
        UserWarning, match=found + r"at most 0.005, as time_grid\(\.\.\., dt=0.005\)"
    ):
        z = p.sample()
    assert z[-1].abs() > 1e6  # where the SDE has a standard deviation of 0.05
    for _ in range(5):
        silent(p.sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("particles", [(), (5,)])
def test_one_dimension_is_enough(particles, dtype):
    p = contracting(1.0, 60.0, -0.5, times=GRID.to(dtype))
    with pytest.warns(UserWarning, match=r"about 60: .* to -2 times.*dt=0.017"):
        p.sample(particles)


def test_one_long_step_is_enough():
    times = torch.tensor([0.0, 0.1, 0.2, 1.2, 1.3])
    with pytest.warns(UserWarning, match=r"about 5: a step of 1 overshoots, to -4 times"):
        contracting(5.0, times=times).sample()


def test_the_prior_of_a_guide_is_looked_at():
    p = contracting(200.0)
    with pytest.warns(UserWarning, match="rate of about 200"):
        AutoSDE(lambda: pyro.sample("z", p))()


def test_steps_that_do_are_silent():
    silent(contracting(200.0, times=torch.linspace(0.0, 0.1, 21)).sample)
    silent(contracting(-50.0, 30.0).sample)  # an explosion that belongs to the process
    silent(OrnsteinUhlenbeck(200.0, 0.0, 1.0, GRID).sample)
    with tolerance(1e-1):
        silent(contracting(200.0, times=torch.linspace(0.0, 0.2, 5)).sample)


@pytest.mark.parametrize("process", PROCESSES)
def test_no_false_alarm(process):
    for _ in range(9):
        silent(PROCESSES[process]().sample)


def test_a_control_is_no_drift():
    push = ControlledPath(contracting(1.0), lambda t, z: -200 * z)
    silent(lambda: ControlledPath(push, lambda t, z: -200 * z).sample())


def test_dropout_is_no_contraction():
    silent(SDEPath(lambda t, z: torch.dropout(z, 0.5, True), 1.0, torch.ones(3), GRID).sample)


def test_a_drift_of_single_states_can_be_drawn():
    a = torch.tensor([[-1.0, 1.0], [-1.0, -1.0]])
    path = SDEPath(lambda t, z: a @ z, 1.0, torch.ones(2), GRID)
    assert silent(path.sample).shape == (21, 2)


def test_it_changes_no_random_number_and_costs_nothing_later():
    calls = []

    def drift(t, z):
        calls.append(t)
        return -z

    def draw(validate):
        torch.manual_seed(0)
        calls.clear()
        p = SDEPath(drift, 1.0, torch.zeros(2), GRID, validate_args=validate)
        return p.sample(), torch.get_rng_state()

    expected, state = draw(False)
    assert len(calls) == 20
    counts = []
    for _ in range(9):
        value, after = draw(True)
        assert torch.equal(value, expected) and torch.equal(after, state)
        counts.append(len(calls))
    assert [n > 20 for n in counts] == [k in (1, 2, 4, 8) for k in range(1, 10)]


def test_a_long_path_is_looked_at_in_places():
    """Or the check would take several times the memory of the path."""
    sizes = []

    def drift(t, z):
        sizes.append(z.numel())
        return -300 * z

    with pytest.warns(UserWarning, match="rate of about 300"):
        SDEPath(drift, 1.0, torch.zeros(1), torch.linspace(0.0, 1.0, 101)).sample((5,))
    assert 5 < max(sizes) < 5 * 64
    sizes.clear()
    times = torch.cat([torch.linspace(0.0, 1.0, 2000), torch.tensor([1.01])])
    with pytest.warns(UserWarning, match="a step of 0.01 overshoots"):
        SDEPath(drift, 1.0, torch.zeros(1), times).sample()
    assert max(sizes) < 64
