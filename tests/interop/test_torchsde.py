"""torchsde as a backend: the law of its draws, and the joint state's gradient against ours."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchsde
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule
from torch import nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.interop.torchsde import Joint, sample
from pyro_sde.nn import SDEBlock
from pyro_sde.solvers import integrate

TIMES = torch.linspace(0, 1, 5, dtype=torch.float64)
ITO, STRATONOVICH = ("euler", "milstein", "srk"), ("midpoint", "heun", "reversible_heun")


@pytest.mark.parametrize("method", [*ITO, *STRATONOVICH])
def test_the_law_of_a_process(method):
    """Mean and variance of OU and of a geometric Brownian motion, whose noise is multiplicative."""
    n = 4000
    ou = OrnsteinUhlenbeck(1.3, 0.2, 0.7, TIMES, torch.ones(1))
    growth = SDEPath(lambda t, z: 0.5 * z, lambda t, z: 0.4 * z, torch.ones(1), TIMES)
    exact = GeometricBrownianMotion(0.4, TIMES, torch.ones(1), 0.5)
    for path, law in ((ou, ou), (growth, exact)):
        torch.manual_seed(0)
        with torch.no_grad():
            z = sample(path, (n,), method=method, dt=1 / 64)
        assert z.shape == (n, 5, 1)
        error = law.variance[1:].sqrt() / math.sqrt(n)
        # 4.5 standard errors, and a weak error of first order in steps of 1/64.
        assert ((z.mean(0) - law.mean)[1:].abs() < 4.5 * error + 0.01).all(), method
        spread = z.var(0)[1:] / law.variance[1:]
        assert ((spread - 1).abs() < 4.5 * math.sqrt(8 / n) + 0.03).all(), method


def test_the_very_path():
    """On one Brownian path, against the closed form; a controlled path has the control's drift."""
    a = 0.6
    moved = ControlledPath(
        BrownianMotion(a, TIMES, torch.zeros(1)), lambda t, z: torch.ones_like(z)
    )
    for method in (*ITO, *STRATONOVICH):
        noise = torchsde.BrownianInterval(
            0.0,
            1.0,
            size=(6, 1),
            dtype=torch.float64,
            entropy=3,
            levy_area_approximation="space-time",
        )
        z = sample(moved, (6,), method=method, dt=1 / 8, brownian=noise)
        torch.testing.assert_close(z[:, -1], a + a * noise(0.0, 1.0), rtol=0, atol=1e-12)


def test_seed_shapes_and_options():
    path = OrnsteinUhlenbeck(1.0, 0.0, torch.tensor([[0.5, 0.1]] * 3), TIMES, torch.zeros(2))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)  # not numpy's, by which torchsde would seed its noise
        draws.append(sample(path, (4,), method="srk", adaptive=True, rtol=1e-2, dt=0.1))
    assert draws[0].shape == (4, 3, 5, 2)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    price = GeometricBrownianMotion(0.2, TIMES, 100.0)
    assert (sample(price, (3,)) > 0).all()
    with pytest.raises(ValueError, match="on one grid, and path has times of shape"):
        sample(OrnsteinUhlenbeck(1.0, 0.0, 1.0, torch.stack([TIMES, 2 * TIMES])))
    with pytest.raises(TypeError, match="must be a path distribution, found Normal"):
        sample(dist.Normal(0.0, 1.0))
    shrunk = ControlledPath(path, lambda t, z: (z, z), contraction=True)
    with pytest.raises(ValueError, match="does not discretise an SDE"):
        sample(shrunk)


class Net(PyroModule):
    def __init__(self, steps=8, **options):
        super().__init__()
        field = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
        self.block = SDEBlock(field, scale=0.3, steps=steps, augment=1, **options)
        self.head = nn.Linear(2, 1)

    def forward(self, x, y=None):
        mean = self.head(self.block(x)).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.2), obs=y)
        return mean


X = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(-1)
Y = X.squeeze(-1).sin()


def build(steps, **options):
    torch.manual_seed(0)
    pyro.clear_param_store()
    net = Net(steps, **options)
    guide = AutoSDE(net).setup(X, Y)
    for p in guide.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    return net, guide, [*net.parameters(), *guide.parameters()]


def noise_of(start):
    """One Brownian path whatever the steps, which halfway_tree is for."""
    return torchsde.BrownianInterval(
        0.0,
        1.0,
        size=start.shape,
        dtype=start.dtype,
        entropy=7,
        halfway_tree=True,
        tol=1e-30,
        cache_size=None,
    )


def theirs(dt, adjoint):
    net, guide, parameters = build(8)
    joint = Joint(net, guide, method="midpoint", dt=dt, adjoint=adjoint, brownian=noise_of)
    loss = Trace_ELBO().differentiable_loss(joint, lambda *args: None, X, Y)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.item(), [torch.zeros(1) if g is None else g for g in gradients]


def gap(a, b):
    top = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))
    return math.sqrt(top / sum(float(y.square().sum()) for y in b))


