"""fit against the loop that one writes oneself, and what it adds to it."""

import functools
import math
import signal
import threading
import warnings
from typing import ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim.lr_scheduler import PyroLRScheduler

import pyro_sde
from pyro_sde import AutoSDE, History, TraceSDE_ELBO, anneal_kl, kl_weight
from pyro_sde.diagnostics import ExplosionWarning
from pyro_sde.training.batches import Batches

from .models import DATA, N, assert_identical, make, values

fit = functools.partial(pyro_sde.fit, progress=False)
every_kind = pytest.mark.parametrize("kind", ["functional", "modular"])


def plain(model, guide, elbo, data, steps, lr, schedule, anneal=0, clip=None):
    """The loop in the doc string of fit."""
    pyro.set_rng_seed(3)
    optim = PyroLRScheduler(
        torch.optim.lr_scheduler.LambdaLR,
        {
            "optimizer": torch.optim.Adam,
            "optim_args": {"lr": lr, "betas": (0.9, 0.99)},
            "lr_lambda": schedule,
        },
    )
    svi = SVI(model, guide, optim, elbo)
    losses = []
    for i in range(steps):
        with anneal_kl(kl_weight(i, anneal)):
            losses.append(svi.step(*data(i)))
        optim.step()
    return losses


@every_kind
def test_equals_the_plain_loop(kind):
    def schedule(i):
        return 0.9**i

    model, guide, elbo = make(kind)
    losses = plain(model, guide, elbo, lambda i: DATA, 6, 0.03, schedule, anneal=3)
    expected = values(model)
    model, guide, elbo = make(kind)
    history = fit(
        model, guide, DATA, steps=6, lr=0.03, schedule=schedule, elbo=elbo, anneal=3, seed=3
    )
    assert_identical(values(model), expected)
    assert history.elbo[3:] == [-x for x in losses[3:]]
    assert history.lr == pytest.approx([0.03 * 0.9**i for i in range(6)])


def test_equals_the_plain_loop_in_batches():
    model, guide, elbo = make("functional")
    batches = Batches(DATA, 3)
    batches.seed = 3
    plain(model, guide, elbo, lambda i: batches(i)[0], 5, 0.03, lambda i: 1.0)
    expected = values()
    model, guide, elbo = make("functional")
    fit(model, guide, DATA, steps=5, lr=0.03, schedule="constant", elbo=elbo, seed=3, batch_size=3)
    assert_identical(values(), expected)


def test_data_by_name_or_alone():
    model, guide, elbo = make("functional")
    fit(model, guide, DATA, steps=2, elbo=elbo, seed=1)
    expected = values()
    model, guide, elbo = make("functional")
    fit(model, guide, dict(zip(("index", "y"), DATA, strict=True)), steps=2, elbo=elbo, seed=1)
    assert_identical(values(), expected)
    model, guide, elbo = make("functional")
    alone = functools.partial(model, DATA[0])
    fit(alone, AutoSDE(alone), DATA[1], steps=2, elbo=elbo, seed=1)
    assert_identical(values(), expected)


def test_batches_go_through_all_rows():
    batches = Batches((DATA[0], "constant", torch.tensor(2.0)), 2)
    batches.seed = 5
    assert len(batches) == 3
    epochs = [[batches(3 * e + k)[0] for k in range(3)] for e in range(30)]
    for epoch in epochs:
        rows = torch.cat([b[0] for b in epoch]).tolist()
        assert len(set(rows)) == 6 and all(b[1:] == ("constant", torch.tensor(2.0)) for b in epoch)
    assert len({tuple(torch.cat([b[0] for b in e]).tolist()) for e in epochs}) == 30
    assert {int(r) for e in epochs for b in e for r in b[0]} == set(range(N))


def test_clipping_is_of_all_gradients_together():
    """SGD with rate 1 moves by the gradient: as long as the clip, and in its direction."""

    def model():
        a = pyro.param("a", torch.tensor([3.0, 0.0]))
        b = pyro.param("b", torch.tensor(-4.0))
        pyro.factor("f", -0.5 * (a.square().sum() + b.square()))

    optim = pyro.optim.SGD({"lr": 1.0})
    fit(model, lambda: None, steps=1, optim=optim, elbo=Trace_ELBO(), clip=0.5)
    assert pyro.param("a").tolist() == pytest.approx([3 - 0.3, 0.0], abs=1e-6)
    assert pyro.param("b").item() == pytest.approx(-4 + 0.4, abs=1e-6)


