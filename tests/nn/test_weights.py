"""A module taken apart: what becomes of its parameters, and what is left of it."""

import copy

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import ConvField, SDEBlock
from pyro_sde.solvers import METHODS

from .nets import FIELDS, Chain, TimeField, X, by_hand, draw, mlp, run_with


def train(model, x, steps=2):
    guide = AutoSDE(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceSDE_ELBO())
    for _ in range(steps):
        svi.step(x, x)
    return guide


@pytest.mark.parametrize("initial", ["point", "normal"])
def test_the_field_that_was_given_is_left_alone(initial):
    field = mlp()
    before = {name: (id(p), p.detach().clone()) for name, p in field.named_parameters()}
    train(Chain(a=SDEBlock(field, steps=3, initial=initial)), X)
    after = dict(field.named_parameters())
    assert list(after) == list(before) and not list(field.buffers())
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity and torch.equal(after[name], value)
        assert after[name].requires_grad and after[name].grad is None


@pytest.mark.parametrize("name", FIELDS)
def test_start_is_the_module_s_weights(name):
    field = FIELDS[name][0](2)
    block = SDEBlock(field)
    start = nn.utils.parameters_to_vector(field.parameters())
    assert torch.equal(block.start, start) and block.dim == len(start)
    assert [n for n, _ in block.named_parameters()] == ["w_0"]
    with torch.no_grad():
        block.start.zero_()
    assert (start != 0).any()


@pytest.mark.filterwarnings("ignore:.*requires_grad=False")
def test_frozen_parameters_stay_constant_and_out_of_w():
    field = mlp()
    field[0].weight.requires_grad_(False)
    frozen = field[0].weight.clone()
    model = Chain(a=SDEBlock(field, steps=3, scale=0.5))
    assert model.a.dim == 3 + 6 + 2
    h, draws = draw(model, X)
    expected = by_hand(field, X, draws["a.w"])
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)
    train(model, X)
    assert torch.equal(model.a.skeleton.field[0].weight, frozen)
    assert torch.equal(model.state_dict()["a.skeleton.field.0.weight"], frozen)
    assert "skeleton" not in " ".join(pyro.get_param_store().keys())


def test_frozen_parameters_warn_of_nothing():
    field = mlp()
    field[0].weight.requires_grad_(False)
    SDEBlock(field, steps=2)(X)


