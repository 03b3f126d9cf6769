"""Controls that read other latents: what they see, what it is good for, what is refused."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoDelta

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, forecast, select
from pyro_sde.distributions import OrnsteinUhlenbeck, SDEPath

from ..cases import assert_same, loss_and_gradients
from .models import GRID, MODELS, SERIES, T_OBS, Y, mixed, series, shaken, simple

TIMES = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
OBSERVED = torch.tensor([2, 4])
ENDS = torch.tensor([0.9, 1.4], dtype=torch.float64)
SCALE, NOISE = 0.5, 0.2


def trend(y=ENDS):
    """A path with an unknown drift: they have to agree with the data together."""
    m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0)).unsqueeze(-1)
    z = pyro.sample(
        "z", SDEPath(lambda t, z: m.expand_as(z), lambda t, z: SCALE, torch.zeros(1), TIMES)
    )
    pyro.sample("y", dist.Normal(z[..., OBSERVED, 0], NOISE).to_event(1), obs=y)


def exact():
    """The log evidence, and mean and standard deviation of m."""
    t = TIMES[OBSERVED]
    noise = SCALE**2 * torch.minimum(t, t[:, None]) + NOISE**2 * torch.eye(2)
    evidence = dist.MultivariateNormal(torch.zeros(2).double(), noise + t * t[:, None])
    precision = 1 + t @ torch.linalg.solve(noise, t)
    mean = t @ torch.linalg.solve(noise, ENDS) / precision
    return evidence.log_prob(ENDS).item(), mean.item(), precision.rsqrt().item()


def train(condition_on):
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    guide = AutoSDE(trend, contraction=True, condition_on=condition_on)
    elbo = TraceSDE_ELBO(num_particles=32, vectorize_particles=True)
    steps = 400
    optim = pyro.optim.ClippedAdam({"lr": 4e-2, "lrd": 0.05 ** (1 / steps)})
    svi = SVI(trend, guide, optim, elbo)
    for _ in range(steps):
        svi.step()
    elbo.num_particles = 4000
    with torch.no_grad():
        bound = -elbo.loss(trend, guide)
    m = Predictive(trend, guide=guide, num_samples=4000, parallel=True)()["m"]
    return bound, m.mean().item(), m.std().item()


def test_the_posterior_of_a_latent_drift_is_as_wide_as_it_is():
    evidence, mean, sd = exact()
    bound, *found = train(condition_on=("m",))
    # 4000 draws: a standard error of 0.01 sd in the mean, of 1.1 % in the sd. Training leaves more.
    assert abs(found[0] - mean) < 0.1 * sd
    assert abs(found[1] / sd - 1) < 0.1
    assert abs(evidence - bound) < 0.03
    bound, *found = train(condition_on=False)
    assert found[1] < 0.8 * sd
    assert bound < evidence - 0.1


@pytest.mark.parametrize("name", ["mixed", "series"])
def test_each_particle_reads_its_own_latents(name):
    model, y = MODELS[name]
    guide = shaken(model, y, condition_on=True)
    with pyro.plate("particles", 3, dim=-2):
        draws = guide(y)
    _, trace = guide.get_traces()
    q, reader = trace.nodes["z"]["fn"], guide.paths.z.reader
    context = q.control.context(q.times)
    if name == "series":
        # Behind an embedding of each series, the plates broadcast against each other.
        assert context.shape == (3, len(SERIES), 16 + 2)
        context = context[..., 16:]
    for k, latent in enumerate(reader.dims):
        expected = (draws[latent] - reader.loc[k]) / reader.scale[k]
        expected = expected.expand(context.shape[:-1])
        torch.testing.assert_close(context[..., k], expected, rtol=0, atol=0)


def test_what_is_read():
    guide = AutoSDE(mixed, condition_on=True).setup(Y)
    assert list(guide.paths.z.reader.dims) == ["scale", "dyn.rate", "noise"]
    # LogNormal(0, 1/2) by what it is made of, Gamma(2, 2) and HalfNormal(1) by their moments.
    locs = [1.0, 1.0, math.sqrt(2 / math.pi)]
    expected = locs, [math.exp(0.5) - 1, math.sqrt(0.5), math.sqrt(1 - 2 / math.pi)]
    reader = guide.paths.z.reader
    for found, numbers in zip((reader.loc, reader.scale), expected, strict=True):
        torch.testing.assert_close(found, torch.tensor(numbers), rtol=1e-6, atol=1e-12)
    guide = AutoSDE(mixed, name="one", condition_on="scale").setup(Y)
    assert list(guide.paths.trend.reader.dims) == ["scale"]
    guide = AutoSDE(series, name="local", condition_on=True).setup(SERIES)
    assert list(guide.paths.z.reader.dims) == ["scale", "shift"]
    guide = AutoSDE(simple, name="none", condition_on=True).setup(Y)
    assert guide.paths.z.reader is None


def vector(y=None):
    """Latents with dimensions of their own, and without moments."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(3, 2), 2.0).to_event(2))
    rate = pyro.sample("rate", dist.HalfCauchy(1.0))
    z = pyro.sample("z", OrnsteinUhlenbeck(rate.unsqueeze(-1), loc[..., 0, :], 1.0, GRID))
    pyro.sample("y", dist.Normal(select(z, GRID, T_OBS)[..., 0], 0.3).to_event(1), obs=y)