def test_history():
    model, guide, elbo = make("functional")
    history = fit(model, guide, DATA, steps=4, elbo=elbo, anneal=lambda i: 0.1)
    assert isinstance(history, History) and history.step == [1, 2, 3, 4]
    assert set(history.kl_by_site) == {"shift", "z"} and history.stopped == "steps"
    for k in range(4):
        kl = sum(v[k] for v in history.kl_by_site.values())
        assert history.kl[k] == pytest.approx(kl)
        assert history.elbo[k] == pytest.approx(history.log_likelihood[k] - kl)
    again = History.from_state(history.state())
    again.stopped = "steps"
    assert again == history


def test_other_elbos_do_not_tell_their_parts():
    model, *_ = make("functional")
    guide = AutoSDE(model)
    history = fit(model, guide, DATA, steps=2, elbo=Trace_ELBO())
    assert all(map(math.isfinite, history.elbo))
    assert all(map(math.isnan, history.kl)) and history.kl_by_site == {}


def test_a_scheduler_of_ones_own():
    model, guide, _ = make("functional")
    optim = pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.SGD, "optim_args": {"lr": 1e-3}, "gamma": 0.5}
    )
    assert fit(model, guide, DATA, steps=3, optim=optim).lr == pytest.approx([1e-3, 5e-4, 2.5e-4])


def gaussian(y):
    loc = pyro.param("loc", torch.tensor(0.0))
    pyro.sample("y", dist.Normal(loc, 1.0).expand([len(y)]).to_event(1), obs=y)


def test_an_early_stop_goes_back_to_the_best():
    """Towards the data at 3, past the validation data at 1: there it was best."""
    options = dict(steps=200, elbo=Trace_ELBO(), lr=0.05, every=5, patience=3)
    history = fit(
        gaussian, lambda y: None, torch.full((4,), 3.0), validation=torch.ones(2), **options
    )
    step, elbo = history.best
    assert all(map(math.isnan, history.kl))
    assert history.stopped == "patience" and len(history.step) == step + 15
    loc = pyro.param("loc").item()
    assert elbo == pytest.approx(2 * dist.Normal(loc, 1.0).log_prob(torch.tensor(1.0)).item())
    assert abs(loc - 1) < 0.2
    assert [s for s, _ in history.validation] == list(range(5, step + 16, 5))


@every_kind
def test_validation_does_not_disturb(kind):
    """Neither parameters nor random numbers nor the buffers of the model."""
    model, guide, elbo = make(kind)
    expected = fit(model, guide, DATA, steps=6, elbo=elbo, seed=1)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    model, guide, elbo = make(kind)
    begins, real = [], elbo.loss

    def loss(*args):
        begins.append(torch.get_rng_state())
        np.random.rand()
        return real(*args)

    elbo.loss = loss
    options = {"validation": DATA, "every": 2, "validation_draws": 5}
    history = fit(model, guide, DATA, steps=6, elbo=elbo, seed=1, **options)
    assert history.elbo == expected.elbo and len(history.validation) == 3
    assert torch.equal(state[0], torch.get_rng_state())
    assert (state[1] == np.random.get_state()[1]).all()
    assert len(begins) == 15 and torch.equal(begins[0], begins[5])  # the same random numbers
    if kind == "modular":
        assert model.calls == 1 + 2 * history.best[0]  # one of setup


class Quiet(dist.TorchDistribution):
    """A density that nobody checks."""

    arg_constraints: ClassVar[dict] = {}
    support = dist.constraints.real

    def __init__(self, energy):
        self.energy = energy
        super().__init__()

    def log_prob(self, value):
        return -self.energy


@pytest.mark.filterwarnings("ignore:Encountered NaN")
@pytest.mark.parametrize("where", ["loss", "gradient", "refused"])
def test_nan_stops_before_it_reaches_a_parameter(where):
    calls = []

    def model():
        a = pyro.param("a", torch.tensor(2.0))
        calls.append(a.item())
        bad = len(calls) == 4
        if where == "refused" and bad:
            dist.Normal(a * math.nan, 1.0)
        if where == "loss" and bad:
            a = a * math.nan
        if where == "gradient" and bad:
            a = a + (0 * a).sqrt()
        pyro.sample("f", Quiet(a.square()), obs=torch.tensor(1.0))

    text = {"loss": "the loss became nan", "gradient": "the gradient of a is not finite"}
    with pytest.raises(pyro_sde.training.Diverged, match=text.get(where, "not be evaluated")) as e:
        fit(model, lambda: None, steps=9, elbo=Trace_ELBO())
    assert "in step 4. The parameters are those after step 3. The norm of the last finite grad" in (
        str(e.value)
    )
    assert "There is no checkpoint" in str(e.value)
    assert (e.value.step, e.value.parameter, e.value.checkpoint) == (4, "a", None)
    assert e.value.norm == pytest.approx(2 * calls[-2], rel=1e-5)
    assert pyro.param("a").item() == calls[-1] != calls[-2]
    assert pyro.param("a").unconstrained().grad == 0


