"""The autoguide: what it builds, what it sees, what it refuses."""

import functools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuideList, AutoNormal

from pyro_sde import (
    AutoSDE,
    MLPControl,
    TraceMeanFieldSDE_ELBO,
    TraceSDE_ELBO,
    select,
)
from pyro_sde.distributions import BrownianMotion

from ..cases import Net, assert_same, loss_and_gradients
from .models import GRID, MODELS, SERIES, T_OBS, Y, mixed, series, shaken, simple


def test_untrained_posterior_is_the_prior():
    guide = AutoSDE(simple)
    guide(Y)
    model_trace, guide_trace = guide.get_traces()
    p, q = model_trace.nodes["z"]["fn"], guide_trace.nodes["z"]["fn"]
    z = p.sample((5,))
    torch.testing.assert_close(q.log_prob(z), p.log_prob(z), rtol=1e-12, atol=1e-12)
    for estimator in ("kl", "full", "stl"):
        elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=0)
        _, guide_trace = elbo._get_trace(simple, guide, (Y,), {})
        assert abs(guide_trace.nodes["z"]["path_divergence"].item()) < 1e-12


def test_the_elbo_refuses_a_model_that_the_guide_would_ignore():
    guide = AutoSDE(simple)
    with pytest.raises(ValueError, match="runs the model that it was built with"):
        TraceSDE_ELBO().loss(poutine.scale(simple, 0.1), guide, Y)


@pytest.mark.parametrize("condition_on", [False, True])
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("vectorized", [False, True])
def test_full_is_stock_in_mixed_models(name, contraction, vectorized, condition_on):
    model, y = MODELS[name]
    guide = shaken(model, y, contraction=contraction, condition_on=condition_on)
    options = {"num_particles": 3, "vectorize_particles": vectorized}
    options["max_plate_nesting"] = 1 + vectorized
    expected = loss_and_gradients(Trace_ELBO(**options), model, guide, y)
    # What the guide draws beside paths is auxiliary or a Delta, without an analytic KL.
    for ours in (TraceSDE_ELBO, TraceMeanFieldSDE_ELBO):
        elbo = ours(path_estimator="full", **options)
        assert_same(loss_and_gradients(elbo, model, guide, y), expected)


@pytest.mark.parametrize("rest", [AutoNormal, AutoDiagonalNormal, AutoDelta])
@pytest.mark.parametrize("name", ["mixed", "series"])
def test_rest_guides_train(rest, name):
    model, y = MODELS[name]
    guide = AutoSDE(model, other_guide=rest)
    elbo = TraceSDE_ELBO(num_particles=8, vectorize_particles=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
    losses = torch.tensor([svi.step(y) for _ in range(80)])
    assert losses[-20:].mean() < losses[:20].mean()


def test_the_model_runs_once_per_elbo():
    calls = 0

    def counted(y):
        nonlocal calls
        calls += 1
        mixed(y)

    guide = AutoSDE(counted).setup(Y)
    elbo = TraceSDE_ELBO(max_plate_nesting=0)
    calls = 0
    elbo.loss_and_grads(counted, guide, Y)
    assert calls == 1


def test_diffusion_tracks_a_latent_scale():
    """Prior and posterior share the sampled scale, so the path KL does not grow with the grid."""

    def kl(steps):
        pyro.clear_param_store()
        times = torch.linspace(0.0, 1.0, steps + 1)

        def model():
            s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
            z = pyro.sample("z", BrownianMotion(s.unsqueeze(-1), times, torch.zeros(1)))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 1.0), obs=torch.tensor(0.5))

        guide = AutoSDE(model, control=lambda t, z: torch.ones_like(z)).setup()
        elbo = TraceSDE_ELBO(path_estimator="kl", max_plate_nesting=0)
        guide()
        _, guide_trace = elbo._get_trace(model, guide, (), {})
        return guide_trace.nodes["z"]["path_divergence"].item()

    assert kl(10) == pytest.approx(0.5) and kl(160) == pytest.approx(0.5)


def test_subsampling_is_unbiased_by_enumeration():
    """The mean loss over all mini-batches of one series is the loss of all, on the same noise."""

    def model(y, index):
        with pyro.plate("series", len(SERIES), subsample=index, dim=-1) as i:
            z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
            x = select(z, GRID, T_OBS)[..., 0]
            pyro.sample("y", dist.Normal(x, 0.3).to_event(1), obs=y[i])

    guide = shaken(model, SERIES, torch.arange(4))
    elbo = TraceSDE_ELBO(path_estimator="kl", max_plate_nesting=1)
    noise = torch.randn(len(GRID) - 1, 1, 1)
    real = torch.randn
    torch.randn = lambda shape, **kw: noise.expand(shape)  # one noise for any series and batch
    try:
        whole = loss_and_gradients(elbo, model, guide, SERIES, torch.arange(4))
        parts = [
            loss_and_gradients(elbo, model, guide, SERIES, torch.tensor([i])) for i in range(4)
        ]
    finally:
        torch.randn = real
    mean = sum(p[0] for p in parts) / 4
    grads = {k: sum(p[1][k] for p in parts) / 4 for k in whole[1]}
    assert_same(whole, (mean, grads))


