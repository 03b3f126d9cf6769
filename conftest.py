"""Every test and every example in a doc string begins with an empty param store and a seed."""

import os

import pyro
import pytest

os.environ.setdefault("MPLBACKEND", "Agg")  # examples draw, and open no window


@pytest.fixture(autouse=True)
def fresh_start():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