class TiedWeight(nn.Module):
    """Two layers that share a weight and have biases of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last.weight = self.first.weight

    def forward(self, h):
        return self.last(torch.tanh(self.first(h)))


class TiedLayer(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = self.first

    def forward(self, h):
        return self.last(torch.tanh(self.first(h)))


@pytest.mark.parametrize("kind, dim", [(TiedWeight, 8), (TiedLayer, 6)])
def test_tied_parameters_occur_once_and_both_users_see_them(kind, dim):
    block = SDEBlock(kind(), steps=3, scale=0.5)
    assert block.dim == dim
    h, draws = draw(block, X)
    w = draws["w"]
    # Written out: the weight comes first, then the bias of the first layer, then the other's.
    expected = X
    for wi in w[:-1].detach():
        weight, first, last = wi[:4].reshape(2, 2), wi[4:6], wi[-2:]
        slope = torch.tanh(expected @ weight.T + first) @ weight.T + last
        expected = expected + slope / 3
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("particles", [False, True])
@pytest.mark.parametrize("field", [mlp, TiedWeight, TiedLayer, TimeField])
def test_nothing_of_a_draw_stays_in_the_module(field, particles):
    """So that it can be copied after it was used, and its graph is freed."""
    block = SDEBlock(field(), steps=3)
    before = [b.clone() for b in block.skeleton.field.buffers()]
    run = pyro.plate("num_particles_vectorized", 3, dim=-2)(block) if particles else block
    run(X)
    for old, new in zip(before, block.skeleton.field.buffers(), strict=True):
        assert new.shape == old.shape and not new.requires_grad
    assert torch.equal(copy.deepcopy(block).start, block.start)


def test_field_of_h_and_field_of_t_and_h():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(1))

    class WithTime(Scaled):
        def forward(self, t, h):
            return self.a * t + 0 * h

    class Without(Scaled):
        def forward(self, h):
            return self.a + 0 * h

    class Optional(Scaled):
        def forward(self, h, gain=2.0, *, shift=0.0):
            return gain * self.a + 0 * h + shift

    w = {"w": torch.ones(5, 1)}
    x = torch.zeros(2, 1)
    # The sums of t over the grid 0, 1/4, 1/2, 3/4, 1: left ends, trapezoids, midpoints.
    for method, integral in (("euler", 6 / 16), ("heun", 0.5), ("midpoint", 0.5)):
        timed = SDEBlock(WithTime(), steps=4, method=method)
        assert run_with(timed, w, x).flatten().tolist() == [integral] * 2
        assert run_with(SDEBlock(Without(), steps=4, method=method), w, x).tolist() == [[1.0]] * 2
        assert run_with(SDEBlock(Optional(), steps=4, method=method), w, x).tolist() == [[2.0]] * 2


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("method", METHODS)
def test_evaluations_are_counted(method, steps):
    block = SDEBlock(mlp(), steps=steps, method=method)
    calls = []
    block.skeleton.field.register_forward_hook(lambda *_: calls.append(1))
    block(X)
    expected = {"euler": steps, "rk4": 4 * steps, "reversible_heun": steps + 1}
    assert len(calls) == block.evaluations == expected.get(method, 2 * steps)
    assert f"weights=17, steps={steps}, method={method!r}" in repr(block)


@pytest.mark.parametrize("initial", ["point", "normal"])
def test_single_precision_is_kept(initial):
    block = SDEBlock(mlp().float(), steps=3, initial=initial)
    model, x = Chain(a=block), X.float()
    assert {b.dtype for b in (block.start, block.times, block.start_scale)} == {torch.float32}
    guide = train(model, x)
    h, draws = draw(model, x)
    assert h.dtype == draws["a.w"].dtype == torch.float32
    assert {p.dtype for p in guide.parameters()} == {torch.float32}
    assert guide(x, x)["a.w"].dtype == torch.float32
    cast = SDEBlock(mlp(), steps=3, initial=initial).float()
    assert cast(x).dtype == torch.float32


def test_the_grid_has_the_precision_of_the_field():
    torch.set_default_dtype(torch.float32)
    block = SDEBlock(mlp().double(), steps=10)
    assert torch.equal(block.times, torch.linspace(0, 1, 11, dtype=torch.float64))


def test_modes_and_constants_of_the_field_go_along():
    """Buffers that are only read, train and eval, and normalisation without statistics."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("shift", torch.tensor([1.0, -1.0]))

        def forward(self, h):
            return self.layer(h) + self.shift * self.training

    block = SDEBlock(Shifted(), steps=1, scale=0.5)
    h, draws = draw(block, X)
    quiet = run_with(block.eval(), draws, X)
    torch.testing.assert_close(h - quiet, torch.tensor([1.0, -1.0]).expand(4, 2))
    assert "skeleton.field.shift" in block.state_dict()
    for norm in (nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, affine=True)):
        field = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), norm)
        assert SDEBlock(field, steps=2)(torch.randn(2, 2, 4, 4)).shape == (2, 2, 4, 4)


def test_what_one_input_is():
    assert SDEBlock(mlp()).event_dim == 1
    assert SDEBlock(nn.LayerNorm(2)).event_dim == 1
    assert SDEBlock(nn.Conv1d(2, 2, 3, padding=1)).event_dim == 2
    assert SDEBlock(ConvField(2, 2)).event_dim == 3


def test_augmentation_follows_event_dim_in_fields_with_larger_parameters():
    """Features, not rows: a parameter of three dimensions does not make a field of images."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 3))

        def forward(self, h):
            return torch.tanh(torch.einsum("kij,...j->...ki", self.weight, h)).sum(-2)

    block = SDEBlock(Experts(), augment=1, steps=2, event_dim=1)
    assert block(X).shape == (4, 3)
