"""Gradients through the block and the ELBO, against central differences on the same noise."""

import functools

import pyro
import pytest
import torch
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import nn

from pyro_sde import MLPControl, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock
from pyro_sde.solvers import METHODS

from ..guides.models import shaken
from .nets import FIELDS, Chain, TimeField, mlp

STEP = 1e-5


def assert_gradients(loss, tensors):
    """The slope of ``loss`` along a random unit direction of each tensor.

    The differences err by STEP^2 / 6 third derivatives and by 1e-16 |loss| / STEP, some 1e-9 both.
    """
    grads = torch.autograd.grad(loss(), list(tensors.values()))
    for (name, x), grad in zip(tensors.items(), grads, strict=True):
        assert (grad != 0).any(), name
        v = torch.randn_like(x)
        v /= v.norm()
        with torch.no_grad():
            x.add_(v, alpha=STEP)
            up = loss()
            x.sub_(v, alpha=2 * STEP)
            down = loss()
            x.add_(v, alpha=STEP)
        slope = ((up - down) / (2 * STEP)).item()
        assert abs((grad * v).sum().item() - slope) < 1e-7 * (1 + abs(slope)), name


@pytest.mark.parametrize("particles", [0, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FIELDS)
def test_through_the_block(name, method, particles):
    make, rest = FIELDS[name]
    scale, rate = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(0.7))
    block = SDEBlock(make(3), scale=scale, rate=rate, steps=4, method=method, augment=1)
    x = torch.randn(2, 2, *rest, requires_grad=True)
    run = pyro.plate("num_particles_vectorized", particles, dim=-2)(block) if particles else block

    def loss():
        with torch.random.fork_rng():
            pyro.set_rng_seed(3)
            return run(x).square().sum()

    assert_gradients(loss, {"start": block.start, "scale": scale, "rate": rate, "x": x})


@pytest.mark.parametrize("particles, contraction", [(1, False), (2, True)])
@pytest.mark.parametrize("initial", ["point", "normal"])
@pytest.mark.parametrize("estimator", ["kl", "full"])
def test_through_the_elbo(estimator, initial, particles, contraction):
    """Of w_0, the controls, the input and a learned scale; two blocks, one of them augmented."""
    scale = PyroParam(torch.tensor(0.3), constraint=constraints.positive)
    model = Chain(
        a=SDEBlock(mlp(), scale=scale, steps=4, initial=initial),
        b=SDEBlock(TimeField(3), steps=3, augment=1, method="heun", initial=initial),
    )
    x, y = torch.randn(4, 2, requires_grad=True), torch.randn(4, 3)
    control = functools.partial(MLPControl, hidden=(3,))
    guide = shaken(model, x, y, control=control, contraction=contraction)
    elbo = TraceSDE_ELBO(
        path_estimator=estimator,
        num_particles=particles,
        vectorize_particles=particles > 1,
        max_plate_nesting=1,
    )

    def loss():
        with torch.random.fork_rng():
            pyro.set_rng_seed(3)
            return elbo.differentiable_loss(model, guide, x, y)

    tensors = {"x": x, **dict(model.named_parameters()), **dict(guide.named_parameters())}
    assert "a.scale_unconstrained" in tensors and ("b.w_0" in tensors) == (initial == "point")
    assert_gradients(loss, tensors)