def test_latents_of_any_shape():
    guide = shaken(vector, Y, condition_on=True)
    reader = guide.paths.z.reader
    # A HalfCauchy by its median and the quantile of 84 %.
    width = math.tan(0.42 * math.pi) - 1
    for found, numbers in ((reader.loc, [0.0] * 6 + [1.0]), (reader.scale, [2.0] * 6 + [width])):
        torch.testing.assert_close(found, torch.tensor(numbers))
    options = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 0}
    full = TraceSDE_ELBO(path_estimator="full", **options)
    stock = pyro.infer.Trace_ELBO(**options)
    assert_same(*(loss_and_gradients(e, vector, guide, Y) for e in (full, stock)))


def test_beside_an_encoder():
    times = torch.tensor([0.25, 1.0]).expand(4, 2)
    values = torch.randn(4, 2, 1)

    def model(times, values=None):
        rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5))
        grid = torch.linspace(0.0, float(times.max()), 9)
        with pyro.plate("series", len(times)):
            z = pyro.sample("z", OrnsteinUhlenbeck(rate.unsqueeze(-1), 0.0, 1.0, grid))
            law = dist.Normal(select(z, grid, times[0]), 0.3)
            pyro.sample("y", law.to_event(2), obs=values)

    guide = shaken(model, times, values, encoder=GRUEncoder(1, 8, 4), condition_on=True)
    assert guide.paths.z.control.context.in_features == 4 + 1
    options = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1}
    full = TraceSDE_ELBO(path_estimator="full", **options)
    stock = pyro.infer.Trace_ELBO(**options)
    assert_same(*(loss_and_gradients(e, model, guide, times, values) for e in (full, stock)))
    ahead = forecast(model, guide, (times, values), torch.tensor([1.5, 2.0]), num_samples=5)
    assert torch.isfinite(ahead.samples).all()


@pytest.mark.parametrize("memory", ["graph", "recompute"])
def test_every_estimator_has_one_mean(memory):
    """With the noise of 20,000 paths; "kl" has the least, "stl" stops what the control reads."""

    def model():
        m = pyro.sample("m", dist.Normal(torch.zeros(()), 1.0)).unsqueeze(-1)
        path = SDEPath(
            lambda t, z: m.expand_as(z), lambda t, z: SCALE, torch.zeros(1), TIMES, memory=memory
        )
        z = pyro.sample("z", path)
        pyro.sample("y", dist.Normal(z[..., OBSERVED, 0], NOISE).to_event(1), obs=ENDS)

    guide = shaken(model, condition_on=True)
    means = {}
    for estimator in ("kl", "full", "stl"):
        elbo = TraceSDE_ELBO(path_estimator=estimator, num_particles=1000, vectorize_particles=True)
        draws = [_by_location(elbo, model, guide) for _ in range(20)]
        means[estimator] = torch.stack(draws).mean(), torch.stack(draws).std() / 20**0.5
    for estimator in ("full", "stl"):
        (a, da), (b, db) = means["kl"], means[estimator]
        assert abs(a - b) < 4.5 * (da**2 + db**2).sqrt()


def _by_location(elbo, model, guide):
    """The gradient by the mean of m, which the path meets through drift and control."""
    loc = guide.rest.loc
    loss = elbo.differentiable_loss(model, guide)
    return torch.autograd.grad(loss, loc)[0]


