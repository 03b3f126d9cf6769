"""Hidden units that are computed in place, and their slopes."""

import pytest
import torch

from pyro_sde.distributions.units import UNITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", UNITS)
def test_all_ways_agree_to_the_rounding_of_their_range(name, dtype):
    unit = UNITS[name]
    exact = torch.linspace(-40, 40, 100_001, dtype=torch.float64).requires_grad_()
    value = unit.of(exact)
    (slope,) = torch.autograd.grad(value.sum(), exact)
    x = exact.detach().to(dtype)
    # Twice a sigmoid less one: two roundings of numbers up to 1 besides that of the sigmoid.
    tol = 2 * torch.finfo(dtype).eps * value.detach().abs().clamp(min=1)
    room = unit.factor * x
    found = unit.in_place(x)(room)
    assert found.data_ptr() == room.data_ptr()
    assert bool(((found - value.detach()).abs() <= tol).all())
    again = (unit.compiled or unit.of)(x)
    assert bool(((again - value.detach()).abs() <= tol).all())
    # A slope of tanh is 1 - h^2, twice as uncertain as h; that of softplus is bent at 20 by torch.
    assert bool(((unit.slope(found) - slope).abs() <= 4 * torch.finfo(dtype).eps + 3e-9).all())
