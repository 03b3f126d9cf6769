"""q(z_0): before training, trained on problems with a known answer, and with all it reads."""

import io
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck, Stack
from pyro_sde.distributions.starts import PartlyFixed
from pyro_sde.guides.start import StartPosterior
from pyro_sde.nn import SDEBlock

from ..cases import assert_same, loss_and_gradients
from .models import shaken

TIMES = torch.tensor([0.0, 1.0], dtype=torch.float64)


def of_normal(d):
    return dist.Normal(torch.linspace(-3, 900, d), torch.linspace(0.1, 50, d)).to_event(1)


def of_covariance(d):
    lower = torch.eye(d) + 0.3 * torch.ones(d, d).tril(-1)
    return dist.MultivariateNormal(torch.linspace(-3, 9, d), scale_tril=2 * lower)


def of_logarithm(d):
    return dist.LogNormal(torch.linspace(-3, 4, d), torch.linspace(0.1, 2, d)).to_event(1)


def beside(d):
    """Two kinds side by side, and entries that are fixed."""
    paths = [BrownianMotion(1.0, TIMES, f(d)) for f in (of_logarithm, of_normal)]
    return Stack(BrownianMotion(1.0, TIMES, torch.ones(2)), *paths).initial


def posterior(law, plate=None, **options):
    """The law of the start in a new guide, and the prior's."""

    def model():
        if plate is None:
            z = pyro.sample("z", BrownianMotion(1.0, TIMES, law))
        else:
            with pyro.plate("plate", plate, dim=-1):
                z = pyro.sample("z", BrownianMotion(1.0, TIMES, law), **options)
        pyro.sample("y", dist.Normal(z[..., -1, :].sum(), 1.0), obs=torch.tensor(0.0))

    guide = AutoSDE(model, name=f"guide{torch.randint(10**9, ()).item()}").setup()
    guide()
    return guide.get_traces()[1].nodes["z"]["fn"].initial


@pytest.mark.parametrize("plate", [None, 3])
@pytest.mark.parametrize("d", [1, 3, 16, 17])
@pytest.mark.parametrize("make", [of_normal, of_covariance, of_logarithm, beside])
def test_before_training_it_is_the_prior(make, d, plate):
    """In a plate of 3 a matrix in R^3 must not be taken for 3 vectors."""
    prior = make(d)
    q = posterior(prior, plate)
    assert q.batch_shape == (() if plate is None else (plate,))
    x = prior.sample((5, 1) if plate else (5,))
    log_p = prior.log_prob(x)
    torch.testing.assert_close(q.log_prob(x), log_p.expand(5, *q.batch_shape), rtol=1e-6, atol=1e-6)


