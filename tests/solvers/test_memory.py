"""What the backward pass of a solution keeps: the same gradient, and how little it is."""

import itertools

import pytest
import torch
from torch import nn

from pyro_sde.solvers import METHODS, integrate

PAIRS = [
    (method, memory)
    for method, memory in itertools.product(METHODS, ("recompute", "reversible"))
    if memory == "recompute" or method == "reversible_heun"
]
every_pair = pytest.mark.parametrize(("method", "memory"), PAIRS)


class Problem:
    """A field that closes over a module and over something computed from a parameter."""

    def __init__(self, steps=100, dtype=torch.float64, width=16):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
        self.gain = torch.tensor(0.3, dtype=dtype, requires_grad=True)
        self.times = torch.linspace(0, 1, steps + 1, dtype=dtype) ** 1.3  # uneven
        noise = torch.randn(steps, 4, dtype=dtype) / steps**0.5
        start = torch.ones(1, 4, dtype=dtype)
        self.path = torch.cat([start, start + 0.3 * noise.cumsum(0)]).requires_grad_()
        self.h0 = torch.randn(5, 3, dtype=dtype, requires_grad=True)

    def solve(self, method, memory):
        gain = self.gain.exp()

        def field(t, h, w):
            return gain * self.net(h) * w[:3] + torch.sin(w[3] * h + t)

        return integrate(field, self.h0, self.path, self.times, method=method, memory=memory)

    def inputs(self):
        return [self.h0, self.path, self.gain, *self.net.parameters()]

    def gradients(self, method, memory):
        return torch.autograd.grad(self.solve(method, memory).square().sum(), self.inputs())


def gap(a, b):
    """The largest difference, relative to the largest entry."""
    return max(
        float((x - y).abs().max() / y.abs().max().clamp(min=1e-30))
        for x, y in zip(a, b, strict=True)
    )


@every_pair
def test_the_gradient_is_the_graphs(method, memory):
    p = Problem()
    torch.testing.assert_close(p.solve(method, memory), p.solve(method, "graph"), rtol=0, atol=0)
    # Recomputed, it is summed in another order; reconstructed, 100 steps of rounding.
    tol = 1e-13 if memory == "recompute" else 1e-12
    assert gap(p.gradients(method, memory), p.gradients(method, "graph")) <= tol


def test_reversible_in_single_precision():
    p = Problem(dtype=torch.float32)
    a, b = (p.gradients("reversible_heun", memory) for memory in ("reversible", "graph"))
    assert 0 < gap(a, b) < 1e-4


@every_pair
def test_in_every_order(method, memory):
    """Differentiated twice, with respect to some inputs only, and after another solution."""
    p = Problem(steps=20)
    expected = p.gradients(method, "graph")
    h = p.solve(method, memory)
    loss = h.square().sum()
    for some in ([0], [2], [1, 3], [0, 1, 2, 3, 4, 5, 6]):
        inputs = [p.inputs()[i] for i in some]
        a = torch.autograd.grad(loss, inputs, retain_graph=True)
        p.solve(method, memory)
        assert gap(a, [expected[i] for i in some]) < 1e-12
    loss.backward()
    assert gap([p.net[0].weight.grad], [expected[3]]) < 1e-12


@every_pair
def test_an_input_that_needs_no_gradient(method, memory):
    p = Problem(steps=20)
    p.h0, p.path = p.h0.detach(), p.path.detach()
    a, b = (
        torch.autograd.grad(p.solve(method, m).square().sum(), [p.gain, *p.net.parameters()])
        for m in (memory, "graph")
    )
    assert gap(a, b) < 1e-12


@every_pair
def test_the_two_terms_of_a_sum(method, memory):
    """Autograd gives both one tensor for their gradients, which add up over the steps apart."""
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    times, results = torch.linspace(0, 1, 6), []
    for mode in (memory, "graph"):
        h = integrate(
            lambda t, h, w: a + b - h, torch.ones(3), None, times, method=method, memory=mode
        )
        results.append(torch.autograd.grad(h.square().sum(), (a, b)))
    assert gap(*results) < 1e-12


@every_pair
def test_what_is_kept(method, memory):
    """Bytes saved for the backward pass: those that grow with the steps are states, or nothing."""

    def kept(memory, steps):
        p = Problem(steps=steps, width=1000)
        saved = []

        def pack(x):
            saved.append(x.untyped_storage())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            h = p.solve(method, memory)
        assert h.requires_grad
        mine = {x.untyped_storage().data_ptr() for x in [*p.inputs(), p.times]}
        return sum({s.data_ptr(): s.nbytes() for s in saved if s.data_ptr() not in mine}.values())

    graph = kept("graph", 60) - kept("graph", 20)
    assert graph > 40 * 5 * 1000 * 8  # the hidden units of 5 rows, in 40 steps
    states = 40 * 5 * 3 * 8 if memory == "recompute" else 0
    assert kept(memory, 60) - kept(memory, 20) == states


def test_no_second_derivatives():
    p = Problem(steps=3)
    for memory in ("recompute", "reversible"):
        h = p.solve("reversible_heun", memory)
        with pytest.raises(RuntimeError, match=r'create_graph=True.*use memory="graph"'):
            torch.autograd.grad(h.sum(), p.h0, create_graph=True)


def test_random_fields_are_refused():
    times, h0 = torch.linspace(0, 1, 4), torch.ones(3, requires_grad=True)
    for memory in ("recompute", "reversible"):
        with pytest.raises(RuntimeError, match="draws random numbers"):
            integrate(
                lambda t, h, w: nn.functional.dropout(h),
                h0,
                None,
                times,
                method="reversible_heun",
                memory=memory,
            )


def test_a_field_that_changes_over_time():
    """Each step has a module of its own."""
    torch.manual_seed(0)
    nets = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    h0, times = torch.randn(2, 3), torch.linspace(0, 1, 5)
    results = []
    for memory in ("graph", "recompute"):
        h = integrate(lambda t, h, w: nets[int(4 * t)](h).tanh(), h0, None, times, memory=memory)
        results.append(torch.autograd.grad(h.square().sum(), list(nets.parameters())))
    assert gap(*results) < 1e-12


def test_a_state_that_was_written_to():
    for memory in ("recompute", "reversible"):
        h0 = torch.ones(3, requires_grad=True)
        start = h0 * 2
        h = integrate(
            lambda t, h, w: h.sin(),
            start,
            None,
            torch.linspace(0, 1, 4),
            method="reversible_heun",
            memory=memory,
        )
        loss = h.sum()
        with torch.no_grad():
            (start if memory == "recompute" else h).add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


def test_inside_of_vmap():
    h0 = torch.ones(2, 3, requires_grad=True)
    times = torch.linspace(0, 1, 4)

    def solve(h):
        return integrate(lambda t, h, w: h.sin(), h, None, times, memory="recompute")

    with pytest.raises(RuntimeError, match=r"cannot be used inside torch.func.vmap"):
        torch.func.vmap(solve)(h0)


def test_times_need_the_graph():
    times = torch.linspace(0, 1, 4, requires_grad=True)
    with pytest.raises(ValueError, match="with respect to times"):
        integrate(lambda t, h, w: h, torch.ones(1), None, times, memory="recompute")
