"""The sticking-the-landing estimator: what it stops, what it keeps, and what that buys."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_sde import TraceSDE_ELBO
from pyro_sde.diagnostics import gradient_variance
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck, SDEPath

from ..cases import PROCESSES, TIMES, Net, assert_same, loss_and_gradients


def frozen(net):
    net = copy.deepcopy(net)
    return net.requires_grad_(False)


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("shared_prior", [False, True])
def test_equals_the_ratio_with_a_frozen_copy_of_the_guide(process, contraction, shared_prior):
    """The reference evaluates the guide again, with a copy of its network that has no gradients:
    ``log q_frozen(z) - log p(z)`` along the attached path (without contraction, the martingale
    alone is taken from the frozen copy).
    """
    make = PROCESSES[process]
    net = Net(make().event_shape[-1], 2 if contraction else 1)

    def split(net):
        return lambda t, z: tuple(net(t, z).chunk(2, -1)) if contraction else net(t, z)

    def model():
        z = pyro.sample("z", make())
        pyro.sample("y", dist.Cauchy(z[..., -1, 0], 0.2), obs=torch.tensor(0.7))

    def guide():
        pyro.module("net", net)
        pyro.sample("z", ControlledPath(make(), split(net), contraction=contraction))

    def reference():
        pyro.set_rng_seed(7)
        with pyro.poutine.trace(param_only=True) as capture:
            pyro.module("net", net)
            prior = make()
            z = ControlledPath(prior, split(net), contraction=contraction).rsample()
            eps = []
            dt = TIMES.diff().unsqueeze(-1)
            mean, scale = prior.transition(TIMES[:-1, None], dt, z[:-1])
            u = split(net)(TIMES[:-1, None], z[:-1])
            stopped = split(frozen(net))(TIMES[:-1, None], z[:-1])
            xi = (z[1:] - mean) / scale
            if contraction:
                eps = ((xi - dt.sqrt() * u[0]) / u[1].exp()).detach()
                xi = dt.sqrt() * u[0] + u[1].exp() * eps
                back = (xi - dt.sqrt() * stopped[0]) / stopped[1].exp()
                ratio = 0.5 * xi.square() - 0.5 * back.square() - stopped[1]
            else:
                eps = (xi - dt.sqrt() * u).detach()
                ratio = 0.5 * u.square() * dt + stopped * eps * dt.sqrt()
            loss = ratio.sum() - dist.Cauchy(z[-1, 0], 0.2).log_prob(torch.tensor(0.7))
        params = {k: s["value"].unconstrained() for k, s in capture.trace.nodes.items()}
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        zeros = [torch.zeros_like(p) for p in params.values()]
        grads = [z if g is None else g for g, z in zip(grads, zeros, strict=True)]
        return loss.item(), dict(zip(params, grads, strict=True))

    elbo = TraceSDE_ELBO(max_plate_nesting=0)
    if not shared_prior:
        assert_same(loss_and_gradients(elbo, model, guide), reference())
        return

    def joint():
        """Model and guide around one prior object, as AutoSDE has it."""
        prior = make()
        q = ControlledPath(prior, split(net), contraction=contraction)
        return prior, q

    holder = {}

    def guide_shared():
        pyro.module("net", net)
        holder["prior"], q = joint()
        pyro.sample("z", q)

    def model_shared():
        z = pyro.sample("z", holder["prior"])
        pyro.sample("y", dist.Cauchy(z[..., -1, 0], 0.2), obs=torch.tensor(0.7))

    assert_same(loss_and_gradients(elbo, model_shared, guide_shared), reference())


def test_q_of_a_random_start_is_stopped_too():
    """At q = posterior the STL gradient of q(z_0) is zero for every draw, not on average.

    Prior N(0, 1), y ~ N(z_0, 1): the posterior is N(y / 2, 1 / 2).
    """

    def model():
        z = pyro.sample("z", BrownianMotion(1.0, TIMES, dist.Normal(0.0, 1.0)))
        pyro.sample("y", dist.Normal(z[..., 0, 0], 1.0), obs=torch.tensor(0.8))

    def guide():
        loc = pyro.param("loc", torch.tensor([0.4]))
        scale = pyro.param("scale", torch.tensor([math.sqrt(0.5)]))
        start = dist.Normal(loc, scale).to_event(1)
        prior = BrownianMotion(1.0, TIMES, start)
        pyro.sample("z", ControlledPath(prior, lambda t, z: torch.zeros_like(z)))

    _, stl = loss_and_gradients(TraceSDE_ELBO(max_plate_nesting=0), model, guide)
    _, full = loss_and_gradients(
        TraceSDE_ELBO(path_estimator="full", max_plate_nesting=0), model, guide
    )
    for name in ("loc", "scale"):
        assert abs(stl[name].item()) < 1e-12 < 1e-3 < abs(full[name].item())


class Optimal(nn.Module):
    """The optimal control of Brownian motion from 0 with one observation y at T = 1,
    u*(t, z) = s d/dz log N(y; z, s^2 (T - t) + noise^2), with the factors that may be learned."""

    def __init__(self, s=1.0, noise=0.5, y=0.8):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.target = nn.Parameter(torch.tensor(y))
        self.noise = nn.Parameter(torch.tensor(noise))
        self.s = s

    def forward(self, t, z):
        var = self.s**2 * (1 - t) + self.noise.square()
        return self.gain * self.s * (self.target - z) / var


def brownian_problem(steps, noise=0.5):
    times = torch.linspace(0.0, 1.0, steps + 1)
    control = Optimal(noise=noise)

    def model():
        z = pyro.sample("z", BrownianMotion(1.0, times, torch.zeros(1)))
        pyro.sample("y", dist.Normal(z[..., -1, 0], noise), obs=torch.tensor(0.8))

    def guide():
        pyro.module("control", control)
        pyro.sample("z", ControlledPath(BrownianMotion(1.0, times, torch.zeros(1)), control))

    return model, guide, control


def variances_at(steps, estimator, noise):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model, guide, _ = brownian_problem(steps, noise)
    elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=0)
    result = gradient_variance(elbo, model, guide, num_samples=100)
    return {name.split("$$$")[1]: v.item() for name, v in result.variance.items()}


@pytest.mark.parametrize(
    "noise, parameters", [(0.5, ("gain", "target", "noise")), (0.3, ("gain", "target"))]
)
def test_variance_vanishes_at_the_optimum(noise, parameters):
    """At 100 steps at most 1/100 of the others'; at least 8 times less at 4 times the steps.

    The error of the discrete control is of order dt / noise^2, so the variance falls 16-fold in
    theory; 100 draws know a variance to some 20 %. With noise 0.3 the learned noise, which acts at
    the very end, is at 1/45 of "kl" at 100 steps and below 1/600 at 400; all others hold.
    """
    coarse = {e: variances_at(100, e, noise) for e in ("stl", "full", "kl")}
    fine = variances_at(400, "stl", noise)
    for name in parameters:
        assert coarse["stl"][name] < coarse["full"][name] / 100
        assert coarse["stl"][name] < coarse["kl"][name] / 100
    assert all(fine[name] < coarse["stl"][name] / 8 for name in fine)


def test_the_three_estimators_have_one_mean():
    """Away from the optimum, mean gradients within 4 standard errors of each other."""
    n, results = 3000, {}
    for estimator in ("stl", "full", "kl"):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        model, guide, control = brownian_problem(20)
        with torch.no_grad():
            control.gain.fill_(0.6)
            control.target.fill_(0.1)
            control.noise.fill_(0.7)
        elbo = TraceSDE_ELBO(
            path_estimator=estimator,
            num_particles=10,
            vectorize_particles=True,
            max_plate_nesting=0,
        )
        results[estimator] = gradient_variance(elbo, model, guide, num_samples=n // 10)
    for a, b in (("stl", "full"), ("stl", "kl"), ("full", "kl")):
        for name in results[a].average:
            gap = results[a].average[name] - results[b].average[name]
            error = ((results[a].variance[name] + results[b].variance[name]) / (n // 10)).sqrt()
            assert (gap.abs() < 4 * error).all(), (a, b, name, gap, error)


def test_contraction_has_zero_variance_at_the_exact_discrete_posterior():
    """With the noise of each step free, the posterior of the grid is in the family: the gradient
    is zero for every draw. The chain is Brownian, its bridge to a noisy end known in closed form.
    """
    times = torch.linspace(0.0, 1.0, 6)
    dt, noise, y = 0.2, 0.3, 0.8
    gain = nn.Parameter(torch.ones(()))
    shrink = nn.Parameter(torch.ones(()))

    def control(t, z):
        left = 1 - t - dt + noise**2  # variance of y given the state after the step
        u = gain * (y - z) / (left + dt)
        log_c = 0.5 * shrink * torch.log(left / (left + dt))
        return u, log_c.expand_as(z)

    def model():
        z = pyro.sample("z", BrownianMotion(1.0, times, torch.zeros(1)))
        pyro.sample("y", dist.Normal(z[..., -1, 0], noise), obs=torch.tensor(y))

    def guide():
        pyro.param("gain", gain)
        pyro.param("shrink", shrink)
        prior = BrownianMotion(1.0, times, torch.zeros(1))
        pyro.sample("z", ControlledPath(prior, control, contraction=True))

    loss, grads = loss_and_gradients(TraceSDE_ELBO(max_plate_nesting=0), model, guide)
    evidence = dist.Normal(0.0, math.sqrt(1 + noise**2)).log_prob(torch.tensor(y))
    assert loss == pytest.approx(-evidence.item(), abs=1e-9)
    assert max(abs(g.item()) for g in grads.values()) < 1e-9


def test_a_latent_scale_keeps_the_variance_bounded_as_the_grid_is_refined():
    """The scale cancels from Girsanov's form; stopping log q instead would let the variance of
    the latent's gradient grow with the number of steps."""

    def variance(steps):
        pyro.clear_param_store()
        pyro.set_rng_seed(2)
        times = torch.linspace(0.0, 1.0, steps + 1)

        def model():
            s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
            z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, s.unsqueeze(-1), times))
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.tensor(0.8))

        def guide():
            loc = pyro.param("loc", torch.tensor(0.1))
            s = pyro.sample("s", dist.LogNormal(loc, 0.4))
            prior = OrnsteinUhlenbeck(1.0, 0.0, s.unsqueeze(-1), times)
            pyro.sample("z", ControlledPath(prior, lambda t, z: 0.5 - z))

        elbo = TraceSDE_ELBO(max_plate_nesting=0)
        return gradient_variance(elbo, model, guide, num_samples=200).mean

    # 200 draws know a variance to some 20 %.
    assert variance(160) < 2 * variance(10)