SUPPORTS = {
    "gamma": lambda: dist.Gamma(torch.tensor([2.0, 50.0]), torch.tensor([0.01, 3.0])).to_event(1),
    "uniform": lambda: dist.Uniform(torch.tensor([900.0, -1.0]), 1000.0).to_event(1),
    "beta": lambda: dist.Beta(torch.tensor([2.0, 30.0]), 3.0).to_event(1),
    "half normal": lambda: dist.HalfNormal(torch.tensor([200.0, 0.1])).to_event(1),
    "half Cauchy": lambda: dist.HalfCauchy(torch.tensor([200.0, 0.1])).to_event(1),
    "Cauchy": lambda: dist.Cauchy(torch.tensor([200.0, 0.1]), 3.0).to_event(1),
    "Student": lambda: dist.StudentT(1.5, torch.tensor([200.0, 0.1]), 3.0).to_event(1),
    "Dirichlet": lambda: dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("name", SUPPORTS)
def test_other_laws_have_the_support_and_the_place_of_the_prior(name):
    """The medians lie within the middle 95 % of the prior, and are as wide within a factor of 3."""
    prior = SUPPORTS[name]()
    q = posterior(prior)
    draws, ours = prior.sample((4001,)), q.sample((4001,))
    assert prior.support.check(ours).all()
    low, high = draws.quantile(0.025, 0), draws.quantile(0.975, 0)
    middle = ours.median(0).values
    assert ((low < middle) & (middle < high)).all(), (low, middle, high)
    widths = [x.quantile(0.75, 0) - x.quantile(0.25, 0) for x in (draws, ours)]
    ratio = widths[1] / widths[0]
    assert ((ratio > 1 / 3) & (ratio < 3)).all(), ratio


def trained(model, steps=300, lr=0.05, particles=16, nesting=0):
    pyro.set_rng_seed(1)
    guide = AutoSDE(model, control=lambda t, z: torch.zeros_like(z)).setup()
    optim = pyro.optim.ClippedAdam({"lr": lr, "lrd": 0.02 ** (1 / steps)})
    elbo = TraceSDE_ELBO(
        num_particles=particles, vectorize_particles=True, max_plate_nesting=nesting
    )
    svi = SVI(model, guide, optim, elbo)
    for _ in range(steps):
        svi.step()
    return guide


def draws_of(guide, n=20_000, nesting=0):
    with torch.no_grad(), pyro.plate("draws", n, dim=-1 - nesting):
        return guide()


@pytest.mark.parametrize("make", [lambda: of_normal(2), lambda: of_covariance(2)])
def test_conjugate_covariance(make):
    """An observation of a sum and one of an entry: the posterior is Normal and correlated."""
    prior = make()
    rows = torch.tensor([[1.0, 1.0], [1.0, 0.0]]) / prior.stddev
    noise = torch.tensor([0.3, 1.0])
    y = rows @ prior.mean + torch.tensor([1.0, -1.0])

    def model():
        z = pyro.sample("z", BrownianMotion(1.0, TIMES, prior))
        seen = (rows @ z[..., 0, :].unsqueeze(-1)).squeeze(-1)
        pyro.sample("y", dist.Normal(seen, noise).to_event(1), obs=y)

    before = prior.covariance_matrix if hasattr(prior, "scale_tril") else prior.variance.diag()
    precision = before.inverse() + rows.T @ noise.pow(-2).diag() @ rows
    exact = precision.inverse()
    shift = exact @ rows.T @ noise.pow(-2).diag() @ (y - rows @ prior.mean)
    guide = trained(model, 500)
    guide()
    q = guide.get_traces()[1].nodes["z"]["fn"].initial
    # "stl" has no noise at the optimum: what is left is that of training, and small.
    sd = exact.diagonal().sqrt()
    assert ((q.mean - prior.mean - shift).abs() < 0.05 * sd).all()
    assert ((q.covariance_matrix - exact).abs() < 0.05 * sd * sd.unsqueeze(-1)).all()


def test_gamma_start_with_counts():
    counts = torch.tensor([5.0, 4.0])

    def model():
        start = dist.Gamma(torch.tensor([3.0]), 1.0).to_event(1)
        z = pyro.sample("z", BrownianMotion(1.0, TIMES, start))
        pyro.sample(
            "y", dist.Poisson(z[..., 0, :].expand(*z.shape[:-2], 2)).to_event(1), obs=counts
        )

    z0 = draws_of(trained(model))["z"][..., 0, 0]
    mean, sd = 12 / 3, math.sqrt(12) / 3  # of Gamma(3 + 9, 1 + 2)
    assert abs(z0.mean() / mean - 1) < 0.1 and abs(z0.std() / sd - 1) < 0.1


@pytest.mark.parametrize("plate", [None, 2])
def test_it_moves_with_a_latent(plate):
    """A sum of a location and the start is known, neither of them is."""

    def one():
        loc = pyro.sample("loc", dist.Normal(torch.zeros(()), 1.0))
        start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
        z = pyro.sample("z", BrownianMotion(1.0, TIMES, start))
        pyro.sample("y", dist.Normal(z[..., 0, 0] + loc, 0.3), obs=torch.tensor(1.0))

    def several():
        with pyro.plate("plate", plate):
            one()

    nesting = int(plate is not None)
    draws = draws_of(trained(several if plate else one, 800, nesting=nesting), nesting=nesting)
    loc, z0 = (x.reshape(20_000, -1).T for x in (draws["loc"], draws["z"][..., 0, 0]))
    var, cov = 1 - 1 / 2.09, -1 / 2.09
    for pair in zip(loc, z0, strict=True):
        found = torch.stack(pair).cov()
        assert abs(found[0, 0] / var - 1) < 0.1 and abs(found[1, 1] / var - 1) < 0.1
        assert abs(found[0, 1] / found.diagonal().prod().sqrt() / (cov / var) - 1) < 0.1


def panel(times, values=None):
    rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5)).unsqueeze(-1)
    mean = pyro.sample("mean", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    start = dist.MultivariateNormal(mean, scale_tril=of_covariance(3).scale_tril)
    with pyro.plate("series", len(times)):
        z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, 1.0, TIMES, start))
        pyro.sample("y", dist.Normal(z[..., :1], 0.3).to_event(2), obs=values)


