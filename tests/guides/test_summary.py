"""A guide at a glance, and the warning when it has run away."""

import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sde import AutoSDE, time_grid
from pyro_sde.diagnostics import ExplosionWarning, elbo_parts
from pyro_sde.distributions import BrownianMotion, ODEPath, OrnsteinUhlenbeck

from .models import GRID, SERIES, Y, mixed, series, shaken, simple


def test_sites_grids_and_parameters():
    found = shaken(mixed, Y).summary()
    by_name = {s.name: s for s in found.sites}
    assert {n: (s.role, s.kind) for n, s in by_name.items()} == {
        "scale": ("latent", "LogNormal"),
        "dyn.rate": ("latent", "Gamma"),
        "z": ("path", "OrnsteinUhlenbeck"),
        "trend": ("path", "BrownianMotion"),
        "noise": ("latent", "HalfNormal"),
        "y": ("observed", "Normal"),
    }
    z, dt = by_name["z"], GRID.diff()
    assert (z.steps, z.start, z.end) == (len(dt), 0.0, 1.0)
    assert (z.smallest, z.largest) == (dt.min().item(), dt.max().item())
    assert z.event == (len(GRID), 1) and by_name["y"].event == (3,)
    assert found.evaluations == 2 * len(dt)


def test_every_parameter_is_listed():
    weight = pyro.nn.PyroModule[torch.nn.Linear](1, 1)

    def model(y):
        rate = pyro.param("rate", torch.ones(3), constraint=dist.constraints.positive)
        z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, 0.7, GRID))
        pyro.sample("y", dist.Normal(weight(z[..., -1, :1])[..., 0], 0.3), obs=y)

    guide = AutoSDE(model).setup(torch.tensor(0.3))
    found = guide.summary()
    mine = {
        f"AutoSDE.{n.removesuffix('_unconstrained')}": tuple(p.shape)
        for n, p in guide.named_parameters()
    }
    assert found.parameters == mine | {"rate": (3,), "weight": (1, 1), "bias": (1,)}
    assert found.total == 5 + sum(p.numel() for p in guide.parameters())
    assert f"{found.total:,} parameters" in str(found)


@pytest.mark.parametrize(("model", "args"), [(mixed, (Y,)), (series, (SERIES, 2))])
def test_kl_by_site_and_time(model, args):
    guide = shaken(model, *args)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = guide.summary(*args, num_particles=3, bins=4)
    assert torch.equal(before, torch.get_rng_state())
    expected = elbo_parts(model, guide, *args, num_particles=3)
    assert found.parts.kl == expected.kl and repr(found) == str(found)
    for name in guide.path_sites:
        bins = found.kl_by_time(name)
        assert [a for a, _, _ in bins] == pytest.approx([0.0, 0.25, 0.5, 0.75])
        steps, middle = expected.paths[name].steps, (GRID[1:] + GRID[:-1]) / 2
        for a, b, nats in bins:
            assert nats == pytest.approx(steps[(middle > a) & (middle <= b)].sum().item())
        assert f"{bins[0][2]:.4g}" in str(found)


def test_arguments_are_those_of_setup():
    guide = AutoSDE(simple)
    with pytest.raises(ValueError, match=r"call guide\.setup\(\.\.\.\) first"):
        guide.summary()
    with_args = AutoSDE(simple, name="other").summary(Y)
    guide.setup(Y)
    assert guide.summary().parts.log_likelihood == with_args.parts.log_likelihood
    with pytest.raises(ValueError, match="has not seen the model's arguments"):
        pickle.loads(pickle.dumps(guide)).summary()
    with pytest.raises(ValueError, match="bins must be at least 1: found 0"):
        guide.summary(bins=0)


def test_grids_of_their_own_and_paths_without_noise():
    grids = torch.stack([torch.linspace(0, 1, 6), torch.linspace(0, 3, 6)])

    def model():
        start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
        pyro.sample("ode", ODEPath(lambda t, z: -z, start, GRID))
        with pyro.plate("series", 2):
            z = pyro.sample("z", BrownianMotion(1.0, grids, torch.zeros(1)))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=torch.ones(2))

    found = shaken(model).summary()
    z = next(s for s in found.sites if s.name == "z")
    assert (z.start, z.end, z.batch) == (0.0, 3.0, (2,))
    assert (z.smallest, z.largest) == pytest.approx((0.2, 0.6))
    total = found.parts.paths["z"].path
    assert sum(n for _, _, n in found.kl_by_time("z")) == pytest.approx(total)
    assert found.kl_by_time("z")[-1][1] == pytest.approx(2.0)  # the mean of the ends


def runaway(scale, push=1e3):
    """A posterior that pushes each step by ``push`` standard deviations."""
    grid = time_grid(0.0, 1.0, dt=0.1)

    def model(y):
        z = pyro.sample("z", BrownianMotion(scale, grid, torch.zeros(1)))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 100.0), obs=y)

    root = grid.diff()[0].sqrt()
    return AutoSDE(model, control=lambda t, z: torch.full_like(z, push) / root)


def test_an_explosion_is_warned_of():
    with pytest.warns(ExplosionWarning, match=r"posterior of 'z'.*KL is 5e\+06 nats") as record:
        runaway(1.0).summary(torch.tensor(1.0))
    text = str(record[0].message)
    assert "some 1e+03 standard deviations" in text and "Lower the learning rate" in text
    with pytest.warns(ExplosionWarning, match="KL is 5e\\+06"):  # the likelihood exploded too
        runaway(1.0).summary(torch.tensor(1e9))
    with pytest.warns(ExplosionWarning, match="KL is inf"):
        runaway(1.0, 1e200).summary(torch.tensor(1.0))


def test_healthy_ones_are_silent():
    """A strong push that the data pay for, and a weak one that they do not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the paths .* are on one grid")
        runaway(1.0, 10.0).summary(torch.tensor(1.0))
        runaway(1e-3, 100.0).summary(torch.tensor(1e6))
        shaken(mixed, Y).summary()


def test_a_line_says_how_right_it_is():
    found = shaken(simple, Y).summary()
    assert found.importance.num_samples == 4000
    assert str(found).endswith(f"\n\n{found.importance.line}")
    assert found.importance.line.startswith("importance check: log evidence ")
    part = shaken(series, SERIES, 2, name="part").summary()
    assert part.importance is None
    assert "not made, because site" in part.importance_line and "draws 2 of 4" in str(part)
