"""Observed values that are wrong are named: the site, the series, the time."""

import functools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

import pyro_sde
from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, fill_missing
from pyro_sde.distributions import OrnsteinUhlenbeck, PoissonProcess
from pyro_sde.infer.finite import NonFiniteLoss

fit = functools.partial(pyro_sde.fit, progress=False, match=False, elbo=TraceSDE_ELBO())
GRID = torch.tensor([0.0, 0.5, 1.5], dtype=torch.float64)
TIMES = GRID.expand(4, 3)
VALUES = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3, 1)
Y = VALUES[:, 0, 0]


def series(times, values):
    """Four series in a plate."""
    with pyro.plate("series", len(times)):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        pyro.sample("y", dist.Normal(z, 0.5).to_event(2), obs=values)


def guided(times, values):
    """The same without an AutoSDE."""
    prior = OrnsteinUhlenbeck(1.0, 0.0, pyro.param("scale", torch.tensor(1.0)), GRID)
    with pyro.plate("series", len(times)):
        pyro.sample("z", prior)


def rows(index, y):
    with pyro.plate("rows", 4, subsample=index):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.5), obs=y)


def shared(y):
    z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.5), obs=y)


def spoilt(values, place, bad):
    values = values.clone()
    values[place] = bad
    return values


@pytest.mark.parametrize(
    "bad, kind", [(math.inf, "infinite"), (-math.inf, "infinite"), (math.nan, "NaN")]
)
@pytest.mark.parametrize("how", ["setup", "fit", "own guide"])
def test_site_series_and_time(bad, kind, how):
    values = spoilt(VALUES, (2, 1, 0), bad)
    message = (
        rf"site 'y' is observed at 1 values that are {kind}, the first at \[2, 1, 0\] of the shape "
        r"\(4, 3, 1\), element 2 of the plate 'series', at time 0.5: .*fill_missing"
    )
    with pytest.raises(ValueError, match=message):
        if how == "setup":
            AutoSDE(series).setup(TIMES, values)
        else:
            fit(series, AutoSDE(series) if how == "fit" else guided, (TIMES, values), steps=2)


def test_times_of_one_series_and_none():
    def model(times, values):
        prior = OrnsteinUhlenbeck.scalar(1.0, 0.0, 1.0, GRID)
        z = pyro.sample("z", prior)
        with pyro.plate("observations", 3):
            pyro.sample("y", dist.Normal(prior.at(z, times), 0.5), obs=values)

    values = spoilt(VALUES[0, :, 0], 2, math.inf)
    place = r"at \[2\] of the shape \(3,\), element 2 of the plate 'observations'"
    with pytest.raises(ValueError, match=place + ", at time 1.5: "):
        AutoSDE(model).setup(GRID, values)

    def blind(t, y):
        model(t, y)

    with pytest.raises(ValueError, match=place + ": "):
        AutoSDE(blind).setup(GRID, values)
    with pytest.raises(ValueError, match="that are infinite, the first and only one: "):
        AutoSDE(
            lambda y: (
                pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID)),
                pyro.sample("y", dist.Normal(0.0, 1.0), obs=y),
            )
        ).setup(torch.tensor(math.inf))


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_mini_batches_name_the_row_of_the_data(seed, bad):
    """In whichever step the row comes."""
    y = spoilt(Y, 2, bad)
    kind = "NaN" if math.isnan(bad) else "infinite entries"
    with pytest.raises(
        ValueError, match=rf"argument 1 of the data has 1 {kind}, the first at \[2\]"
    ):
        fit(rows, AutoSDE(rows), (torch.arange(4), y), steps=5, batch_size=1, seed=seed)


def test_later_in_a_loop_of_ones_own():
    svi = SVI(series, AutoSDE(series), pyro.optim.Adam({}), TraceSDE_ELBO())
    svi.step(TIMES, VALUES)
    message = r"site 'y' is observed at inf, at \[3, 0, 0\] .* element 3 of the plate 'series'"
    with pytest.raises(NonFiniteLoss, match=message):
        svi.step(TIMES, spoilt(VALUES, (3, 0, 0), math.inf))


def test_what_is_masked_is_not_looked_at_after_fill_missing():
    def model(y):
        y, seen = fill_missing(y)
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.5).mask(seen), obs=y)

    whole = np.ma.masked_array(Y.numpy().copy(), mask=[0, 1, 0, 0])
    whole.data[1] = math.inf
    losses = []
    for y in (whole, spoilt(Y, 1, math.nan)):
        pyro.clear_param_store()
        losses.append(fit(model, AutoSDE(model), y, steps=3, seed=0).elbo)
    assert losses[0] == losses[1]


