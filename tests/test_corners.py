"""Ways through the library that no law, model or example takes."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, girsanov, pad_series
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    PathDistribution,
    SDEPath,
)
from pyro_sde.distributions.wrapping import unwrap
from pyro_sde.infer.girsanov import path_divergence
from pyro_sde.interop.torchsde import _ito_correction
from pyro_sde.nn import SDEBlock

from .cases import TIMES, loss_and_gradients
from .guides.models import GRID, Y, simple


def test_a_geometric_motion_from_any_positive_start():
    """The density is that of the start times log-normal steps; its guide starts at its mean."""
    start = dist.Gamma(2.0 * torch.ones(1), 3.0).to_event(1)
    path = GeometricBrownianMotion(0.4, TIMES, start, drift=0.1)
    x = path.sample((3,))
    dt = TIMES.diff().unsqueeze(-1)
    steps = dist.LogNormal(x[:, :-1].log() + (0.1 - 0.08) * dt, 0.4 * dt.sqrt())
    expected = start.log_prob(x[:, 0]) + steps.log_prob(x[:, 1:]).sum((-2, -1))
    torch.testing.assert_close(path.log_prob(x), expected)

    def model():
        pyro.sample("x", path)

    guide = AutoSDE(model)
    guide()
    q = unwrap(guide.trace.nodes["x"]["fn"]).path.initial.base_dist
    mean, sd = 2 / 3, math.sqrt(2) / 3  # of the Gamma, and the logarithm to first order
    assert q.loc.item() == pytest.approx(math.log(mean))
    assert q.scale.item() == pytest.approx(math.log1p(sd / mean))


def test_whole_numbers_are_times_and_states():
    path = BrownianMotion(1.0, torch.tensor([0, 1, 3]), torch.tensor([2]))
    assert path.times.dtype == path.sample().dtype == torch.get_default_dtype()
    assert path.sample()[0] == 2
    with pytest.raises(ValueError, match=r"at least two points.*found shape \(\)"):
        BrownianMotion(1.0, torch.tensor(1.0), 0.0)


def test_a_process_is_its_transition():
    with pytest.raises(NotImplementedError):
        PathDistribution(TIMES, torch.zeros(1)).sample()


def test_a_wrapper_that_nobody_knows_hides_a_path():
    class Strange(dist.Delta):
        base_dist = OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES)

    assert unwrap(Strange(torch.zeros(1))) is None


def test_a_guide_inside_of_a_module():
    """Its parameters get the module's name before their own."""

    class Both(PyroModule):
        def __init__(self):
            super().__init__()
            self.guide = AutoSDE(simple).setup(Y)

        def forward(self, y):
            return self.guide(y)

    trace = poutine.trace(Both()).get_trace(Y)
    params = [name for name, site in trace.nodes.items() if site["type"] == "param"]
    assert params and all(name.startswith("guide.paths.z") for name in params)


def test_sequential_plates_are_refused():
    def model():
        for i in pyro.plate("several", 2):
            z = pyro.sample(f"z_{i}", OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES))
            pyro.sample(f"y_{i}", dist.Normal(z[..., -1, 0], 1.0), obs=torch.tensor(0.5))

    with pytest.raises(NotImplementedError, match="sequential"):
        AutoSDE(model)()


def test_a_site_that_stops_being_a_path():
    def model(is_path=True):
        path = OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES)
        other = dist.Normal(torch.zeros(len(TIMES), 1), 1.0).to_event(2)
        pyro.sample("z", path if is_path else other)

    guide = AutoSDE(model).setup()
    with pytest.raises(ValueError, match="'z' was a path when the guide was set up"):
        guide(False)


def test_a_mini_batch_of_another_size_than_its_paths():
    def model(times, values, n):
        with pyro.plate("series", n):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 1.0), obs=torch.zeros(n))

    encoder = GRUEncoder(1, 4, 3)
    assert "obs_dim=1, hidden=4, context=3" in repr(encoder)
    observe = lambda times, values, n: (times, values)  # noqa: E731
    guide = AutoSDE(model, encoder=encoder, observations=observe)
    times, values = torch.rand(3, 2).sort(-1).values, torch.randn(3, 2, 1)
    guide(times, values, 3)
    with pytest.raises(ValueError, match=r"3 series were observed.*batch_shape \(2,\)"):
        guide(times, values, 2)


def test_a_value_that_the_user_put_into_the_store_is_the_guide_s():
    guide = AutoSDE(simple).setup(Y)
    name = "AutoSDE.paths.z.start.values"
    pyro.get_param_store()[name] = torch.tensor([3.0, 0.0])
    guide(Y)
    assert guide.paths.z.start.values[0].item() == 3.0
    svi = pyro.infer.SVI(simple, guide, pyro.optim.Adam({"lr": 0.1}), TraceSDE_ELBO())
    svi.step(Y)
    assert guide.paths.z.start.values[0].item() == pyro.param(name)[0].item() != 3.0


