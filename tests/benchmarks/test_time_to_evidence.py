"""The race to the evidence: what it judges by is exact. No time is judged."""

import dataclasses
import json
from types import SimpleNamespace

import pyro
import pytest
import time_to_evidence
import torch
from evidence_contestants import CONTRACTION, LADDER, PLAIN, TORCHSDE, needed, racer
from ou_evidence import END, FOUR, bound, exact, optimal_guide, optimum, solve
from pyro import poutine
from time_to_evidence import arrival, draw, main, medians, parse, table

from pyro_sde import time_grid
from pyro_sde.distributions import ControlledPath

CASES = [FOUR, draw(3), draw(8)]


@pytest.mark.parametrize("case", CASES)
def test_evidence_of_any_problem(case):
    """The law of what is observed, and the filter on a coarse and on a fine grid."""
    S = torch.empty(len(case.t), len(case.t))
    for i, s in enumerate(case.t):
        for j, t in enumerate(case.t):
            S[i, j] = (-case.rate * (s - t).abs()).exp() / (2 * case.rate)
            S[i, j] += case.noise**2 * (i == j)
    law = torch.distributions.MultivariateNormal(torch.zeros(len(case.t)), S)
    expected = law.log_prob(case.y).item()
    assert exact(case)[0] == pytest.approx(expected, abs=1e-10)
    for grid in (time_grid(0.0, END, dt=END, include=case.t), case.grid(240)):
        assert solve(grid, case)[1] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("euler", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_best_bound_of_a_grid(case, euler):
    """Against paths under the control that attains it."""
    grid = case.grid(60)
    guide = optimal_guide(grid, case, of_grid=True, euler=euler)
    value, error = bound(case.model(grid, euler), guide, y=case.y)
    assert abs(value - optimum(grid, case, euler)) < 4.5 * error
    assert 4.5 * error < 0.2 * solve(grid, case, euler)[2]  # so that the line above says something


@pytest.mark.parametrize("push", [0.8, 1.2])
def test_no_control_is_better(push):
    """Not one that pushes less, or more."""
    grid = FOUR.grid(60)
    best = poutine.trace(optimal_guide(grid, of_grid=True)).get_trace(FOUR.y).nodes["z"]["fn"]
    other = ControlledPath(best.prior, lambda t, z: push * best.control(t, z), best.initial)
    value, error = bound(FOUR.model(grid), lambda y: pyro.sample("z", other))
    assert value < optimum(grid) - 4 * error


@pytest.mark.parametrize("euler", [False, True])
def test_the_grid_that_is_needed(euler):
    steps = len(needed(FOUR, euler, 0.05)) - 1
    gaps = {n: abs(exact()[0] - optimum(FOUR.grid(n), FOUR, euler)) for n in LADDER}
    assert all(gap <= 0.05 for n, gap in gaps.items() if n >= steps)
    assert gaps[LADDER[LADDER.index(steps) - 1]] > 0.05


def test_random_problems():
    for case in map(draw, range(50)):
        assert 3 <= len(case.t) <= 8 and 0.2 <= case.noise <= 0.6 and 0.3 <= case.rate <= 3
        assert (case.t.diff() > 0).all() and case.t[0] > 0 and case.t[-1] <= END
        assert len(case.grid(60)) == 61
    assert torch.equal(draw(1).y, draw(1).y) and len({draw(i).noise for i in range(50)}) == 50


def test_torchsde_is_judged_by_what_it_computes():
    """Its own loss, over many of its paths, and the bound of the path with Euler steps; under a
    control that is not zero."""
    case = dataclasses.replace(FOUR, noise=1.0)  # so that paths differ less in what they are worth
    r = racer(TORCHSDE, case, 2000, (1e-2, 100.0), 1.0)
    with torch.no_grad():
        r.net.last.weight.normal_(0, 0.3)
        r.shift.fill_(0.7)
        r.log_scale.fill_(-0.3)
        losses = -torch.stack([r.loss() for _ in range(10)])
    value, error = bound(r.model, r.guide, 20_000)
    error = (error**2 + losses.var().item() / 10) ** 0.5
    assert abs(losses.mean().item() - value) < 4.5 * error < 0.2
    assert 10 * r.steps <= r.calls <= 10 * (r.steps + 2)  # sdeint tries f before it begins


@pytest.mark.parametrize("name", [CONTRACTION, PLAIN, TORCHSDE])
def test_training_comes_nearer(name):
    r = racer(name, FOUR, 8, (1e-2, 100.0), 1.0)
    before = bound(r.model, r.guide, 2000, r.case.y)[0]
    for _ in range(10):
        r.step()
    value, error = bound(r.model, r.guide, 2000, r.case.y)
    assert before + 1 < value < exact()[0] + 4.5 * error


def test_arrival():
    """Within the tolerance, and at the next judgements too."""
    assert arrival([3.0, 0.1, 0.05, 0.0], 0.1, stay=2) == 1
    assert arrival([3.0, 0.1, 0.05, 0.2, 0.1, 0.1, 0.1], 0.1, stay=2) == 4
    assert arrival([3.0, 0.1, 0.05], 0.1, stay=2) is None
    assert arrival([0.0, -0.2, -0.1, 0.0, 0.1], 0.1, stay=2) == 2  # above is no better than below
    assert arrival([float("nan")] * 4, 0.1, stay=2) is None
    assert arrival([], 0.1) is None


@pytest.mark.parametrize("budget", [0.0, 1e9])
def test_to_stay_takes_more_steps(budget, monkeypatch):
    """After the budget too; and what is near when it is spent may go on."""
    monkeypatch.setattr(time_to_evidence, "FIRST", 100)
    monkeypatch.setattr(time_to_evidence, "bound", lambda *_: (-1.05, 0.01))
    racer = SimpleNamespace(
        step=lambda: None, paths=3, calls=7, steps=60, model=None, guide=None, case=FOUR
    )
    args = parse(["--budget", str(budget)])
    found = time_to_evidence.race(racer, -1.0, args)
    assert found["at"]["steps"] == 100 and found["at"]["evaluations"] == 21
    assert found["curve"][-1]["steps"] >= 163
    monkeypatch.setattr(time_to_evidence, "bound", lambda *_: (-1.2, 0.01))
    missed = time_to_evidence.race(racer, -1.0, parse(["--budget", "0"]))
    assert missed["at"] is None and missed["best"] == pytest.approx(0.2)


def test_ratios(capsys):
    """Made-up races; what has not arrived counts as its budget, and says so."""

    def result(seconds, arrived=True):
        at = {"seconds": seconds, "evaluations": 7, "steps": 5}
        about = {"grid": 60, "best": 0.3, "seconds": 9.0, "evidence": -1.0}
        return {**about, "at": at if arrived else None}

    runs = {
        0: {CONTRACTION: result(1.0), TORCHSDE: result(100.0)},
        1: {CONTRACTION: result(2.0), TORCHSDE: result(6.0)},
        2: {CONTRACTION: result(0.5), TORCHSDE: result(6.0, arrived=False)},
        3: {CONTRACTION: result(1.0, arrived=False), TORCHSDE: result(6.0)},
    }
    assert medians(runs) == {TORCHSDE: (3 + 18) / 2}
    assert "1 not within the budget" in capsys.readouterr().out
    text = table(runs, dict.fromkeys(runs, FOUR))
    assert "not within 9 s, best gap 0.30 | - | > 18 |" in text and "| 6 | 7 | 3 |" in text


def test_benchmark(tmp_path, capsys):
    """Run, and then again from what was kept."""
    out = tmp_path / "found.jsonl"
    options = "--problems 1 --budget 0.01 --samples 1000 --within 2 --paths 4"
    args = parse([*options.split(), "--out", str(out)])
    found = main(args)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [run["task"]["contestant"] for run in lines] == [CONTRACTION, PLAIN, TORCHSDE] * 2
    assert lines[0]["grid"] == 5 and lines[1]["grid"] == lines[2]["grid"] == 60
    assert "torchsde, tuned" in capsys.readouterr().out
    assert main(args) == found and len(out.read_text().splitlines()) == 6
