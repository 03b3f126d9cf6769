"""fit refuses to take a batch for all of the data, and parameters that nobody would train."""

import functools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule
from torch import nn

import pyro_sde
from pyro_sde import AutoSDE, TraceSDE_ELBO, fill_missing
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck, SDEPath
from pyro_sde.nn import SDEBlock
from pyro_sde.training.batches import Batches

fit = functools.partial(pyro_sde.fit, progress=False, steps=2)
X = torch.linspace(-1.0, 1.0, 40, dtype=torch.float64).unsqueeze(-1)
Y = X[:, 0].sin()
GRID = torch.linspace(0.0, 1.0, 4, dtype=torch.float64)
UNTRAINED = r"parameters that Pyro does not know.* trained: "


class Net(PyroModule):
    """The form of SDEBlock's doc string."""

    def __init__(self):
        super().__init__()
        self.block = SDEBlock(nn.Linear(1, 1), steps=2)
        self.head = nn.Linear(1, 1)

    def forward(self, x, y=None, size=None):
        mean = self.head(self.block(x)).squeeze(-1)
        with pyro.plate("data", size or len(x), subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


@pytest.mark.parametrize("size", [5, 7])
def test_a_batch_is_not_all_of_the_data(size):
    net = Net()
    message = rf"batch_size={size} of 40 rows.*\(y\).*by {40 / size:g}.*plate\(\"data\", 40, subs"
    with pytest.raises(ValueError, match=message):
        fit(net, AutoSDE(net), (X, Y), batch_size=size)
    assert not any(p.grad.any() for p in net.parameters() if p.grad is not None)


def test_a_plate_that_knows_the_size_is_scaled():
    """The mean over all batches of an epoch is the log likelihood of the whole."""
    net = Net()
    guide = AutoSDE(net)
    options = {"lr": 1e-12, "elbo": TraceSDE_ELBO(num_particles=50)}
    whole = pyro_sde.fit(net, guide, (X, Y, 40), steps=8, progress=False, **options)
    parts = pyro_sde.fit(net, guide, (X, Y, 40), epochs=1, batch_size=5, progress=False, **options)
    means = [torch.tensor(h.log_likelihood).mean() for h in (whole, parts)]
    assert means[0] < -100
    torch.testing.assert_close(*means, rtol=0.05, atol=0)


def test_a_scale_of_ones_own_is_taken():
    def model(y):
        loc = pyro.param("loc", torch.tensor(0.0))
        with pyro.poutine.scale(scale=0.5 * 40 / len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0).expand([len(y)]).to_event(1), obs=y)

    assert len(fit(model, lambda y: None, Y, batch_size=5, elbo=Trace_ELBO()).step) == 2


def test_all_rows_in_every_step_need_no_scale():
    net = Net()
    assert len(fit(net, AutoSDE(net), (X, Y)).step) == 2
    assert len(fit(net, AutoSDE(net, name="other"), (X, Y), batch_size=40).step) == 2


def observe(z, y):
    pyro.sample("y", dist.Normal(z, 0.5), obs=y)


def plain_module():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 1)

        def forward(self, y):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            observe(self.head(z)[..., -1, 0], y)

    return Model()


def closure():
    head = nn.Linear(1, 1)

    def model(y):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        observe(head(z)[..., -1, 0], y)

    return model


def closure_in_the_prior():
    head = nn.Linear(1, 1)

    def drift(t, z):
        return head(z)

    def model(y):
        z = pyro.sample("z", SDEPath(drift, 1.0, torch.zeros(1), GRID))
        observe(z[..., -1, 0], y)

    return model


def closure_in_the_start():
    """Which the guide replaces by a start of its own."""
    head = nn.Linear(1, 1)

    def model(y):
        start = dist.Normal(head(torch.ones(1)), 1.0).to_event(1)
        z = pyro.sample("z", BrownianMotion(1.0, GRID, start))
        observe(z[..., -1, 0], y)

    return model


def closure_in_a_latent():
    head = nn.Linear(1, 1)

    def model(y):
        z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
        a = pyro.sample("a", dist.Normal(head(torch.ones(1))[0], 1.0))
        observe(z[..., -1, 0] + a, y)

    return model


