"""What AutoSDE does where it is not told."""

import functools
import warnings
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch.distributions.transforms import AffineTransform

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO
from pyro_sde.distributions import BrownianMotion, ODEPath, OrnsteinUhlenbeck, Stack
from pyro_sde.guides.correlated_normal import CorrelatedNormal, SinhArcsinh
from pyro_sde.guides.defaults import contraction_of, is_factory, joint_sizes
from pyro_sde.infer.elbo_terms import _by_latent, record_parts
from pyro_sde.nn import SDEBlock

from ..cases import assert_same, loss_and_gradients
from .models import GRID, shaken

PLAIN, WEIGHTS = {"infer": {}}, {"infer": {"weights": True}}


class Narrow(MLPControl):
    """MLPControl with other defaults is still one."""


class Own(MLPControl):
    def forward(self, t, z, context=None):
        return super().forward(t, z, context)


class Other(torch.nn.Linear):
    pass


def u(t, z):
    return -z


MLPS = [MLPControl, Narrow, functools.partial(MLPControl, hidden=(8,))]
OTHERS = [Own, Other, u, torch.nn.Linear(2, 2), functools.partial(Other, bias=False), MLPControl(2)]


@pytest.mark.parametrize(
    ("kind", "by_dim"),
    [
        ("auto", {1: "full", 2: "full", 16: "full", 17: "diagonal", 512: "diagonal", 513: None}),
        (True, {1: "full", 16: "full", 17: "diagonal", 513: "diagonal"}),
        ("full", {1: "full", 17: "full", 513: "full"}),
        ("diagonal", {1: "diagonal", 16: "diagonal", 513: "diagonal"}),
        (None, {1: None, 513: None}),
        (False, {1: None, 513: None}),
    ],
)
def test_contraction_of_networks(kind, by_dim):
    for dim, expected in by_dim.items():
        for control in MLPS:
            assert contraction_of(kind, PLAIN, dim, control) == expected


def test_contraction_of_weights_and_of_controls_of_ones_own():
    assert contraction_of("auto", WEIGHTS, 3, MLPControl) is None
    assert contraction_of(True, WEIGHTS, 3, MLPControl) == "full"
    for control in OTHERS:
        assert contraction_of("auto", PLAIN, 2, control) is None
        assert contraction_of(True, PLAIN, 2, control) == "diagonal"
        assert contraction_of("full", PLAIN, 2, control) == "full"
    assert [is_factory(c) for c in MLPS + OTHERS] == [True] * 5 + [False] * 2 + [True] + [False]


def test_a_wrong_contraction_is_refused():
    for kind in ("ful", "none", 2, ""):
        with pytest.raises(ValueError, match=f'"full", "diagonal" or None: found {kind!r}'):
            AutoSDE(small, contraction=kind).setup()


def small(dim=2):
    path = OrnsteinUhlenbeck(torch.ones(dim), 0.0, 1.0, GRID)
    z = pyro.sample("z", path)
    pyro.sample("y", dist.Normal(z[..., -1, :].sum(-1), 0.3), obs=torch.tensor(1.0))


def test_shapes_of_what_a_guide_learns():
    for dim, outputs in ((1, 2), (2, 5), (16, 32 + 120), (17, 34), (513, 513)):
        guide = AutoSDE(functools.partial(small, dim), name=f"guide{dim}").setup()
        assert guide.paths.z.control.last.out_features == outputs


