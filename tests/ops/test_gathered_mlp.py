"""What an encoder says at many times, as one operation, against plain ones."""

import itertools

import pytest
import torch

from pyro_sde._ops import gathered_mlp as module

NAMES = ("known", "more", "wait", "out", "bias")


def inputs(dtype=torch.float64, n=23):
    shapes = ((7, 4), (n, 3), (4, 3), (5, 4), (5,))
    tensors = [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]
    return torch.randint(7, (n,)), tensors


@pytest.fixture(params=[1, 8, 10**6])
def block(request, monkeypatch):
    """Of one row, of two, and of all: 23 rows leave one over."""
    monkeypatch.setattr(module, "BLOCK", request.param)


def both(rows, tensors):
    return module.gathered_mlp(tensors[0], rows, *tensors[1:]), module._plain(rows, *tensors)


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("n", [0, 1, 23])
def test_value_and_gradients(block, dtype, tol, n):
    rows, tensors = inputs(dtype, n)
    found = []
    for out in both(rows, tensors):
        weights = torch.linspace(1, 2, out.numel(), dtype=dtype).reshape(out.shape)
        found.append([out, *torch.autograd.grad((out.sin() * weights).sum(), tensors)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    assert type(both(rows, tensors)[0].grad_fn).__name__ == "_GatheredMLPBackward"


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2, 4)])
def test_gradients_by_some_only(block, needed):
    rows, tensors = inputs()
    for i, x in enumerate(tensors):
        x.requires_grad_(i in needed)
    wanted = [tensors[i] for i in needed]
    ours, plain = (torch.autograd.grad(x.square().sum(), wanted) for x in both(rows, tensors))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients():
    rows, tensors = inputs()
    found = []
    for out in both(rows, tensors):
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), tensors))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


def test_inside_of_torch_func():
    rows, (known, *rest) = inputs()

    def f(known):
        return module.gathered_mlp(known, rows, *rest).square().sum()

    torch.testing.assert_close(torch.func.grad(f)(known), torch.autograd.grad(f(known), known)[0])


def test_nothing_of_the_layers_size_is_kept():
    rows, tensors = inputs(n=1000)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.setdefault(x.data_ptr(), x) is None or x, lambda x: x
    ):
        module.gathered_mlp(tensors[0], rows, *tensors[1:])
    assert {x.data_ptr() for x in itertools.chain([rows], tensors)} == set(kept)
