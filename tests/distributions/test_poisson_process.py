"""The Poisson process: its density, its draws, its life in a Pyro model, its refusals."""

import itertools
import math
import pickle

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck, PoissonProcess

NAN = math.nan
GRID = torch.tensor([0.0, 0.5, 0.7, 2.0, 3.0], dtype=torch.float64)
RATE = torch.tensor([2.0, 5.0, 1.0, 1.0, 4.0], dtype=torch.float64)
EVENTS = torch.tensor([0.1, 0.5, 0.69, 2.5, 3.0], dtype=torch.float64)


def test_constant_rate():
    process = PoissonProcess(torch.full((5,), 1.7), GRID)
    torch.testing.assert_close(process.log_prob(EVENTS), torch.tensor(5 * math.log(1.7) - 1.7 * 3))
    none = process.log_prob(EVENTS[:0])
    torch.testing.assert_close(none, torch.tensor(-1.7 * 3))


def test_linear_rate_on_any_grid():
    """r(t) = 1 + 2 t: the coarsest grid and a fine one are the same process."""
    exact = (1 + 2 * EVENTS).log().sum() - (3 + 9)
    for grid in (torch.tensor([0.0, 3.0]), GRID, torch.linspace(0.0, 3.0, 40)):
        process = PoissonProcess(1 + 2 * grid, grid)
        torch.testing.assert_close(process.log_prob(EVENTS), exact)
        torch.testing.assert_close(process.cumulative(EVENTS), EVENTS + EVENTS**2)
        torch.testing.assert_close(process.intensity(EVENTS), 1 + 2 * EVENTS)


def test_order_and_padding_do_not_matter():
    process = PoissonProcess(RATE, GRID)
    padded = torch.tensor([NAN, 2.5, 0.69, NAN, 0.5, 3.0, 0.1, NAN])
    torch.testing.assert_close(process.log_prob(padded), process.log_prob(EVENTS))
    torch.testing.assert_close(process.log_prob(torch.tensor([NAN])), -process.total)
    assert process.intensity(torch.tensor([NAN])).isnan().all()


def test_gradients_against_finite_differences():
    """In the rate, the grid and the events, through padding, for series of different grids."""
    rate = torch.stack([RATE, RATE.flip(0)]).requires_grad_()
    grid = torch.stack([GRID, 1.1 * GRID]).requires_grad_()
    # Off the knots, where the rate has a kink.
    events = torch.tensor([[0.1, 0.6, NAN], [2.9, NAN, NAN]]).requires_grad_()

    def f(rate, grid, events):
        return PoissonProcess(rate, grid).log_prob(events)

    f(rate, grid, events).sum().backward()
    assert events.grad is not None and events.grad.isfinite().all()
    kept = events.detach()

    def without_padding(rate, grid, a, b):
        t = torch.cat([a, kept[0, 2:], b, kept[1, 1:]]).reshape(2, 3)
        return f(rate, grid, t)

    a = events[0, :2].detach().requires_grad_()
    b = events[1, :1].detach().requires_grad_()
    assert torch.autograd.gradcheck(without_padding, (rate, grid, a, b))


def test_density_integrates_to_the_law_of_the_count():
    """Over all places of one event: P(n = 1) = L exp(-L), with L the integral of the rate."""
    process = PoissonProcess(RATE, GRID)
    t = torch.linspace(0.0, 3.0, 30_001)[:-1] + 5e-5
    one = process.log_prob(t.unsqueeze(-1)).exp().sum() * 1e-4  # midpoints: exact up to the knots
    torch.testing.assert_close(one, process.total * (-process.total).exp(), rtol=1e-6, atol=0)


def test_batches_against_one_at_a_time():
    rates = torch.rand(4, 3, 5) + 0.1
    grids = GRID * torch.tensor([1.0, 1.5, 2.0]).unsqueeze(-1)
    events = torch.tensor([[0.2, NAN], [0.9, 2.9], [NAN, NAN]])
    log_p = PoissonProcess(rates, grids).log_prob(events)
    assert log_p.shape == (4, 3)
    for i in range(4):
        for j in range(3):
            alone = PoissonProcess(rates[i, j], grids[j]).log_prob(events[j][~events[j].isnan()])
            torch.testing.assert_close(log_p[i, j], alone)
    more = PoissonProcess(rates, grids).log_prob(events.expand(2, 1, 3, 2))
    torch.testing.assert_close(more, log_p.expand(2, 4, 3))


