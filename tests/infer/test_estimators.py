"""Laws of the path ELBOs, for every process, likelihood, plate and particle layout."""

from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, girsanov
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck, SDEPath

from ..cases import LIKELIHOODS, PROCESSES, TIMES, Net, assert_same, loss_and_gradients, positive

OBSERVED = [1, 3, 5]
LAYOUTS = {
    "plain": ({"max_plate_nesting": 1}, False),
    "plate": ({"max_plate_nesting": 1}, True),
    "loop": ({"max_plate_nesting": 1, "num_particles": 2}, True),
    "loop_plain": ({"max_plate_nesting": 1, "num_particles": 2}, False),
    "vectorized_plain": (
        {"max_plate_nesting": 1, "num_particles": 3, "vectorize_particles": True},
        False,
    ),
    "vectorized": (
        {"max_plate_nesting": 2, "num_particles": 3, "vectorize_particles": True},
        True,
    ),
}

every_process = pytest.mark.parametrize("process", PROCESSES)
every_likelihood = pytest.mark.parametrize("likelihood", LIKELIHOODS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Problem:
    """One model and one guide, as paths and as chains of one Normal site a step."""

    def __init__(self, process, likelihood, layout, contraction=False):
        self.make = PROCESSES[process]
        self.likelihood, data = LIKELIHOODS[likelihood]
        self.data = torch.tensor(data)
        self.options, self.plate = LAYOUTS[layout]
        self.dim = self.make().event_shape[-1]
        self.net = Net(self.dim, 2 if contraction else 1)
        self.contraction = contraction

    def plates(self):
        stack = ExitStack()
        if self.plate:
            stack.enter_context(pyro.plate("series", 2, dim=-1))
        return stack

    def observe(self, z):
        x = z[..., OBSERVED, 0]
        pyro.sample("y", self.likelihood(x).to_event(1), obs=self.data)

    def control(self, t, z):
        out = self.net(t, z)
        return tuple(out.chunk(2, -1)) if self.contraction else out

    def posterior(self):
        pyro.module("net", self.net)
        prior = self.make()
        initial = None
        if not isinstance(prior.initial, torch.Tensor):
            loc = pyro.param("q_loc", torch.full((self.dim,), 0.2))
            scale = pyro.param("q_scale", torch.ones(self.dim), dist.constraints.positive)
            initial = dist.Normal(loc, 0.5 * scale).to_event(1)
        return ControlledPath(prior, self.control, initial, self.contraction)

    def model(self):
        with self.plates():
            self.observe(pyro.sample("z", self.make()))

    def guide(self):
        with self.plates():
            pyro.sample("z", self.posterior())

    def as_chain(self, values):
        """The same pair with a Normal site a step, drawing the noise that made ``values``."""
        draws = iter(values)

        def guide():
            q, value = self.posterior(), next(draws)
            z = None
            with self.plates():
                for i, step in enumerate(_steps(q, value)):
                    z = (
                        q.initial.expand(value[..., 0, :].shape)
                        if step is None
                        else (pyro.sample(f"z_{i}", step(z)))
                    )

        def model():
            p, states = self.make(), []
            with self.plates():
                if isinstance(p.initial, torch.Tensor):
                    shape = next(iter(values))[..., 0, :].shape
                    states.append(p.initial.expand(shape))
                else:
                    states.append(pyro.sample("z_0", p.initial))
                for i in range(len(TIMES) - 1):
                    dt = TIMES[i + 1] - TIMES[i]
                    mean, scale = p.transition(TIMES[i], dt, states[-1])
                    states.append(pyro.sample(f"z_{i + 1}", dist.Normal(mean, scale).to_event(1)))
                self.observe(torch.stack(states, -2))

        return model, guide


class Given(dist.Normal):
    """A Normal that draws a given noise."""

    def expand(self, batch_shape, _instance=None):
        new = super().expand(batch_shape, _instance)
        new.eps = self.eps
        return new

    def rsample(self, sample_shape=()):
        return self.loc + self.scale * self.eps


def given(mean, scale, target):
    d = Given(mean, scale)
    d.eps = ((target - mean) / scale).detach()
    return d.to_event(1)


def _steps(q, value):
    start = q.initial
    if isinstance(start, torch.Tensor):
        yield None
    else:
        base = start.base_dist
        yield lambda z: given(base.loc, base.scale, value[..., 0, :].detach())
    for i in range(len(TIMES) - 1):
        dt = TIMES[i + 1] - TIMES[i]
        target = value[..., i + 1, :].detach()
        yield lambda z, i=i, dt=dt, target=target: given(*q.transition(TIMES[i], dt, z), target)


def drawn_by(elbo_class, **options):
    """An ELBO that keeps the paths of its traces."""

    class Spy(elbo_class):
        def _get_trace(self, *args):
            traces = super()._get_trace(*args)
            self.values.append(traces[1].nodes["z"]["value"])
            return traces

    spy = Spy(**options)
    spy.values = []
    return spy


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
    if contraction or not isinstance(fixed(), SDEPath):
        return

    def own_drift():
        pyro.module("AutoSDE.paths.z.control", problem.net)
        p = fixed()
        drift = lambda t, z: p.drift(t, z) + p.diffusion(t, z) * problem.net(t, z)  # noqa: E731
        pyro.sample("z", SDEPath(drift, p.diffusion, p.initial, TIMES))

    pyro.get_param_store().clear()
    assert_same(by_hand, loss_and_gradients(elbo, model, own_drift))


@every_process
@pytest.mark.parametrize("contraction", [False, True])
def test_girsanov_is_the_log_ratio(process, contraction):
    """The two terms sum to log q - log p of any path, drawn from q or not."""
    problem = Problem(process, "normal", "plain", contraction)
    prior = problem.make()
    q = ControlledPath(prior, problem.control, contraction=contraction).expand((4,))
    for value in (q.rsample(), q.rsample().clone(), prior.expand((4,)).rsample()):
        for p in (prior, problem.make()):
            terms = girsanov(q, p, value)
            assert terms.quadratic.shape == terms.martingale.shape == (4,)
            assert (terms.quadratic >= 0).all()
            torch.testing.assert_close(
                terms.quadratic + terms.martingale,
                q.log_prob(value) - p.log_prob(value),
                rtol=1e-9,
                atol=1e-9,
            )


def test_martingale_has_mean_zero_under_q():
    problem = Problem("double_well", "normal", "plain", contraction=True)
    q = ControlledPath(problem.make(), problem.control, contraction=True)
    with torch.no_grad():
        m = girsanov(q, problem.make(), q.sample((50_000,))).martingale
    assert abs(m.mean()) < 5 * m.std() / 50_000**0.5


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


def test_a_path_drawn_without_gradients_is_scored_with_them():
    """A draw made under no_grad knows no gradients: it must not be used where they are wanted."""
    problem = Problem("ou", "normal", "plain")
    q = ControlledPath(problem.make(), problem.control)
    with torch.no_grad():
        value = q.rsample()
    for p in (q.prior, problem.make()):
        terms = girsanov(q, p, value)
        fresh = girsanov(q, p, value.clone())
        for a, b in zip(terms, fresh, strict=True):
            slopes = [
                torch.autograd.grad(x, list(problem.net.parameters()), retain_graph=True)
                for x in (a, b)
            ]
            torch.testing.assert_close(*slopes)


def test_terms_have_the_batch_shape_of_the_site():
    problem = Problem("ou", "normal", "plain")
    prior = problem.make().expand((4, 3))
    q = ControlledPath(prior, problem.control)
    value = q.sample()
    plain, event = girsanov(q, prior, value), girsanov(q.to_event(1), prior.to_event(1), value)
    mask = torch.tensor([True, False, True])
    masked = girsanov(q.mask(mask), prior.mask(mask), value)
    for a, b, c in zip(plain, event, masked, strict=True):
        assert a.shape == (4, 3) and b.shape == (4,)
        torch.testing.assert_close(a.sum(-1), b)
        torch.testing.assert_close(a * mask, c)


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