def test_what_an_array_hides_is_named():
    y = np.ma.masked_array(Y.numpy().copy(), mask=[0, 1, 0, 0])
    match = r"1 values that are NaN, the first at \[1\] .*fill_missing"
    with pytest.raises(ValueError, match=match):
        fit(shared, AutoSDE(shared), y, steps=1)
    with pytest.raises(ValueError, match=match):
        AutoSDE(shared).setup(y)
    with pytest.raises(
        TypeError, match=r"observed at a MaskedArray: replace what it hides.*fill_m"
    ):
        AutoSDE(lambda: shared(y)).setup()


def test_an_encoder_does_not_read_what_an_array_hides():
    def model(times, values):
        values, mask = fill_missing(values)
        with pyro.plate("series", len(times)):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            pyro.sample("y", dist.Normal(z, 0.5).mask(mask).to_event(2), obs=values)

    values = np.ma.masked_array(VALUES.numpy().copy(), mask=False)
    values[2, 1, 0] = np.ma.masked
    values.data[2, 1, 0] = 1e6
    units = []
    for given in (values, torch.from_numpy(values.filled(np.nan))):
        guide = AutoSDE(model, encoder=GRUEncoder(1)).setup(TIMES, given)
        units.append((guide.encoder.loc, guide.encoder.scale))
    assert torch.equal(units[0][0], units[1][0]) and torch.equal(units[0][1], units[1][1])


def test_complex_numbers():
    with pytest.raises(TypeError, match=r"'y' is observed at complex numbers.*value.real and"):
        AutoSDE(shared).setup(Y + 1j)


def test_booleans_and_integers():
    """Where torch says that a subtraction is not supported."""

    def coin(y):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=z[..., -1, 0]), obs=y)

    heads = np.array([True, False, True])
    for y in (heads, heads.astype(int)):
        with pytest.raises(
            TypeError, match=r"'y' is observed at torch.(bool|int64), which its Bern"
        ):
            fit(coin, AutoSDE(coin), y, steps=1)
    assert len(fit(coin, AutoSDE(coin), heads.astype(float), steps=2).step) == 2

    def counts(y):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Poisson(z[..., -1, 0].exp()), obs=y)

    assert len(fit(counts, AutoSDE(counts, name="counts"), np.arange(3), steps=2).step) == 2


class TestEmptyBatches:
    @pytest.mark.parametrize("model", [shared, lambda y: rows(torch.arange(len(y)), y)])
    def test_in_fit_and_in_a_loop(self, model):
        message = (
            r"the batch is empty: argument 0 of the data has the shape \(0,\). Leave the batch"
        )
        with pytest.raises(ValueError, match=message):
            fit(model, AutoSDE(model), torch.zeros(0), steps=1)
        pyro.clear_param_store()
        svi = SVI(model, AutoSDE(model), pyro.optim.Adam({}), TraceSDE_ELBO())
        svi.step(Y)
        with pytest.raises(ValueError, match=message):
            svi.step(torch.zeros(0))

    def test_an_event_of_no_numbers(self):
        """No plate: Pyro would make the loss the KL alone."""

        def model(y):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            pyro.sample("y", dist.Normal(z[..., -1, :].expand(len(y)), 0.5).to_event(1), obs=y)

        svi = SVI(model, AutoSDE(model), pyro.optim.Adam({}), TraceSDE_ELBO())
        svi.step(Y)
        with pytest.raises(ValueError, match=r"the batch is empty: .* \{'y': \(0,\)\}"):
            svi.step(torch.zeros(0))

    def test_rows(self):
        data = torch.zeros(0, dtype=torch.long), torch.zeros(0)
        with pytest.raises(ValueError, match="data has no rows: found tensors of the shapes"):
            fit(rows, AutoSDE(rows), data, steps=1, batch_size=1)

    def test_no_event_is_data(self):
        def model(events):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            pyro.sample("events", PoissonProcess(z[..., 0].exp(), GRID), obs=events)

        assert len(fit(model, AutoSDE(model), torch.zeros(0), steps=2).step) == 2

    def test_a_factor_is_data(self):
        def model(nothing):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            pyro.factor("near zero", -z[..., -1, 0].square())

        assert len(fit(model, AutoSDE(model), torch.zeros(0), steps=2).step) == 2

    def test_one_empty_site_of_two(self):
        def model(x, y):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            for name, values in (("x", x), ("y", y)):
                law = dist.Normal(z[..., -1, :].expand(len(values)), 0.5).to_event(1)
                pyro.sample(name, law, obs=values)

        assert len(fit(model, AutoSDE(model), (Y, torch.zeros(0)), steps=2).step) == 2