def test_weights_of_a_small_network_have_no_contraction():
    class Net(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.block = SDEBlock(torch.nn.Linear(2, 2), steps=2)

        def forward(self, x, y):
            pyro.sample("y", dist.Normal(self.block(x), 0.1).to_event(2), obs=y)

    guide = AutoSDE(Net()).setup(torch.ones(3, 2), torch.ones(3, 2))
    assert guide.paths.block.w.contraction is None


def many(*sizes, plate=None):
    for i, n in enumerate(sizes):
        pyro.sample(f"x{i}", dist.Normal(torch.zeros(n), 1.0).to_event(1))
    with pyro.plate("foreign", 3):
        pyro.sample("other", dist.Normal(0.0, 1.0))
    small()


def read(model, **options):
    pyro.clear_param_store()
    reader = AutoSDE(model, **options).setup().paths.z.reader
    return [] if reader is None else list(reader.dims)


def test_what_is_read_without_being_asked():
    assert read(functools.partial(many, 64)) == ["x0"]
    assert read(functools.partial(many, 65)) == []
    assert read(functools.partial(many, 60, 5, 4)) == ["x0", "x2"]
    assert read(functools.partial(many, 65), condition_on=True) == ["x0"]
    assert read(functools.partial(many, 65), condition_on="x0") == ["x0"]
    assert read(functools.partial(many, 3), condition_on=False) == []
    assert read(many) == []

    def in_plate():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        with pyro.plate("series", 40):
            pyro.sample("x1", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.ones(40))

    # Each path reads the two numbers of its own element, not eighty.
    assert read(in_plate) == ["x", "x1"]


def test_a_callable_is_given_the_latents_only_if_they_are_named():
    def model():
        pyro.sample("x", dist.Normal(0.0, 1.0))
        small()

    calls = []

    def control(t, z, *context):
        calls.append([c.shape[-1] for c in context])
        return -z

    for condition_on, expected in (("auto", []), ("x", [1]), (True, [1]), (False, [])):
        pyro.clear_param_store()
        calls.clear()
        guide = AutoSDE(model, control=control, condition_on=condition_on)
        guide()
        assert calls and all(c == expected for c in calls)
        # The start reads them in any case but False.
        assert (guide.paths.z.start.head is None) == (condition_on is False)


def plate_of(size):
    return pyro.plate(f"plate of {size}", size, dim=-1) if size else nullcontext()


def pair(second=None, plates=(None, None)):
    def model():
        total, entered = 0.0, {size: plate_of(size) for size in set(plates)}
        for name, make, size in zip("ab", (ou, second or ou), plates, strict=True):
            with entered[size]:
                total = total + pyro.sample(name, make())[..., -1, 0].sum()
        pyro.sample("y", dist.Normal(total, 0.3), obs=torch.tensor(1.0))

    return model


def ou(grid=GRID, **options):
    return OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid, **options)


def warned(model, *args):
    pyro.clear_param_store()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        guide = AutoSDE(model)
        for _ in range(3):
            guide(*args)
    return [str(w.message) for w in found if "one grid" in str(w.message)]


def test_several_paths_are_warned_of_once():
    (message,) = warned(pair())
    assert "['a', 'b']" in message and "pyro_sde.distributions.Stack(...)" in message
    (message,) = warned(pair(plates=(3, 3)))
    assert "['a', 'b']" in message
    assert warned(pair(lambda: ou(GRID.clone()))), "the same grid, though another tensor"


