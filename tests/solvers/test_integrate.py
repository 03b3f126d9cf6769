"""The solver along a path: exact sums, and the strong order in the number of steps.

The path is known on the grid only. Between two times it is a bridge whose integral has the
variance scale^2 dt^3 / 12 whatever is done on the grid, so that no method's strong order exceeds
1. What heun and midpoint gain is the constant, and the order 2 of what is left without noise.
"""

import functools
import math

import pytest
import torch

from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck
from pyro_sde.solvers import METHODS, SolutionError, evaluations, integrate

HIDDEN, FINE, PATHS = 4, 11, 200
DIM = 5 * HIDDEN + 2


def network(t, h, w):
    """A tanh network of the plane, each path with weights of its own."""
    a, b, c, d = w.split([2 * HIDDEN, HIDDEN, 2 * HIDDEN, 2], -1)
    hidden = torch.tanh((a.unflatten(-1, (HIDDEN, 2)) * h.unsqueeze(-2)).sum(-1) + b)
    return (c.unflatten(-1, (2, HIDDEN)) * hidden.unsqueeze(-2)).sum(-1) + d


@functools.cache
def strong_errors(scale):
    """RMS of h(1) over the paths of the prior, by method, at 2, 4, ..., 128 steps.

    Against 2048 steps on the same paths, whose own error is a sixteenth of the last one's.
    """
    torch.manual_seed(3)
    times = torch.linspace(0, 1, 2**FINE + 1)
    start = 3 * torch.randn(DIM)
    w = OrnsteinUhlenbeck(1.0, 0.0, scale, times, start).sample((PATHS,))
    h0 = torch.tensor([1.0, -0.5]).expand(PATHS, 2)
    reference = integrate(network, h0, w, times, method="heun")
    errors = {}
    for method in METHODS:
        gaps = []
        for k in range(1, 8):
            every = 2 ** (FINE - k)
            h = integrate(network, h0, w[:, ::every], times[::every], method=method)
            gaps.append((h - reference).square().sum(-1).mean().sqrt())
        errors[method] = torch.stack(gaps)
    return errors


def order(errors):
    """The slope of the regression of -log2 error on log2 steps."""
    k = torch.arange(float(len(errors)))
    k -= k.mean()
    return -((k * errors.log2()).sum() / k.square().sum()).item()


def test_strong_order_of_the_default_noise():
    """From 8 steps on all three are of order 1: what is left is what the grid does not know.

    A fitted order has a standard error of 1 / sqrt(2 PATHS) / log 2 / sqrt(10) = 0.023.
    """
    errors = {method: e[2:] for method, e in strong_errors(0.1).items()}
    for method, e in errors.items():
        assert 0.9 < order(e) < 1.1, (method, order(e))
    for method in set(METHODS) - {"euler"}:
        assert (errors[method] < 0.3 * errors["euler"]).all()


def test_strong_order_where_the_deterministic_part_dominates():
    """With few steps at the default noise, and with hardly any noise at any number of steps."""
    coarse = {method: order(e[:3]) for method, e in strong_errors(0.1).items()}
    quiet = {method: order(e[2:]) for method, e in strong_errors(0.001).items()}
    assert coarse["euler"] < 1.1 and 0.9 < quiet["euler"] < 1.1
    for method in ("heun", "midpoint", "reversible_heun"):
        assert coarse[method] > 1.5 and 1.8 < quiet[method] < 2.3, method
    first = {method: e[0] for method, e in strong_errors(0.001).items()}
    assert first["rk4"] < 0.2 * first["heun"]


def test_the_part_of_the_error_that_the_grid_cannot_know():
    """h = the integral of a Brownian w: the errors' variances are known in every digit.

    A step of dt misses scale^2 dt^3 / 12 by trapezoids, which heun and midpoint both are here,
    and scale^2 dt^3 / 3 by left ends; a sum of 8 finer steps knows all but its own trapezoids'.
    """
    n, scale, finer = 4000, 0.7, 8
    for steps in (4, 16):
        times = torch.linspace(0, 1, steps * finer + 1)
        w = BrownianMotion(scale, times, torch.zeros(1)).sample((n,))
        h0, dt = torch.zeros(n, 1), 1 / steps

        def solve(every, method, w=w, h0=h0, times=times):
            return integrate(lambda t, h, w: w, h0, w[:, ::every], times[::every], method=method)

        exact = solve(1, "heun")
        torch.testing.assert_close(exact, torch.trapezoid(w, times, dim=1))
        for method, share in (("euler", 1 / 3), ("heun", 1 / 12), ("midpoint", 1 / 12)):
            variance = (solve(finer, method) - exact).square().mean().item()
            expected = scale**2 * dt**2 * (share - 1 / 12 / finer**2)
            # The relative standard error of a variance of n Gaussians is sqrt(2 / n).
            assert abs(variance / expected - 1) < 4.5 * math.sqrt(2 / n), (steps, method)


