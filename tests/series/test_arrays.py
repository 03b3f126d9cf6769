"""Arrays of numpy in the place of tensors."""

import pytest
import torch

from pyro_sde import check_series, fill_missing, series_grid

TIMES = torch.tensor([[0.0, 0.3, 0.7, 2.0], [0.0, 2.0, 2.0, 2.0]])
VALUES = torch.tensor([[1.0, torch.nan, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]).unsqueeze(-1)
MASK = torch.tensor([[True, False, True, True], [True, True, False, False]])


def test_grids():
    expected = series_grid(TIMES, MASK, dt=0.5)
    found = series_grid(TIMES.numpy(), MASK.numpy(), dt=0.5)
    assert torch.equal(found, expected) and found.dtype == TIMES.dtype


def test_checks():
    check_series(TIMES.numpy(), VALUES.numpy(), MASK.numpy())
    with pytest.raises(ValueError, match=r"series 0: values\[1, 0\] is nan"):
        check_series(TIMES[:1].numpy(), VALUES[:1].numpy(), (MASK[:1] | True).numpy())


def test_missing_values():
    for found, expected in zip(
        fill_missing(VALUES.numpy(), MASK.numpy()), fill_missing(VALUES, MASK), strict=True
    ):
        assert torch.equal(found, expected.to(found.dtype))
