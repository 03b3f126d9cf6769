"""Posteriors computed from the observations of each series."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, fill_missing, select, series_grid
from pyro_sde.distributions import ODEPath, OrnsteinUhlenbeck
from pyro_sde.guides import MLPControl, SummaryEncoder
from pyro_sde.guides.encoders import as_observations

from .observed import D, Plain, S, assert_same, data, loss_and_gradients, model, shaken


def subsampled(times, values=None, mask=None, grid=None, index=None):
    values, mask = fill_missing(values, mask)
    with pyro.plate("series", S, subsample=index) as i:
        rows = grid[i]
        start = dist.Normal(torch.zeros(D), 1.0).to_event(1)
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.8, rows, start))
        y = dist.Normal(select(z, rows, times[i]), 0.3).mask(mask[i]).to_event(2)
        pyro.sample("y", y, obs=values[i])


@pytest.mark.parametrize("given", ["all", "batch"])
def test_subsampling_reads_the_right_rows(given):
    """Of a plate that subsamples, the posteriors are those of the same series in the full run."""
    args = data()
    guide = shaken(subsampled, args)
    guide(*args)
    full = guide.trace.nodes["z"]["fn"].initial.mean
    index = torch.tensor([3, 1])
    if given == "all":
        guide(*args, index)
    else:
        rows = tuple(x[index] for x in args)
        guide._observations = lambda *a: rows[:3]
        guide(*args, index)
    site = guide.trace.nodes["z"]
    assert (full[3] - full[1]).abs().max() > 1e-3
    torch.testing.assert_close(site["fn"].initial.mean, full[index])
    assert site["scale"] == S / 2


def test_unseen_series():
    args, others = data(), data(series=9)
    guide = shaken(args=args)
    assert guide(*others)["z"].shape == (9, others[-1].shape[-1], D)


def test_particles_broadcast_where_they_belong():
    """As many particles as series: a context along the wrong dimension would go unnoticed."""
    args = data()
    guide = shaken(args=args)
    guide(*args)
    q = guide.trace.nodes["z"]["fn"]
    t, _ = q.step_times(1)
    z = torch.randn(S, S, D)
    together = q.evaluate(t[2], z)[0]
    for p in range(S):
        torch.testing.assert_close(together[p], q.evaluate(t[2, 0], z[p])[0])
    elbo = TraceSDE_ELBO(num_particles=S, vectorize_particles=True, max_plate_nesting=1)
    loss, gradients = loss_and_gradients(model, guide, args, num_particles=S)
    assert loss.isfinite() and any(g.abs().max() > 0 for g in gradients.values())
    assert torch.isfinite(elbo.differentiable_loss(model, guide, *args))


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
def test_recomputing_gives_the_same_gradient(contraction, estimator):
    args = data()
    guide = shaken(args=args, contraction=contraction)
    here = loss_and_gradients(model, guide, args, path_estimator=estimator)
    lean = loss_and_gradients(model, guide, (*args, "recompute"), path_estimator=estimator)
    assert_same(here, lean, 1e-9)


@pytest.mark.parametrize("make", [lambda: MLPControl, Plain], ids=["mlp", "plain"])
@pytest.mark.parametrize("memory", ["graph", "recompute"])
def test_the_context_is_asked_for_once(monkeypatch, memory, make):
    """Not in every step, whose backward pass would then fill all that the encoder knows."""
    args, asked = data(), []
    guide = AutoSDE(model, encoder=GRUEncoder(D, 8, 4), control=make()).setup(*args)
    encode = guide.encoder.forward

    def forward(*observations):
        encoding = encode(*observations)
        return encoding._replace(context=lambda t: asked.append(t) or encoding.context(t))

    monkeypatch.setattr(guide.encoder, "forward", forward)
    TraceSDE_ELBO().differentiable_loss(model, guide, *args, memory).backward()
    assert len(asked) == 1


def mixed(times, values=None, mask=None, grid=None):
    """A latent beside the paths of the series, and a path that all share."""
    values, mask = fill_missing(values, mask)
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    shared = torch.linspace(0, 1, 5)
    trend = pyro.sample("trend", OrnsteinUhlenbeck(1.0, 0.0, 0.5, shared))
    with pyro.plate("series", len(times)):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, torch.full((D,), 0.8), grid))
        mean = select(z, grid, times) + trend[..., -1:, :]
        pyro.sample("y", dist.Normal(mean, noise).mask(mask).to_event(2), obs=values)


@pytest.mark.parametrize("contraction", [False, True])
def test_beside_a_rest_guide_and_a_shared_path(contraction):
    args = data()
    guide = AutoSDE(mixed, encoder=GRUEncoder(D, 8, 4), contraction=contraction)
    svi = SVI(mixed, guide, pyro.optim.Adam({"lr": 0.02}), TraceSDE_ELBO())
    before = sum(svi.evaluate_loss(*args) for _ in range(30)) / 30
    for _ in range(60):
        svi.step(*args)
    after = sum(svi.evaluate_loss(*args) for _ in range(30)) / 30
    assert guide.other_sites == ("noise",) and set(guide.path_sites) == {"trend", "z"}
    assert after < before - 5
    assert all(p.grad is None or p.grad.isfinite().all() for p in guide.parameters())
    samples = Predictive(guide, num_samples=3)(*args)
    assert samples["z"].shape[:2] == (3, S)


def test_one_series_outside_of_any_plate():
    times, values = torch.tensor([0.2, 0.7]), torch.randn(2, 1)
    grid = series_grid(times.unsqueeze(0), dt=0.2, start=0.0, end=1.0)[0]

    def alone(times, values):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid))
        pyro.sample("y", dist.Normal(select(z, grid, times), 0.3).to_event(2), obs=values)

    guide = shaken(alone, (times, values), encoder=GRUEncoder(1, 8, 4))
    assert guide(times, values)["z"].shape == (len(grid), 1)
    loss, _ = loss_and_gradients(alone, guide, (times, values))
    for particles in ({}, {"vectorize_particles": True, "max_plate_nesting": 0}):
        elbo = TraceSDE_ELBO(num_particles=4, **particles)
        assert torch.isfinite(elbo.differentiable_loss(alone, guide, times, values))
    assert loss.isfinite()


def test_an_ode_has_a_start_from_the_encoder_and_no_control():
    args = data()

    def flow(times, values, mask, grid):
        with pyro.plate("series", len(times)):
            start = dist.Normal(torch.zeros(D), 1.0).to_event(1)
            z = pyro.sample("z", ODEPath(lambda t, z: -z, start, grid))
            y = dist.Normal(select(z, grid, times), 0.3).mask(mask).to_event(2)
            pyro.sample("y", y, obs=values)

    guide = shaken(flow, args)
    assert not any("control" in name for name, _ in guide.named_parameters())
    _, gradients = loss_and_gradients(flow, guide, args)
    assert gradients["encoder.gru.weight_ih_l0"].abs().max() > 0


def test_other_names_of_the_arguments():
    times, values, mask, grid = data()

    def renamed(batch, grid):
        return model(*batch, grid)

    batch = (times, values, mask)
    with pytest.raises(ValueError, match=r"called \['batch', 'grid'\]; say .*observations=fn"):
        AutoSDE(renamed, encoder=GRUEncoder(D, 8, 4)).setup(batch, grid)
    pyro.clear_param_store()
    guide = shaken(renamed, (batch, grid), observations=lambda batch, grid: batch)
    here = loss_and_gradients(renamed, guide, (batch, grid))
    pyro.clear_param_store()
    args = (*batch, grid)
    assert_same(here, loss_and_gradients(model, shaken(args=args), args))


def test_refusals():
    times, values, mask, grid = data()
    with pytest.raises(ValueError, match="give AutoSDE an encoder, too"):
        AutoSDE(model, observations=lambda *a: a)
    with pytest.raises(ValueError, match="hidden must be an integer of at least 1: found 0"):
        GRUEncoder(1, hidden=0)
    with pytest.raises(ValueError, match=r"obs_dim=3: found values of shape \(5, 4, 2\)"):
        AutoSDE(model, encoder=GRUEncoder(3)).setup(times, values, mask, grid)
    with pytest.raises(ValueError, match=r"found shapes .*'times': \(5, 3\)"):
        AutoSDE(model, encoder=GRUEncoder(D), observations=lambda *a: (times[:, 1:], values)).setup(
            times, values, mask, grid
        )
    with pytest.raises(ValueError, match="must return"):
        AutoSDE(model, encoder=GRUEncoder(D), observations=lambda *a: times).setup(
            times, values, mask, grid
        )
    with pytest.raises(ValueError, match=r"2 series were observed, but no path"):
        few = (times[:2], values[:2], mask[:2])
        AutoSDE(model, encoder=GRUEncoder(D), observations=lambda *a: few).setup(
            times, values, mask, grid
        )
    guide = shaken(args=(times, values, mask, grid))
    with pytest.raises(ValueError, match="times or values is None"):
        guide(times, None, mask, grid)
    with pytest.raises(ValueError, match="reads length=2 observations of each series: found 4"):
        SummaryEncoder(D, length=2)(*as_observations(times, values, mask))


def test_a_control_of_ones_own_reads_the_context():
    args = data()
    guide = shaken(args=args, control=Plain())
    _, gradients = loss_and_gradients(model, guide, args)
    assert gradients["encoder.out.weight"].abs().max() > 0
