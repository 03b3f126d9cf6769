"""The law of the latents, matched to weighted draws: on a posterior that is known."""

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_sde import AutoSDE, TraceSDE_ELBO, fit
from pyro_sde.distributions import BrownianMotion
from pyro_sde.training import Matching, match_latents, matching

from .models import DATA, assert_identical, make, values

TIMES = torch.linspace(0.0, 1.0, 5)
Y = torch.tensor([0.5, 1.5])
SHIFT_SD = math.sqrt(1 / (1 + 2 / 1.25))
"""Y is Normal(shift, 1.25) for each of two: the path's end has variance 1, the noise 0.25."""
SHIFT_MEAN = SHIFT_SD**2 * float(Y.sum()) / 1.25


def model(y):
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0)).unsqueeze(-1)
    pyro.sample("unseen", dist.LogNormal(0.0, 0.5))
    z = pyro.sample("z", BrownianMotion(1.0, TIMES, torch.zeros(2)))
    pyro.sample("y", dist.Normal(shift + z[..., -1, :], 0.5).to_event(1), obs=y)


def trained(steps=200, **options):
    pyro.clear_param_store()
    guide = AutoSDE(model, **options)
    elbo = TraceSDE_ELBO(num_particles=16, vectorize_particles=True, max_plate_nesting=0)
    fit(model, guide, Y, steps=steps, elbo=elbo, match=False, progress=False, seed=0)
    return guide


def squeeze(guide, factor):
    """Make the guide of the latents narrower by a factor."""
    with torch.no_grad():
        rest = guide.rest
        before = rest.get_posterior().rsample((20_000,)).std(0)
        rest.scale = rest.scale * factor
        after = rest.get_posterior().rsample((20_000,)).std(0)
    torch.testing.assert_close(after, factor * before, rtol=0.05, atol=0.0)


def moments(guide, name="shift"):
    with torch.no_grad(), pyro.plate("num_particles_vectorized", 20_000, dim=-1):
        x = guide(Y)[name]
    return x.mean().item(), x.std().item()


def spread_of_unseen(guide):
    """In unconstrained space, in which that of its prior is 0.5."""
    with torch.no_grad(), pyro.plate("num_particles_vectorized", 20_000, dim=-1):
        return guide(Y)["unseen"].log().std().item()


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_a_wrong_width_becomes_that_of_the_posterior(factor):
    guide = trained()
    squeeze(guide, factor)
    before = spread_of_unseen(guide)
    found = match_latents(model, guide, Y)
    mean, sd = moments(guide)
    assert mean == pytest.approx(SHIFT_MEAN, abs=0.03)
    assert sd == pytest.approx(SHIFT_SD, rel=0.04)
    assert set(found.widths) == {"shift", "unseen"} and found.rounds >= 1 and found.gain > 0.05
    assert found.widths["unseen"] == pytest.approx(0.5 / before, rel=0.08)
    assert spread_of_unseen(guide) == pytest.approx(0.5, rel=0.04)
    assert "matched to weighted draws" in str(found) and "shift" in str(found)


def test_a_right_posterior_is_left_about_as_it_is():
    guide = trained(600)
    before = moments(guide)
    found = match_latents(model, guide, Y)
    assert moments(guide) == pytest.approx(before, abs=0.03)
    assert found.gain < 0.1 and (found.rounds or found.reason)


def test_the_same_each_time_and_random_numbers_are_kept():
    results = []
    for seed in (1, 2):
        guide = trained(100)
        pyro.set_rng_seed(seed)
        state = torch.get_rng_state()
        match_latents(model, guide, Y)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(values())
    assert_identical(*results)


def test_only_the_law_of_the_latents_changes():
    guide = trained(100)
    before = values()
    match_latents(model, guide, Y)
    after = values()
    changed = {k for k in after if not torch.equal(after[k], before[k])}
    assert changed and all(".rest." in name for name in changed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"MAX_K_HAT": -math.inf}, r"k-hat is .*: train longer"),
        ({"MIN_DRAWS": 10**9}, "the model is large"),
    ],
)
def test_why_nothing_was_changed(change, reason, monkeypatch):
    guide = trained(100)
    before = values()
    for name, value in change.items():
        monkeypatch.setattr(matching, name, value)
    found = match_latents(model, guide, Y)
    assert_identical(values(), before)
    assert found.rounds == 0 and found.widths == {}
    assert re.search(reason, str(found))


def test_a_law_whose_draws_overflow_is_taken_back(monkeypatch):
    """Tails that became too long: the model refuses an infinite scale after the first round."""
    guide = trained(100)
    draw, calls = matching._draw, []

    def overflow(*args):
        calls.append(args)
        if len(calls) > 2:
            raise ValueError("scale must be finite: found [inf]")
        return draw(*args)

    monkeypatch.setattr(matching, "_draw", overflow)
    monkeypatch.setattr(matching, "SMALL", -math.inf)
    squeeze(guide, 0.6)
    before = values()
    found = match_latents(model, guide, Y)
    assert_identical(values(), before)
    assert found.rounds == 0 and "out of range (scale must be finite" in str(found)


