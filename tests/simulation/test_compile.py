"""compile=True: the same numbers from compiled chunks of steps."""

import functools
import warnings

import compile_gain
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn

from pyro_sde import AutoSDE, TraceSDE_ELBO, _compiling
from pyro_sde._ops.fused import forward
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck, SDEPath
from pyro_sde.guides import MLPControl
from pyro_sde.infer.girsanov import ESTIMATORS
from pyro_sde.nn import NeuralDiffusion, NeuralDrift, SDEBlock
from pyro_sde.solvers import integrate

from ..cases import needs_compiler

# The compiler has warnings of its own, which say nothing to us.
pytestmark = pytest.mark.filterwarnings(
    "ignore", "error::RuntimeWarning", "ignore:Guards may run slower on Python 3.13.0"
)
D, STEPS = 2, 4
SMALL = functools.partial(MLPControl, hidden=(8,), features=2, embedding=2)


@pytest.fixture(autouse=True)
def small_chunks(clean_slate, monkeypatch):
    """Two chunks of two steps: quickly compiled, and one goes on where the other ended."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(_compiling, "CHUNK", 2)
    monkeypatch.setattr(forward, "COMPILED_STEPS", 2)


class Latent(PyroModule):
    def __init__(self, is_linear):
        super().__init__()
        self.is_linear = is_linear
        if not is_linear:
            self.drift, self.diffusion = NeuralDrift(D, (8,)), NeuralDiffusion(D, 4)

    def forward(self, y):
        times = torch.linspace(0, 1, STEPS + 1)
        start = dist.Normal(torch.zeros(D), 1.0).to_event(1)
        path = OrnsteinUhlenbeck(1.0, 0.2, 0.5, times, start)
        if not self.is_linear:
            path = SDEPath(self.drift, self.diffusion, start, times)
        z = pyro.sample("z", path)
        pyro.sample("y", dist.Cauchy(z[..., -1, :], 0.3).to_event(1), obs=y)


def loss_and_gradients(model, guide, estimator, *args):
    pyro.clear_param_store()
    torch.manual_seed(3)
    elbo = TraceSDE_ELBO(
        num_particles=5, vectorize_particles=True, path_estimator=estimator, max_plate_nesting=1
    )
    loss = elbo.differentiable_loss(model, guide, *args)
    parameters = [p for m in (model, guide) for p in m.parameters()]
    return loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)


def assert_agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))
    assert any(g is not None and g.abs().max() > 1e-3 for g in expected[1:])


@needs_compiler
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("is_linear", [True, False])
def test_path(is_linear, contraction):
    model, y = Latent(is_linear), torch.tensor([0.4, -1.0])
    guides = []
    for compiles in (False, True):
        options = {"contraction": contraction, "control": SMALL, "compile": compiles}
        guides.append(AutoSDE(model, name=f"guide_{compiles}", **options).setup(y))
    eager, compiled = guides
    for p in eager.parameters():
        nn.init.normal_(p, std=0.5)
    compiled.load_state_dict(eager.state_dict())
    for estimator in ESTIMATORS:
        found = loss_and_gradients(model, compiled, estimator, y)
        assert_agree(found, loss_and_gradients(model, eager, estimator, y))
    assert not _compiling.compiled.broken


@needs_compiler
def test_what_stops_the_compiler_is_said(monkeypatch):
    """In the middle of a step it would leave code that is slower than ordinary steps."""
    monkeypatch.setattr(_compiling.compiled, "broken", False)

    def step(x):
        print("a side effect")
        return 2 * x

    with pytest.warns(RuntimeWarning, match="compile=True has no effect"):
        assert _compiling.compiled(step)(torch.ones(())) == 2


@needs_compiler
def test_too_many_shapes_are_not_compiled_and_the_others_are():
    f = _compiling.compiled(lambda x: 2 * x)
    with torch._dynamo.config.patch(recompile_limit=1):
        assert f(torch.ones(1)).sum() == 2
        with pytest.warns(RuntimeWarning, match="no more than eight combinations"):
            assert f(torch.ones(2)).sum() == 4
        assert f(torch.ones(3)).sum() == 6  # said once
        f.fn = None
        assert f(torch.ones(1)).sum() == 2  # is compiled: needs it no more
    assert not _compiling.compiled.broken


@needs_compiler
def test_block():
    x, y = torch.randn(6, 3), torch.randn(6)

    class Net(PyroModule):
        def __init__(self, compiles):
            super().__init__()
            torch.manual_seed(0)
            field = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
            self.block = SDEBlock(field, steps=STEPS, method="heun", compile=compiles)

        def forward(self, x, y):
            h = self.block(x)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(h[..., 0], 0.5), obs=y)

    results = []
    for compiles in (False, True):
        net = Net(compiles)
        guide = AutoSDE(net, name=f"guide_{compiles}", control=SMALL).setup(x, y)
        results.append(loss_and_gradients(net, guide, "stl", x, y))
    assert_agree(*results)
    assert not _compiling.compiled.broken


def test_without_a_compiler(monkeypatch):
    """One warning, and everything as without compile=True; bad input has its own error."""

    def fail(*args, **kwargs):
        raise RuntimeError("no C++ compiler was found\nand more")

    monkeypatch.setattr(torch, "compile", lambda fn, **options: fail)
    monkeypatch.setattr(_compiling.compiled, "broken", False)
    double = _compiling.compiled(lambda x: 2 * x.exp())
    with pytest.raises(AttributeError, match="exp"):
        double("a string")
    assert not _compiling.compiled.broken
    with pytest.warns(RuntimeWarning, match=r"has no effect.*no C\+\+ compiler was found\)$"):
        assert double(torch.zeros(())) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(torch.zeros(())) == 2


@pytest.mark.parametrize("more, programs", [([], 2), (["--constant"], 3)])
def test_gain_benchmark(more, programs, monkeypatch, capsys):
    """Runs; here without a compiler, and no time is judged."""
    monkeypatch.setattr(_compiling.compiled, "broken", True)
    options = ["--paths", "2", "--dim", "2", "--steps", "3", "--repeats", "2", *more]
    found = compile_gain.main(compile_gain.parse(options))
    assert {k: len(v) for k, v in found.items()} == dict.fromkeys(ESTIMATORS, programs)
    assert "compiling took" in capsys.readouterr().out


@pytest.mark.parametrize("size", [None, 10])
@pytest.mark.parametrize("n", [1, 2, 9, 10, 11, 12, 99, 101, 1000])
def test_chunks(monkeypatch, n, size):
    monkeypatch.setattr(_compiling, "CHUNK", 10 if size is None else 3)
    found = _compiling.chunks(n, size)
    assert [i for s in found for i in range(s.start, s.stop)] == list(range(n))
    lengths = {s.stop - s.start for s in found}
    assert max(lengths) <= 10 and max(lengths) - min(lengths) <= 1
    assert len(found) == -(-n // 10)


def test_refusals():
    times = torch.linspace(0, 1, 3)
    for options in ({"memory": "recompute"}, {"method": "reversible_heun"}):
        with pytest.raises(ValueError, match="compile=True needs memory"):
            integrate(lambda t, h, w: h, torch.ones(1), None, times, compile=True, **options)
        with pytest.raises(ValueError, match="compile=True needs memory"):
            SDEBlock(nn.Linear(2, 2), compile=True, **options)
    prior = OrnsteinUhlenbeck(1.0, 0.0, 0.5, times, memory="recompute")
    with pytest.raises(ValueError, match=r'compile=True needs memory="graph".*recompute'):
        ControlledPath(prior, SMALL(1), compile=True)


def test_a_control_that_is_not_compiled():
    prior = OrnsteinUhlenbeck(1.0, 0.0, 0.5, torch.linspace(0, 1, 3))
    with pytest.warns(RuntimeWarning, match="not an MLPControl"):
        assert ControlledPath(prior, lambda t, z: -z, compile=True).sample().shape == (3, 1)