MODELS = [plain_module, closure, closure_in_the_prior, closure_in_the_start, closure_in_a_latent]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_parameters_that_would_not_be_trained_are_named(make):
    model = make()
    own = r"model\." if make is plain_module else ""
    named = rf"{own}head\.weight, {own}head\.bias\..*pyro\.module"
    with pytest.raises(ValueError, match=UNTRAINED + named):
        fit(model, AutoSDE(model), torch.tensor(1.0))


def test_a_tensor_that_wants_a_gradient():
    shift = torch.tensor(0.0, requires_grad=True)

    def model(y):
        observe(shift, y)

    with pytest.raises(ValueError, match=UNTRAINED + r"shift\. "):
        fit(model, lambda y: None, torch.tensor(1.0), elbo=Trace_ELBO())
    shift.requires_grad_(False)
    fit(model, lambda y: pyro.param("a", torch.tensor(0.0)), torch.tensor(1.0), elbo=Trace_ELBO())


@pytest.mark.parametrize("registered", ["module", "frozen"])
def test_the_remedies(registered):
    head = nn.Linear(1, 1).requires_grad_(registered == "module")
    before = head.weight.detach().clone()

    def model(y):
        layer = pyro.module("head", head) if registered == "module" else head
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        observe(layer(z)[..., -1, 0], y)

    fit(model, AutoSDE(model), torch.tensor(1.0))
    assert torch.equal(before, head.weight) == (registered == "frozen")


def test_a_second_model_with_the_names_of_the_first():
    """Pyro would go on with the first one's head, and use the second's."""
    for message in (None, r"model\.head\.weight.*clear_param_store"):
        net = Net()
        guide = AutoSDE(net, name=f"guide of {message}")
        if message is None:
            fit(net, guide, (X, Y))
        else:
            with pytest.raises(ValueError, match=message):
                fit(net, guide, (X, Y))


def series(y):
    z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
    pyro.sample("y", dist.Normal(z[..., 0], 0.5).to_event(1), obs=y)


def test_arrays_of_numpy_are_data():
    y = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = []
    for data in (y, y.numpy(), {"y": y.numpy()}, (y.numpy(),)):
        pyro.clear_param_store()
        found.append(fit(series, AutoSDE(series), data, seed=0, validation=data).elbo)
    assert all(elbo == found[0] for elbo in found)
    rows = Batches({"y": y.float().numpy(), "n": np.arange(4)}, 2)
    assert rows.rows == 4 and rows(0)[1]["y"].dtype == torch.get_default_dtype()
    assert rows(0)[1]["n"].dtype == torch.int64


def test_an_observed_array_is_named():
    def model():
        series(np.zeros(4))

    with pytest.raises(TypeError, match=r"site 'y' is observed at a ndarray: .*torch.as_tensor"):
        fit(model, AutoSDE(model))


def test_an_observed_value_does_not_grow():
    """(4,) against (4, 1) are 16 numbers, for Pyro without a word."""

    def model(y):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        pyro.sample("y", dist.Normal(z, 0.5).to_event(2), obs=y)

    with pytest.raises(ValueError, match=r"'y' is observed at .* \(4,\).*\(4, 1\).*unsqueeze"):
        fit(model, AutoSDE(model), torch.zeros(4))
    assert len(fit(model, AutoSDE(model, name="right"), torch.zeros(4, 1)).step) == 2


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("as_dict", [True, False])
def test_missing_values_are_named(validates, as_dict):
    y = torch.tensor([0.1, math.nan, 0.3, 0.4])
    pyro.enable_validation(validates)
    with pytest.raises(ValueError, match=r"'y'.* 1 values that are NaN.*fill_missing"):
        fit(series, AutoSDE(series), {"y": y} if as_dict else y)


def test_missing_values_that_the_model_masks():
    def model(y):
        y, mask = fill_missing(y.unsqueeze(-1))
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        pyro.sample("y", dist.Normal(z, 0.5).mask(mask).to_event(2), obs=y)

    y = torch.tensor([0.1, math.nan, 0.3, 0.4])
    assert len(fit(model, AutoSDE(model), y).step) == 2
