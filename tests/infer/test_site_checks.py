"""A dimension that no plate claims, or a site of one trace alone, is an error of every ELBO."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, select
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck

P = 4
GRID = torch.linspace(0.0, 1.0, 6)
AT = torch.tensor([0.2, 0.6, 1.0])
Y = torch.tensor([0.3, -0.4, 1.0])

every_elbo = pytest.mark.parametrize("ELBO", [TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])


def latent_scale():
    return pyro.sample("scale", dist.LogNormal(0.0, 0.3))


def path(scale):
    return OrnsteinUhlenbeck(1.0, 0.0, scale, GRID)


def states_without_select():
    z = pyro.sample("z", path(1.0))
    with pyro.plate("obs", 3):
        pyro.sample("y", dist.Normal(z[..., [1, 3, 5], 0], 0.3), obs=Y)


def select_outside():
    z = pyro.sample("z", path(1.0))
    x = select(z, GRID, AT)[..., 0]
    with pyro.plate("obs", 3):
        pyro.sample("y", dist.Normal(x, 0.3), obs=Y)


def scale_without_state_dim():
    z = pyro.sample("z", path(latent_scale()))
    with pyro.plate("obs", 3):
        pyro.sample("y", dist.Normal(select(z, GRID, AT)[..., 0], 0.3), obs=Y)


def noise_without_event_dim():
    z = pyro.sample("z", path(1.0))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 0.3))
    pyro.sample("y", dist.Normal(z[..., [1, 3, 5], 0], noise).to_event(1), obs=Y)
    with pyro.plate("others", 3):
        pyro.sample("x", dist.Normal(0.0, 1.0), obs=Y)


def one_dimension_too_many():
    pyro.sample("z", path(1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(b.unsqueeze(-1), 1.0), obs=Y[0])


STRAY = {
    states_without_select: "y",
    select_outside: "y",
    scale_without_state_dim: "z",
    noise_without_event_dim: "y",
    one_dimension_too_many: "y",
}


@every_elbo
@pytest.mark.parametrize("model", STRAY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{}, {"max_plate_nesting": 1}])
def test_a_stray_dimension_under_particles(ELBO, model, options):
    elbo = ELBO(num_particles=P, vectorize_particles=True, **options)
    message = rf"site '{STRAY[model]}'.*no plate claims its dim -\d, of size {P} \('num_particles"
    with pytest.raises(ValueError, match=message):
        elbo.loss(model, AutoSDE(model).setup())


def one_observation():
    """Of a path that is seen once, which a plate of one element holds."""
    z = pyro.sample("z", path(1.0))
    with pyro.plate("obs", 1):
        pyro.sample("y", dist.Normal(z[..., [5], 0], 0.3), obs=Y[:1])


def test_the_message_says_what_to_do():
    elbo = TraceSDE_ELBO(num_particles=P, vectorize_particles=True)
    with pytest.raises(ValueError) as e:
        elbo.loss(one_observation, AutoSDE(one_observation).setup())
    for part in (
        "site 'y' has a log_prob of batch shape (4, 4, 1)",
        "no plate claims its dim -3, of size 4",
        "'num_particles_vectorized' claims dim -2, of size 4",
        "'obs' claims dim -1, of size 1",
        ".unsqueeze(-1)",
        "plate_dim=",
        ".to_event(1)",
    ):
        assert part in str(e.value)


@every_elbo
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("where", ["outside of plates", "right of a plate"])
def test_a_stray_dimension_without_particles(ELBO, validate, where):
    """Right of a plate Pyro does not look."""

    def model():
        pyro.sample("z", path(1.0))
        if where == "right of a plate":
            with pyro.plate("two", 2, dim=-2):
                pyro.sample("y", dist.Normal(torch.zeros(2, 3), 1.0), obs=Y)
        else:
            pyro.sample("y", dist.Normal(torch.zeros(3), 1.0), obs=Y)

    guide = AutoSDE(model).setup()
    with pyro.validation_enabled(validate), pytest.raises(ValueError, match=r"site .y.[ ,]"):
        ELBO().loss(model, guide)


def test_a_stray_dimension_of_the_guide():
    def model():
        pyro.sample("z", path(1.0))
        pyro.sample("x", dist.Normal(0.0, 1.0))

    def guide():
        pyro.sample("z", path(1.0))
        u = pyro.sample("u", dist.Normal(torch.zeros(3), 1.0), infer={"is_auxiliary": True})
        pyro.sample("x", dist.Delta(u.sum()))

    with pyro.validation_enabled(False), pytest.raises(ValueError, match=r"site 'u'.*in no plate"):
        TraceSDE_ELBO().loss(model, guide)


def everything_legal():
    """All kinds of sites, in plates that leave dimensions of size 1."""
    scale = latent_scale().unsqueeze(-1)
    z = pyro.sample("z", path(scale))
    x = pyro.deterministic("x", select(z, GRID, AT)[..., 0])
    pyro.deterministic("x_event", x, event_dim=1)
    with poutine.mask(mask=False):
        pyro.sample("masked", dist.Normal(0.0, scale.squeeze(-1)))
    pyro.factor("factor", torch.zeros(scale.shape[:-1]))
    with pyro.plate("three", 3, dim=-3), poutine.scale(scale=2.0):
        shift = pyro.sample("shift", dist.Normal(torch.zeros(3, 1, 1), 1.0))
        with pyro.plate("big", 8, subsample_size=2, dim=-2) as index:
            keep = torch.tensor([[True], [False]])
            with poutine.mask(mask=keep):
                law = dist.Normal(shift.unsqueeze(-1) + x, 0.3).to_event(1)
                pyro.sample("y", law, obs=Y + index.unsqueeze(-1).unsqueeze(-1))
    for i in pyro.plate("loop", 2):
        pyro.sample(f"w_{i}", dist.Normal(0.0, scale.squeeze(-1)), obs=torch.tensor(0.1))


@pytest.mark.parametrize("other", ["AutoNormal", "AutoMultivariateNormal"])
@pytest.mark.parametrize("options", [{}, {"num_particles": 5, "vectorize_particles": True}])
@every_elbo
def test_what_is_legal_passes(ELBO, other, options):
    kind = getattr(pyro.infer.autoguide, other)
    guide = AutoSDE(everything_legal, other_guide=kind).setup()
    assert math.isfinite(ELBO(**options).loss(everything_legal, guide))


def hand_written(model_path):
    """A guide that draws the path as the model does, with a control."""

    def guide():
        pyro.sample("z", ControlledPath(model_path(latent_scale()), lambda t, z: -z))

    def model():
        z = pyro.sample("z", model_path(latent_scale()))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=Y[0])

    return model, guide


def test_particles_in_the_place_of_the_state():
    """The path is in R^P then, and all particles have the first one's scale."""
    elbo = TraceSDE_ELBO(num_particles=P, vectorize_particles=True)
    model, guide = hand_written(path)
    with pytest.raises(
        ValueError, match=r"event shape \(6, 4\) with 4.*\(6, 5\) with 5.*unsqueeze"
    ):
        elbo.loss(model, guide)
    with pytest.raises(ValueError, match=r"R\^1.*now it is in R\^4.*unsqueeze"):
        elbo.loss(model, AutoSDE(model))
    right, right_guide = hand_written(lambda scale: path(scale.unsqueeze(-1)))
    for validate in (True, False):
        with pyro.validation_enabled(validate), pytest.raises((ValueError, RuntimeError)):
            elbo.loss(model, right_guide)
    assert math.isfinite(elbo.loss(right, right_guide))