@pytest.mark.parametrize("adjoint", [False, True])
def test_the_joint_gradient_tends_to_ours(adjoint):
    """The control's embedding, of one entry a step of the grid, is interpolated between: ours on
    512 steps with the embedding of 8 is the limit of both."""
    loss, gradients = reference()
    gaps, losses = [], []
    for n in (8, 32, 128):
        value, found = theirs(1 / n, adjoint)
        gaps.append(gap(found, gradients))
        losses.append(abs(value - loss))
    # Strong order 1: a quarter for a quarter, up to the noise of single increments.
    assert gaps[1] < 0.5 * gaps[0] and gaps[2] < 0.5 * gaps[1], gaps
    assert gaps[2] < 0.02 and losses[2] < 0.02 * abs(loss), (gaps, losses)


def reference(steps=512):
    """Loss and gradients of ours on a fine grid, with the weights' share of the same noise."""
    net, guide, parameters = build(8)
    net.block.times = torch.linspace(0, 1, steps + 1)
    block = net.block
    size = 2 * len(X) + block.dim + 1
    noise = noise_of(torch.zeros(1, size))
    t = block.times.tolist()
    increments = [noise(a, b)[0, 2 * len(X) : -1] for a, b in itertools.pairwise(t)]
    q = guide.paths.block.w(block.prior())
    draw = q.draw(q._draw_initial(torch.Size()), torch.stack(increments) * steps**0.5)
    h0 = torch.cat([X, torch.zeros_like(X)], -1)
    h = integrate(block._field()[0], h0, draw.value, block.times, method="heun")
    mean = net.head(h).squeeze(-1)
    kl = draw.ratio.kl()
    loss = kl - dist.Normal(mean, 0.2).log_prob(Y).sum()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.item(), [torch.zeros(1) if g is None else g for g in gradients]


@pytest.mark.parametrize("initial", ["point", "normal"])
def test_one_loss(initial):
    """The mean of the joint loss is the mean of the "kl" ELBO on a grid as fine."""
    net, guide, _ = build(16, initial=initial)
    joint = Joint(net, guide, method="euler", adjoint=False)
    n = 200
    with torch.no_grad():
        torch.manual_seed(0)
        a = torch.tensor([Trace_ELBO().loss(joint, lambda *args: None, X, Y) for _ in range(n)])
        elbo = TraceSDE_ELBO(path_estimator="kl")
        b = torch.tensor([elbo.loss(net, guide, X, Y) for _ in range(n)])
    error = math.sqrt((a.var() + b.var()) / n)
    # And a weak error of first order in 1/16.
    assert abs(a.mean() - b.mean()) < 4.5 * error + 0.02 * abs(b.mean()), (a.mean(), b.mean())


def test_the_start_is_counted():
    """Without a control the path costs nothing: the factor is the KL of w_0 alone."""
    torch.manual_seed(0)
    net = Net(4, initial="normal")
    guide = AutoSDE(net).setup(X, Y)  # its control is zero
    trace = pyro.poutine.trace(Joint(net, guide)).get_trace(X, Y)
    q = guide.paths.block.w(net.block.prior())
    expected = torch.distributions.kl_divergence(q.initial, q.prior.initial)
    assert expected > 1
    torch.testing.assert_close(trace.nodes["block.w_kl"]["fn"].log_factor, -expected)


def test_it_trains_and_predicts():
    net, guide, _ = build(5)
    joint = Joint(net, guide, method="midpoint")
    svi = SVI(joint, lambda *args, **kwargs: None, pyro.optim.Adam({"lr": 2e-2}), Trace_ELBO())
    before = [p.clone() for p in guide.parameters()]
    losses = [svi.step(X, Y) for _ in range(60)]
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert sum(not torch.equal(a, b) for a, b in zip(before, guide.parameters(), strict=True)) > 5
    assert joint(X).shape == (6,)
    # The same parameters are those of the ordinary model and guide.
    assert TraceSDE_ELBO().loss(net, guide, X, Y) < losses[0]


def test_refusals():
    net, guide, _ = build(4)
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"call guide\.setup"):
        Joint(net, AutoSDE(net, name="other"))
    with pytest.raises(ValueError, match="so it is not an SDE: build it"):
        Joint(net, AutoSDE(net, contraction=True, name="third").setup(X, Y))
    joint = Joint(net, guide)
    with pytest.raises(NotImplementedError, match="one path of weights"):
        Trace_ELBO(num_particles=2, vectorize_particles=True).loss(joint, lambda *a: None, X, Y)

    class Twice(PyroModule):
        def __init__(self):
            super().__init__()
            self.block = SDEBlock(nn.Linear(2, 2), steps=3)

        def forward(self, x, y=None):
            return self.block(self.block(x))

    twice = Twice()
    x = torch.randn(3, 2)
    with pytest.raises(NotImplementedError, match="called twice"):
        Joint(twice, AutoSDE(twice, name="fourth").setup(x))(x)

    pyro.clear_param_store()
    smooth = SDEBlock(nn.Linear(2, 2), steps=3, regularise={"kinetic": 0.1})
    with pytest.raises(NotImplementedError, match=r"does not support energies.*'kinetic': 0\.1"):
        Joint(smooth, AutoSDE(smooth, name="fifth").setup(x))(x)