def test_a_model_for_one_draw_at_a_time_is_left_as_it_is():
    def one_by_one(y):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", BrownianMotion(1.0, TIMES, torch.zeros(2)))
        assert shift.dim() == 0
        pyro.sample("y", dist.Normal(shift + z[..., -1, :], 0.5).to_event(1), obs=y)

    guide = AutoSDE(one_by_one)
    history = fit(one_by_one, guide, Y, steps=3, progress=False)
    assert "draws cannot be vectorised" in history.matching.reason


def test_a_guide_that_has_no_joint_density_is_an_error_and_fit_passes_it():
    guide = AutoSDE(model, other_guide=AutoNormal)
    history = fit(model, guide, Y, steps=3, progress=False)
    assert history.matching is None
    with pytest.raises(TypeError, match=r"found AutoNormal of \['shift', 'unseen'\]"):
        match_latents(model, guide, Y)
    with pytest.raises(TypeError, match="found a function"):
        match_latents(model, lambda y: None, Y)


def test_an_interruption_leaves_what_was_trained(monkeypatch):
    guide = trained(100)
    before = values()

    def interrupt(objective, parameters):
        with torch.no_grad():
            for p in parameters:
                p.add_(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(matching, "_maximise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        match_latents(model, guide, Y)
    assert_identical(values(), before)
    history = fit(model, guide, Y, steps=1, progress=False)
    assert history.step == [1] and "interrupted" in history.matching.reason


@pytest.mark.parametrize(
    ("options", "is_matched"),
    [
        ({}, True),
        ({"match": False}, False),
        ({"anneal": lambda i: 0.5}, False),
        ({"steps": 0}, False),
    ],
)
def test_when_fit_does_it(options, is_matched):
    pyro.clear_param_store()
    guide = AutoSDE(model)
    history = fit(model, guide, Y, progress=False, seed=0, **{"steps": 20} | options)
    assert isinstance(history.matching, Matching) is is_matched


def test_mini_batches_are_not_matched():
    functional, guide, elbo = make("functional")
    history = fit(functional, guide, DATA, steps=2, elbo=elbo, batch_size=3, progress=False)
    assert history.matching is None


def test_a_finished_run_is_the_same_when_it_is_resumed(tmp_path):
    found = []
    for resume in (False, True):
        pyro.clear_param_store()
        guide = AutoSDE(model)
        path = tmp_path / "run.pt"
        fit(model, guide, Y, steps=20, checkpoint=path, resume=resume, progress=False, seed=0)
        found.append(values())
    assert_identical(*found)


def test_fit_says_it(capsys, monkeypatch):
    monkeypatch.setattr(matching, "DELAY", 0.0)
    fit(model, AutoSDE(model), Y, steps=20, seed=0)
    shown = capsys.readouterr().err
    assert "latents: " in shown and "matching:" in shown


def test_an_argument_of_the_model_may_be_called_progress():
    def of_progress(y, progress):
        model(y)

    options = {"steps": 20, "seed": 0, "progress": False}
    history = fit(of_progress, AutoSDE(of_progress), {"y": Y, "progress": 0.5}, **options)
    assert "progress" not in history.matching.reason


def test_draws_are_of_a_wider_law():
    """And the guide is bit for bit what it was."""
    guide = trained(100)
    before = values()
    problem = matching.Problem.of(model, guide, (Y,), {})
    widening, log_weights, x = matching._first_draws(problem, guide.rest)
    assert widening == pytest.approx(1 + matching.WIDER / math.sqrt(2)) and matching.WIDER > 0
    _, narrow = matching._draw(problem, guide.rest, 1, 1.0)
    assert len(log_weights) == len(x) == problem.chunk
    # The ratio of two standard deviations of 1000 draws has an error of 3 per cent.
    torch.testing.assert_close(
        x.std(0) / narrow.std(0), torch.full((2,), widening), rtol=0.15, atol=0.0
    )
    assert_identical(values(), before)


def test_a_model_that_refuses_what_is_far_out_is_drawn_from_as_it_is(monkeypatch):
    guide, draw = trained(100), matching._draw

    def refuse(problem, rest, calls, widening):
        if widening > 1:
            raise ValueError("scale must be finite: found [inf]")
        return draw(problem, rest, calls, widening)

    monkeypatch.setattr(matching, "_draw", refuse)
    assert matching._first_draws(matching.Problem.of(model, guide, (Y,), {}), guide.rest)[0] == 1.0
