"""The data that simulation-based calibration simulates reach model, guide and encoder, or it
refuses."""

import functools

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule

from pyro_sde import AutoSDE, anneal_kl, fill_missing
from pyro_sde.diagnostics import sbc
from pyro_sde.distributions import OrnsteinUhlenbeck, PoissonProcess
from pyro_sde.guides import GRUEncoder

Y = torch.tensor([0.3, -0.8, 1.2], dtype=torch.float64)
TIMES = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
ONCE = {"simulations": 1, "draws": 3, "steps": 0, "seed": 0, "progress": False}


def run(model, data, **options):
    """A check, and the arguments of the guide, which draws from the prior of x."""
    seen = []

    def guide(*args, **kwargs):
        seen.append((args, kwargs))
        pyro.sample("x", dist.Normal(0.0, 1.0))

    check = sbc(model, lambda model: guide, data, **ONCE | options)
    return check, *seen[-1]


def simple(times, values=None):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("observations", len(times)):
        pyro.sample("y", dist.Normal(x * times, 0.1), obs=values)


@pytest.mark.parametrize("is_named", [False, True])
def test_the_argument_that_holds_the_data_is_replaced(is_named):
    data = {"times": TIMES, "values": Y} if is_named else (TIMES, Y)
    _, args, kwargs = run(simple, data)
    times, values = (kwargs["times"], kwargs["values"]) if is_named else args
    assert times is TIMES and values.shape == Y.shape
    assert not torch.isclose(values, Y).any()
    x = values / TIMES  # the truth, and noise of 0.1
    assert float(x.std()) < 1.0


def test_missing_values_stay_missing():
    def masked(times, values):
        values, mask = fill_missing(values)
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("observations", len(times)):
            pyro.sample("y", dist.Normal(x, 0.1).mask(mask), obs=values)

    values = np.array([0.3, np.nan, 1.2])
    check, (_, new), _ = run(masked, (TIMES, values))
    assert new.isnan().tolist() == [False, True, False] and check.completed == 1


def test_another_shape_in_the_model():
    def column(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Normal(x, torch.ones(1)).to_event(1), obs=y.unsqueeze(-1))

    _, (new,), _ = run(column, Y)
    assert new.shape == (3,)


def test_counts_keep_their_dtype():
    def counts(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 3):
            pyro.sample("y", dist.Poisson(x.exp()), obs=y)

    _, (new,), _ = run(counts, torch.tensor([1, 0, 2]))
    assert new.dtype == torch.int64 and (new >= 0).all()