def test_errors_of_the_model_are_its_own():
    def model(y):
        pyro.param("a", torch.tensor(2.0))
        raise ValueError("y is not finite")

    with pytest.raises(ValueError, match=r"^y is not finite"):
        fit(model, lambda y: None, torch.tensor(1.0), steps=2, elbo=Trace_ELBO())


def test_an_explosion_is_warned_of_once():
    model, guide, elbo = make("functional")
    guide.setup(*DATA)
    with torch.no_grad():
        guide.paths.z.control.last.bias[:1] = 1e4
    with pytest.warns(ExplosionWarning, match="step 1: the posterior of 'z'") as record:
        fit(model, guide, DATA, steps=3, lr=1e-6, elbo=elbo)
    assert len(record) == 1


def test_healthy_training_is_silent():
    model, guide, elbo = make("functional")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, guide, DATA, steps=30, lr=0.05, elbo=elbo, anneal=20)


@pytest.fixture
def interruptible():
    """A process that a shell has started in the background ignores Ctrl-C, and so would fit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_after_the_step(tmp_path, interruptible):
    model, guide, elbo = make("functional")
    calls = []

    def press(i):
        calls.append(i)
        if i == 3:
            signal.raise_signal(signal.SIGINT)
        return 1.0

    before = signal.getsignal(signal.SIGINT)
    path = tmp_path / "a.pt"
    history = fit(model, guide, DATA, steps=9, elbo=elbo, seed=1, anneal=press, checkpoint=path)
    assert history.stopped == "interrupted" and history.step == [1, 2, 3, 4]
    assert signal.getsignal(signal.SIGINT) is before
    model, guide, elbo = make("functional")
    fit(model, guide, DATA, steps=9, elbo=elbo, checkpoint=path, resume=True)
    resumed = values()
    model, guide, elbo = make("functional")
    fit(model, guide, DATA, steps=9, elbo=elbo, seed=1)
    assert_identical(values(), resumed)

    def press_twice(i):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        fit(model, guide, DATA, steps=9, elbo=elbo, anneal=press_twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread():
    result = []
    run = functools.partial(
        fit, gaussian, lambda y: None, torch.ones(2), steps=2, elbo=Trace_ELBO()
    )
    thread = threading.Thread(target=lambda: result.append(run()))
    thread.start()
    thread.join()
    assert result[0].stopped == "steps"


def test_the_bar_shows_the_parts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # to which older versions of tqdm cut the bar
    model, guide, elbo = make("functional")
    pyro_sde.fit(model, guide, DATA, steps=10, elbo=elbo, validation=DATA, validation_draws=1)
    shown = capsys.readouterr().err
    assert all(k in shown for k in ("10/10", "ELBO=", "KL=", "likelihood=", "validation="))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1, "epochs": 1}, "either steps or epochs"),
        ({"steps": 1, "batch_size": 9}, "batch_size must be 1 to 7.*found 9"),
        ({"steps": 1, "lr": 0.0}, "lr must be a positive number: found 0.0"),
        ({"steps": 1, "patience": 2}, "need validation"),
        ({"steps": 1, "lr": 0.1, "optim": pyro.optim.Adam({})}, "learning rate of its own"),
        ({"steps": 1, "resume": True}, "give checkpoint, a path"),
    ],
)
def test_refusals(options, message):
    model, guide, _ = make("functional")
    with pytest.raises(ValueError, match=message):
        fit(model, guide, DATA, **options)


def test_data_that_have_no_rows_in_common():
    with pytest.raises(ValueError, match=r"same number of rows.*'index': 7, 'grid': 5"):
        Batches({"index": DATA[0], "grid": torch.zeros(5)}, 2)
    with pytest.raises(ValueError, match="data has no tensor"):
        Batches((1.0, torch.tensor(2.0)), 2)


def test_epochs():
    model, guide, elbo = make("functional")
    assert len(fit(model, guide, DATA, epochs=2, batch_size=3, elbo=elbo).step) == 4
    assert len(fit(model, guide, DATA, epochs=2, elbo=TraceSDE_ELBO()).step) == 2
