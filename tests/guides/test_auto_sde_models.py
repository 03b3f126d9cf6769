"""The autoguide on models of many kinds: their grids, starts, types and modules."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule
from torch import nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, select
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck, SDEPath

from ..cases import Net, assert_same, loss_and_gradients
from .models import GRID, T_OBS, Y, shaken, simple


def test_a_trained_guide_moves_to_another_grid():
    """Nothing that is learned is tied to the number of steps."""

    def model(grid, y=None):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, grid))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)

    coarse, fine = torch.linspace(0.0, 1.0, 11), torch.linspace(0.0, 1.0, 41)
    y = torch.tensor(1.5)
    guide = AutoSDE(model)
    elbo = TraceSDE_ELBO(num_particles=16, vectorize_particles=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), elbo)
    for _ in range(150):
        svi.step(coarse, y)
    ends = []
    for grid in (coarse, fine):
        with torch.no_grad(), pyro.plate("samples", 4000, dim=-1):
            ends.append(guide(grid, y)["z"][..., -1, 0])
    assert guide(fine, y)["z"].shape == (41, 1)
    # The same control in finer steps differs by order dt = 0.1; the prior's mean is 0.
    assert (ends[0].mean() - ends[1].mean()).abs() < 0.2
    assert ends[1].mean() > 1.0


def test_every_series_on_a_grid_of_its_own():
    times = torch.stack([torch.linspace(0.0, 1.0, 6), torch.linspace(0.0, 3.0, 6)])

    def model(y):
        with pyro.plate("series", 2):
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, times))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)

    y = torch.tensor([1.0, -1.0])
    guide = shaken(model, y)
    options = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 2}
    assert_same(
        loss_and_gradients(TraceSDE_ELBO(path_estimator="full", **options), model, guide, y),
        loss_and_gradients(Trace_ELBO(**options), model, guide, y),
    )


def test_a_start_without_moments():
    """A Cauchy start has no mean to measure in: q(z_0) is then in units of 1 around 0."""

    def model(y):
        start = dist.Cauchy(torch.zeros(1), 1.0).to_event(1)
        z = pyro.sample("z", BrownianMotion(1.0, GRID, start))
        pyro.sample("y", dist.Normal(z[..., 0, 0], 0.1), obs=y)

    y = torch.tensor(0.5)
    guide = shaken(model, y)
    for estimator, stock in (("full", Trace_ELBO), ("kl", None), ("stl", None)):
        elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=0)
        result = loss_and_gradients(elbo, model, guide, y)
        assert abs(result[1]["AutoSDE.paths.z.start.values"][0].item()) > 0
        if stock is not None:
            expected = loss_and_gradients(stock(max_plate_nesting=0), model, guide, y)
            assert_same(result, expected)


@pytest.mark.parametrize("encoder", [None, GRUEncoder(1)], ids=["embedding", "encoder"])
def test_where_the_law_of_the_start_begins(encoder):
    """infer={"start": (mean, sd)}, whether the start is learned or computed by an encoder."""
    times = torch.linspace(0.0, 1.0, 3).expand(4, 3)

    def model(times, values):
        start = dist.Normal(torch.tensor([1.0, -1.0]), 2.0).to_event(1)
        with pyro.plate("series", 4):
            infer = {"start": (torch.tensor([3.0, 0.0]), 0.5)}
            z = pyro.sample("z", BrownianMotion(1.0, times[0], start), infer=infer)
            pyro.sample("y", dist.Normal(z[..., :1], 0.1).to_event(2), obs=values)

    guide = AutoSDE(model, encoder=encoder)
    trace = poutine.trace(guide).get_trace(times, torch.randn(4, 3, 1))
    q0 = trace.nodes["z"]["fn"].initial
    torch.testing.assert_close(q0.mean, torch.tensor([3.0, 0.0]).expand(4, 2))
    torch.testing.assert_close(q0.stddev, torch.full((4, 2), 0.5))


def test_single_precision_and_mixed_types():
    times = torch.linspace(0.0, 1.0, 6, dtype=torch.float32)

    def model():
        z = pyro.sample("z", OrnsteinUhlenbeck(torch.tensor(1.0).double(), 0.0, 1.0, times))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=torch.tensor(0.5))

    guide = AutoSDE(model)
    TraceSDE_ELBO().loss_and_grads(model, guide)
    assert guide()["z"].dtype == torch.float64
    torch.set_default_dtype(torch.float32)
    guide = AutoSDE(simple, name="single")
    TraceSDE_ELBO().loss_and_grads(simple, guide, Y)


def test_a_latent_parameter_without_a_state_dimension_is_refused():
    """Vectorised particles would turn into dimensions of the state."""

    def model(y):
        s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, s, GRID))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)

    elbo = TraceSDE_ELBO(num_particles=4, vectorize_particles=True)
    with pytest.raises(ValueError, match=r"R\^1 when the guide was set up.*R\^4.*unsqueeze"):
        elbo.loss(model, AutoSDE(model), torch.tensor(0.3))


def test_a_path_without_rsample_gets_a_score_function():
    """A guide that refuses reparametrisation is left to the parent ELBO."""
    gain = torch.nn.Parameter(torch.tensor(0.5))

    def model():
        z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.tensor(0.5))

    def guide():
        pyro.param("gain", gain)
        q = ControlledPath(BrownianMotion(1.0, GRID, torch.zeros(1)), lambda t, z: gain - z)
        pyro.sample("z", q.has_rsample_(False))

    options = {"max_plate_nesting": 0}
    assert_same(
        loss_and_gradients(TraceSDE_ELBO(**options), model, guide),
        loss_and_gradients(Trace_ELBO(**options), model, guide),
    )


class LearnedPrior(PyroModule):
    """A model that is a module: its prior drift is a network, its site lives in a submodule."""

    def __init__(self):
        super().__init__()
        self.drift = Net(1)
        self.log_noise = nn.Parameter(torch.zeros(()))

    def forward(self, y=None):
        start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
        z = pyro.sample("block.w", SDEPath(self.drift, lambda t, z: 0.5, start, GRID))
        x = select(z, GRID, T_OBS)[..., 0]
        pyro.sample("y", dist.Normal(x, self.log_noise.exp()).to_event(1), obs=y)


def test_a_module_as_model_is_trained_with_its_guide():
    model = LearnedPrior()
    guide = AutoSDE(model).setup(Y)
    assert guide.path_sites == ("block.w",)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    elbo = TraceSDE_ELBO(num_particles=4, vectorize_particles=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), elbo)
    losses = torch.tensor([svi.step(Y) for _ in range(60)])
    assert losses[-15:].mean() < losses[:15].mean()
    assert all((v != before[k]).any() for k, v in model.state_dict().items())
    assert guide(Y)["block.w"].shape == (len(GRID), 1)

    loss_fn = elbo(model, guide)
    names = {n for n, _ in loss_fn.named_parameters()}
    assert any(n.startswith("model.drift") for n in names)
    assert any(n.startswith("guide.paths.block.w.control") for n in names)
    options = {"max_plate_nesting": 0}
    assert_same(
        loss_and_gradients(TraceSDE_ELBO(path_estimator="full", **options), model, guide, Y),
        loss_and_gradients(Trace_ELBO(**options), model, guide, Y),
    )