def test_events_have_padding_of_their_own():
    grid = torch.linspace(0.0, 5.0, 6)

    def events(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        rate = x.exp().unsqueeze(-1).expand(6)
        pyro.sample("y", PoissonProcess(rate, grid), obs=y)

    sizes = {
        run(events, torch.tensor([0.5, torch.nan]), seed=seed)[1][0].shape[-1] for seed in range(5)
    }
    assert len(sizes) > 1


def test_deterministic_sites_are_no_data():
    def named(y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.deterministic("double", 2 * x)
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    check, _, _ = run(named, Y[0])
    assert set(check.ranks) == {"x", "log likelihood"}


def logs(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=y.log())


def test_a_function_of_the_argument():
    _, (new,), _ = run(logs, Y[2], to_data=lambda seen: seen["y"].exp())
    assert float(new) > 0
    with pytest.raises(ValueError, match=r"no argument .* 'y' is observed at.* to_data=lambda"):
        run(logs, Y[2])
    with pytest.raises(ValueError, match="'y' is not observed at what was drawn for it"):
        run(logs, Y[2], to_data=lambda seen: seen["y"].exp() + 0.1)


def closed(y=None):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(x, 1.0), obs=Y)


def empirical(y):
    x = pyro.sample("x", dist.Normal(y.mean(), 1.0))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def autoregressive(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    before = torch.cat([torch.zeros(1), y[:-1]])
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(x * before, 1.0), obs=y)


def two_sites(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 3):
        pyro.sample("a", dist.Normal(x, 1.0), obs=y)
        pyro.sample("b", dist.Normal(x, 2.0), obs=y)


def factor(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("f", -x.square())
    pyro.sample("y", dist.Normal(x, 1.0), obs=y[0])


def discrete(y):
    x = pyro.sample("x", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(x, 1.0), obs=y[0])


def no_plate(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def subsampled(y):
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 9, subsample_size=3):
        pyro.sample("y", dist.Normal(x, 1.0), obs=y)


def no_data(y):
    pyro.sample("x", dist.Normal(0.0, 1.0))


def no_latent(y):
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def other_latent(y):
    closed_over = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 3):
        pyro.sample("y", dist.Normal(closed_over, 1.0), obs=y)


REFUSED = {
    closed: "site 'y' is not observed at what was drawn for it",
    empirical: "the prior of 'x' depends on the data",
    autoregressive: "its distribution depends on the data",
    two_sites: "another observed site have their data from one argument",
    factor: "site 'f' is a factor",
    discrete: r"latent 'x' is discrete \(Bernoulli\)",
    no_plate: "site 'y' is observed at 3 numbers, and its distribution draws 1|would be expanded",
    subsampled: "draws 3 of 9 elements",
    no_data: "observes nothing",
    no_latent: "no latent site",
    other_latent: r"does not draw the latents \['w'\]",
}


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_what_cannot_be_right_is_refused(model):
    with pytest.raises((ValueError, NotImplementedError), match=REFUSED[model]):
        run(model, Y)


def test_data_that_are_no_argument_are_refused():
    with pytest.raises(
        ValueError, match="no argument of the model holds the numbers that site 'y'"
    ):
        run(closed, ())


def test_scaled_densities_are_refused():
    with anneal_kl(0.5), pytest.raises(ValueError, match=r"'x' has the scale 0\.5"):
        run(simple, (TIMES, Y))
    with pytest.raises(ValueError, match=r"has the scale 2\.0"):
        run(poutine.scale(simple, scale=2.0), (TIMES, Y))


def test_autoregression_through_the_sites():
    """A model that reads what pyro.sample returns simulates its own data."""

    def chain(y):
        x, last = pyro.sample("x", dist.Normal(0.0, 1.0)), torch.zeros(())
        for i in range(3):
            last = pyro.sample(f"y_{i}", dist.Normal(x + last, 0.1), obs=y[i])

    to_data = lambda seen: torch.stack([seen[f"y_{i}"] for i in range(3)])  # noqa: E731
    _, (new,), _ = run(chain, Y, to_data=to_data)
    steps = new.diff(prepend=torch.zeros(1))
    assert float(steps.std()) < 0.5


class Line(PyroModule):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Linear(1, 1)

    def forward(self, y):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        mean = self.slope(x.reshape(1)).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_parameters_of_the_model():
    """Trained ones would move away from the truth; fixed ones, and those of a guide as it is, stay
    where they are."""
    model, data = Line(), Y[0]
    with pytest.raises(ValueError, match=r"has parameters \(slope.weight.*requires_grad_\(False\)"):
        run(model, data, steps=1)
    assert run(model, data)[0].completed == 1
    model.requires_grad_(False).train(False)
    assert sbc(model, AutoNormal, data, **ONCE | {"steps": 2}).completed == 1


def paths(times, values):
    prior = OrnsteinUhlenbeck.scalar(1.0, 0.0, 0.7, torch.linspace(0.0, 2.0, 5))
    with pyro.plate("series", len(values)):
        z = pyro.sample("z", prior)
        pyro.sample("y", dist.Normal(prior.at(z, TIMES), 0.3).to_event(1), obs=values[..., 0])


def amortised(observations=None):
    def make(model):
        encoder = GRUEncoder(obs_dim=1, hidden=4, context=2)
        return AutoSDE(model, encoder=encoder, observations=observations)

    return make


def test_an_encoder_reads_the_simulated_data():
    values = torch.randn(4, 3, 1)
    times, seen = TIMES.expand(4, 3), []

    def observations(times, values):
        seen.append(values)
        return times, values

    options = ONCE | {"steps": 2}
    check = sbc(paths, amortised(observations), (times, values), **options)
    assert check.ranks["z"].shape == (1, 12)
    assert len({id(x) for x in seen}) == 2 and seen[-1] is not values
    assert sbc(paths, amortised(), (times, values), **options).completed == 1


def test_an_encoder_that_reads_other_data_is_refused():
    values = torch.randn(4, 3, 1)
    times = TIMES.expand(4, 3)
    with pytest.raises(ValueError, match="the encoder of the guide reads the same observations"):
        sbc(paths, amortised(lambda *_: (times, values)), (times, values), **ONCE | {"steps": 1})


def test_factories():
    for factory, message in {
        AutoNormal(simple): "found a AutoNormal, a guide itself",
        lambda: None: "guide_factory is called with the model",
        lambda model: None: "returned a NoneType",
        lambda model: 3.0: "returned a float",
    }.items():
        with pytest.raises(TypeError, match=message):
            sbc(simple, factory, (TIMES, Y), **ONCE)
    one = AutoNormal(simple)
    with pytest.raises(TypeError, match="the guide that the last simulation has trained"):
        sbc(simple, lambda model: one, (TIMES, Y), **ONCE | {"steps": 1, "simulations": 2})
    assert sbc(simple, functools.partial(AutoNormal), (TIMES, Y), **ONCE).completed == 1


def test_arguments_are_checked():
    for option, message in {
        "simulations": "simulations must be at least 1: found 0",
        "draws": "draws must be at least 1: found 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            run(simple, (TIMES, Y), **{option: 0})
    with pytest.raises(TypeError, match="validation belongs to one"):
        run(simple, (TIMES, Y), validation=(TIMES, Y))
    with pytest.raises(ValueError, match="'x', which is ranked already"):
        run(simple, (TIMES, Y), statistics={"x": lambda latents: 0.0})
