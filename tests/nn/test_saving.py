"""Blocks and their guides saved, loaded, pickled and copied."""

import copy
import io

import pyro
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Predictive
from pyro.nn import PyroParam
from torch import nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock

from .nets import Chain, TimeField, X, Y, mlp

INITIALS = pytest.mark.parametrize("initial", ["point", "normal"])


def build(initial):
    """A learned scale, a vector of scales, and modules of other random weights every time."""
    scale = PyroParam(torch.tensor(0.3), constraint=constraints.positive)
    model = Chain(
        a=SDEBlock(mlp(), steps=3, scale=scale, initial=initial),
        b=SDEBlock(TimeField(), steps=2, scale=0.1 + torch.rand(22), initial=initial),
    )
    return model, AutoSDE(model)


def train(model, guide, steps=4):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceSDE_ELBO())
    return [svi.step(X, Y) for _ in range(steps)]


def predict(model, guide, parallel=False):
    pyro.set_rng_seed(5)
    sites = ("a.w", "b.w", "y", "_RETURN")
    return Predictive(model, guide=guide, num_samples=3, parallel=parallel, return_sites=sites)(X)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@INITIALS
def test_state_dicts_restore_the_predictions(initial):
    model, guide = build(initial)
    train(model, guide)
    expected, parallel = predict(model, guide), predict(model, guide, parallel=True)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "guide": guide.state_dict()}, saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)

    pyro.clear_param_store()
    model, guide = build(initial)
    guide.setup(X, Y)
    assert not torch.equal(predict(model, guide)["_RETURN"], expected["_RETURN"])
    model.load_state_dict(state["model"])
    guide.load_state_dict(state["guide"])
    assert_equal(predict(model, guide), expected)
    assert_equal(predict(model, guide, parallel=True), parallel)


@INITIALS
def test_whole_modules_are_pickled(initial):
    model, guide = build(initial)
    train(model, guide)
    expected = predict(model, guide)
    saved = io.BytesIO()
    torch.save((model, guide), saved)
    saved.seek(0)
    pyro.clear_param_store()
    model, guide = torch.load(saved, weights_only=False)
    assert guide.model is model
    assert_equal(predict(model, guide), expected)
    before = model.a.skeleton.dim, guide.state_dict().keys()
    assert all(torch.isfinite(torch.tensor(train(model, guide))))
    assert before == (model.a.skeleton.dim, guide.state_dict().keys())


@INITIALS
def test_a_copy_lives_on_its_own(initial):
    model, guide = build(initial)
    train(model, guide)
    expected = predict(model, guide)
    pyro.clear_param_store()
    twin, twin_guide = copy.deepcopy((model, guide))
    assert twin_guide.model is twin
    assert_equal(predict(twin, twin_guide), expected)
    train(twin, twin_guide)
    assert not torch.equal(predict(twin, twin_guide)["_RETURN"], expected["_RETURN"])
    pyro.clear_param_store()
    assert_equal(predict(model, guide), expected)


def test_a_block_alone_is_copied_and_pickled():
    block = SDEBlock(mlp(), steps=3)
    block(X)
    saved = io.BytesIO()
    torch.save(block, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(block), torch.load(saved, weights_only=False)):
        results = []
        for b in (block, twin):
            pyro.clear_param_store()
            pyro.set_rng_seed(1)
            results.append(b(X))
        assert torch.equal(*results) and twin.start is not block.start


def test_what_a_state_dict_holds():
    """The weights and what is learned; the grid and the prior's widths are how it was built."""
    model, _ = build("point")
    names = {"a.w_0", "a.scale_unconstrained", "b.w_0", "b.scale"}
    assert set(model.state_dict()) == names
    assert set(build("normal")[0].state_dict()) == names
    fine = SDEBlock(nn.Linear(2, 2), steps=50)
    fine.load_state_dict(SDEBlock(nn.Linear(2, 2), steps=5).state_dict())
    assert fine(X).shape == X.shape
