"""What a resumed training takes from its checkpoint, and notices."""

import signal

import pyro
import pyro.distributions as dist
import pytest
import torch
from attacks.victim import DATA, Victim
from pyro.infer import Trace_ELBO

import pyro_sde
from pyro_sde.training import CheckpointError, load_checkpoint, save_times

from ..training.models import assert_identical, values


def step_of(path):
    return load_checkpoint(path, "pyro_sde.fit")["step"] if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_returns(number, tmp_path):
    path = tmp_path / "run.pt"

    def press(step):
        if step == 3:
            signal.raise_signal(number)
        return 1.0

    def missed(number, frame):
        raise AssertionError("the signal was not noted")

    before = signal.signal(number, missed)
    try:
        history = Victim().train(path, 9, anneal=press, save_every=100)
        assert signal.getsignal(number) is missed
    finally:
        signal.signal(number, before)
    assert (history.stopped, step_of(path)) == ("interrupted", 4)
    resumed = Victim().train(path, 9, resume=True)
    found = values()
    whole = Victim().train(None, 9)
    assert_identical(found, values())
    assert resumed.elbo == whole.elbo and resumed.stopped == "steps"


@pytest.mark.parametrize("every", ["3 s", "0.05 min"])
def test_saving_by_the_clock(every, tmp_path, monkeypatch):
    path, clock, seen = tmp_path / "run.pt", [100.0], []
    monkeypatch.setattr(save_times.time, "monotonic", lambda: clock[0])

    def tick(step):
        seen.append(step_of(path))
        clock[0] += 1.0  # each step takes a second
        return 1.0

    Victim().train(path, 11, save_every=every, anneal=tick)
    assert seen == [0, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9] and step_of(path) == 11


def test_other_data_of_the_same_shape(tmp_path):
    def train(y, validation=None, **options):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)

        def model(y):
            loc = pyro.param("loc", torch.tensor(0.0))
            pyro.sample("y", dist.Normal(loc, 1.0).expand([len(y)]).to_event(1), obs=y)

        more = {"lr": 0.1, "elbo": Trace_ELBO(), "checkpoint": tmp_path / "a.pt"}
        more |= {"validation": validation, "progress": False, **options}
        return pyro_sde.fit(model, lambda y: None, y, **more)

    train(DATA, steps=2)
    train(DATA.clone(), steps=3, resume=True)
    other = DATA.clone()
    other[1] = torch.nextafter(other[1], other[0])
    for y in (other, DATA.flip(0), {"y": DATA}):
        before = values()
        pyro.get_param_store().clear()
        with pytest.raises(CheckpointError, match=r"a\.pt was made with other data.*allow_other"):
            train(y, steps=4, resume=True)
        assert values() == {} != before
        train(DATA, steps=3, resume=True)
    with pytest.raises(CheckpointError, match="other data"):
        train(DATA, other, steps=4, resume=True)
    history = train(other, steps=4, resume=True, allow_other_data=True)
    assert history.step == [1, 2, 3, 4]
    train(other, steps=5, resume=True)  # now these are the data
    with pytest.raises(CheckpointError, match="other data"):
        train(DATA, steps=6, resume=True)


class Late:
    """A model with a parameter that steps 4, 7, 10, ... alone have, with a random start."""

    def __init__(self) -> None:
        self.step = 0

    def anneal(self, step):
        self.step = step
        return 1.0

    def model(self, y):
        loc = pyro.param("loc", torch.tensor(0.0))
        if self.step >= 4 and self.step % 3 == 1:
            start = lambda: 0.5 + torch.rand(())  # noqa: E731
            loc = loc * pyro.param("late", start, constraint=dist.constraints.positive)
        noise = torch.rand(())
        pyro.sample("y", dist.Normal(loc + noise, 1.0).expand([len(y)]).to_event(1), obs=y)


class Drawing:
    """A model that draws from two generators of its own, one in a module and one captured."""

    def __init__(self) -> None:
        mine, modules = torch.Generator().manual_seed(1), torch.nn.Module()
        modules.generator = torch.Generator().manual_seed(2)

        def model(y):
            loc = pyro.param("loc", torch.tensor(0.0))
            noise = torch.rand((), generator=mine) * torch.rand((), generator=modules.generator)
            pyro.sample("y", dist.Normal(loc + noise, 1.0).expand([len(y)]).to_event(1), obs=y)

        self.model, self.anneal = model, lambda step: 1.0


def plateau():
    """Adam whose rate falls wherever two validations bring nothing."""
    options = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.5}}
    options |= {"factor": 0.5, "patience": 1}
    return pyro.optim.ReduceLROnPlateau(options)


@pytest.mark.parametrize("case", ["late", "own optimiser", "generators", "plateau"])
@pytest.mark.parametrize("stop", [3, 5, 8])
def test_going_on_is_bit_for_bit(case, stop, tmp_path):
    """A parameter that comes at step 4, before or after the end of the first run, and a learning
    rate that falls while it is away; an optimiser without a scheduler; own generators; a rate that
    looks at the validation."""

    def train(steps, checkpoint, **more):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        mine = Drawing() if case == "generators" else Late()
        if case == "plateau":
            more |= {"optim": plateau(), "validation": 5.0 + DATA, "every": 1}
        elif case == "own optimiser":
            more |= {"optim": pyro.optim.Adam({"lr": 0.02})}
        else:
            more |= {"lr": 0.02, "schedule": lambda step: 0.9**step}
        options = {"elbo": Trace_ELBO(), "anneal": mine.anneal, "progress": False, **more}
        options |= {"steps": steps, "checkpoint": checkpoint}
        return pyro_sde.fit(mine.model, lambda y: None, -DATA, **options), values()

    path = tmp_path / "run.pt"
    train(stop, path)
    torch.rand(5)
    resumed, found = train(12, path, resume=True)
    whole, expected = train(12, None)
    assert_identical(found, expected)
    assert resumed.elbo == whole.elbo and resumed.lr == whole.lr
    assert ("late" in found) == (case != "generators")
    if case == "plateau":
        assert len({rate for rate in whole.lr[:stop]}) > 1 or stop == 3
        assert len(set(whole.lr)) > 2


def test_generators_that_no_checkpoint_holds(tmp_path):
    import numpy as np

    generator = np.random.default_rng(0)

    def model(y):
        pyro.param("loc", torch.tensor(float(generator.normal())))

    with pytest.raises(NotImplementedError, match=r"model\.generator is a Generator.*torch\.Gen"):
        pyro_sde.fit(model, lambda y: None, DATA, steps=1, checkpoint=tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists()
