"""Posteriors computed from the observations of each series."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from torch import nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, fill_missing, select, series_grid
from pyro_sde.distributions import ODEPath, OrnsteinUhlenbeck
from pyro_sde.guides import MLPControl, SummaryEncoder
from pyro_sde.guides.encoders import as_observations

S, N, D = 5, 4, 2
NAN = float("nan")


def data(series=S):
    """Series with times of their own, rows that are padding, and entries that are missing."""
    times = torch.rand(series, N).sort(-1).values
    values = torch.randn(series, N, D)
    mask = torch.ones(series, N, D, dtype=torch.bool)
    mask[0, 2:] = False  # two rows of padding
    mask[1, 1] = False  # a row in the middle
    mask[2, 3, 0] = False  # one of two dimensions
    return times, values, mask, series_grid(times, dt=0.2, start=0.0, end=1.0)


def model(times, values=None, mask=None, grid=None, memory="graph"):
    values, mask = fill_missing(values, mask)
    with pyro.plate("series", len(times)):
        start = dist.Normal(torch.zeros(D), 1.0).to_event(1)
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.8, grid, start, memory))
        y = dist.Normal(select(z, grid, times), 0.3).mask(mask).to_event(2)
        return pyro.sample("y", y, obs=values)


class Plain(nn.Module):
    """A control without preparations."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, D)

    def forward(self, t, z, context):
        return self.last(context) - z


