"""The gated recurrent unit that keeps its states alone."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from pyro_sde import GRUEncoder
from pyro_sde._ops import gru as module
from pyro_sde._ops.gru import run_gru
from pyro_sde.guides.encoders import _waiting

C, H = 3, 4
GATES = 3 * H


def unit(**options):
    return nn.GRU(C, H, batch_first=True, **options)


def stock(gru, x):
    """The module's own states, with the zero before them."""
    states, _ = gru(x.transpose(0, 1))
    return torch.cat([torch.zeros_like(states[:, :1]), states], 1).transpose(0, 1)


def gradients(states, weight, by, **options):
    """Of a function whose slope is another at every state."""
    return torch.autograd.grad((states * weight + states.square()).sum(), by, **options)


def assert_same(found, expected, tol=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.fixture(params=[1, 3, 1000], ids=lambda size: f"blocks of {size}")
def blocks(request, monkeypatch):
    """Sets how many steps of so many rows are a block."""
    return lambda rows: monkeypatch.setattr(module, "BLOCK", request.param * rows * GATES)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_equal_to_the_module_in_states_and_gradients(n, rows, blocks):
    blocks(rows)
    gru, x = unit(), torch.randn(n, rows, C, requires_grad=True)
    by, weight = [x, *gru.parameters()], torch.randn(n + 1, rows, H)
    found, expected = run_gru(gru, x), stock(gru, x)
    assert type(found.grad_fn).__name__ == "_GRUBackward"
    assert_same([found], [expected])
    assert_same(gradients(found, weight, by), gradients(expected, weight, by))


def test_saturated_gates(blocks):
    """Where tanh and sigmoid are flat the gradients are as small as they should be."""
    blocks(2)
    gru, x = unit(), 300 * torch.randn(5, 2, C)
    found, expected = run_gru(gru, x), stock(gru, x)
    weight = torch.randn_like(expected)
    assert_same([found], [expected])
    by = list(gru.parameters())
    # Rounding is that of the gates, which is multiplied by inputs of some hundred.
    assert_same(gradients(found, weight, by), gradients(expected, weight, by), tol=1e-10)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4])
def test_gradients_by_one_input_alone(wanted, blocks):
    blocks(2)
    gru, x = unit(), torch.randn(4, 2, C)
    inputs = [x, *gru.parameters()]
    for i, p in enumerate(inputs):
        p.requires_grad_(i == wanted)
    weight = torch.randn(5, 2, H)
    found = gradients(run_gru(gru, x), weight, [inputs[wanted]])
    assert_same(found, gradients(stock(gru, x), weight, [inputs[wanted]]))


def test_layouts_of_inputs_and_of_gradients(blocks):
    """Series first in memory, and a gradient that is one number for all states."""
    blocks(3)
    gru, x = unit(), torch.randn(3, 7, C, requires_grad=True)
    by = [x, *gru.parameters()]
    found, expected = (f(gru, x.transpose(0, 1)).sum() for f in (run_gru, stock))
    assert_same(torch.autograd.grad(found, by), torch.autograd.grad(expected, by))


def test_gradients_of_gradients():
    gru, x = unit(), torch.randn(4, 2, C, requires_grad=True)
    by, weight = [x, *gru.parameters()], torch.randn(5, 2, H)

    def twice(states):
        first = gradients(states, weight, by, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), by)

    assert_same(twice(run_gru(gru, x)), twice(stock(gru, x)))

    def of_all(x, *weights):
        return module._GRU.apply(x, *weights)

    assert torch.autograd.gradcheck(of_all, by)
    assert torch.autograd.gradgradcheck(of_all, by)


def test_a_batch_of_gradients():
    gru, x = unit(), torch.randn(3, 2, C, requires_grad=True)
    by, weights = [x, *gru.parameters()], torch.randn(6, 4, 2, H)
    found, expected = (
        torch.autograd.grad(f(gru, x), by, weights, is_grads_batched=True) for f in (run_gru, stock)
    )
    assert_same(found, expected)


def test_float32(blocks):
    blocks(5)
    gru, x = unit(dtype=torch.float32), torch.randn(7, 5, C, dtype=torch.float32)
    by, weight = list(gru.parameters()), torch.randn(8, 5, H, dtype=torch.float32)
    found, expected = run_gru(gru, x), stock(gru, x)
    assert found.dtype == torch.float32
    # A sum of 35 rows, each with rounding of 6e-8 in a few operations.
    assert_same([found], [expected], tol=1e-6)
    assert_same(gradients(found, weight, by), gradients(expected, weight, by), tol=1e-5)