def test_the_gradient_reaches_what_is_read():
    """By float64 finite differences: through the drift, and through the control."""
    guide = shaken(trend, condition_on=True)
    loc = guide.rest.loc
    elbo = TraceSDE_ELBO(path_estimator="full", num_particles=5, max_plate_nesting=0)

    def loss(shift):
        pyro.set_rng_seed(0)
        with torch.no_grad():
            loc.add_(shift)
        value = elbo.differentiable_loss(trend, guide)
        with torch.no_grad():
            loc.sub_(shift)
        return value

    h = 1e-5
    difference = (loss(h) - loss(-h)) / (2 * h)
    (gradient,) = torch.autograd.grad(loss(0.0), loc)
    torch.testing.assert_close(gradient.squeeze(), difference.detach(), rtol=1e-6, atol=1e-6)


def test_paths_in_a_batch_that_is_no_plate():
    """With as many particles as paths in an event: a latent goes with its particle."""

    def model():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5)).unsqueeze(-1).unsqueeze(-1)
        pair = OrnsteinUhlenbeck(1.0, 0.0, scale * torch.ones(2, 1), GRID)
        z = pyro.sample("z", pair.to_event(1))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3).to_event(1), obs=torch.ones(2))

    guide = shaken(model, condition_on=True)
    with pyro.plate("particles", 2, dim=-1):
        scale = guide()["scale"]
    q = guide.get_traces()[1].nodes["z"]["fn"].base_dist
    context, reader = q.control.context(q.times), guide.paths.z.reader
    expected = ((scale - reader.loc) / reader.scale).unsqueeze(-1).expand(2, 2)
    torch.testing.assert_close(context[..., -1], expected, rtol=0, atol=0)
    options = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 0}
    full = TraceSDE_ELBO(path_estimator="full", **options)
    stock = pyro.infer.Trace_ELBO(**options)
    assert_same(*(loss_and_gradients(e, model, guide) for e in (full, stock)))


def test_saving(tmp_path):
    guide = shaken(mixed, Y, condition_on=True)
    torch.save(guide.state_dict(), tmp_path / "guide.pt")
    pyro.clear_param_store()
    other = AutoSDE(mixed, condition_on=True).setup(Y)
    other.load_state_dict(torch.load(tmp_path / "guide.pt", weights_only=True))
    draws = []
    for g in (guide, other):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        draws.append(g(Y)["z"])
    torch.testing.assert_close(*draws, rtol=0, atol=0)


def crowd(y=None):
    with pyro.plate("obs", 3):
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
    z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID))
    x = select(z, GRID, T_OBS)[..., 0]
    pyro.sample("y", dist.Normal(x, noise).to_event(1), obs=y)


def test_refusals():
    latents = r"\['dyn.rate', 'noise', 'sca"
    with pytest.raises(ValueError, match=rf"condition_on names 'rat', but .* {latents}"):
        AutoSDE(mixed, condition_on=("rat",)).setup(Y)
    with pytest.raises(ValueError, match="condition_on names 'trend'"):
        AutoSDE(mixed, condition_on=("trend",)).setup(Y)
    with pytest.raises(
        ValueError, match=r"cannot be conditioned on 'noise'.* inside of the plate 'obs'"
    ):
        AutoSDE(crowd, condition_on=("noise",)).setup(Y)
    assert AutoSDE(crowd, condition_on=True).setup(Y).paths.z.reader is None


def test_former_names_of_the_options():
    guide = AutoSDE(mixed, rest=AutoDelta, reads="scale").setup(Y)
    assert isinstance(guide.rest, AutoDelta) and list(guide.paths.z.reader.dims) == ["scale"]
    with pytest.raises(TypeError, match="AutoSDE has no option 'read'"):
        AutoSDE(mixed, read=True)


@pytest.mark.parametrize("plate", [None, 3])
@pytest.mark.parametrize("of_path", [torch.float32, torch.float64])
@pytest.mark.parametrize("of_latent", [torch.float32, torch.float64])
def test_latents_of_another_precision(of_latent, of_path, plate):
    """The networks have the precision of the path, and are given latents in that precision."""

    def model():
        loc = torch.zeros((), dtype=of_latent)
        noise = pyro.sample("noise", dist.LogNormal(loc, loc + 0.5))
        with pyro.plate("plate", plate) if plate else nullcontext():
            one = torch.ones(1, dtype=of_path)
            z = pyro.sample("z", OrnsteinUhlenbeck(one, 0 * one, one, GRID.to(of_path)))
            pyro.sample("y", dist.Normal(z[..., -1, 0], noise), obs=Y if plate else Y[0])

    guide = shaken(model)
    TraceSDE_ELBO().loss_and_grads(model, guide)
    assert all(p.dtype == of_path for p in guide.paths.parameters())
    assert guide()["z"].dtype == of_path
