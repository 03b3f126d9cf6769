"""The laws of paths, guides and ELBOs on models drawn at random.

Few examples, always the same, unless HYPOTHESIS_PROFILE=thorough.
"""

import os

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyro.infer import Trace_ELBO
from pyro.poutine import trace
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_sde import (
    AutoSDE,
    GRUEncoder,
    TraceMeanFieldSDE_ELBO,
    TraceSDE_ELBO,
    fill_missing,
    girsanov,
    select,
    time_grid,
)
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck
from pyro_sde.distributions.wrapping import unwrap

from .cases import loss_and_gradients
from .random_models import CASES

# Grids drawn at random may be too coarse for a drift, which is no matter to the laws on a grid.
pytestmark = pytest.mark.filterwarnings("ignore:the steps of SDEPath are too long")

common = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
}
settings.register_profile("few", derandomize=True, max_examples=30, **common)
settings.register_profile("thorough", max_examples=3000, print_blob=True, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))


def assert_close(a, b, tol):
    """Losses and gradients, the latter in units of the largest entry of all."""
    assert abs(a[0] - b[0]) <= tol * max(1.0, abs(a[0])), (a[0], b[0])
    assert set(a[1]) == set(b[1])
    largest = max([1.0] + [g.abs().max().item() for g in a[1].values() if g.numel()])
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=tol, atol=tol * largest)


def results(case, guide, *elbos, y=None):
    data = (case.y if y is None else y, case.mask)
    return [
        loss_and_gradients(elbo(**case.options()), case.model, guide, *data, seed=case.seed)
        for elbo in elbos
    ]


def estimator(name, kind=TraceSDE_ELBO):
    return lambda **options: kind(path_estimator=name, **options)


@given(CASES)
def test_full_is_stock(case):
    """Value and gradient of both ELBOs; and "stl" has the value of "full"."""
    case.start()
    guide = case.guide()
    full, stock, stl = results(case, guide, estimator("full"), Trace_ELBO, estimator("stl"))
    assert_close(full, stock, case.tolerance())
    assert abs(full[0] - stl[0]) <= case.tolerance() * max(1.0, abs(full[0]))
    # What the guide draws beside paths is auxiliary or a Delta, without an analytic KL.
    (mean_field,) = results(case, guide, estimator("full", TraceMeanFieldSDE_ELBO))
    assert_close(mean_field, stock, case.tolerance())


def joint(mean, scale):
    """A Normal law with a dense covariance, from a scale that is a vector or a matrix."""
    matrix = scale.dim() > mean.dim()
    tril = scale if matrix else torch.diag_embed(scale.expand_as(mean))
    return MultivariateNormal(mean, scale_tril=tril)


def as_joint(law):
    if isinstance(law, MultivariateNormal):
        return law
    return joint(law.base_dist.loc, law.base_dist.scale)


def divergence(q, p, z):
    """The KL of every step and of the start, in closed form, one Normal after the other."""
    kl = 0.0
    if not isinstance(p.initial, torch.Tensor):
        kl = kl_divergence(*(as_joint(d.initial) for d in (q, p)))
    for i in range(q.times.shape[-1] - 1):
        t = q.times[..., i : i + 1]
        step = (t, q.times[..., i + 1 : i + 2] - t, z[..., i, :])
        kl = kl + kl_divergence(*(joint(*d.transition(*step)) for d in (q, p)))
    return kl


@given(CASES)
def test_kl_is_the_closed_form_of_every_step(case):
    """Everything else is as in stock Trace_ELBO, on the same draws."""
    case.start()
    guide = case.guide()
    (found,) = results(case, guide, estimator("kl"))
    pyro.set_rng_seed(case.seed)
    expected = 0.0
    args = case.model, guide, (case.y, case.mask), {}
    for model_trace, guide_trace in Trace_ELBO(**case.options())._get_traces(*args):
        p, q = (unwrap(tr.nodes["z"]["fn"]) for tr in (model_trace, guide_trace))
        term = divergence(q.path, p.path, q.to_path(guide_trace.nodes["z"]["value"])).sum()
        for name, site in guide_trace.nodes.items():
            if site["type"] == "sample" and name != "z":
                term = term + site["log_prob_sum"]
        for name, site in model_trace.nodes.items():
            if site["type"] == "sample" and name != "z":
                term = term - site["log_prob_sum"]
        expected += term.item() / case.particles
    assert abs(found[0] - expected) <= case.tolerance() * max(1.0, abs(expected))


