"""Trainings that diverge say where, and leave something to go on from."""

import math
import pickle

import pyro
import pytest
import torch
from attacks import divergence
from attacks.divergence import WAYS, LeapingAdam, Run, attack, play
from pyro.infer import Trace_ELBO

from pyro_sde import fit
from pyro_sde.training import Diverged, RejectedWarning
from pyro_sde.training.checkpoint import load_checkpoint
from pyro_sde.training.snapshot import KIND


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


def small(tmp_path, optim, loss=lambda a: a.square(), **options):
    def model():
        pyro.factor("f", -loss(pyro.param("a", torch.tensor(2.0))))

    options = {"steps": 12, "save_every": 3, "match": False, "progress": False} | options
    path = tmp_path / "run.pt"
    return fit(model, lambda: None, elbo=Trace_ELBO(), optim=optim, checkpoint=path, **options)


def leap(at, to):
    return pyro.optim.PyroOptim(LeapingAdam, {"lr": 0.1, "at": at, "to": to})


def test_the_last_update_is_looked_at(tmp_path):
    with pytest.raises(Diverged, match="a is not finite after the update in step 12") as e:
        small(tmp_path, leap(12, math.nan))
    assert (e.value.step, e.value.parameter) == (12, "a")
    assert load_checkpoint(e.value.checkpoint, KIND)["step"] == 9


def test_a_spoilt_optimiser_is_not_saved(tmp_path):
    """The parameters and losses are finite, but not what the optimiser remembers."""

    class Forgetful(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
                self.state[p]["mean"] = torch.tensor(
                    math.inf if self.state[p]["calls"] > 4 else 0.0
                )

    optim = pyro.optim.PyroOptim(Forgetful, {"lr": 0.01})
    with pytest.raises(Diverged, match="of a is not finite, and no checkpoint was written") as e:
        small(tmp_path, optim)
    assert e.value.parameter == "a"
    assert load_checkpoint(e.value.checkpoint, KIND)["step"] == 3


@pytest.mark.filterwarnings("ignore:Encountered (NaN|.inf)")
@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_training_though_its_gradient_is(tmp_path, bad):
    calls = []

    def loss(a):
        calls.append(a)
        return a.square() + (bad if len(calls) == 5 else 0.0)

    with pytest.raises(Diverged, match=f"the loss became {bad} in step 5"):
        small(tmp_path, pyro.optim.Adam({"lr": 0.1}), loss)


def test_a_gradient_whose_square_overflows_reaches_no_optimiser(tmp_path):
    """Adam would make steps of zero from then on."""
    calls = []

    def loss(a):
        calls.append(a)
        large = 1e25 * a if len(calls) == 5 else a
        return a.square() + large - large.detach()

    optim = pyro.optim.Adam({"lr": 0.1})
    with pytest.warns(RejectedWarning, match="gradient of a is so large that its square overfl"):
        history = small(tmp_path, optim, loss, max_rejected=1)
    assert history.rejected == 1 and pyro.param("a") < 1.2


@pytest.mark.parametrize("keep", [1, 2])
def test_a_state_worse_than_the_start_is_not_what_is_left(tmp_path, keep):
    """The loss is finite for many checkpoints, and only then too large to go on."""
    with pytest.raises(Diverged) as e:
        optim = pyro.optim.SGD({"lr": 1.1})  # each step multiplies a by -1.2
        small(tmp_path, optim, steps=400, keep=keep)
    assert e.value.step > 60
    state = load_checkpoint(e.value.checkpoint, KIND)
    assert state["is_good"] and abs(state["parameters"]["a"]) < 10


def test_the_error_can_be_sent_to_another_process(tmp_path):
    with pytest.raises(Diverged) as e:
        small(tmp_path, leap(4, math.nan))
    copy = pickle.loads(pickle.dumps(e.value))
    assert str(copy) == str(e.value) and vars(copy) == vars(e.value)


def test_the_attack_counts_what_went_wrong(monkeypatch):
    """No training gains as much as this one is said to gain."""
    monkeypatch.setattr(divergence, "WAYS", {"NaN in the guide": WAYS["NaN in the guide"]})
    assert attack(1, 0) == {"diverged": 1, "survived": 0, **dict.fromkeys(divergence.BOUNDS, 0)}
    with monkeypatch.context() as m:
        m.setattr(divergence, "healthy", lambda *_, **__: (0.0, 1e9))
        found = attack(1, 0)
    assert found["failed to go on"] == 1
