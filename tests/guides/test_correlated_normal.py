"""The guide of the latents that are no paths: its units, its posterior, and where it is used."""

import functools
import io
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_sde import AutoSDE, TraceSDE_ELBO, fit
from pyro_sde.distributions import BrownianMotion, OrnsteinUhlenbeck
from pyro_sde.guides.correlated_normal import CorrelatedNormal
from pyro_sde.guides.defaults import default_guide
from pyro_sde.infer.elbo_terms import record_parts

from ..cases import assert_same, loss_and_gradients
from .models import GRID

TIMES = torch.tensor([0.0, 1.0], dtype=torch.float64)


def latents():
    """Latents of all kinds, two of them with priors that depend on others."""
    price = pyro.sample("price", dist.Normal(1000.0, 500.0))
    size = pyro.sample("size", dist.LogNormal(3.0, 0.2))
    pyro.sample("share", dist.Beta(2.0, 3.0))
    pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    pyro.sample("tail", dist.HalfCauchy(50.0))
    pyro.sample("child", dist.Normal(price, size))
    with pyro.plate("items", 2):
        pyro.sample("item", dist.Normal(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 0.01])))
    pyro.sample("y", dist.Normal(price, 1.0), obs=torch.tensor(900.0))


# Median and half of the middle 68 % in unconstrained space; None where there is no closed form.
UNITS = [
    (1000.0, 500.0),
    (3.0, 0.2),
    (None, None),
    (None, None),
    (None, None),
    # The median of |Cauchy| is its scale, and its quantiles are scale * tan(pi p / 2).
    (math.log(50.0), 0.5 * math.log(math.tan(0.42 * math.pi) / math.tan(0.08 * math.pi))),
    (1000.0, math.exp(3.0)),
    (0.0, 1.0),
    (5.0, 0.01),
]


def set_up(model=latents, seed=0):
    pyro.set_rng_seed(seed)
    guide = CorrelatedNormal(model)
    guide()
    return guide


def test_units_are_those_of_the_prior():
    guide = set_up()
    assert guide.start.shape == guide.unit.shape == (9,)
    for (start, unit), a, b in zip(UNITS, guide.start, guide.unit, strict=True):
        if start is not None:
            # 1001 draws: the median is known to 4 % of the spread, the spread to 4 %.
            assert abs(a - start) < 0.2 * unit and abs(b / unit - 1) < 0.2
    assert ((guide.unit > 0) & torch.isfinite(guide.start)).all()
    assert (guide.loc == 0).all() and ((guide.scale - 0.1).abs() < 1e-12).all()


def test_units_do_not_depend_on_the_seed_nor_change_it():
    a, b = set_up(seed=0), set_up(seed=1)
    assert torch.equal(a.start, b.start) and torch.equal(a.unit, b.unit)
    states = []
    for model in (latents, lambda: None):
        pyro.set_rng_seed(3)
        guide = CorrelatedNormal(model)
        if model is latents:
            guide._setup_prototype()
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


def shake(guide):
    with torch.no_grad():
        for p in guide.parameters():
            p.add_(0.3 * torch.randn_like(p))


def test_median_quantiles_and_draws_are_of_one_law():
    guide = set_up()
    shake(guide)
    q = guide.get_posterior()
    middle = torch.sinh(guide.log_tail.exp() * guide.skew)
    loc = guide.start + guide.unit * (guide.loc + guide.scale * middle)
    torch.testing.assert_close(guide.median()["price"], loc[0])
    torch.testing.assert_close(guide.median()["size"], loc[1].exp())
    found = guide.quantiles([0.1, 0.5, 0.9])
    draws = Predictive(latents, guide=guide, num_samples=4000, parallel=True)
    draws = {k: x.detach() for k, x in draws().items()}
    for name in ("price", "size", "child", "tail", "item"):
        x = draws[name].reshape(4000, -1)
        for p, value in zip((0.1, 0.5, 0.9), found[name], strict=True):
            below = (x < value.detach().reshape(-1)).double().mean(0)
            assert ((below - p).abs() < 5 * (p * (1 - p) / 4000) ** 0.5).all()
    eps = torch.randn(9)
    x = guide.get_transform()(eps)
    y = guide.scale_tril @ eps
    torch.testing.assert_close(x, q.transforms[1](q.transforms[0](y)))
    base = dist.Normal(torch.zeros(9), 1.0).to_event(1)
    density = dist.TransformedDistribution(base, [guide.get_transform()])
    torch.testing.assert_close(density.log_prob(x), q.log_prob(x))


def test_the_density_is_that_of_the_draw():
    """The loss of stock Trace_ELBO, from the joint density and the Jacobians."""
    guide = set_up()
    shake(guide)
    pyro.set_rng_seed(5)
    loss = Trace_ELBO().loss(latents, guide)
    pyro.set_rng_seed(5)
    trace = poutine.trace(guide).get_trace()
    replayed = poutine.trace(poutine.replay(latents, trace)).get_trace()
    site = next(s for n, s in trace.nodes.items() if n.endswith("_latent"))
    log_q = guide.get_posterior().log_prob(site["value"])
    for name in ("size", "share", "mix", "tail"):
        inverse = dist.transforms.biject_to(replayed.nodes[name]["fn"].support).inv
        value = replayed.nodes[name]["value"]
        jacobian = inverse.inv.log_abs_det_jacobian(inverse(value), value)
        log_q = log_q - jacobian
    expected = log_q - replayed.log_prob_sum()
    assert abs(loss - expected.item()) < 1e-6 * abs(loss)