@given(CASES, st.lists(st.integers(1, 3), max_size=2).map(tuple))
def test_shapes_densities_and_their_ratio(case, sample_shape):
    case.start()
    guide = case.guide()
    guide(case.y, case.mask)
    site, tol = guide.trace.nodes["z"], case.tolerance()
    q, p = site["fn"], site["infer"]["prior"]
    batch = case.plates[::-1]
    for d in (q, p, q.expand((2, *batch)), p.expand((2, *batch))):
        value = d.rsample(sample_shape)
        assert d.batch_shape[-len(batch) :] == batch or not batch
        assert d.event_shape == (len(case.steps) + 1, case.dim)
        assert value.shape == sample_shape + d.batch_shape + d.event_shape
        assert value.dtype == torch.get_default_dtype()
        log_prob = d.log_prob(value)
        assert log_prob.shape == sample_shape + d.batch_shape and torch.isfinite(log_prob).all()
        # Scored one at a time it is the same, whatever batch it was drawn in.
        rows = value.reshape(-1, *d.batch_shape, *d.event_shape)
        alone = torch.stack([d.log_prob(row) for row in rows]).reshape(log_prob.shape)
        torch.testing.assert_close(alone, log_prob, rtol=tol, atol=tol)
    inner_q, inner_p = unwrap(q).path, unwrap(p).path
    for value in (q.rsample(sample_shape), p.rsample(sample_shape)):
        ratio = q.log_prob(value) - p.log_prob(value)
        if not isinstance(inner_p.initial, torch.Tensor):
            z0 = unwrap(q).to_path(value)[..., 0, :]
            ratio = ratio - inner_q.initial.log_prob(z0) + inner_p.initial.log_prob(z0)
        found = sum(girsanov(q, p, value))
        large = max(1.0, q.log_prob(value).abs().max().item())
        torch.testing.assert_close(found, ratio, rtol=tol, atol=tol * large)


@given(CASES)
def test_masked_observations_have_no_influence(case):
    case.start()
    if not case.masked:
        return
    guide = case.guide()
    other = torch.where(case.mask, case.y, torch.ones_like(case.y))
    for name in ("stl", "kl"):
        (a,), (b,) = (results(case, guide, estimator(name), y=y) for y in (case.y, other))
        assert a[0] == b[0] and all(torch.equal(a[1][k], b[1][k]) for k in a[1])


def observed(times, values, mask):
    """Paths of the dimension of the observations, one a series."""
    grid = time_grid(0.0, 1.0, dt=0.4, include=times)
    with pyro.plate("series", len(times)):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, torch.zeros(values.shape[-1]), 1.0, grid))
        y, seen = fill_missing(values, mask)
        x = dist.StudentT(4.0, select(z, grid, times), 0.4)
        pyro.sample("y", x.mask(seen).to_event(2), obs=y)