@pytest.mark.parametrize("method", METHODS)
def test_without_a_path(method):
    """dh/dt = -2 h + t on an uneven grid, w being None; the order in the number of steps."""
    errors = []
    for n in (32, 64):
        times = torch.linspace(0, 1, n + 1) ** 1.5 + 0.5
        seen = []

        def field(t, h, w, seen=seen):
            seen.append((t.item(), w))
            return -2 * h + t

        h = integrate(field, torch.ones(3), None, times, method=method)
        # The solution is t/2 - 1/4 + c exp(-2 t), c such that it is 1 at 0.5.
        exact = 1.5 / 2 - 0.25 + math.exp(-2.0)
        errors.append((h - exact).abs().max().item())
        assert all(w is None for _, w in seen)
        middle = (times[:-1] + times[1:]) / 2
        stages = {"euler": times[:-1], "midpoint": middle, "rk4": torch.cat([times, middle])}
        stage = {round(t, 12) for t in stages.get(method, times).tolist()}
        assert {round(t, 12) for t, _ in seen} >= stage
        assert len(seen) == evaluations(method, n)
    expected = {"euler": 1, "rk4": 4}.get(method, 2)
    # The next term of the error is 1/n of the first.
    assert abs(math.log2(errors[0] / errors[1]) - expected) < 0.1


def test_one_step_by_hand():
    """field = t + h w over one step from 1 to 3, w from 2 to 4, h = 5."""
    times, w = torch.tensor([1.0, 3.0]), torch.tensor([[2.0], [4.0]])
    k = 1 + 5 * 2  # the slope at the start
    steps = {
        "euler": 5 + 2 * k,
        "heun": 5 + (k + 3 + (5 + 2 * k) * 4),
        "midpoint": 5 + 2 * (2 + (5 + k) * 3),
        "reversible_heun": 5 + (k + 3 + (5 + 2 * k) * 4),  # its first step is Heun's
    }
    k2 = 2 + (5 + k) * 3
    k3 = 2 + (5 + k2) * 3
    k4 = 3 + (5 + 2 * k3) * 4
    steps["rk4"] = 5 + (k + 2 * k2 + 2 * k3 + k4) * 2 / 6
    assert set(steps) == set(METHODS)
    for method, expected in steps.items():
        h = integrate(lambda t, h, w: t + h * w, torch.tensor([5.0]), w, times, method=method)
        assert h.item() == pytest.approx(expected, rel=1e-15)
    numbers = {"euler": 7, "heun": 14, "midpoint": 14, "rk4": 28, "reversible_heun": 8}
    assert {method: evaluations(method, 7) for method in METHODS} == numbers


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_of_paths_is_a_loop(method):
    times = torch.tensor([0.0, 0.2, 0.7, 1.0])
    w, h0 = torch.randn(2, 3, 4, DIM), torch.randn(2, 3, 2)
    h = integrate(network, h0, w, times, method=method)
    assert h.shape == h0.shape
    for i in range(2):
        for j in range(3):
            one = integrate(network, h0[i, j], w[i, j], times, method=method)
            torch.testing.assert_close(h[i, j], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_gradients(method):
    times = torch.tensor([0.0, 0.2, 0.7, 1.0], requires_grad=True)
    w, h0 = torch.randn(4, DIM, requires_grad=True), torch.randn(2, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda h0, w, times: integrate(network, h0, w, times, method=method), (h0, w, times)
    )


def test_single_precision_is_kept():
    times, w = torch.linspace(0, 1, 4).float(), torch.randn(4, DIM).float()
    for method in METHODS:
        assert integrate(network, torch.ones(2).float(), w, times, method=method).dtype == w.dtype


def test_bad_input():
    times, h0 = torch.linspace(0, 1, 4), torch.ones(2)
    with pytest.raises(ValueError, match=r"one of \['euler', .*'rk4'\]: found 'rk5'"):
        integrate(network, h0, None, times, method="rk5")
    with pytest.raises(ValueError, match="one of graph, recompute, reversible: found 'none'"):
        integrate(network, h0, None, times, memory="none")
    with pytest.raises(ValueError, match=r'found .euler.; use method="reversible_heun"'):
        integrate(network, h0, None, times, memory="reversible")
    for length in (3, 5):
        with pytest.raises(ValueError, match=f"path has {length} states, times 4: pass the grid"):
            integrate(network, h0, torch.randn(2, length, DIM), times)


@pytest.mark.parametrize("method", METHODS)
def test_a_field_that_blows_up(method):
    """dh/dt = h^3 from 2 is infinite at t = 1/8; the first state that overflows is named."""
    times = torch.linspace(0, 4, 401)
    with pytest.raises(SolutionError, match=r"not finite at t=0\.\d+, after a step of 0\.01 \(\d+"):
        integrate(lambda t, h, w: h**3, torch.tensor([2.0]), None, times, method=method)
    bad = torch.tensor([float("nan")])
    with pytest.raises(SolutionError, match="not finite at t=0,"):
        integrate(lambda t, h, w: h, bad, None, times, method=method)
    large = torch.full((20,), 1e307)  # finite, though its sum is not
    assert integrate(lambda t, h, w: 0 * h, large, None, times, method=method)[0] == 1e307


@pytest.mark.parametrize("method", ["heun", "rk4", "reversible_heun"])
def test_a_field_that_is_infinite_at_the_end(method):
    with pytest.raises(SolutionError, match=r"not finite at t=1, .*\(4 of 4\)"):
        integrate(
            lambda t, h, w: h / (t < 1 - 1e-9),
            torch.ones(1),
            None,
            torch.linspace(0, 1, 5),
            method=method,
        )