def test_drift_written_by_hand():
    """The martingale of two drifts of one's own is a function of the path alone."""
    net = Net(1)
    k = nn.Parameter(torch.tensor(0.7))

    def model():
        pyro.param("k", k)
        prior = SDEPath(lambda t, z: -k * z, lambda t, z: 0.5, torch.ones(1), TIMES)
        z = pyro.sample("z", prior)
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.tensor(0.2))

    def guide():
        pyro.module("net", net)
        pyro.sample("z", SDEPath(net, lambda t, z: 0.5, torch.ones(1), TIMES))

    loss, grads = loss_and_gradients(TraceSDE_ELBO(max_plate_nesting=0), model, guide)

    pyro.set_rng_seed(7)
    z = SDEPath(net, lambda t, z: 0.5, torch.ones(1), TIMES).rsample()
    t, dt = TIMES[:-1, None], TIMES.diff().unsqueeze(-1)
    root = 0.5 * dt.sqrt()
    eps = ((z[1:] - z[:-1] - net(t, z[:-1]) * dt) / root).detach()
    w = (net(t, z[:-1]) + k * z[:-1]) * dt / root
    w_stopped = (frozen(net)(t, z[:-1]) + k.detach() * z[:-1]) * dt / root
    expected = (0.5 * w.square() + w_stopped * eps).sum()
    expected = expected - dist.Normal(z[-1, 0], 0.3).log_prob(torch.tensor(0.2))
    params = {"k": k, **{f"net$$${n}": p for n, p in net.named_parameters()}}
    slopes = torch.autograd.grad(expected, list(params.values()))
    assert_same((loss, grads), (expected.item(), dict(zip(params, slopes, strict=True))))