@given(
    st.integers(0, 2**20),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_an_encoder_sees_what_was_observed_and_no_more(seed, series, n, dim, contraction, single):
    """Other numbers under the mask, or NaN: the same loss and gradient; and "full" is stock."""
    torch.set_default_dtype(torch.float32 if single else torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    times, values = torch.rand(series, n).sort(-1).values, torch.randn(series, n, dim)
    mask = torch.rand(series, n, dim) < 0.6
    mask[:, 0] = True
    guide = AutoSDE(observed, encoder=GRUEncoder(dim, 5, 3), contraction=contraction)
    guide.setup(times, values, mask)
    for p in guide.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    for name in ("stl", "full"):
        elbo = TraceSDE_ELBO(path_estimator=name, max_plate_nesting=1)
        found = [
            loss_and_gradients(elbo, observed, guide, times, torch.where(mask, values, x), mask)
            for x in (values, torch.tensor(7.0), torch.tensor(torch.nan))
        ]
        for other in found[1:]:
            assert_close(found[0], other, 0.0)
    stock = Trace_ELBO(max_plate_nesting=1)
    stock = loss_and_gradients(stock, observed, guide, times, values, mask)
    assert_close(found[0], stock, 2e-3 if single else 1e-8)


@given(CASES)
def test_the_model_runs_by_itself_and_under_the_guide(case):
    """The sites of a trace of either are those that were asked for, with densities that exist."""
    case.start()
    guide = case.guide()
    for run in (case.model, guide):
        found = trace(run).get_trace(case.y, case.mask)
        assert found.nodes["z"]["value"].shape[-2:] == (len(case.steps) + 1, case.dim)
        assert torch.isfinite(found.log_prob_sum())
    latents = {"z"} if case.latent == "none" else {"z", "scale"}
    assert set(guide(case.y, case.mask)) == latents


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=8),
    st.sets(st.integers(1, 7)),
    st.just(0.0) | st.floats(0.01, 5.0),
    st.floats(0.1, 3.0),
    st.booleans(),
)
def test_an_ornstein_uhlenbeck_process_does_not_see_its_grid(steps, dropped, rate, scale, fixed):
    """Means and variances at the times that stay, and the density of the states there: the finer
    chain's joint law, its other states integrated out."""
    torch.set_default_dtype(torch.float64)
    fine = torch.nn.functional.pad((0.02 * torch.tensor(steps)).cumsum(0), (1, 0))
    keep = [i for i in range(len(fine)) if i not in dropped or i == len(fine) - 1]
    start = torch.tensor([0.4]) if fixed or rate == 0 else None
    paths = [OrnsteinUhlenbeck(rate, -0.5, scale, t, start) for t in (fine, fine[keep])]
    for moment in ("mean", "variance"):
        all_times, some = (getattr(path, moment) for path in paths)
        torch.testing.assert_close(all_times[keep], some, rtol=1e-10, atol=1e-12)
    z = paths[1].sample()
    cov = _covariance(fine, rate, scale, start is not None)[keep][:, keep]
    mean = paths[0].mean[keep, 0]
    first = int(start is not None)
    joint = torch.distributions.MultivariateNormal(mean[first:], cov[first:, first:])
    expected = joint.log_prob(z[first:, 0])
    torch.testing.assert_close(paths[1].log_prob(z), expected, rtol=1e-6, atol=1e-6)


def _covariance(t, rate, scale, fixed):
    """Of an Ornstein-Uhlenbeck process, or of Brownian motion, by its textbook formula."""
    low, gap = torch.minimum(t.unsqueeze(-1), t), (t.unsqueeze(-1) - t).abs()
    if rate == 0:
        return scale**2 * low
    spread = 1 - torch.exp(-2 * rate * low) if fixed else torch.ones_like(gap)
    return scale**2 / (2 * rate) * torch.exp(-rate * gap) * spread


@given(
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_select_finds_the_times(seed, series, n, dim, shared, single):
    """A path whose state is the time itself, at times in any order, repeated or not."""
    torch.set_default_dtype(torch.float32 if single else torch.float64)
    pyro.set_rng_seed(seed)
    at = (3 * torch.rand(n)).round(decimals=2) - 1
    grids = [time_grid(-1.0, 2.0, dt=0.3, include=at)]
    if not shared:
        grids = [time_grid(-1.0, 2.0, dt=0.3, include=at).lerp(at[0], w) for w in (0, 0.2, 0.5)]
        grids = grids[:series]
    grid = torch.stack(grids) if not shared else grids[0]
    wanted = at if shared else torch.stack([at.lerp(at[:1], w) for w in (0, 0.2, 0.5)[:series]])
    path = grid.unsqueeze(-1).expand(*grid.shape, dim)
    found = select(path, grid, wanted)
    assert found.shape == (*wanted.shape, dim)
    torch.testing.assert_close(found, wanted.unsqueeze(-1).expand_as(found), rtol=0, atol=4e-6)
    particles = select(
        path.expand(4, *(() if not shared else (series,)), *path.shape), grid, wanted
    )
    torch.testing.assert_close(particles, found.expand_as(particles), rtol=0, atol=0)


@given(CASES)
def test_brownian_motion_is_the_limit_of_a_slow_return(case):
    """At rate 0, and smoothly near it."""
    case.start()
    one = torch.ones(case.dim)
    start = torch.zeros(case.dim)
    exact = BrownianMotion(0.7 * one, case.times, start)
    value = exact.sample()
    for rate in (0.0, 1e-9, -1e-9):
        path = OrnsteinUhlenbeck(rate, 0.4, 0.7 * one, case.times, start)
        tol = 1e-3 if case.single else 1e-6
        torch.testing.assert_close(path.log_prob(value), exact.log_prob(value), rtol=tol, atol=tol)