def test_without_gradients(blocks):
    blocks(2)
    gru, x = unit(), torch.randn(7, 2, C)
    with torch.no_grad():
        found = run_gru(gru, x)
        assert not found.requires_grad
        assert_same([found], [stock(gru, x)])


def test_inside_of_func():
    """There the module itself runs."""
    gru, x = unit(), torch.randn(6, 4, 2, C)
    params = dict(gru.named_parameters())

    class Loss(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.gru, self.f = gru, f

        def forward(self, x):
            return self.f(self.gru, x).square().sum()

    def loss(f):
        named = {f"gru.{name}": p for name, p in params.items()}
        return lambda x: functional_call(Loss(f), named, (x,))

    found, expected = grad(loss(run_gru))(x[0]), grad(loss(stock))(x[0])
    assert_same([found], [expected])
    with torch.no_grad():
        each = torch.stack([stock(gru, one) for one in x])
        assert_same([vmap(lambda one: run_gru(gru, one))(x)], [each])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_as_the_module(dtype):
    gru, x = unit(dtype=torch.float32), torch.randn(3, 2, C, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        found, expected = run_gru(gru, x), stock(gru, x)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_another_dtype_is_the_error_of_the_module():
    gru, x = unit(), torch.randn(3, 2, C, dtype=torch.float32)
    with pytest.raises((ValueError, RuntimeError)) as expected:
        stock(gru, x)
    with pytest.raises(expected.type) as found:
        run_gru(gru, x)
    assert str(found.value) == str(expected.value)


def test_what_the_encoder_says_is_that_of_its_layers():
    """Before the first of two observations, between them, and after both, beside other series."""
    encoder = GRUEncoder(1, hidden=8, context=4)
    times, values = torch.rand(3, 2), torch.randn(3, 2, 1)
    times[1], values[1] = torch.tensor([0.3, 0.7]), torch.tensor([[0.5], [-2.0]])
    about = encoder(times, values, torch.ones(3, 2, 1, dtype=torch.bool))
    gap = _waiting(torch.tensor([0.4]))
    inputs = torch.tensor([[-2.0, 1.0], [0.5, 1.0]])  # the last first, each with its mask
    waited = torch.cat([torch.zeros_like(gap), gap])
    states, _ = encoder.gru(torch.cat([inputs, waited, torch.eye(2)[:, :1]], -1))
    ahead = torch.cat([states, inputs, torch.ones(2, 1)], -1)
    known = encoder.row(torch.cat([torch.zeros_like(ahead[:1]), ahead])).flip(0)
    waiting = _waiting(torch.tensor([0.2, 0.3, 0.0])) * torch.tensor([[1.0], [1.0], [0.0]])
    expected = torch.tanh(known + encoder.wait(waiting))
    found = about.context(torch.tensor([[0.1], [0.4], [0.9]]))
    assert_same([found[:, 1]], [encoder.out(expected)])
    start = torch.tanh(encoder.first(expected[:1]))
    assert_same([about.start(torch.tensor(0.1))[1:2]], [start])


def kept_bytes(run):
    """What the backward pass of ``run()`` keeps, every storage once."""
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    assert result is not None
    return sum(kept.values())


def nbytes(*tensors):
    return sum(x.untyped_storage().nbytes() for x in tensors)


def test_keeps_the_states_and_the_inputs():
    gru, x = unit(), torch.randn(50, 6, C)
    states = run_gru(gru, x)
    kept = kept_bytes(lambda: run_gru(gru, x))
    assert 0 < kept <= nbytes(x, states, *gru.parameters())
    assert kept_bytes(lambda: stock(gru, x)) > 3 * kept


def test_the_encoder_keeps_its_states_once():
    """Those of the unit, and what it says at the times that are asked for."""
    series, n, hidden = 7, 40, 64
    encoder = GRUEncoder(1, hidden, context=4)
    times, values = torch.rand(series, n), torch.randn(series, n, 1)
    mask = torch.ones(series, n, 1, dtype=torch.bool)
    at = torch.linspace(0.0, 1.0, n).unsqueeze(-1)
    kept = kept_bytes(lambda: encoder(times, values, mask).context(at))
    large = series * n * hidden * 8
    # Besides them 31 numbers for each observation and time asked for, which is half of a state.
    assert 2 * large < kept < 2.75 * large + nbytes(*encoder.parameters())
