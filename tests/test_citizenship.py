"""Path sites among the rest of Pyro: every place where a distribution can be put."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import (
    MCMC,
    NUTS,
    SVI,
    Importance,
    Predictive,
    RenyiELBO,
    Trace_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, select, time_grid
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck

from .cases import assert_same, loss_and_gradients
from .one_path import GRID, T_OBS, Y, guide, model, prior

ELBOS = {
    "Trace": Trace_ELBO,
    "TraceMeanField": TraceMeanField_ELBO,
    "TraceGraph": TraceGraph_ELBO,
    "Renyi": lambda **kw: RenyiELBO(alpha=0.5, **{"num_particles": 3, **kw}),
    "TraceSDE": TraceSDE_ELBO,
    "TraceMeanFieldSDE": TraceMeanFieldSDE_ELBO,
}


@pytest.mark.parametrize("elbo", ELBOS.values(), ids=ELBOS)
def test_every_elbo_trains(elbo):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo())
    losses = [svi.step(Y) for _ in range(3)]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert pyro.param("gain").item() != 0.5


def test_a_plate_of_observations_needs_nothing_special_for_single_particles():
    def m(y=None):
        z = pyro.sample("z", prior())
        with pyro.plate("obs", len(T_OBS)):
            pyro.sample("y", dist.Laplace(select(z, GRID, T_OBS)[..., 0], 0.1), obs=y)

    for options in ({}, {"num_particles": 3}):
        pyro.clear_param_store()
        svi = SVI(m, AutoSDE(m), pyro.optim.Adam({"lr": 1e-2}), TraceSDE_ELBO(**options))
        assert all(torch.isfinite(torch.tensor([svi.step(Y) for _ in range(3)])))


@pytest.mark.parametrize("elbo", [TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])
def test_num_particles_vectorized_or_not_agree(elbo):
    """Means over 400 draws, within 5 standard errors of their difference."""
    means, variances = [], []
    for vectorized in (False, True):
        pyro.set_rng_seed(0)
        e = elbo(num_particles=20, vectorize_particles=vectorized, max_plate_nesting=1)
        losses = torch.tensor([e.loss(model, guide, Y) for _ in range(20)])
        means.append(losses.mean())
        variances.append(losses.var() / 20)
    assert abs(means[0] - means[1]) < 5 * (variances[0] + variances[1]).sqrt()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("auto", [False, True])
def test_predictive(parallel, auto):
    q = AutoSDE(model) if auto else guide
    if auto:
        q.setup(Y)
    draws = Predictive(model, guide=q, num_samples=7, parallel=parallel)(None)
    assert draws["z"].reshape(7, *prior().event_shape).shape == (7, len(GRID), 1)
    assert draws["y"].shape == (7, 3)
    assert draws["y"].unique().numel() == 21
    prior_draws = Predictive(model, num_samples=5, parallel=parallel)(None)
    assert prior_draws["y"].shape == (5, 3)


def test_condition_scale_mask_replay():
    value = prior().sample()
    trace = poutine.trace(poutine.condition(model, {"z": value})).get_trace(Y)
    assert trace.nodes["z"]["is_observed"]
    torch.testing.assert_close(
        trace.log_prob_sum(),
        prior().log_prob(value)
        + (dist.Normal(select(value, GRID, T_OBS)[..., 0], 0.3).log_prob(Y).sum()),
    )
    replayed = poutine.trace(poutine.replay(model, trace=poutine.trace(guide).get_trace(Y)))
    assert torch.isfinite(replayed.get_trace(Y).log_prob_sum())
    elbo = TraceSDE_ELBO(max_plate_nesting=1, path_estimator="full")
    stock = Trace_ELBO(max_plate_nesting=1)
    for handler in (
        lambda f: poutine.scale(f, 0.3),
        lambda f: poutine.mask(f, mask=torch.tensor(False)),
    ):
        assert_same(
            loss_and_gradients(elbo, handler(model), handler(guide), Y),
            loss_and_gradients(stock, handler(model), handler(guide), Y),
        )
    assert elbo.loss(poutine.mask(model, mask=False), poutine.mask(guide, mask=False), Y) == 0


def test_an_observed_path_keeps_its_density():
    """A path that is data is scored as data, beside one that is latent."""
    seen = prior().sample()

    def both(y=None):
        model(y)
        rate = pyro.param("rate", torch.tensor(1.0))
        pyro.sample("seen", OrnsteinUhlenbeck(rate, 0.0, 0.7, GRID), obs=seen)

    for estimator in ("full", "kl", "stl"):
        elbo = TraceSDE_ELBO(max_plate_nesting=1, path_estimator=estimator)
        with_data = loss_and_gradients(elbo, both, guide, Y)
        without = loss_and_gradients(elbo, model, guide, Y)
        assert with_data[0] - without[0] == pytest.approx(-prior().log_prob(seen).item())
        assert with_data[1]["rate"] != 0


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("vectorized", [False, True])
def test_densities_that_the_model_computes_itself(auto, vectorized):
    """A path's log_prob inside model or guide is the user's, and is left alone."""
    seen = prior().sample()
    runs = 0

    def m(y):
        nonlocal runs
        runs += 1
        model(y)
        rate = pyro.param("rate", torch.tensor(1.0))
        pyro.factor("extra", OrnsteinUhlenbeck(rate, 0.0, 0.7, GRID).log_prob(seen))

    q = AutoSDE(m).setup(Y) if auto else guide
    options = {"max_plate_nesting": 1}
    if vectorized:
        options = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 2}
    runs = 0
    full = loss_and_gradients(TraceSDE_ELBO(path_estimator="full", **options), m, q, Y)
    assert runs == 1
    assert full[1]["rate"] != 0
    assert_same(full, loss_and_gradients(Trace_ELBO(**options), m, q, Y))


def test_nuts_samples_a_path():
    """Posterior mean at the observations against the exact Gaussian one."""
    pyro.set_rng_seed(0)
    coarse = time_grid(0.0, 1.0, dt=0.5, include=T_OBS)

    def small(y):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, coarse))
        pyro.sample("y", dist.Normal(select(z, coarse, T_OBS)[..., 0], 0.3).to_event(1), obs=y)

    mcmc = MCMC(NUTS(small), num_samples=300, warmup_steps=100, disable_progbar=True)
    mcmc.run(Y)
    draws = select(mcmc.get_samples()["z"], coarse, T_OBS)[..., 0]
    gap = (T_OBS.unsqueeze(-1) - T_OBS).abs()
    K = 0.49 / 2 * torch.exp(-gap)
    mean = K @ torch.linalg.solve(K + 0.09 * torch.eye(3), Y)
    sd = (K - K @ torch.linalg.solve(K + 0.09 * torch.eye(3), K)).diagonal().sqrt()
    # 300 correlated draws count for at least 60 independent ones here.
    assert ((draws.mean(0) - mean).abs() < 5 * sd / 60**0.5).all()


def test_nuts_may_overflow():
    """Its first leaps may take a scale to infinity: a density that is turned down, not an error."""
    scale, times = torch.tensor([float("inf")]), torch.arange(6.0)
    with pyro.validation_enabled(False):
        assert not OrnsteinUhlenbeck(1.0, 0.0, scale, times).log_prob(torch.ones(6, 1)).isfinite()
    with pytest.raises(ValueError, match="scale must be finite"):
        OrnsteinUhlenbeck(1.0, 0.0, scale, times)


@pytest.mark.parametrize("auto", [False, True])
def test_importance_weights_estimate_the_evidence(auto):
    """log of the mean weight, within 5 standard errors of the exact evidence."""
    pyro.set_rng_seed(1)
    q = AutoSDE(model).setup(Y) if auto else guide
    n = 600
    weights = torch.stack([w for _, w in Importance(model, q, num_samples=n)._traces(Y)]).detach()
    gap = (T_OBS.unsqueeze(-1) - T_OBS).abs()
    K = 0.49 / 2 * torch.exp(-gap) + 0.09 * torch.eye(3)
    exact = dist.MultivariateNormal(torch.zeros(3), K).log_prob(Y)
    ratio = (weights - exact).exp()
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / n**0.5


@pytest.mark.parametrize("auto", [AutoNormal, AutoDelta])
def test_other_autoguides_over_a_path(auto):
    q = auto(model)
    for elbo in (Trace_ELBO(), TraceSDE_ELBO()):
        svi = SVI(model, q, pyro.optim.Adam({"lr": 0.05}), elbo)
        losses = torch.tensor([svi.step(Y) for _ in range(150)])
        assert losses[-30:].mean() < losses[:30].mean()
        pyro.clear_param_store()
        q = auto(model)


def test_beside_a_discrete_latent():
    """A score function upstream of a path: its cost to go contains the path's log ratio."""

    def m(y):
        k = pyro.sample("k", dist.Bernoulli(0.4))
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 2 * k.unsqueeze(-1), 0.7, GRID))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=y)

    def q(y):
        k = pyro.sample("k", dist.Bernoulli(pyro.param("p", torch.tensor(0.3))))
        gain = pyro.param("gain", torch.tensor(0.5))
        p = OrnsteinUhlenbeck(1.0, 2 * k.unsqueeze(-1), 0.7, GRID)
        pyro.sample("z", ControlledPath(p, lambda t, z: gain * (0.5 - z)))

    y = torch.tensor(0.6)
    full = loss_and_gradients(TraceSDE_ELBO(path_estimator="full", max_plate_nesting=0), m, q, y)
    assert_same(full, loss_and_gradients(Trace_ELBO(max_plate_nesting=0), m, q, y))
    assert full[1]["p"] != 0
