import contextlib
import warnings

import pyro
import pytest
import torch


def pytest_configure(config):
    """ArviZ notes the day of its last warning in a file, which two processes cannot do at once."""
    if not hasattr(config, "workerinput"):
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            warnings.simplefilter("ignore")
            import arviz  # noqa: F401


@pytest.fixture(autouse=True)
def clean_slate():
    """Every test: float64, a fixed seed, an empty param store, validation on."""
    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(20261116)
    pyro.enable_validation(True)
    yield
    torch.set_default_dtype(before)
