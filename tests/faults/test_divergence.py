"""Trainings that diverge say where, and leave something to go on from."""

import pytest
import torch
from attacks import divergence
from attacks.divergence import WAYS, Run, play


@pytest.fixture(autouse=True)
def single_precision():
    """As most trainings have it, whose squares overflow above 1e19."""
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(divergence, "STEPS", 12)
    divergence.healthy.cache_clear()
    yield
    divergence.healthy.cache_clear()


@pytest.mark.parametrize("way", WAYS)
def test_the_error_is_complete_and_training_goes_on(way):
    assert play(way, 0) == Run(way, "diverged")
