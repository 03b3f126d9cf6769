"""Times and the dtype that has to hold them."""

import pytest
import torch

from pyro_sde import pad_series, series_grid


@pytest.mark.parametrize("n, dt", [(100, 0.1), (100, 0.01), (100, 0.05)])
def test_regular_series_in_single_precision_have_their_own_grid(n, dt):
    end = dt * (n - 1)
    for times in (torch.linspace(0, end, n).float(), torch.arange(n, dtype=torch.float32) * dt):
        assert torch.equal(series_grid(times.expand(3, n), dt=dt), times.expand(3, n))


def test_a_grid_that_single_precision_cannot_hold():
    times = (1.7e9 + 256.0 * torch.arange(10, dtype=torch.float32)).expand(2, 10)
    with pytest.raises(ValueError, match=r"torch.float32 cannot hold.*Subtract the first time"):
        series_grid(times, dt=256.0)
    exact = times.double()
    assert torch.equal(series_grid(exact, dt=256.0), exact)


def test_times_are_not_rounded_beyond_recognition():
    """Every 200 seconds since 1970: of float32, which has multiples of 128 there, all differ."""
    times = [1.7e9 + 200 * i for i in range(10)]
    data = [([0.0, 1.0], [1.0, 2.0]), (times, torch.zeros(10))]
    with pytest.raises(ValueError, match=r"series 1: torch.float32 rounds its times by up to"):
        pad_series(data, dtype=torch.float32)
    assert pad_series(data, dtype=torch.float64).times[1].tolist() == times
    since = [t - times[0] for t in times]
    assert pad_series([(since, torch.zeros(10))]).times[0].tolist() == since
