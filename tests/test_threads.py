"""Two threads at once: the second one is refused, and the first is not disturbed."""

import contextlib
import multiprocessing
import os
import runpy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK

import pyro_sde
from pyro_sde import AutoSDE, Predictive, TraceSDE_ELBO, _threads, forecast, time_grid
from pyro_sde._threads import one_thread
from pyro_sde.diagnostics import importance
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.training import match_latents

TIMES = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
VALUES = torch.ones(3, dtype=torch.float64)


class Model:
    """A model that stops in run number ``stops``, until it may go on."""

    def __init__(self, stops: float = float("inf")) -> None:
        self.stops, self.runs = stops, 0
        self.waits, self.may_go = threading.Event(), threading.Event()

    def __call__(self, times: Any, values: Any = None) -> None:
        self.runs += 1
        rate = pyro.sample("rate", dist.LogNormal(0.0, 0.1))
        grid = time_grid(0.0, float(times.max()), dt=0.5, include=times)
        prior = OrnsteinUhlenbeck.scalar(rate, 0.0, 1.0, grid)
        z = pyro.sample("z", prior)
        if self.runs == self.stops:
            self.waits.set()
            assert self.may_go.wait(60)
        with pyro.plate("observations", len(times)):
            pyro.sample("y", dist.Normal(prior.at(z, times), 0.5), obs=values)


def in_thread(f: Callable[[], Any]) -> tuple[threading.Thread, list]:
    """A thread that runs ``f``, and its result or its error."""
    result: list = []

    def run() -> None:
        try:
            result.append(f())
        except Exception as e:
            result.append(e)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    return thread, result


def result_of(f: Callable[[], Any]) -> Any:
    thread, result = in_thread(f)
    thread.join(60)
    return result[0]


@contextlib.contextmanager
def training(model: Model, guide: Any, steps: int = 6) -> Iterator[list]:
    """Another thread is in the middle of ``fit`` inside of the context."""
    options = {"steps": steps, "progress": False, "match": False, "seed": 3}
    elbo = TraceSDE_ELBO()
    thread, result = in_thread(
        lambda: pyro_sde.fit(model, guide, (TIMES, VALUES), elbo=elbo, **options)
    )
    assert model.waits.wait(60)
    yield result
    model.may_go.set()
    thread.join(60)
    assert not _PYRO_STACK and not _DIM_ALLOCATOR._stack


def undisturbed() -> list:
    pyro.clear_param_store()
    model = Model(stops=4)
    with training(model, AutoSDE(model)) as result:
        pass
    elbo = result[0].elbo
    pyro.clear_param_store()
    return elbo


def others(guide: Any, model: Model) -> dict[str, Callable[[], Any]]:
    data = TIMES, VALUES
    return {
        "fit": lambda: pyro_sde.fit(model, guide, data, steps=1, progress=False),
        "forecast": lambda: forecast(model, guide, data, TIMES + 2, num_samples=2),
        "Predictive": lambda: Predictive(model, guide=guide, num_samples=2)(*data),
        "AutoSDE.setup": lambda: AutoSDE(model, name="new").setup(*data),
        "importance": lambda: importance(model, guide, *data, num_samples=50),
        "match_latents": lambda: match_latents(model, guide, *data),
    }


@pytest.mark.parametrize(
    "what", ["fit", "forecast", "Predictive", "AutoSDE.setup", "importance", "match_latents"]
)
def test_a_second_thread_is_refused_and_the_first_goes_on(what):
    expected = undisturbed()
    quiet = Model()
    other = AutoSDE(quiet, name="other").setup(TIMES, VALUES)
    model = Model(stops=4)
    guide = AutoSDE(model)
    with training(model, guide) as result:
        message = (
            rf"^thread 'MainThread' called {what} while thread 'second' is in fit. .*multiproc"
        )
        with pytest.raises(RuntimeError, match=message):
            others(other, quiet)[what]()
    assert result[0].elbo == expected


@pytest.mark.parametrize("what", ["guide", "svi"])
def test_handlers_of_a_second_thread(what):
    """It has put handlers of its own onto the stack of the first. Both say so, or the first is as
    it would be alone; nothing stays on the stack."""
    expected = undisturbed()
    quiet = Model()
    other = AutoSDE(quiet, name="other").setup(TIMES, VALUES)
    svi = SVI(quiet, other, pyro.optim.Adam({}), TraceSDE_ELBO())
    before = svi.evaluate_loss(TIMES, VALUES)
    model = Model(stops=4)
    with training(model, AutoSDE(model)) as result:
        called = {"guide": "a guide", "svi": "an ELBO"}[what]
        with pytest.raises(RuntimeError, match=f"called {called} while thread 'second' is in fit"):
            other(TIMES, VALUES) if what == "guide" else svi.step(TIMES, VALUES)
    if isinstance(result[0], Exception):
        message = rf"fit was disturbed by thread 'MainThread', which called {called}, and failed"
        assert isinstance(result[0], RuntimeError) and message in str(result[0])
    else:
        assert result[0].elbo == expected
    assert before > 0 and svi.step(TIMES, VALUES) > 0


