"""Without noise the block is a neural ODE: against Runge-Kutta, and against the loop by hand."""

import itertools
import math

import pytest
import torch

from pyro_sde import AutoSDE
from pyro_sde.nn import SDEBlock
from pyro_sde.solvers import METHODS

from .nets import FIELDS, Chain, TimeField, X, by_hand, draw, mlp, run_with, with_weights

TINY = 1e-8


def strong(field, gain=2.0):
    """A field that is not nearly linear."""
    with torch.no_grad():
        for p in field.parameters():
            p.mul_(gain)
    return field


@torch.no_grad()
def runge_kutta(field, h, rate, steps=256):
    """dh/dt = field(t, h; w_0 exp(-rate t)); the error of order 4 is some 1e-10 here."""
    f, dt = with_weights(field), 1 / steps
    start = torch.cat([p.detach().clone().flatten() for p in field.parameters()])

    def slope(t, h):
        return f(t, h, start * math.exp(-rate * t))

    for i in range(steps):
        t = i * dt
        a = slope(t, h)
        b = slope(t + dt / 2, h + dt / 2 * a)
        c = slope(t + dt / 2, h + dt / 2 * b)
        d = slope(t + dt, h + dt * c)
        h = h + dt / 6 * (a + 2 * b + 2 * c + d)
    return h


@torch.no_grad()
def solve(field, x, method, steps, rate):
    """h(1) on weights from the untrained guide."""
    block = SDEBlock(field, rate=rate, scale=TINY, steps=steps, method=method)
    model = Chain(block=block)
    guide = AutoSDE(model, name=f"{method}{steps}").setup(x, x)
    return run_with(model, guide(x, x), x)


@pytest.mark.parametrize("rate", [0.0, 1.3])
@pytest.mark.parametrize("method", METHODS)
def test_the_error_falls_with_the_order_of_the_method(method, rate):
    field = strong(TimeField(2, 4))
    exact = runge_kutta(field, X, rate)
    sizes = [8, 16, 32, 64]
    errors = [(solve(field, X, method, n, rate) - exact).abs().max().item() for n in sizes]
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    if method == "rk4" and rate == 0:  # without a path to interpolate; it meets TINY at 32 steps
        assert abs(orders[0] - 4) < 0.1, (errors, orders)
        return
    order = 1 if method == "euler" else 2
    # The next term of the error is 1/n of the first: at 32 steps and more a few percent.
    assert abs(orders[-1] - order) < 0.1, (errors, orders)
    assert errors[-1] < (0.02 if method == "euler" else 1e-3)


@pytest.mark.parametrize("name", FIELDS)
def test_rate_zero_is_the_ode_net_of_the_module_itself(name):
    """The module that was passed in, called in a loop, nothing of ours."""
    make, rest = FIELDS[name]
    field = make(2)
    x = torch.randn(3, 2, *rest)
    h, n = x, 5
    with torch.no_grad():
        for i in range(n):
            h = h + (field(h) if name == "linear" else field(i / n, h)) / n
    # w moves by 1e-8 sqrt(t), h by at most some ten times that.
    torch.testing.assert_close(solve(field, x, "euler", n, 0.0), h, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [TINY, 0.5])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FIELDS)
def test_the_loop_by_hand_agrees_to_rounding(name, method, scale):
    make, rest = FIELDS[name]
    field = make(2)
    x = torch.randn(3, 2, *rest)
    block = SDEBlock(field, scale=scale, steps=6, method=method)
    h, draws = draw(block, x)
    assert draws["w"].shape == (7, block.dim)
    torch.testing.assert_close(h, by_hand(field, x, draws["w"], method), rtol=1e-12, atol=1e-12)


def test_untrained_weights_decay_from_the_module_s_own():
    field = mlp()
    start = torch.nn.utils.parameters_to_vector(field.parameters()).detach()
    block = SDEBlock(field, rate=2.0, scale=TINY, steps=4)
    w = AutoSDE(block).setup(X)(X)["w"]
    t = torch.linspace(0, 1, 5).unsqueeze(-1)
    # 5 standard deviations of at most 1e-8, the largest of 80 draws.
    torch.testing.assert_close(w, start * (-2.0 * t).exp(), rtol=0, atol=5 * TINY)
    assert torch.equal(w[0], start)


def test_augmentation_is_columns_of_zeros_at_the_end():
    field = mlp(5)
    block = SDEBlock(field, augment=3, steps=4)
    h, draws = draw(block, X)
    wide = torch.cat([X, torch.zeros(4, 3)], -1)
    torch.testing.assert_close(h, by_hand(field, wide, draws["w"]), rtol=1e-12, atol=1e-12)
    make, rest = FIELDS["conv"]
    field, x = make(3), torch.randn(2, 2, *rest)
    h, draws = draw(SDEBlock(field, augment=1, steps=4), x)
    wide = torch.cat([x, torch.zeros(2, 1, *rest)], 1)
    torch.testing.assert_close(h, by_hand(field, wide, draws["w"]), rtol=1e-12, atol=1e-12)
