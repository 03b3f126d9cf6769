"""Parameters of a guide: built, saved, loaded, shared and trained on."""

import io
import pickle

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_sde import (
    AutoSDE,
    TraceSDE_ELBO,
)

from ..cases import Net
from .models import MODELS, SERIES, Y, mixed, series, simple


def test_setup_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    guide = AutoSDE(series).setup(SERIES)
    assert torch.equal(before, torch.get_rng_state())
    names = set(guide.state_dict())
    svi = SVI(series, guide, pyro.optim.Adam({"lr": 0.01}), TraceSDE_ELBO())
    svi.step(SERIES)
    assert set(guide.state_dict()) == names
    stored = {p.unconstrained() for p in map(pyro.param, pyro.get_param_store().keys())}
    assert stored == set(guide.parameters())


def train(guide, model, y, steps, seed, optim=None):
    pyro.set_rng_seed(seed)
    optim = optim or pyro.optim.Adam({"lr": 0.02})
    svi = SVI(model, guide, optim, TraceSDE_ELBO())
    return [svi.step(y) for _ in range(steps)], optim


@pytest.mark.parametrize("name", MODELS)
def test_param_store_and_optimizer_save_and_go_on_identically(name, tmp_path):
    model, y = MODELS[name]
    guide = AutoSDE(model)
    _, optim = train(guide, model, y, 5, seed=0)
    pyro.get_param_store().save(tmp_path / "params")
    optim.save(tmp_path / "optim")
    expected, _ = train(guide, model, y, 5, seed=1, optim=optim)

    pyro.clear_param_store()
    pyro.get_param_store().load(tmp_path / "params")
    again, optim = AutoSDE(model), pyro.optim.Adam({"lr": 0.02})
    optim.load(tmp_path / "optim")
    got, _ = train(again, model, y, 5, seed=1, optim=optim)
    assert got == expected


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_and_pickle_go_on_identically(name):
    model, y = MODELS[name]
    guide = AutoSDE(model)
    train(guide, model, y, 5, seed=0)
    blob, state = pickle.dumps(guide), io.BytesIO()
    torch.save(guide.state_dict(), state)
    expected, _ = train(guide, model, y, 5, seed=1)

    pyro.clear_param_store()
    got, _ = train(pickle.loads(blob), model, y, 5, seed=1)
    assert got == expected

    pyro.clear_param_store()
    state.seek(0)
    fresh = AutoSDE(model).setup(y)
    fresh.load_state_dict(torch.load(state, weights_only=True))
    got, _ = train(fresh, model, y, 5, seed=1)
    assert got == expected


def test_plain_torch_optimizer():
    guide = AutoSDE(mixed).setup(Y)
    loss_fn = TraceSDE_ELBO(num_particles=8, vectorize_particles=True)(mixed, guide)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.03)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_fn(Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-15:]) < sum(losses[:15])


def test_a_seed_reproduces_training():
    runs = []
    for _ in range(2):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        guide = AutoSDE(mixed, contraction=True)
        runs.append(train(guide, mixed, Y, 4, seed=3)[0])
    assert runs[0] == runs[1]


def test_a_second_guide_of_the_same_name_is_refused():
    first = AutoSDE(simple)
    train(first, simple, Y, 1, seed=0)
    second = AutoSDE(simple)
    with pytest.raises(ValueError, match=r"clear_param_store.*name="):
        train(second, simple, Y, 1, seed=0)
    train(AutoSDE(simple, name="Second"), simple, Y, 1, seed=0)
    train(first, simple, Y, 1, seed=0)
    del first
    with pytest.raises(ValueError, match="another guide"):
        train(AutoSDE(simple), simple, Y, 1, seed=0)
    pyro.clear_param_store()
    train(second, simple, Y, 1, seed=0)


def test_module_control_keeps_its_parameters_trainable():
    """A module passed in by hand is trained in place."""

    class Wrap(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(1)

        def forward(self, t, z):
            return self.net(t, z)

    control = Wrap()
    before = [p.detach().clone() for p in control.parameters()]
    train(AutoSDE(simple, control=control), simple, Y, 3, seed=0)
    assert all((a != b).any() for a, b in zip(before, control.parameters(), strict=True))


def test_loading_before_setup_says_so():
    state = AutoSDE(simple).setup(Y).state_dict()
    fresh = AutoSDE(simple)
    with pytest.raises(RuntimeError, match=r"Call guide.setup\(\*args\) with the data first"):
        fresh.load_state_dict(state)
    fresh.setup(Y).load_state_dict(state)