def test_expand_mask_and_pickle():
    process = PoissonProcess(RATE, GRID, max_events=30)
    wide = process.expand((2, 3))
    assert isinstance(wide, PoissonProcess) and wide.batch_shape == (2, 3)
    assert wide.shape((7,)) == wide.sample((7,)).shape == (7, 2, 3, 30)
    torch.testing.assert_close(wide.log_prob(EVENTS), process.log_prob(EVENTS).expand(2, 3))
    mask = torch.tensor([True, False, True])
    hidden = wide.mask(mask).log_prob(EVENTS)
    torch.testing.assert_close(hidden, torch.where(mask, process.log_prob(EVENTS), 0).expand(2, 3))
    assert wide.to_event(1).log_prob(EVENTS).shape == (2,)
    again = pickle.loads(pickle.dumps(wide))
    torch.testing.assert_close(again.log_prob(EVENTS), wide.log_prob(EVENTS))


N = 20_000


def test_draws_count_as_they_should():
    """Counts in bins that cut the steps: Poisson means and variances, within 5 standard errors."""
    process = PoissonProcess(RATE, GRID)
    t = process.sample((N,))
    assert t.isnan().any() and ((t >= 0) & (t <= 3) | t.isnan()).all()
    assert (t.diff().nan_to_num(0.0) >= 0).all()  # sorted, NaN last
    assert (t.isnan().int().diff(dim=-1) >= 0).all()
    edges = torch.tensor([0.0, 0.2, 0.6, 1.0, 2.4, 3.0])
    counts = torch.stack(
        [((t >= a) & (t < b)).sum(-1) for a, b in itertools.pairwise(edges)]
    ).double()
    means = process.cumulative(edges).diff()
    assert ((counts.mean(-1) - means).abs() < 5 * (means / N).sqrt()).all()
    # The variance of a sample variance of a Poisson law: (m + 2 m^2) / N.
    spread = ((means + 2 * means**2) / N).sqrt()
    assert ((counts.var(-1) - means).abs() < 5 * spread).all()
    # Independent bins: the correlation of each pair has standard error 1 / sqrt(N).
    off = torch.corrcoef(counts) - torch.eye(len(means))
    assert (off.abs() < 5 / math.sqrt(N)).all()


def test_time_rescaling():
    """Of draws, the cumulative at the events is uniform, each batch by its own rate and grid."""
    rates = torch.stack([RATE, RATE.flip(0)]).unsqueeze(1)
    grids = torch.stack([GRID, 1 + 2 * GRID])
    process = PoissonProcess(rates, grids)
    assert process.batch_shape == (2, 2)
    t = process.sample((3000,))
    u = process.cumulative(t) / process.total.unsqueeze(-1)
    for i in range(2):
        for j in range(2):
            x = u[:, i, j][~t[:, i, j].isnan()].sort().values
            steps = torch.arange(len(x) + 1) / len(x)
            distance = max((steps[1:] - x).max(), (x - steps[:-1]).max())
            # Kolmogorov: P(sqrt(n) D > 2.6) = 3e-6.
            assert distance * math.sqrt(len(x)) < 2.6


def test_steep_and_flat_steps_are_inverted():
    grid = torch.tensor([0.0, 1.0, 2.0, 3.0])
    process = PoissonProcess(torch.tensor([1e-12, 50.0, 50.0 + 1e-12, 1e-12]), grid)
    area = torch.linspace(0.0, float(process.total), 101)
    torch.testing.assert_close(process.cumulative(process._invert(area)), area)


def path_model(events=None, size=None, max_events=None):
    """Several series, each with a path of its own."""
    with pyro.plate("series", 3, subsample_size=size) as index:
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID))
        process = PoissonProcess((1 + z[..., 0]).exp(), GRID, max_events)
        seen = None if events is None else events[index]
        pyro.sample("events", process, obs=seen)


THREE = torch.tensor([[0.1, 0.5, 2.9], [0.3, NAN, NAN], [NAN, NAN, NAN]], dtype=torch.float64)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceSDE_ELBO])
def test_training(elbo, vectorize, size):
    guide = AutoSDE(path_model)
    loss = elbo(num_particles=3, vectorize_particles=vectorize)
    svi = SVI(path_model, guide, pyro.optim.Adam({"lr": 1e-2}), loss)
    losses = [svi.step(THREE, size=size) for _ in range(3)]
    assert all(math.isfinite(x) for x in losses)


def test_subsampling_and_scale_are_unbiased():
    """The mean of the log likelihood over the three pairs is that of the whole."""
    z = torch.randn(3, 5, 1)

    def likelihood(index=None):
        def model():
            with pyro.plate("series", 3, subsample=index) as i:
                pyro.sample("events", PoissonProcess(z[i, :, 0].exp(), GRID), obs=THREE[i])

        return poutine.trace(model).get_trace().log_prob_sum()

    pairs = [likelihood(torch.tensor(pair)) for pair in ([0, 1], [0, 2], [1, 2])]
    torch.testing.assert_close(torch.stack(pairs).mean(), likelihood())


