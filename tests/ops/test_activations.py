"""Activations that are computed in place, and their derivatives."""

import pytest
import torch

from pyro_sde._ops.fused.layers import ACTIVATIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_all_ways_agree_to_the_rounding_of_their_range(name, dtype):
    unit = ACTIVATIONS[name]
    exact = torch.linspace(-40, 40, 100_001, dtype=torch.float64).requires_grad_()
    value = unit.function(exact)
    (slope,) = torch.autograd.grad(value.sum(), exact)
    x = exact.detach().to(dtype)
    # Twice a sigmoid less one: two roundings of numbers up to 1 besides that of the sigmoid.
    tol = 2 * torch.finfo(dtype).eps * value.detach().abs().clamp(min=1)
    buffer = unit.factor * x
    found = unit.in_place(x)(buffer)
    assert found.data_ptr() == buffer.data_ptr()
    assert bool(((found - value.detach()).abs() <= tol).all())
    again = (unit.compiled or unit.function)(x)
    assert bool(((again - value.detach()).abs() <= tol).all())
    # A slope of tanh is 1 - h^2, twice as uncertain as h; that of softplus is bent at 20 by torch.
    assert bool(
        ((unit.grad_from_output(found) - slope).abs() <= 4 * torch.finfo(dtype).eps + 3e-9).all()
    )
