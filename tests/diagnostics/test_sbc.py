"""Simulation-based calibration of guides that are exact, or wrong by a known amount."""

import math
import os
import signal

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_sde import AutoSDE, fit, time_grid
from pyro_sde.diagnostics import sbc
from pyro_sde.diagnostics.uniformity import normal_scores
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.training import Diverged

ZERO = torch.tensor(0.0, dtype=torch.float64)
FAST = {"steps": 0, "draws": 19, "seed": 0, "progress": False}


def model(y):
    """The posterior is Normal(y / 2, 1 / sqrt(2))."""
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def guide_of(shift=0.0, width=1.0):
    """What makes the exact posterior, shifted by standard deviations and wider by a factor."""

    def guide(y):
        sd = math.sqrt(0.5)
        pyro.sample("x", dist.Normal(y / 2 + shift * sd, width * sd))

    return lambda model: guide


def exact_scores(shift, width, draws):
    """Mean and standard deviation of the scores of Normal(shift, width) among draws from
    Normal(0, 1), by quadrature."""
    x = torch.linspace(-8.0, 8.0, 2001)
    weights = (-x.square() / 2).softmax(0)
    below = torch.special.ndtr(shift + width * x).unsqueeze(-1)
    law = dist.Binomial(draws, below).log_prob(torch.arange(draws + 1.0)).exp()
    scores = torch.as_tensor(normal_scores(draws))
    mean, square = (weights @ (law @ s) for s in (scores, scores.square()))
    return float(mean), float((square - mean.square()).sqrt())


@pytest.mark.parametrize(
    "shift, width, words",
    [
        (0.0, 1.0, ""),
        (0.0, 0.5, "too narrow"),
        (0.0, 2.0, "too wide"),
        (0.8, 1.0, "too high"),
        (-0.8, 1.0, "too low"),
    ],
)
def test_guides_that_are_exact_or_wrong(shift, width, words):
    n = 100
    check = sbc(model, guide_of(shift, width), ZERO, simulations=n, **FAST)
    assert check.is_right == (not words) and check.completed == n
    found = {q.label: q for q in check.quantities}
    x = found["x"]
    assert x.deviation(check.level) == words
    if words:
        assert f"not calibrated: x is {words}" in check.verdict
    else:
        assert check.verdict.startswith("the posterior is calibrated as far as 100 simulations")
    # The truth is Normal(-shift / width, 1 / width) in units of the guide.
    mean, sd = exact_scores(-shift / width, 1 / width, 19)
    assert abs(x.shift.value - mean) < 4 * sd / math.sqrt(n)
    unit = float(normal_scores(19).std())
    assert abs(x.ratio.value - sd / unit) < 4 * sd / unit / math.sqrt(2 * n)


def test_a_guide_that_ignores_the_data():
    """The ranks of the prior are uniform, those of its log likelihood are not."""

    def prior(y):
        pyro.sample("x", dist.Normal(0.0, 1.0))

    check = sbc(model, lambda model: prior, ZERO, simulations=60, **FAST)
    found = {q.label: q.deviation(check.level) for q in check.quantities}
    assert found["x"] == "" and "too low" in found["log likelihood"]


def test_a_point_is_too_narrow():
    options = FAST | {"steps": 5, "lr": 0.1}
    check = sbc(model, AutoDelta, ZERO, simulations=10, **options)
    assert {q.label: q for q in check.quantities}["x"].deviation() == "too narrow"


GRID = time_grid(0.0, 2.0, dt=0.5).double()
OBSERVED = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


def path(y):
    prior = OrnsteinUhlenbeck.scalar(1.0, 0.0, 0.7, GRID)
    z = pyro.sample("z", prior)
    with pyro.plate("observations", len(OBSERVED)):
        pyro.sample("y", dist.Normal(prior.at(z, OBSERVED), 0.3), obs=y)


def test_paths_with_the_default_guide():
    """Twelve simulations find a shift of 1.4 standard deviations. The untrained guide, which is the
    prior, is found by the log likelihood."""
    y, options = torch.zeros(3), {"simulations": 12, "draws": 19, "seed": 0, "progress": False}
    statistics = {"mean": lambda latents: latents["z"].mean()}
    check = sbc(path, AutoSDE, y, steps=60, statistics=statistics, **options)
    assert check.is_right and check.completed == 12 and not check.failures
    assert check.entries == {
        "z": ((0,), (2,), (4,)),
        "mean": ((),),
        "log likelihood": ((),),
    }
    assert check.ranks["z"].shape == (12, 3) and check.resolution[0] < 1.4
    untrained = sbc(path, AutoSDE, y, steps=0, **options)
    assert "log likelihood is too low" in untrained.verdict


def test_a_fixed_start_and_a_plate_of_paths():
    grid = torch.linspace(0.0, 1.0, 3)

    def series(y):
        with pyro.plate("series", 2):
            start = torch.zeros(1, dtype=torch.float64)
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid, initial=start))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 1.0), obs=y)

    check = sbc(series, AutoSDE, torch.zeros(2), simulations=2, **FAST)
    assert check.entries["z"] == ((0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0))
    assert check.ranks["z"].shape == (2, 4)