def with_path():
    loc = pyro.sample("loc", dist.Normal(1000.0, 500.0))
    rate = pyro.sample("rate", dist.HalfCauchy(1.0)).unsqueeze(-1)
    z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, 1.0, GRID))
    pyro.sample("y", dist.Normal(z[..., -1, 0] + loc, 0.3), obs=torch.tensor(0.4))


def test_a_param_store_is_loaded_under_another_seed():
    def draw(guide):
        pyro.set_rng_seed(9)
        return guide()

    pyro.set_rng_seed(0)
    guide = AutoSDE(with_path)
    guide()
    shake(guide)
    expected, median, file = draw(guide), guide.rest.median(), io.BytesIO()
    torch.save(pyro.get_param_store().get_state(), file)
    pyro.clear_param_store()
    pyro.set_rng_seed(77)
    other = AutoSDE(with_path)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    pyro.get_param_store().set_state(state)
    found = draw(other)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name, value in median.items():
        assert torch.equal(other.rest.median()[name], value), name


def test_far_from_zero_in_300_steps():
    """Data around 20: the posterior of a location is known."""
    y = 20 + torch.tensor([1.3, -0.4, 2.0, 0.1])

    def model(y):
        loc = pyro.sample("loc", dist.Normal(20.0, 5.0))
        z = pyro.sample("z", BrownianMotion(1.0, TIMES, torch.zeros(1)))
        mean = (z[..., -1, 0] + loc).unsqueeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0).expand((*mean.shape[:-1], 4)).to_event(1), obs=y)

    guide = AutoSDE(model)
    fit(model, guide, (y,), steps=300, seed=0, progress=False)
    precision = 1 / 25 + 1 / (1 + 1 / 4)
    exact = (20 / 25 + y.mean() / (1 + 1 / 4)) / precision
    assert abs(guide.rest.median()["loc"] - exact) < 0.5


def kind(model):
    trace = poutine.trace(model).get_trace()
    sites = {n: s for n, s in trace.nodes.items() if n[0] == "x" and s["type"] == "sample"}
    made = default_guide(sites)
    return made.func


def test_where_it_is_used():
    def draw(n=1, name="x"):
        return pyro.sample(name, dist.Normal(torch.zeros(n), 1.0).to_event(1))

    def several(first, second):
        with first:
            draw()
        with second:
            draw(2, "x2")

    def in_plate(**options):
        with pyro.plate("plate", 4, **options):
            pyro.sample("x", dist.Normal(0.0, 1.0))

    scale, mask, partial = poutine.scale, poutine.mask, functools.partial
    some = torch.tensor([True, False, True, True])
    assert kind(draw) is kind(partial(draw, 128)) is kind(in_plate) is CorrelatedNormal
    assert kind(partial(draw, 129)) is AutoNormal
    assert kind(partial(in_plate, subsample_size=2)) is AutoNormal
    assert kind(partial(several, scale(scale=2.0), scale(scale=2.0))) is CorrelatedNormal
    assert kind(partial(several, scale(scale=2.0), scale(scale=3.0))) is AutoNormal
    assert kind(partial(several, scale(scale=2.0), mask(mask=True))) is AutoNormal
    assert kind(partial(several, mask(mask=False), mask(mask=torch.tensor(True)))) is AutoNormal
    assert kind(poutine.mask(in_plate, mask=some)) is AutoNormal
    assert kind(poutine.scale(in_plate, scale=torch.ones(4))) is AutoNormal


@pytest.mark.parametrize("where", ["one latent", "all latents", "none", "mask"])
def test_scales_and_masks_around_latents(where):
    """The densities of guide and model have one weight: "full" is stock, and a masked latent
    costs nothing."""

    def model():
        around = poutine.mask(mask=False) if where == "mask" else poutine.scale(scale=0.3)
        none = poutine.scale(scale=1.0)
        with none if where == "none" else around:
            a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
        with none if where in ("none", "one latent") else around:
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, b.unsqueeze(-1), a.unsqueeze(-1), GRID))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.tensor(1.0))

    guide = AutoSDE(model).setup()
    assert isinstance(guide.rest, AutoNormal if where == "one latent" else CorrelatedNormal)
    shake(guide)
    options = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 0}
    full = TraceSDE_ELBO(path_estimator="full", **options)
    with record_parts() as parts:
        ours = loss_and_gradients(full, model, guide)
    assert_same(ours, loss_and_gradients(Trace_ELBO(**options), model, guide))
    assert set(parts.kl) == {"a", "b", "z"} and abs(parts.elbo + ours[0]) < 1e-9
    if where == "mask":
        assert parts.kl["a"] == parts.kl["b"] == 0
