"""A block among Pyro's own: names, KL, starts, stock ELBOs, learned scales, training."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroParam
from pyro.poutine.util import prune_subsample_sites
from torch import nn

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.nn import SDEBlock

from ..cases import assert_same, loss_and_gradients
from ..guides.models import shaken
from .nets import Chain, TimeField, X, Y, by_hand, draw, mlp


def sites(model, *args):
    trace = prune_subsample_sites(poutine.trace(model).get_trace(*args))
    return trace.stochastic_nodes, sorted(trace.param_nodes)


def test_names_follow_the_attributes():
    blocks = {"a": SDEBlock(mlp(), steps=2), "b": SDEBlock(mlp(), steps=2, name="weights")}
    assert sites(Chain(**blocks), X, Y) == (["a.w", "b.weights"], ["a.w_0", "b.weights_0"])
    pyro.clear_param_store()
    layers = [SDEBlock(mlp(), steps=2), nn.Linear(2, 2), SDEBlock(mlp(), steps=2)]
    names, params = sites(PyroModule[nn.Sequential](*layers), X)
    assert names == ["0.w", "2.w"] and {"0.w_0", "2.w_0"} <= set(params)
    outer = PyroModule()
    outer.net = Chain(a=SDEBlock(mlp(), steps=2))
    assert sites(outer.net, X, Y) == (["net.a.w"], ["net.a.w_0"])
    assert AutoSDE(outer.net).setup(X, Y).path_sites == ("net.a.w",)


class Plain(nn.Module):
    """A root that is no PyroModule."""

    def __init__(self, *names):
        super().__init__()
        self.blocks = nn.ModuleList(SDEBlock(mlp(), steps=2, name=name) for name in names)

    def forward(self, x, y=None):
        for block in self.blocks:
            x = block(x)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x, 0.3).to_event(1), obs=y)


def test_a_plain_root():
    assert sites(SDEBlock(mlp(), steps=2), X) == (["w"], ["w_0"])
    assert sites(Plain("w"), X, Y) == (["w"], ["w_0"])
    with pytest.raises(RuntimeError, match="Multiple sample sites named 'w'"):
        sites(Plain("w", "w"), X, Y)


def test_two_blocks_of_a_plain_root_both_train():
    """Their parameters are named after the sites: one namespace is enough."""
    model = Plain("u", "v")
    svi = SVI(model, AutoSDE(model), pyro.optim.Adam({"lr": 0.01}), TraceSDE_ELBO())
    before = [block.start.detach().clone() for block in model.blocks]
    svi.step(X, Y)
    for block, start in zip(model.blocks, before, strict=True):
        assert (block.start != start).any()


def test_a_block_used_twice_has_one_path():
    field = mlp()
    block = SDEBlock(field, steps=3, scale=0.5)

    class Twice(PyroModule):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(self.block(x))

    h, draws = draw(Twice(), X)
    assert list(draws) == ["block.w"]
    w = draws["block.w"]
    expected = by_hand(field, by_hand(field, X, w), w)
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(draw(block, X)[1]["block.w"][1], w[1])  # another call, another path


def test_a_second_use_may_be_inside_the_plate():
    class Inside(PyroModule):
        def __init__(self):
            super().__init__()
            self.block = SDEBlock(mlp(), steps=3)

        def forward(self, x):
            outside = self.block(x)
            with pyro.plate("data", len(x)):
                return self.block(x) - outside

    assert (Inside()(X) == 0).all()


def test_the_prior_is_the_process_of_the_docstring():
    scale = 0.1 + torch.rand(mlp().state_dict()["0.weight"].numel() * 2 + 5)
    block = SDEBlock(mlp(), rate=0.7, scale=scale, steps=5)
    prior = block.prior()
    expected = OrnsteinUhlenbeck(0.7, 0.0, scale, torch.linspace(0, 1, 6), block.start)
    w = expected.sample((3,))
    assert prior.batch_shape == () and prior.event_shape == (6, block.dim)
    torch.testing.assert_close(prior.log_prob(w), expected.log_prob(w), rtol=1e-12, atol=1e-12)
    assert SDEBlock(mlp()).prior().event_shape == (21, block.dim)
    default = SDEBlock(mlp())
    assert default.rate == 1.0 and default.scale == 0.1 and default.method == "euler"


@pytest.mark.parametrize("estimator", ["stl", "full", "kl"])
def test_an_untrained_guide_costs_nothing(estimator):
    model = Chain(a=SDEBlock(mlp(), steps=3), b=SDEBlock(TimeField(), steps=2))
    guide = AutoSDE(model).setup(X, Y)
    elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=1)
    _, guide_trace = next(elbo._get_traces(model, guide, (X, Y), {}))
    for name in ("a.w", "b.w"):
        assert guide_trace.nodes[name]["path_divergence"].item() == 0.0


def test_a_normal_start():
    """q(w_0) starts at the module's weights with a tenth of the prior's 1 / sqrt(fan in)."""
    field = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2))
    start = nn.utils.parameters_to_vector(field.parameters()).detach()
    fan_in = torch.cat([torch.full((9,), 2.0), torch.ones(6), torch.full((8,), 3.0)])
    model = Chain(a=SDEBlock(field, steps=3, initial="normal"))
    assert not list(model.parameters())
    prior = model.a.prior().initial
    assert (prior.mean == 0).all()
    torch.testing.assert_close(prior.variance, 1 / fan_in, rtol=1e-12, atol=0)
    guide = AutoSDE(model).setup(X, Y)
    q = guide.get_posterior("a.w", model.a.prior()).initial
    torch.testing.assert_close(q.mean, start, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.stddev, 0.1 * fan_in**-0.5, rtol=1e-12, atol=0)
    elbo = TraceSDE_ELBO(path_estimator="kl", max_plate_nesting=1)
    _, guide_trace = next(elbo._get_traces(model, guide, (X, Y), {}))
    # KL(N(m, c^2 s^2) || N(0, s^2)) = (c^2 + m^2 / s^2 - 1) / 2 - log c, with c = 0.1
    kl = 0.5 * (0.01 + start.square() * fan_in - 1) - math.log(0.1)
    got = guide_trace.nodes["a.w"]["path_divergence"].item()
    assert got == pytest.approx(kl.sum().item(), rel=1e-12)


@pytest.mark.parametrize(
    "layer, fan_in",
    [
        (nn.Linear(5, 7), 5),
        (nn.Conv2d(4, 6, 3), 36),
        (nn.Conv2d(4, 6, 3, groups=2), 18),
        (nn.Conv1d(4, 6, 5), 20),
        (nn.ConvTranspose2d(4, 6, 3), 36),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), 18),
        (nn.GroupNorm(2, 4), 1),
        (nn.Bilinear(2, 3, 4), 6),
    ],
)
def test_fan_in_is_the_number_of_terms_in_one_output(layer, fan_in):
    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, h):
            return self.layer(h)

    scale = SDEBlock(Field(), initial="normal").start_scale
    torch.testing.assert_close(scale, torch.full_like(scale, fan_in**-0.5))


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("initial", ["point", "normal"])
@pytest.mark.parametrize("particles", [1, 3])
def test_full_is_stock(particles, initial, contraction):
    model = Chain(
        a=SDEBlock(mlp(), steps=3, initial=initial),
        b=SDEBlock(TimeField(3), steps=2, initial=initial, augment=1, method="heun"),
    )
    y = torch.randn(4, 3)
    guide = shaken(model, X, y, contraction=contraction)
    options = {
        "num_particles": particles,
        "vectorize_particles": particles > 1,
        "max_plate_nesting": 1,
    }
    for ours, stock in (
        (TraceSDE_ELBO, Trace_ELBO),
        (TraceMeanFieldSDE_ELBO, TraceMeanField_ELBO),
    ):
        assert_same(
            loss_and_gradients(ours(path_estimator="full", **options), model, guide, X, y),
            loss_and_gradients(stock(**options), model, guide, X, y),
        )


SCALES = {
    "number": lambda: 0.3,
    "vector": lambda: torch.linspace(0.1, 0.5, 17),
    "parameter": lambda: nn.Parameter(torch.tensor(0.3)),
    "positive": lambda: PyroParam(torch.tensor(0.3), constraint=constraints.positive),
    "positive vector": lambda: PyroParam(torch.full((17,), 0.3), constraint=constraints.positive),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scales_of_every_kind(kind):
    """w spreads by scale sqrt(dt) in a step; what is learned moves, what is not stays."""
    model = Chain(a=SDEBlock(mlp(), rate=0.0, scale=SCALES[kind](), steps=2))
    n = 4000
    _, draws = draw(pyro.plate("num_particles_vectorized", n, dim=-2)(model.a), X)
    spread = draws["a.w"][:, 0, 1].std(0)
    expected = torch.as_tensor(model.a.scale).detach().expand(17) * math.sqrt(0.5)
    # The standard error of a standard deviation is its 1 / sqrt(2 n), here of 17.
    assert ((spread / expected - 1).abs() < 5 / math.sqrt(2 * n)).all()
    guide = AutoSDE(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceSDE_ELBO())
    before = torch.as_tensor(model.a.scale).detach().clone()
    for _ in range(3):
        svi.step(X, Y)
    learned = kind not in ("number", "vector")
    assert (torch.as_tensor(model.a.scale) != before).all() == learned
    assert ("a.scale" in pyro.get_param_store()) == learned


def test_training_as_in_torch():
    """The ELBO as a module, its parameters in an optimiser of torch, none in Pyro's store."""
    with pyro.settings.context(module_local_params=True):
        model = Chain(a=SDEBlock(mlp(), steps=3, scale=nn.Parameter(torch.tensor(0.3))))
        guide = AutoSDE(model).setup(X, Y)
        loss = TraceSDE_ELBO(max_plate_nesting=1)(model, guide)
        loss(X, Y).backward()
        names = {n for n, p in loss.named_parameters() if p.grad is not None and p.grad.any()}
        assert {"model.a.w_0", "model.a.scale", "guide.paths.a.w.control.last.weight"} <= names
        assert not list(pyro.get_param_store().keys())


def test_training_fits_a_rotation():
    """A linear field turns the plane, its weights returning to zero meanwhile."""
    x = torch.randn(16, 2)
    y = x @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    model = Chain(a=SDEBlock(nn.Linear(2, 2), steps=5, method="heun"))
    guide = AutoSDE(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceSDE_ELBO())
    losses = torch.tensor([svi.step(x, y) for _ in range(100)])
    assert losses[-20:].mean() < 0.5 * losses[:20].mean()
    predictive = Predictive(
        model, guide=guide, num_samples=50, parallel=True, return_sites=("_RETURN",)
    )
    h = predictive(x)["_RETURN"]
    assert h.shape == (50, 16, 2)
    # The data have a noise of 0.3 in the model, and none in truth; untrained, the error is 1.4.
    assert (h.mean(0) - y).square().mean().sqrt() < 0.15