def test_paths_that_cannot_be_one_are_not_warned_of():
    assert not warned(pair(lambda: ou(2 * GRID)))
    assert not warned(pair(lambda: ou(GRID[:-1])))
    assert not warned(pair(plates=(None, 3)))
    assert not warned(pair(plates=(2, 3)))
    assert not warned(pair(lambda: ODEPath(lambda t, z: -z, dist.Normal(0.0, 1.0), GRID)))
    assert not warned(pair(lambda: BrownianMotion(torch.ones(513), GRID, 0.0)))
    assert not warned(small)

    class Net(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.a = SDEBlock(torch.nn.Linear(2, 2), steps=2)
            self.b = SDEBlock(torch.nn.Linear(2, 2), steps=2)

        def forward(self, x, y):
            pyro.sample("y", dist.Normal(self.b(self.a(x)), 0.1).to_event(2), obs=y)

    assert not warned(Net(), torch.ones(3, 2), torch.ones(3, 2))


SOME = torch.tensor([True, False, True])


def everything(y, latents_are_masked=False):
    """Latents of several kinds, one after the path, and a Stack with a start that is partly fixed,
    for some series of a plate."""
    mask, around_all = poutine.mask(mask=SOME), poutine.mask(mask=SOME)
    if not latents_are_masked:
        around_all = nullcontext()
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("series", 3, dim=-1), around_all:
        level = pyro.sample("level", dist.Normal(0.0, 2.0))
        trend = BrownianMotion(scale.unsqueeze(-1), GRID, level.unsqueeze(-1))
        cycle = OrnsteinUhlenbeck(1.0, mix[..., :2], 1.0, GRID)
        gamma = BrownianMotion(1.0, GRID, dist.Gamma(2.0, 1.0))
        with mask:
            z = pyro.sample("z", Stack(trend, cycle, gamma))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with mask:
            pyro.sample("y", dist.Normal(z[..., -1, :].sum(-1), noise), obs=y)


PARTICLES = {
    "one": {},
    "loop": {"num_particles": 3},
    "vectorised": {"num_particles": 3, "vectorize_particles": True},
}


@pytest.mark.parametrize("particles", PARTICLES)
@pytest.mark.parametrize("nesting", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_with_all_defaults_full_is_stock(particles, nesting, masked):
    y = torch.tensor([0.4, -1.0, 2.0]), masked
    guide = shaken(everything, *y)
    assert isinstance(guide.rest, AutoNormal if masked else CorrelatedNormal)
    options = {"max_plate_nesting": nesting, **PARTICLES[particles]}
    full = TraceSDE_ELBO(path_estimator="full", **options)
    with record_parts() as parts:
        ours = loss_and_gradients(full, everything, guide, *y)
    assert_same(ours, loss_and_gradients(Trace_ELBO(**options), everything, guide, *y))
    assert sum(bool(g.abs().max() > 0) for g in ours[1].values()) > 0.8 * len(ours[1])
    assert abs(parts.elbo + ours[0]) < 1e-9 * abs(ours[0])
    assert set(parts.kl) >= {"scale", "mix", "level", "z", "noise"}


def latents_only():
    pyro.sample("a", dist.LogNormal(torch.zeros(2), 0.5).to_event(1))
    pyro.sample("b", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("plate", 2):
        pyro.sample("c", dist.Normal(0.0, 2.0))
    small()


@pytest.mark.parametrize("particles", [None, 4])
def test_the_joint_density_by_latent(particles):
    guide = shaken(latents_only)
    with nullcontext() if particles is None else pyro.plate("particles", particles, dim=-2):
        guide()
    _, trace = guide.get_traces()
    (name,) = (n for n in trace.nodes if n.endswith("_latent"))
    assert joint_sizes(guide.rest, name) == {"a": 2, "b": 2, "c": 2}
    parts = _by_latent(trace.nodes[name])
    trace.compute_log_prob()
    total = trace.nodes[name]["log_prob_sum"]
    torch.testing.assert_close(sum(parts.values()), total)
    # Each given those before it: the first is the marginal of its own numbers.
    rest, value = guide.rest, trace.nodes[name]["value"][..., :2]
    base = dist.MultivariateNormal(torch.zeros(2), scale_tril=rest.scale_tril[:2, :2])
    loc, scale = rest.start + rest.unit * rest.loc, rest.unit * rest.scale
    skewed = SinhArcsinh(rest.skew[:2], rest.log_tail[:2].exp())
    first = dist.TransformedDistribution(base, [skewed, AffineTransform(loc[:2], scale[:2])])
    torch.testing.assert_close(parts["a"], first.log_prob(value).sum())
    assert _by_latent(trace.nodes["z"]) == {} and _by_latent(None) == {}
    assert joint_sizes(AutoDelta(latents_only), "x_latent") == {}


def noisy(plate, before):
    """A latent that the guide of the path reads, and the prior of the path does not."""

    def model():
        def noise():
            return pyro.sample("noise", dist.LogNormal(-1.0, 0.5))

        with plate_of(plate):
            s = noise() if before else None
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
            s = noise() if s is None else s
            obs = torch.linspace(0, 1, plate) if plate else torch.tensor(0.4)
            pyro.sample("y", dist.Normal(z[..., -1, 0], s), obs=obs)

    return model


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("plate", "nesting"), [(None, 0), (None, 1), (None, None), (3, 1), (3, 2), (3, None)]
)
def test_a_latent_that_only_the_guide_reads(plate, before, nesting):
    """Each particle has a path of its own, from the posterior of its own noise."""
    model = noisy(plate, before)
    guide = shaken(model)
    assert list(guide.paths.z.reader.dims) == ["noise"]
    options = {"num_particles": 3, "vectorize_particles": True}
    if nesting is not None:
        options["max_plate_nesting"] = nesting
    full, stock = TraceSDE_ELBO(path_estimator="full", **options), Trace_ELBO(**options)
    if nesting is None:  # guessed in a first run, which draws too
        for elbo in (full, stock):
            elbo.loss(model, guide)
            assert elbo.max_plate_nesting == 1 + int(plate is not None)  # that of the particles
    ours = loss_and_gradients(full, model, guide)
    assert_same(ours, loss_and_gradients(stock, model, guide))
    with pyro.plate("particles", 5, dim=-1 - int(plate is not None)):
        z = guide()["z"]
    assert z.shape == (5, *([plate] if plate else []), len(GRID), 1)
    assert z[..., -1, 0].unique().numel() == z[..., -1, 0].numel()
