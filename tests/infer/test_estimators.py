"""Laws of the path ELBOs, for every process, likelihood, plate and particle layout."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck, SDEPath

from ..cases import TIMES, assert_same, loss_and_gradients, positive
from .problems import Problem, drawn_by, every_layout, every_likelihood, every_process


@every_process
@every_likelihood
@every_layout
def test_full_is_stock_trace_elbo(process, likelihood, layout):
    problem = Problem(process, likelihood, layout)
    ours = TraceSDE_ELBO(path_estimator="full", **problem.options)
    stock = Trace_ELBO(**problem.options)
    assert_same(
        loss_and_gradients(ours, problem.model, problem.guide),
        loss_and_gradients(stock, problem.model, problem.guide),
    )


@every_process
@every_likelihood
@every_layout
def test_kl_is_mean_field_elbo_of_the_chain(process, likelihood, layout):
    problem = Problem(process, likelihood, layout)
    ours = drawn_by(TraceSDE_ELBO, path_estimator="kl", **problem.options)
    result = loss_and_gradients(ours, problem.model, problem.guide)
    chain = problem.as_chain(ours.values)
    stock = TraceMeanField_ELBO(**problem.options)
    assert_same(result, loss_and_gradients(stock, *chain))


@every_process
@pytest.mark.parametrize("layout", ["plain", "vectorized"])
def test_laws_hold_with_contraction(process, layout):
    problem = Problem(process, "cauchy", layout, contraction=True)
    full = TraceSDE_ELBO(path_estimator="full", **problem.options)
    assert_same(
        loss_and_gradients(full, problem.model, problem.guide),
        loss_and_gradients(Trace_ELBO(**problem.options), problem.model, problem.guide),
    )
    kl = drawn_by(TraceSDE_ELBO, path_estimator="kl", **problem.options)
    result = loss_and_gradients(kl, problem.model, problem.guide)
    chain = problem.as_chain(kl.values)
    assert_same(result, loss_and_gradients(TraceMeanField_ELBO(**problem.options), *chain))


@every_process
def test_mean_field_variant_agrees(process):
    """No site but the path: both ELBOs are the same."""
    problem = Problem(process, "normal", "plate")
    for estimator in ("stl", "full", "kl"):
        assert_same(
            *(
                loss_and_gradients(
                    elbo(path_estimator=estimator, **problem.options), problem.model, problem.guide
                )
                for elbo in (TraceSDE_ELBO, TraceMeanFieldSDE_ELBO)
            )
        )


@every_process
@pytest.mark.parametrize("estimator", ["stl", "full", "kl"])
@pytest.mark.parametrize("contraction", [False, True])
def test_guides_written_by_hand_equal_autosde(process, estimator, contraction):
    """A posterior drift of one's own, a ControlledPath and AutoSDE with the same control.

    AutoSDE draws q(z_0) in units of the prior's, so a fixed start keeps the draws comparable.
    """
    problem = Problem(process, "cauchy", "plain", contraction)
    make = problem.make

    def fixed():
        path = make()
        path.initial = torch.full((problem.dim,), 0.3)
        return path

    def model():
        problem.observe(pyro.sample("z", fixed()))

    def controlled():
        pyro.module("AutoSDE.paths.z.control", problem.net)
        contract = problem.contraction
        pyro.sample("z", ControlledPath(fixed(), problem.control, contraction=contract))

    class Wrapped(torch.nn.Module):
        """The parameters under the names that AutoSDE gives them."""

        def __init__(self, net, control):
            super().__init__()
            self.layers = net.layers
            self.control = control

        def forward(self, t, z):
            return self.control(t, z)

    wrapped = Wrapped(problem.net, problem.control)
    wrapped._modules.pop("control", None)
    auto = AutoSDE(model, control=wrapped, contraction=contraction)
    elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=0)
    by_hand = loss_and_gradients(elbo, model, controlled)
    pyro.get_param_store().clear()
    assert_same(by_hand, loss_and_gradients(elbo, model, auto))
    if contraction or type(fixed()) is not SDEPath:
        return

    def own_drift():
        pyro.module("AutoSDE.paths.z.control", problem.net)
        p = fixed()
        drift = lambda t, z: p.drift(t, z) + p.diffusion(t, z) * problem.net(t, z)  # noqa: E731
        pyro.sample("z", SDEPath(drift, p.diffusion, p.initial, TIMES))

    pyro.get_param_store().clear()
    assert_same(by_hand, loss_and_gradients(elbo, model, own_drift))


@pytest.mark.parametrize("estimator", ["stl", "full", "kl"])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("transformed", [False, True])
def test_sampled_once_evaluated_once(estimator, by_hand, transformed):
    """The control is called once a step, whatever the estimator and the wrapping."""
    problem = Problem("ou", "normal", "plain")
    calls = 0

    def control(t, z):
        nonlocal calls
        calls += 1
        return problem.net(t, z)

    def wrap(path):
        # By hand the transform has to remember its input; AutoSDE sees to that itself.
        exp = torch.distributions.transforms.ExpTransform(cache_size=int(by_hand))
        return dist.TransformedDistribution(path, [exp]) if transformed else path

    def model():
        problem.observe(pyro.sample("z", wrap(problem.make())))

    def guide():
        pyro.sample("z", wrap(ControlledPath(problem.make(), control)))

    q = guide if by_hand else AutoSDE(model, control=control).setup()
    elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=0)
    calls = 0
    elbo.differentiable_loss(model, q).backward()
    assert calls == len(TIMES) - 1


def test_one_diffusion_in_two_discretisations():
    """An exact OU prior and a guide of Euler steps: their scales differ by order dt, their
    diffusion does not. The laws hold, and the bound meets that of the ControlledPath."""

    def pair(steps):
        times = torch.linspace(0.0, 1.0, steps + 1)

        def prior():
            return OrnsteinUhlenbeck(1.5, 0.2, positive("s", 0.8), times, initial=torch.zeros(1))

        def model():
            z = pyro.sample("z", prior())
            pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.tensor(0.7))

        def euler():
            s, k = positive("s", 0.8), pyro.param("k", torch.tensor(0.6))
            drift = lambda t, z: -1.5 * (z - 0.2) + s * (k - z)  # noqa: E731
            pyro.sample("z", SDEPath(drift, lambda t, z: s, torch.zeros(1), times))

        def controlled():
            k = pyro.param("k", torch.tensor(0.6))
            pyro.sample("z", ControlledPath(prior(), lambda t, z: k - z))

        return model, euler, controlled

    model, euler, _ = pair(8)
    options = {"max_plate_nesting": 0}
    full = loss_and_gradients(TraceSDE_ELBO(path_estimator="full", **options), model, euler)
    assert_same(full, loss_and_gradients(Trace_ELBO(**options), model, euler))
    stl = loss_and_gradients(TraceSDE_ELBO(**options), model, euler)
    assert stl[0] == pytest.approx(full[0], abs=1e-9)
    excess = []
    for steps in (10, 40, 160):
        model, euler, controlled = pair(steps)
        elbo = TraceSDE_ELBO(
            path_estimator="kl", num_particles=2000, vectorize_particles=True, max_plate_nesting=1
        )
        losses = []
        for guide in (euler, controlled):
            pyro.set_rng_seed(0)
            losses.append(elbo.loss(model, guide))
        excess.append(abs(losses[0] - losses[1]))
    assert excess[2] < excess[1] / 2 < excess[0] / 4
