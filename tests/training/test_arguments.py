"""What fit is given is checked before anything is trained."""

import functools
import math

import numpy as np
import pyro
import pytest
import torch

import pyro_sde
from pyro_sde import AutoSDE, Predictive, TraceSDE_ELBO, anneal_kl, kl_weight

from .models import DATA, make

WHOLE = ["steps", "epochs", "batch_size", "every", "patience", "validation_draws", "keep"]
fit = functools.partial(pyro_sde.fit, progress=False, match=False)


def refused(message, error=ValueError, **options):
    model, guide, _ = make("functional")
    with pytest.raises(error, match=message):
        fit(model, guide, DATA, **options)
    assert not pyro.get_param_store().keys()


@pytest.mark.parametrize("name", [*WHOLE, "max_rejected", "seed", "anneal"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 2.5, 10.0, "100", True, torch.tensor(2)])
def test_whole_numbers(name, value):
    found = "10.0; write 10" if isinstance(value, float) and value == 10 else ""
    more = {"validation": DATA} if name in ("every", "patience", "validation_draws") else {}
    message = rf"^{name} must be a whole number of at least (0|1): found {found}"
    refused(message, **more, **{name: value})


@pytest.mark.parametrize("name", ["batch_size", "every", "patience", "validation_draws", "keep"])
def test_nothing_is_too_little(name):
    refused(rf"{name} must be a whole number of at least 1: found 0", **{name: 0})


@pytest.mark.parametrize("name", ["lr", "clip"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, "0.1", True, 1j, None])
def test_positive_numbers(name, value):
    refused(rf"{name} must be a positive number: found ", **{name: [] if value is None else value})


def test_integers_of_numpy():
    model, guide, elbo = make("functional")
    history = fit(
        model, guide, DATA, steps=np.int64(3), seed=np.int32(1), lr=np.float32(0.1), elbo=elbo
    )
    assert len(history.step) == 3


def test_seeds_are_those_of_numpy():
    refused("seed must be at most 4294967295: found 4294967296", seed=2**32)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "0.5", None, 1j, True])
def test_factors_of_the_learning_rate(value):
    """When they are asked for: here, at the third step. The steps before are those of training."""
    message = r"^schedule\(2\) must return a number of at least 0, by which .*: found "
    model, guide, elbo = make("functional")
    with pytest.raises(ValueError, match=message):
        fit(model, guide, DATA, steps=5, elbo=elbo, schedule=lambda i: 1.0 if i < 2 else value)
    history = fit(
        model, guide, DATA, steps=2, lr=0.5, elbo=elbo, schedule=lambda i: torch.tensor(0.0)
    )
    assert history.lr == [0.0, 0.0]


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, "0.5", None])
def test_weights_of_the_kl(value):
    message = r"^anneal\(2\) must return a number above 0, the weight of the KL: found "
    model, guide, elbo = make("functional")
    with pytest.raises(ValueError, match=message):
        fit(model, guide, DATA, steps=5, elbo=elbo, anneal=lambda i: 1.0 if i < 2 else value)


def test_weights_outside_of_fit():
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"weight must be positive: found {weight}"):
            anneal_kl(weight)
    for steps in (-1, math.nan, math.inf):
        with pytest.raises(
            ValueError, match=f"steps must be a number of at least 0: found {steps}"
        ):
            kl_weight(0, steps)


def test_objects():
    refused(
        r"elbo must be an ELBO, as TraceSDE_ELBO\(\): found <class", TypeError, elbo=TraceSDE_ELBO
    )
    refused("elbo must be an ELBO", TypeError, elbo="kl")
    refused("optim must be an optimiser of Pyro.*found <class", TypeError, optim=torch.optim.Adam)
    model, guide, _ = make("functional")
    with pytest.raises(TypeError, match="guide must be a function or a module: found None"):
        fit(model, None, DATA)
    with pytest.raises(TypeError, match="model must be a function or a module: found 3"):
        fit(3, guide, DATA)


def test_numbers_of_samples():
    model, guide, _ = make("functional")
    for number in (0, -1, 2.5, "100", True):
        with pytest.raises(
            ValueError, match="num_samples must be a whole number of at least 1: found"
        ):
            Predictive(model, guide=guide, num_samples=number)
    assert isinstance(AutoSDE(model, name="other").setup(*DATA), AutoSDE)
