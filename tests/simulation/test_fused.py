"""A path that is one operation equals the same path step by step."""

import itertools

import pytest
import torch

from pyro_sde._ops.fused import forward
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck
from pyro_sde.infer.girsanov import path_divergence

from .fused_cases import (
    CONTRACTIONS,
    ESTIMATORS,
    GRID,
    ByStep,
    WithContext,
    brownian,
    check,
    control_of,
    leaf,
    loss_of,
    neural,
    neural_and_constant,
    ou,
    ou_random_start,
)


@pytest.mark.parametrize("process", [ou, ou_random_start, brownian, neural, neural_and_constant])
@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dim", [1, 3])
def test_equals_its_steps(process, contraction, estimator, dim):
    control = control_of(dim, contraction=contraction)
    for shape, batch in itertools.product([(), (4,), (2, 3)], [(), (2,)]):
        parameters, prior = process(dim, batch)
        inputs = [*parameters, *control.parameters()]
        check(prior, inputs, control, contraction, estimator, shape)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("hidden", [(4,), (3, 2, 4)])
@pytest.mark.parametrize("block, path", [(1, 10**6), (30, 10**6), (10**6, 1), (10**6, 12)])
@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("process", [ou, neural])
def test_any_depth_and_any_block(estimator, hidden, block, path, contraction, process, monkeypatch):
    monkeypatch.setattr(forward, "BLOCK", block)
    monkeypatch.setattr(forward, "MAX_PATH_ELEMENTS", path)
    monkeypatch.setattr(forward, "MAX_FUSED_SUM", path)
    for dim in (1, 2, 5):
        control = control_of(dim, hidden=hidden, contraction=contraction)
        parameters, prior = process(dim)
        check(prior, [*parameters, *control.parameters()], control, contraction, estimator, (3,))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("process", [ou, neural, neural_and_constant])
def test_a_grid_for_each_series_and_gradients_by_the_times(estimator, process):
    times = torch.stack([GRID, 1.5 * GRID]).requires_grad_()
    control = control_of(2)
    parameters, prior = process(2, (2,), times)
    for shape in ((), (3,)):
        inputs = [times, *parameters, *control.parameters()]
        check(prior, inputs, control, None, estimator, shape)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize(
    "size, shape",
    [((4,), ()), ((2, 4), ()), ((2, 4), (3,)), ((5, 2, 4), ()), ((5, 1, 2, 4), (3,))],
)
@pytest.mark.parametrize("times", [GRID, torch.stack([GRID, 1.5 * GRID])])
@pytest.mark.parametrize("process", [ou, neural])
def test_a_context_of_each_element_and_of_time(contraction, size, shape, times, process):
    """Of shape (5, ...) it differs from step to step."""
    control = control_of(2, context=4, contraction=contraction)
    context = leaf(*size)
    parameters, prior = process(2, (2,), times)
    inputs = [context, *parameters, *control.parameters()]
    check(prior, inputs, WithContext(control, context), contraction, "stl", shape)


@pytest.mark.parametrize("process", [ou, neural])
def test_gradients_by_some_inputs_only(process):
    control = control_of(3)
    parameters, prior = process(3)
    for needed in (parameters[:1], parameters[3:], [control.last.weight], [control.embedding]):
        for x in (*parameters, *control.parameters()):
            x.requires_grad_(any(x is y for y in needed))
        for estimator in ESTIMATORS:
            check(prior, needed, control, None, estimator, (2,))


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("dim", [2, 7])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_gradients(contraction, dim, estimator):
    """No units are kept then."""
    control = control_of(dim, contraction=contraction)
    _, prior = ou(dim)
    with torch.no_grad():
        found = [
            loss_of(prior, c, contraction, estimator, (4,))[1:] for c in (control, ByStep(control))
        ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dim", [1, 2, 7])
def test_a_loss_of_the_divergence_alone(contraction, estimator, dim):
    """Then nothing but the control reads the states."""
    control = control_of(dim, contraction=contraction)
    _, prior = ou(dim)
    found = []
    for c in (control, ByStep(control)):
        term = loss_of(prior, c, contraction, estimator, (3,))[2]
        found.append(torch.autograd.grad(term.sum(), list(control.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("hidden, paths", [((2,), 2), ((4, 9), 3)])
def test_many_outputs_of_few_units_are_not_kept(hidden, paths):
    """Of a path's size are states and noise; outputs, if many units make them."""
    dim, saved = 50, []

    def pack(x):
        saved.append(x.untyped_storage())
        return x

    control = control_of(dim, hidden=hidden)
    prior = OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID, torch.zeros(dim))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q = ControlledPath(prior, control)
        loss = path_divergence(q, prior, q.rsample((3,)), "stl").sum()
    assert loss.requires_grad
    sizes = {s.data_ptr(): s.nbytes() // 8 for s in saved}
    assert sum(n >= 3 * dim * (len(GRID) - 1) for n in sizes.values()) == paths


def test_a_backward_pass_leaves_what_it_needs_for_another():
    for dim in (1, 2, 7):
        control = control_of(dim)
        parameters, prior = ou(dim)
        _, z, term = loss_of(prior, control, None, "stl", (3,))
        loss, inputs = z.sum() + term.sum(), [*parameters, *control.parameters()]
        once, twice = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
        for a, b in zip(once, twice, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("estimator", ["kl", "full"])
@pytest.mark.parametrize("process", [ou, neural])
def test_gradients_of_gradients(dim, contraction, estimator, process):
    control = control_of(dim, contraction=contraction)
    parameters, prior = process(dim)
    inputs = [*parameters, *control.parameters()]
    found = []
    for c in (control, ByStep(control)):
        _, z, term = loss_of(prior, c, contraction, estimator, (2,))
        first = torch.autograd.grad(z.sum() + term.sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_gradients_of_gradients_by_what_is_known(contraction):
    """A grid for each series, and a context."""
    times = torch.stack([GRID, 1.5 * GRID])
    control, context = control_of(2, context=4, contraction=contraction), leaf(5, 2, 4)
    parameters, prior = neural(2, (2,), times)
    inputs = [context, *parameters, *control.parameters()]
    found = []
    for c in (WithContext(control, context), ByStep(WithContext(control, context))):
        _, z, term = loss_of(prior, c, contraction, "full", ())
        first = torch.autograd.grad(z.sum() + term.sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
