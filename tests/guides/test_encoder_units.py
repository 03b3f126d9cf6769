"""The units that an encoder takes from the data."""

import torch

from pyro_sde.guides import GRUEncoder, SummaryEncoder
from pyro_sde.guides.encoders import as_observations


def test_units_are_mean_and_spread():
    values = torch.randn(50, 3, 2) * torch.tensor([1e-4, 30.0]) + torch.tensor([0.0, 5.0])
    encoder = SummaryEncoder(2, length=3).double()
    encoder.take_units(as_observations(torch.arange(3.0).expand(50, -1), values))
    flat = values.flatten(0, 1)
    torch.testing.assert_close(encoder.loc, flat.mean(0))
    torch.testing.assert_close(encoder.scale, flat.std(0, correction=0))
    torch.testing.assert_close(encoder.gap, torch.tensor(1.0))


def test_rounding_is_no_spread():
    """A joint that never moves says nothing, also if its angle is only zero to 1e-14."""
    values = torch.randn(50, 3, 3)
    values[..., 1] *= 1e-14
    values[..., 2] = 4.0
    encoder = SummaryEncoder(3, length=3).double()
    observations = as_observations(torch.arange(3.0).expand(50, -1), values)
    encoder.take_units(observations)
    assert encoder.scale[1:].tolist() == [1.0, 1.0]
    still = observations._replace(values=values * torch.tensor([1.0, 0.0, 1.0]))
    at = torch.zeros(50)
    torch.testing.assert_close(encoder(*observations).start(at), encoder(*still).start(at))
    alone = GRUEncoder(1)
    third = torch.full((50, 3, 1), 1e6 / 3, dtype=torch.float32)
    alone.take_units(as_observations(torch.arange(3.0).expand(50, -1), third))
    assert alone.scale.tolist() == [1.0]