@every_elbo
@pytest.mark.parametrize("guided", ["by hand", "AutoSDE"])
def test_as_many_particles_as_dimensions(ELBO, guided):
    """Every shape is right, and the scale of a particle is taken for that of a dimension."""
    start = torch.zeros(P)
    model, guide = hand_written(lambda scale: BrownianMotion(scale, GRID, start))
    guide = guide if guided == "by hand" else AutoSDE(model)
    elbo = ELBO(num_particles=P, vectorize_particles=True)
    with pytest.raises(
        ValueError, match=r"fails with 5 particles.*\(6, 4\) of site 'z'.*unsqueeze"
    ):
        elbo.loss(model, guide)
    assert elbo.num_particles == P


def test_as_many_particles_as_series():
    def model():
        scale = latent_scale()
        with pyro.plate("series", P):
            z = pyro.sample("z", path(scale))  # (P, 1): a batch of particles as one of series
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.zeros(P))

    elbo = TraceSDE_ELBO(num_particles=P, vectorize_particles=True)
    with pytest.raises(ValueError, match=r"fails with 5 particles.*the plate 'series'"):
        elbo.loss(model, AutoSDE(model))


def test_trying_another_number_of_particles_leaves_no_trace():
    """As many observations as particles, rightly: the loss and the last draw are as ever."""

    def model():
        z = pyro.sample("z", path(latent_scale().unsqueeze(-1)))
        with pyro.plate("obs", 3):
            pyro.sample("y", dist.Normal(select(z, GRID, AT)[..., 0], 0.3), obs=Y)

    options = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1}
    guide = AutoSDE(model).setup()
    ours, losses = TraceSDE_ELBO(path_estimator="full", **options), []
    for elbo in (ours, Trace_ELBO(**options), ours):
        pyro.set_rng_seed(0)
        losses.append(elbo.loss(model, guide))
        assert guide.get_traces()[1].nodes["z"]["value"].shape == (3, 1, 6, 1)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@every_elbo
@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
@pytest.mark.filterwarnings("ignore:Found non-auxiliary vars in guide")
def test_a_site_of_one_trace_alone(ELBO):
    def model(y):
        pyro.sample("z", path(1.0))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    def guide(y):
        pyro.sample("z", path(1.0))

    def more(y):
        guide(y)
        pyro.sample("u", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="site 'y' of the model has neither data nor"):
        ELBO().loss(model, guide, None)
    with pytest.raises(ValueError, match="site 'u' of the guide is not in the model"):
        ELBO().loss(model, more, Y[0])