@pytest.mark.parametrize("is_encoded", [False, True])
@pytest.mark.parametrize("particles", [1, 3])
def test_beside_an_encoder_and_latents_full_is_stock(is_encoded, particles):
    """As many series and particles as dimensions, so that none may be taken for another."""
    data = TIMES.expand(3, 2), torch.randn(3, 2, 1)
    encoder = GRUEncoder(1, 8, 4) if is_encoded else None
    guide = shaken(panel, *data, encoder=encoder)
    assert guide.paths.z.start.head[0].in_features == 8 * is_encoded + 4
    options = {"num_particles": particles, "vectorize_particles": particles > 1}
    full = TraceSDE_ELBO(path_estimator="full", max_plate_nesting=1, **options)
    stock = Trace_ELBO(max_plate_nesting=1, **options)
    ours = loss_and_gradients(full, panel, guide, *data)
    assert_same(ours, loss_and_gradients(stock, panel, guide, *data))
    starts = [g for name, g in ours[1].items() if ".start." in name]
    assert len(starts) == 4 + (not is_encoded) and all(g.abs().max() > 0 for g in starts)


@pytest.mark.parametrize("law", [of_normal, of_covariance, of_logarithm, beside])
def test_where_it_begins(law):
    """infer={"start": (mean, sd)}, in the units of the state, whatever the law."""
    prior = law(2)
    mean, sd = prior.mean + 0.1 * prior.stddev, 0.01 * prior.stddev
    q = posterior(prior, 3, infer={"start": (mean, sd)})
    x = q.sample((20_000,))
    # To first order in a width of 1 %, and with the error of 60,000 draws.
    torch.testing.assert_close(x.mean((0, 1)), mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(x.std((0, 1)), sd, rtol=0.03, atol=1e-9)
    if not isinstance(prior, PartlyFixed):
        assert x[:, 0].T.corrcoef()[0, 1].abs() < 0.04


def test_where_the_weights_of_a_block_begin():
    field = torch.nn.Linear(2, 2)

    class Net(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.block = SDEBlock(field, steps=2, initial="normal")

        def forward(self, x, y=None):
            pyro.sample("y", dist.Normal(self.block(x), 0.1).to_event(2), obs=y)

    net = Net()
    guide = AutoSDE(net)
    guide(torch.randn(3, 2), torch.randn(3, 2))
    q = guide.get_traces()[1].nodes["block.w"]["fn"].initial
    torch.testing.assert_close(q.mean, net.block.start.detach())
    torch.testing.assert_close(q.stddev, 0.1 * net.block.start_scale)


def test_saved_and_loaded():
    data = TIMES.expand(3, 2), torch.randn(3, 2, 1)
    guide = shaken(panel, *data)
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    other = AutoSDE(panel).setup(*data)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    draws = []
    for g in (guide, other, pickle.loads(pickle.dumps(guide))):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        draws.append(g(*data)["z"])
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("batch", [(3,), (3, 1)])
def test_a_matrix_is_none_of_three_vectors(batch):
    """Three elements of a plate in R^3, each with the location loc + S m and the scale S L."""
    prior = of_covariance(3)
    start = StartPosterior(prior, torch.Size(batch), 0, torch.zeros(()))
    with torch.no_grad():
        start.values.normal_()
    m, entries = start.values[..., :3], start.values[..., 3:]
    lower = torch.diag_embed(entries[..., :3].exp())
    lower[..., [1, 2, 2], [0, 0, 1]] = entries[..., 3:]
    q = start(prior)
    torch.testing.assert_close(q.loc, prior.loc + m @ prior.scale_tril.T)
    torch.testing.assert_close(q.scale_tril, prior.scale_tril @ lower)
    q = start(prior.expand((2, 1, 1)))
    torch.testing.assert_close(
        q.loc[1], (prior.loc + m @ prior.scale_tril.T).expand(q.loc[1].shape)
    )