def test_subsampled_training_reaches_every_series():
    guide = AutoSDE(series)
    svi = SVI(series, guide, pyro.optim.Adam({"lr": 0.02}), TraceSDE_ELBO())
    for _ in range(40):
        svi.step(SERIES, batch=2)
    moved = guide.paths.z.embedding.detach().abs().sum(-1)
    assert moved.shape == (4,) and (moved > 0).all()
    assert guide.paths.z.start.values.shape == (4, 2)
    shared = AutoSDE(series, name="shared", amortized_plates=("series",)).setup(SERIES)
    assert shared.paths.z.start.values.shape == (1, 2) and not shared.paths.z.has_embedding


def test_the_rest_guide_and_the_model_share_their_draws():
    """Mini-batch indices, and values from a rest guide that draws its sites itself."""
    indices = []

    def model(y, batch):
        with pyro.plate("series", 4, subsample_size=batch, dim=-1) as index:
            indices.append(index)
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
            pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
            pyro.sample("y", dist.Normal(shift, 0.3), obs=y[index])

    y = torch.zeros(4)
    guide = AutoSDE(model, other_guide=AutoDelta).setup(y, 2)
    with torch.no_grad():
        guide.rest.shift_unconstrained.copy_(torch.arange(4.0))
    for _ in range(5):
        draw = guide(y, 2)
        assert torch.equal(draw["shift"], indices[-1].double())

    def by_hand(model):
        return lambda *args: pyro.sample("scale", dist.LogNormal(pyro.param("m", Y[0]), 0.1))

    def scaled(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        pyro.sample("z", BrownianMotion(scale.unsqueeze(-1), GRID, torch.zeros(1)))
        pyro.sample("y", dist.Normal(scale, 0.3), obs=y)

    guide = AutoSDE(scaled, other_guide=by_hand, name="hand")
    options = {"max_plate_nesting": 0}
    full = loss_and_gradients(TraceSDE_ELBO(path_estimator="full", **options), scaled, guide, Y[0])
    assert_same(full, loss_and_gradients(Trace_ELBO(**options), scaled, guide, Y[0]))
    guide(Y[0])
    model_trace, guide_trace = guide.get_traces()
    value = guide_trace.nodes["scale"]["value"]
    assert value is guide._other_trace.nodes["scale"]["value"]
    assert torch.equal(model_trace.nodes["z"]["fn"].scale, value.unsqueeze(-1))


def test_latents_are_those_of_the_first_call():
    guide = AutoSDE(simple).setup(Y)
    assert set(guide(Y)) == set(guide(None)) == {"z"}
    trace = poutine.trace(guide).get_trace(None)
    assert trace.nodes["y"]["mask"] is False
    mixed_guide = AutoSDE(mixed, name="m").setup(Y)
    assert set(mixed_guide(None)) == {"scale", "dyn.rate", "z", "trend", "noise"}
    draws = Predictive(mixed, guide=mixed_guide, num_samples=4)(None)
    assert draws["y"].shape == (4, 3)


def test_controls_of_ones_own():
    def u(t, z):
        return 0.3 * z

    net = Net(1)
    for control in (u, net, MLPControl, functools.partial(MLPControl, hidden=(2, 8, 2))):
        pyro.clear_param_store()
        guide = AutoSDE(simple, control=control).setup(Y)
        loss = TraceSDE_ELBO().loss_and_grads(simple, guide, Y)
        assert torch.isfinite(torch.tensor(loss))
    assert guide.paths.z.control.layers[0].weight.shape == (2, 1)
    pyro.clear_param_store()
    guide = AutoSDE(mixed, control={"z": net}).setup(Y)
    assert guide.paths.z.control is net and isinstance(guide.paths.trend.control, MLPControl)
    with pytest.raises(ValueError, match=r"control names \['w'\]"):
        AutoSDE(mixed, control={"w": net}).setup(Y)


def test_autoguidelist_is_refused():
    guides = AutoGuideList(mixed)
    with pytest.raises(TypeError, match="other_guide="):
        guides.append(AutoSDE(poutine.block(mixed, expose=["z", "trend"])))


def test_models_that_it_cannot_guide():
    def no_path(y):
        pyro.sample("x", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="no latent path site"):
        AutoSDE(no_path).setup(Y)
    with pytest.raises(ValueError, match=r"other_guide=None.*noise"):
        AutoSDE(mixed, other_guide=None).setup(Y)
    with pytest.raises(TypeError, match="control must be callable"):
        AutoSDE(simple, control=3.0).setup(Y)


@pytest.mark.parametrize("parallel", [False, True])
def test_median_and_quantiles(parallel):
    """Before training they are the prior's: Normal(0, 0.49 / 2) at every time."""
    guide = AutoSDE(simple).setup(Y)
    n = 2000 if parallel else 300
    q = guide.quantiles([0.1, 0.5, 0.9], Y, num_samples=n, parallel=parallel)["z"]
    assert q.shape == (3, len(GRID), 1)
    exact = dist.Normal(0.0, (0.49 / 2) ** 0.5).icdf(torch.tensor([0.1, 0.5, 0.9]))
    # The standard error of a quantile, sqrt(p (1 - p) / n) / density, is at most 1.7 sd / sqrt(n).
    assert (q.squeeze(-1) - exact.unsqueeze(-1)).abs().max() < 5 * 1.7 * 0.5 / n**0.5
    median = guide.median(Y, num_samples=20, parallel=parallel)
    assert median["z"].shape == (len(GRID), 1)
    both = AutoSDE(mixed, name="m").setup(Y).median(Y, num_samples=5, parallel=parallel)
    assert set(both) == {"scale", "dyn.rate", "z", "trend", "noise"}