def test_shared_path_in_a_plate():
    """A path outside the plate, with particles: Pyro leaves a 1 where the series stand."""

    def model():
        z = pyro.sample("z", BrownianMotion(0.5, GRID, torch.zeros(1)))
        with pyro.plate("series", 3):
            pyro.sample("events", PoissonProcess(z[..., 0].exp(), GRID), obs=THREE)

    with pyro.plate("particles", 4, dim=-2):
        trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    log_p = trace.nodes["events"]["log_prob"]
    assert log_p.shape == (4, 3)
    z = trace.nodes["z"]["value"]
    alone = PoissonProcess(z[2, 0, :, 0].exp(), GRID).log_prob(THREE[1])
    torch.testing.assert_close(log_p[2, 1], alone)
    assert "events" in trace.format_shapes()


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive(parallel):
    guide = AutoSDE(path_model)
    guide(THREE)
    draw = Predictive(path_model, guide=guide, num_samples=40, parallel=parallel)
    t = draw(max_events=200)["events"]
    assert t.shape == (40, 3, 200) and (t.isfinite().sum(-1) > 0).any()


def test_predictive_without_a_width_is_never_silent():
    """Pyro expands a draw of width 1 to the width of the first; of width 2 it cannot."""
    runs = itertools.count()

    def model():  # Pyro runs it twice for the shapes before it draws
        pyro.sample("events", PoissonProcess(RATE if next(runs) < 2 else RATE / 1e6, GRID))

    with pytest.raises(RuntimeError, match="expand"):
        Predictive(model, num_samples=3, parallel=True)()


def test_missing_series_are_imputed():
    def model():
        with pyro.plate("series", 3):
            process = PoissonProcess(RATE, GRID, max_events=40)
            obs = torch.nn.functional.pad(THREE, (0, 37), value=NAN)
            watched = torch.tensor([True, True, False])
            return pyro.sample("events", process, obs=obs, obs_mask=watched)

    value = model()
    torch.testing.assert_close(value[:2, :3], THREE[:2], equal_nan=True)
    assert value[2].isfinite().any()


def test_single_precision_and_mixed():
    process = PoissonProcess(RATE.float(), GRID.float())
    log_p = process.log_prob(EVENTS)  # the last event is the end of the window, in any precision
    assert log_p.dtype == torch.float32 == process.sample().dtype
    torch.testing.assert_close(log_p.double(), PoissonProcess(RATE, GRID).log_prob(EVENTS))
    assert PoissonProcess(RATE.float(), GRID).log_prob(EVENTS).dtype == torch.float64


def raises(message, f):
    with pytest.raises(ValueError, match=message):
        f()


def test_refusals():
    raises(r"rate\[1, 2\]=0; .*softplus", lambda: PoissonProcess(_with(0.0), GRID))
    raises(r"rate\[1, 2\]=nan", lambda: PoissonProcess(_with(NAN), GRID))
    raises(r"rate\[1, 2\]=inf", lambda: PoissonProcess(_with(math.inf), GRID))
    raises(r"each of the 5 times.*rate \(4,\).*z\[\.\.\., 0\]", lambda: _process(RATE[:4]))
    raises("each of the 5 times", lambda: PoissonProcess(RATE.unsqueeze(-1), GRID))
    raises("each of the 5 times", lambda: PoissonProcess(torch.tensor(1.0), GRID))
    raises("must broadcast together", lambda: PoissonProcess(RATE.expand(2, 5), GRID.expand(3, 5)))
    raises("times must increase strictly", lambda: PoissonProcess(RATE, GRID.flip(0)))
    two = _process(RATE.expand(2, 5))
    late = torch.tensor([[0.1, NAN, 0.2], [1.0, 2.0, 3.5]])
    raises(r"event \[1, 2\] at t=3.5 .*\[0, 3\] \(1 in all\)", lambda: two.log_prob(late))
    raises(r"event \[0, 0\] at t=-1", lambda: two.log_prob(torch.tensor([-1.0])))
    raises("outside", lambda: two.log_prob(torch.tensor([math.inf])))
    raises(r"do not broadcast.*batch_shape \(2,\)", lambda: two.log_prob(torch.ones(3, 1)))
    raises("found a scalar", lambda: two.log_prob(torch.tensor(1.0)))
    crowded = PoissonProcess(100 * RATE, GRID, max_events=3)
    raises("more than max_events=3: raise it", crowded.sample)


def _with(bad):
    rate = RATE.repeat(2, 1)
    rate[1, 2] = bad
    return rate


def _process(rate):
    return PoissonProcess(rate, GRID)