def test_a_control_with_a_place_for_a_module_that_is_not_there():
    class Control(PyroModule):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.5))
            self.register_module("extra", None)

        def forward(self, t, z):
            return self.gain * z

    guide = AutoSDE(simple, control=Control())
    _, slopes = loss_and_gradients(TraceSDE_ELBO(max_plate_nesting=0), simple, guide, Y)
    assert slopes["AutoSDE.paths.z.control.gain"] != 0


def test_a_mask_on_one_side_alone():
    def guide(y):
        pyro.sample("z", ControlledPath(OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID), lambda t, z: -z))

    masked = poutine.mask(simple, mask=torch.tensor(True))
    with pytest.raises(ValueError, match="'z' has different values of mask"):
        TraceSDE_ELBO().loss(masked, guide, Y)


STARTS = {
    "point": lambda: torch.full((1,), 0.3),
    "uniform": lambda: dist.Uniform(-torch.ones(1), torch.ones(1)).to_event(1),
    "learned uniform": lambda: dist.Uniform(
        -torch.ones(1), torch.ones(1).requires_grad_()
    ).to_event(1),
    "laplace": lambda: dist.Laplace(torch.zeros(1).requires_grad_(), 0.5).to_event(1),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("start", STARTS)
def test_a_start_of_any_law(start, grad):
    """All estimators have the value of the log ratio; a point has no density, its prior has."""
    p = OrnsteinUhlenbeck(1.0, 0.0, 0.7, TIMES)
    q = ControlledPath(p, lambda t, z: torch.sin(z), STARTS[start]())
    with torch.set_grad_enabled(grad):
        z = q.rsample()
        expected = sum(girsanov(q, p, z)) - p.initial.log_prob(z[0])
        if start != "point":
            expected = expected + q.initial.log_prob(z[0])
        for estimator in ("full", "stl"):
            torch.testing.assert_close(path_divergence(q, p, z, estimator), expected)


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("sees_state", [False, True])
def test_stopped_parameters_on_a_path_from_elsewhere(contraction, sees_state):
    """A path that was not drawn by q: "stl" has the value of "full"; and without contraction, the
    state being given, its gradient is that of the quadratic part alone."""
    p = OrnsteinUhlenbeck(1.0, 0.0, 0.7, TIMES, initial=torch.zeros(1))
    gain = torch.tensor(0.5, requires_grad=True)

    def control(t, z):
        u = gain * (torch.sin(3 * z) if sees_state else torch.ones_like(z) * t)
        return (u, 0.1 * u) if contraction else u

    q = ControlledPath(p, control, contraction=contraction)
    value = p.sample()
    full, stl, kl = (path_divergence(q, p, value, name) for name in ("full", "stl", "kl"))
    torch.testing.assert_close(full, stl)
    slopes = [torch.autograd.grad(term, gain)[0] for term in (full, stl, kl)]
    assert abs(slopes[0] - slopes[1]) > 0.01
    if not contraction:
        torch.testing.assert_close(slopes[1], slopes[2])


@pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")
def test_what_would_be_compiled_is_right_as_it_stands():
    """The steps that compile=True hands to the compiler, run by Python."""

    class Net(PyroModule):
        def __init__(self, compile):
            super().__init__()
            torch.manual_seed(0)
            self.block = SDEBlock(nn.Linear(2, 2), steps=3, compile=compile)

        def forward(self, x):
            h = self.block(x)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(h, 0.3).to_event(1), obs=x)

    results = []
    for compiled in (False, True):
        pyro.clear_param_store()
        net = Net(compiled)
        torch.manual_seed(1)
        guide = AutoSDE(net, compile=compiled, contraction=True)
        with torch.compiler.set_stance("force_eager"):
            guide.setup(torch.ones(4, 2))
        for p in guide.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        elbo = TraceSDE_ELBO(max_plate_nesting=1)
        with torch.compiler.set_stance("force_eager"):
            results.append(loss_and_gradients(elbo, net, guide, torch.ones(4, 2)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    for name, slope in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], slope)


def test_a_diffusion_that_ignores_the_state_has_no_correction():
    """Ito and Stratonovich are then one equation; else they differ by g g' / 2."""
    z = torch.ones(1)
    path = SDEPath(lambda t, z: -z, lambda t, z: torch.ones_like(z), z, TIMES)
    assert _ito_correction(path, TIMES[:1], z) == 0.0
    path = SDEPath(lambda t, z: -z, lambda t, z: 0.5 * z, z, TIMES)
    assert _ito_correction(path, TIMES[:1], z).item() == 0.125


def test_refusals_that_nothing_else_meets():
    path = OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES).expand((2,))
    masks = torch.tensor([[True, False], [True, True]])
    q, p = (path.mask(mask) for mask in masks)
    with pytest.raises(ValueError, match="different masks"):
        girsanov(q, p, path.sample())
    with pytest.raises(ValueError, match=r"scale must be a number.*found shape \(2, 2\)"):
        SDEBlock(nn.Linear(1, 1), scale=torch.ones(2, 2))
    with pytest.raises(ValueError, match="values is empty"):
        pad_series({"id": [1], "t": [0.0]}, series="id", time="t", values=[])