def shaken(fn=model, args=None, seed=1, encoder=None, **options):
    """A guide with an encoder, away from its start."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        encoder = GRUEncoder(D, hidden=8, context=4) if encoder is None else encoder
        guide = AutoSDE(fn, encoder=encoder, **options)
        torch.manual_seed(seed)
        guide.setup(*args)
        with torch.no_grad():
            for p in guide.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return guide


def loss_and_gradients(fn, guide, args, **elbo):
    torch.manual_seed(7)
    loss = TraceSDE_ELBO(**elbo).differentiable_loss(fn, guide, *args)
    guide.zero_grad()
    loss.backward()
    named = guide.named_parameters()
    return loss.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None}


def assert_same(a, b, tol=0.0):
    (loss, gradients), (other, others) = a, b
    assert (loss - other).abs() <= tol * loss.abs()
    assert gradients.keys() == others.keys()
    for name, g in gradients.items():
        assert g.isfinite().all() and (g - others[name]).abs().max() <= tol * (1 + g.abs().max())


@pytest.mark.parametrize("kind", ["gru", "summary"])
@pytest.mark.parametrize("filler", [NAN, 1e30, -7.0, float("inf")])
def test_masked_entries_have_exactly_no_influence(kind, filler):
    times, values, mask, grid = data()
    encoder = GRUEncoder(D, 8, 4) if kind == "gru" else SummaryEncoder(D, 8, 4, length=N)
    guide = shaken(args=(times, values, mask, grid), encoder=encoder)
    before = loss_and_gradients(model, guide, (times, values, mask, grid))
    spoilt = values.masked_fill(~mask, filler)
    assert_same(before, loss_and_gradients(model, guide, (times, spoilt, mask, grid)))
    moved = torch.where(mask.any(-1), times, grid[:, 1:2])  # a time of padding is no one's
    if kind == "gru":
        assert_same(before, loss_and_gradients(model, guide, (moved, spoilt, mask, grid)))
    # The units were taken from the data, too: from what was observed of it.
    other = GRUEncoder(D, 8, 4)
    other.take_units(as_observations(times, spoilt, mask))
    for unit in ("loc", "scale", "gap"):
        assert torch.equal(getattr(other, unit), getattr(encoder, unit))


def test_nan_is_missing():
    """Without a mask, and beside one."""
    times, values, mask, grid = data()
    guide = shaken(args=(times, values, mask, grid))
    before = loss_and_gradients(model, guide, (times, values, mask, grid))
    holes = values.masked_fill(~mask, NAN)
    assert_same(before, loss_and_gradients(model, guide, (times, holes, None, grid)))
    rows = torch.ones(S, N, dtype=torch.bool)
    assert_same(before, loss_and_gradients(model, guide, (times, holes, rows, grid)))


def elbo_of_each(guide, args):
    torch.manual_seed(7)
    elbo = TraceSDE_ELBO()
    (model_trace, guide_trace), *_ = elbo._get_traces(model, guide, args, {})
    return model_trace.nodes["y"]["log_prob"] - guide_trace.nodes["z"]["log_prob"]


def test_padding_leaves_the_bound_of_each_series():
    times, values, mask, grid = data()
    guide = shaken(args=(times, values, mask, grid))
    before = elbo_of_each(guide, (times, values, mask, grid))
    pad = 3
    padded = (
        torch.cat([times, times[:, -1:].expand(S, pad)], 1),
        torch.cat([values, torch.full((S, pad, D), NAN)], 1),
        torch.cat([mask, torch.zeros(S, pad, D, dtype=torch.bool)], 1),
        grid,
    )
    assert before.shape == (S,)
    torch.testing.assert_close(elbo_of_each(guide, padded), before, rtol=0, atol=1e-9)


def encode(encoder, times, values, mask=None):
    return encoder(*as_observations(times, values, mask))


def test_context_knows_what_is_ahead():
    """The next observation, the time to it and all after it; nothing of what is behind."""
    encoder = GRUEncoder(1, hidden=8, context=3)
    times = torch.tensor([[0.1, 0.4, 0.8]])
    values = torch.randn(1, 3, 1)
    at = torch.tensor([[0.0], [0.2], [0.3], [0.4], [0.6], [0.9]])
    context = encode(encoder, times, values).context(at)
    assert context.shape == (6, 1, 3)

    def changed(times=times, values=values):
        other = encode(encoder, times, values).context(at)
        return (other - context).abs().amax((1, 2)).gt(1e-6).tolist()

    def with_value(i):
        out = values.clone()
        out[0, i] += 1.0
        return out

    assert changed(values=with_value(0)) == [True, False, False, False, False, False]
    assert changed(values=with_value(1)) == [True, True, True, False, False, False]
    assert changed(values=with_value(2)) == [True, True, True, True, True, False]
    assert changed(times=torch.tensor([[0.1, 0.45, 0.8]])) == [True] * 3 + [True, False, False]
    # Of two times before one observation it knows which is the nearer.
    assert (context[1] - context[2]).abs().max() > 1e-6


def test_start_knows_an_observation_at_the_start():
    encoder = GRUEncoder(1, hidden=8)
    times, values = torch.tensor([[0.0, 0.5]]), torch.tensor([[[1.0], [2.0]]])
    start = encode(encoder, times, values).start(torch.zeros(()))
    assert start.shape == (1, 8)
    for i in range(2):
        other = values.clone()
        other[0, i] += 1.0
        moved = encode(encoder, times, other).start(torch.zeros(()))
        assert (moved - start).abs().max() > 1e-6


def test_a_series_alone_and_in_company():
    times, values, mask, grid = data()
    encoder = GRUEncoder(D, 8, 4)
    together = encode(encoder, times, values, mask)
    t = grid.T
    for s in range(S):
        alone = encode(encoder, times[s : s + 1], values[s : s + 1], mask[s : s + 1])
        here = alone.context(t[:, s : s + 1])[:, 0]
        torch.testing.assert_close(here, together.context(t)[:, s], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_units_of_the_data_do_not_matter(seed):
    """Values and times measured otherwise give the same contexts."""
    times, values, mask, _ = data()
    contexts = []
    for a, b, c in ((1.0, 0.0, 1.0), (100.0, -3.0, 365.0)):
        torch.manual_seed(seed)
        encoder = GRUEncoder(D, 8, 4)
        observations = as_observations(c * times, a * values + b, mask)
        encoder.take_units(observations)
        contexts.append(encoder(*observations).context(c * torch.linspace(0, 1, 7).unsqueeze(-1)))
    torch.testing.assert_close(*contexts)


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


def test_saving_keeps_the_units(tmp_path):
    args = data()
    guide = shaken(args=args)
    torch.save(guide.state_dict(), tmp_path / "guide.pt")
    copy = pickle.loads(pickle.dumps(guide))
    pyro.clear_param_store()
    other = AutoSDE(model, encoder=GRUEncoder(D, hidden=8, context=4)).setup(*(x[:3] for x in args))
    other.load_state_dict(torch.load(tmp_path / "guide.pt", weights_only=True))
    before = loss_and_gradients(model, guide, args)
    for again in (copy, other):
        pyro.clear_param_store()
        assert_same(before, loss_and_gradients(model, again, args))


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


BAD = {
    "unsorted": (lambda t, y, m: (t.flip(-1), y, m), r"series 0.*times must increase"),
    "duplicated": (lambda t, y, m: (t[:, :1].expand_as(t), y, m), r"series 0.*twice"),
    "all missing": (
        lambda t, y, m: (t, y, m & (torch.arange(S) != 3).view(-1, 1, 1)),
        "series 3 has no observed value",
    ),
    "outside": (
        lambda t, y, m: (torch.cat([t[:, :-1], t[:, -1:] + 9.0], 1), y, m),
        r"series 1.*times\[3\].*outside \[0, 1\]",
    ),
    "infinite": (lambda t, y, m: (t, y + float("inf"), m), r"series 0.*values\[0, 0\] is inf"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_series_are_named(case):
    times, values, mask, grid = data()
    spoil, message = BAD[case]

    def lenient(times, values, mask, grid):
        with pyro.plate("series", len(times)):
            pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, torch.full((D,), 0.8), grid))

    guide = shaken(lenient, (times, values, mask, grid))
    with pytest.raises(ValueError, match=message):
        guide(*spoil(times, values, mask), grid)


def test_refusals():
    times, values, mask, grid = data()
    with pytest.raises(ValueError, match="give AutoSDE an encoder too"):
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