def test_a_large_site_is_thinned():
    def large(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(10, 20), 1.0).to_event(2))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=y)

    def guide(y):
        pyro.sample("x", dist.Normal(torch.zeros(10, 20), 1.0).to_event(2))

    check = sbc(large, lambda model: guide, ZERO, simulations=2, **FAST)
    assert len(check.entries["x"]) == 64 and check.entries["x"][-1] == (9, 19)


def test_one_seed_one_result():
    ranks = [
        sbc(model, guide_of(), ZERO, simulations=n, **FAST | {"seed": seed}).ranks["x"]
        for n, seed in ((20, 1), (40, 1), (20, 2))
    ]
    assert torch.equal(ranks[0], ranks[1][:20]) and not torch.equal(ranks[0], ranks[2])


def test_ties_are_broken_at_random():
    """A latent that is rounded, so that about half of the draws equal the truth."""

    def rounded(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    statistics = {"sign": lambda latents: latents["x"].sign()}
    options = FAST | {"statistics": statistics}
    check = sbc(rounded, guide_of(), ZERO, simulations=80, **options)
    assert {q.label: q for q in check.quantities}["sign"].p_value > 0.01
    assert len(check.ranks["sign"].unique()) > 15


def test_nothing_of_the_user_is_changed():
    guide = AutoNormal(model)
    fit(model, guide, torch.tensor(1.0), steps=20, progress=False)
    store = pyro.get_param_store()
    before = {name: p.detach().clone() for name, p in store.items()}
    pyro.set_rng_seed(3)
    drawn, later = guide(ZERO)["x"], torch.rand(())
    pyro.set_rng_seed(3)
    sbc(model, AutoNormal, ZERO, simulations=2, draws=9, steps=3, seed=0, progress=False)
    assert torch.equal(guide(ZERO)["x"], drawn) and torch.equal(torch.rand(()), later)
    assert before.keys() == store.keys()
    assert all(torch.equal(store[name], x) for name, x in before.items())
    # As it is, with the parameters that it has:
    trained = sbc(model, lambda model: guide, ZERO, simulations=40, **FAST)
    assert not trained.is_right  # it has seen other data


def test_a_trained_function_is_checked_as_it_is():
    def guide(y):
        slope = pyro.param("slope", torch.tensor(0.0))
        pyro.sample("x", dist.Normal(slope * y, math.sqrt(0.5)))

    pyro.param("slope", torch.tensor(0.5))
    assert sbc(model, lambda model: guide, ZERO, simulations=60, **FAST).is_right
    pyro.clear_param_store()
    assert not sbc(model, lambda model: guide, ZERO, simulations=60, **FAST).is_right
    assert not pyro.get_param_store()


def test_options_of_fit():
    optim = pyro.optim.Adam({"lr": 0.01})
    check = sbc(
        model,
        AutoNormal,
        {"y": ZERO},
        simulations=2,
        draws=9,
        epochs=3,
        optim=optim,
        progress=False,
    )
    assert check.completed == 2 and not optim.optim_objs


def test_failures_are_counted():
    seen = []

    def guide(y):
        seen.append(float(y))
        if y > 1:
            raise Diverged("too far")
        pyro.sample("x", dist.Normal(y / 2, math.sqrt(0.5)))

    check = sbc(model, lambda model: guide, ZERO, simulations=20, **FAST)
    failed = len({y for y in seen if y > 1})
    assert len(check.failures) == failed > 0
    assert all(message.startswith("too far") for message in check.failures.values())
    assert check.completed == 20 - failed
    assert f"{20 - failed} of 20 simulations ({failed} failed)" in check.line

    def never(y):
        raise Diverged("at once")

    with pytest.raises(RuntimeError, match=r"the first 10 simulations failed, .* because at once"):
        sbc(model, lambda model: never, ZERO, simulations=20, **FAST)

    def broken(y):
        raise ValueError("a mistake of the user")

    with pytest.raises(ValueError, match="a mistake"):
        sbc(model, lambda model: broken, ZERO, simulations=20, **FAST)


@pytest.mark.parametrize("steps", [0, 5])
def test_ctrl_c_keeps_what_there_is(steps):
    """A simulation that is interrupted in its training is lost, later on it is completed."""
    before, made = signal.signal(signal.SIGINT, signal.default_int_handler), []

    class Stopped(AutoNormal):
        def __init__(self, model):
            super().__init__(model)
            made.append(self)

        def __call__(self, *args, **kwargs):
            if len(made) == 3:
                made.append(None)
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(*args, **kwargs)

    try:
        check = sbc(model, Stopped, ZERO, simulations=9, **FAST | {"steps": steps})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    completed = 2 if steps else 3
    assert check.completed == completed
    assert f"{completed} of 9 simulations ({9 - completed} not made)" in check.line


def test_nothing_to_keep():
    def stop(y):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sbc(model, lambda model: stop, ZERO, simulations=2, **FAST)