def test_two_loops_of_ones_own():
    """Both begin while the first is in the middle of an ELBO."""
    model, quiet = Model(stops=3), Model()
    guides = AutoSDE(model), AutoSDE(quiet, name="other").setup(TIMES, VALUES)
    loops = [
        SVI(m, g, pyro.optim.Adam({}), TraceSDE_ELBO())
        for m, g in zip((model, quiet), guides, strict=True)
    ]
    thread, result = in_thread(lambda: [loops[0].step(TIMES, VALUES) for _ in range(4)])
    assert model.waits.wait(60)
    with pytest.raises(RuntimeError, match=r"called an ELBO while thread 'second' is in an ELBO"):
        loops[1].step(TIMES, VALUES)
    model.may_go.set()
    thread.join(60)
    assert len(result[0]) == 4 and not _PYRO_STACK


def test_a_stack_that_was_spoilt_is_put_right():
    """The first thread fails, says why, and leaves what it found."""
    outer = pyro.poutine.trace()
    with outer:
        with (
            pytest.raises(
                RuntimeError, match=r"fit was disturbed by thread 'second', which called a"
            ) as e,
            one_thread("fit"),
        ):
            inner = pyro.poutine.trace()
            with inner:

                def intrude():
                    with pyro.poutine.scale(scale=0.5), one_thread("a guide", with_handlers=True):
                        raise AssertionError("was let in")

                found = result_of(intrude)
                assert "called a guide while thread 'MainThread' is in fit" in str(found)
                _PYRO_STACK.clear()
        assert isinstance(e.value.__cause__, IndexError)
        assert _PYRO_STACK == [outer]
    assert not _PYRO_STACK


def test_an_error_of_the_first_is_its_own():
    with pytest.raises(KeyError, match="mine"), one_thread("fit"):
        assert "called fit" in str(result_of(lambda: one_thread("fit").__enter__()))
        raise KeyError("mine")
    with one_thread("fit"):
        pass


def test_inside_of_itself():
    """A training in the schedule of another one is one after the other."""
    inner = []

    def schedule(step):
        if step == 1 and not inner:  # each parameter has a scheduler of its own
            quiet = Model()
            guide = AutoSDE(quiet, name="inner")
            options = {"steps": 2, "progress": False, "match": False}
            inner.append(
                pyro_sde.fit(quiet, guide, (TIMES, VALUES), elbo=TraceSDE_ELBO(), **options)
            )
        return 1.0

    model = Model()
    options = {"steps": 3, "progress": False, "match": False, "elbo": TraceSDE_ELBO()}
    history = pyro_sde.fit(model, AutoSDE(model), (TIMES, VALUES), schedule=schedule, **options)
    assert len(history.step) == 3 and len(inner[0].step) == 2


def test_what_fails_lets_the_next_one_in():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), one_thread("fit"):
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="must be a whole number"):
            pyro_sde.fit(Model(), lambda *args: None, steps=-1)
    found = result_of(
        lambda: pyro_sde.fit(
            gaussian, lambda y: None, torch.ones(2), steps=2, progress=False, elbo=TraceSDE_ELBO()
        )
    )
    assert len(found.step) == 2


def gaussian(y: Any) -> None:
    loc = pyro.param("loc", torch.tensor(0.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def _train(queue: Any) -> None:
    history = pyro_sde.fit(
        gaussian, lambda y: None, torch.ones(2), steps=2, progress=False, elbo=TraceSDE_ELBO()
    )
    queue.put(len(history.step))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_child_process_is_free():
    """It was forked while another thread of its parent trained."""
    model = Model(stops=4)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with training(model, AutoSDE(model)) as result:
        child = context.Process(target=_train, args=(queue,))
        child.start()
        assert queue.get(timeout=60) == 2
        child.join(60)
    assert len(result[0].step) == 6


def test_a_system_without_fork(monkeypatch):
    monkeypatch.delattr(os, "register_at_fork")
    runpy.run_path(str(_threads.__file__))
