"""Several processes as one: everything is that of the parts."""

import io
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS

from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    ODEPath,
    OrnsteinUhlenbeck,
    SDEPath,
    Stack,
)
from pyro_sde.distributions.starts import PartlyFixed, SideBySide
from pyro_sde.simulation.base import LinearSteps, choose

from ..cases import TIMES
from ..simulation.reference import Correlated, Split

T, DT = TIMES[1:2], torch.tensor([0.15], dtype=torch.float64)
RATES = torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)


def ou(rate=1.3, **options):
    return OrnsteinUhlenbeck(rate, 0.2, 0.7, TIMES, **options)


def brownian(dim=1, **options):
    start = torch.linspace(0.4, 0.9, dim).double()
    return BrownianMotion(0.6, TIMES, start, drift=0.3, **options)


def double_well(**options):
    start = dist.Normal(torch.zeros(1).double(), 0.6).to_event(1)
    return SDEPath(
        lambda t, z: z - z**3 + t, lambda t, z: 0.3 + 0.1 * z.square(), start, TIMES, **options
    )


def correlated():
    lower = torch.tensor([[0.0, 0.0], [0.4, 0.0]], dtype=torch.float64)
    return Correlated(lower, torch.tensor([0.3, -0.2]).double(), TIMES)


STACKS = {
    "OU, Brownian": lambda: [ou(), brownian()],
    "different dimensions": lambda: [brownian(2), ou(), brownian(3)],
    "different batches": lambda: [ou(RATES), brownian(2)],
    "batches that broadcast": lambda: [ou(RATES), ou(torch.rand(2, 1, 1).double() + 1)],
    "with an SDEPath": lambda: [ou(RATES), double_well()],
    "with a control": lambda: [ControlledPath(ou(), lambda t, z: torch.sin(z) - t), brownian()],
    "one": lambda: [ou(RATES)],
    "nested": lambda: [Stack(brownian(), ou()), double_well(), Stack(ou(), brownian(2))],
}
every_stack = pytest.mark.parametrize("make", STACKS.values(), ids=STACKS.keys())


def close(a, b):
    torch.testing.assert_close(a, b.expand_as(a), rtol=1e-12, atol=1e-12)


@every_stack
def test_it_is_its_parts(make):
    parts = make()
    stack = Stack(*parts)
    z = stack.sample((4,))
    states = stack.split(z)
    assert z.shape == (4, *stack.batch_shape, len(TIMES), sum(stack.sizes))
    assert [x.shape[-1] for x in states] == [p.event_shape[-1] for p in parts]
    close(stack.log_prob(z), sum(p.log_prob(x) for p, x in zip(parts, states, strict=True)))
    now = stack.split(z[..., 0, :])
    for k, found in enumerate(stack.transition(T, DT, z[..., 0, :])):
        assert found.shape == z[..., 0, :].shape
        for x, p, y in zip(now, parts, stack.split(found), strict=True):
            close(y, p.transition(T, DT, x)[k])
    for k, found in enumerate(stack.coefficients(T, z[..., 0, :])):
        for x, p, y in zip(now, parts, stack.split(found), strict=True):
            close(y, p.coefficients(T, x)[k])


@every_stack
def test_draws_from_the_noise_of_the_parts(make):
    parts = make()
    stack = Stack(*parts)
    z0 = stack.sample((4,))[..., 0, :]
    noise = torch.randn(len(TIMES) - 1, *z0.shape)
    whole = stack.draw(z0, noise).value
    pairs = zip(stack.split(z0), stack.split(noise), parts, strict=True)
    for y, (x, eps, p) in zip(stack.split(whole), pairs, strict=True):
        close(y, p.expand(stack.batch_shape).draw(x, eps).value)


@pytest.mark.parametrize("name", ["OU, Brownian", "different batches", "batches that broadcast"])
def test_moments_and_linear_steps(name):
    parts = STACKS[name]()
    stack = Stack(*parts).expand((5, 2, 3)) if "that" in name else Stack(*parts)
    z = stack.sample((20_000,) if name == "OU, Brownian" else ())
    for moment in ("mean", "variance"):
        found = stack.split(getattr(stack, moment))
        for y, p in zip(found, parts, strict=True):
            close(y, getattr(p, moment))
    if name == "OU, Brownian":
        n, (mean, var) = len(z), (stack.mean, stack.variance)
        assert ((z.mean(0) - mean).abs() <= 5 * (var / n).sqrt() + 1e-12).all()
        assert ((z.var(0) - var).abs() <= 5 * var * math.sqrt(2 / n) + 1e-12).all()
        z = z[0]
    steps = stack.linear_steps()
    t, dt = stack.step_times(0)
    time_first = z.movedim(-2, 0)[:-1]
    for found, expected in zip(
        steps(time_first, *steps.known), stack.transition(t, dt, time_first), strict=True
    ):
        close(found.expand_as(time_first), expected)


def test_what_the_parts_do_not_know_the_stack_does_not():
    assert Stack(ou(), double_well()).linear_steps() is None
    with pytest.raises(NotImplementedError, match="SDEPath does not know its mean"):
        _ = Stack(ou(), double_well()).mean
    with pytest.raises(NotImplementedError, match="Correlated does not say what SDE"):
        Stack(ou(), correlated()).coefficients(T, torch.zeros(3))


def test_the_matrix_of_a_part_without_a_batch_is_no_vector():
    """A matrix of one process has as many dimensions as a vector in the batch of another."""

    class Linear(Correlated):
        def transition(self, t, dt, z):
            return z, (torch.eye(2) + self.lower) * dt.sqrt().unsqueeze(-1)

        def linear_steps(self):
            _, dt = self.step_times(0)
            ones = torch.ones_like(dt).expand(-1, 2)
            return LinearSteps(
                ones, 0 * ones, (torch.eye(2) + self.lower) * dt.sqrt().unsqueeze(-1)
            )

    part = Linear(torch.tensor([[0.0, 0.0], [0.4, 0.0]]), torch.zeros(2), TIMES)
    assert Stack(ou(RATES), part).linear_steps() is None


@pytest.mark.parametrize("order", [1, -1])
def test_a_triangular_scale_beside_a_diagonal_one(order):
    parts = [correlated(), ou(RATES)][::order]
    stack = Stack(*parts)
    z = stack.sample((4,))
    states = stack.split(z)
    close(stack.log_prob(z), sum(p.log_prob(x) for p, x in zip(parts, states, strict=True)))
    _, scale = stack.transition(T, DT, z[..., 0, :])
    blocks = [p.transition(T, DT, x[..., 0, :])[1] for p, x in zip(parts, states, strict=True)]
    blocks = [b if b.dim() == scale.dim() else b.expand(4, 3, 1).diag_embed() for b in blocks]
    rows = zip(*(b.reshape(-1, *b.shape[-2:]) for b in blocks), strict=True)
    expected = torch.stack([torch.block_diag(*row) for row in rows])
    close(scale.reshape(expected.shape), expected)


@every_stack
def test_expand(make):
    with torch.no_grad():
        stack = Stack(*make())
    batch = (2, *stack.batch_shape) if stack.batch_shape else (2, 3)
    grown = stack.expand(batch)
    z = grown.sample()
    assert z.shape == batch + stack.event_shape
    close(grown.log_prob(z), stack.log_prob(z))
    with pytest.raises(ValueError, match="cannot expand"):
        grown.expand((7,))


def test_pickle():
    stack = Stack(ou(), brownian(2))
    z = stack.rsample()
    twin = pickle.load(io.BytesIO(pickle.dumps(stack)))
    assert torch.equal(twin.log_prob(z), stack.log_prob(z))


def test_recomputed_if_a_part_is():
    assert Stack(ou(), brownian()).memory == "graph"
    rate, found = torch.tensor(1.3, dtype=torch.float64, requires_grad=True), []
    for memory in ("graph", "recompute"):
        stack = Stack(ou(rate, memory=memory), double_well())
        assert stack.memory == memory
        assert choose(stack._task(torch.zeros(2))) == {"graph": "loop"}.get(memory, "checkpointed")
        pyro.set_rng_seed(0)
        z = stack.rsample((3,))
        found.append((z, *torch.autograd.grad(z.sin().sum(), rate)))
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_one_process_is_that_process():
    p = ou(RATES)
    for stack in (Stack(p), Stack(Stack(p))):
        assert stack.initial is p.initial or isinstance(stack.initial.base_dist, dist.Normal)
        for f in (lambda d: d.mean, lambda d: d.variance):
            assert torch.equal(f(stack), f(p))
        drawn = []
        for d in (stack, p):
            pyro.set_rng_seed(2)
            drawn.append(d.sample((2,)))
        assert torch.equal(*drawn)
        assert torch.equal(stack.log_prob(drawn[0]), p.log_prob(drawn[0]))


def test_starts_in_the_simplest_form():
    assert isinstance(Stack(brownian(), brownian(2)).initial, torch.Tensor)
    assert isinstance(Stack(ou(), double_well()).initial.base_dist, dist.Normal)
    gamma = BrownianMotion(1.0, TIMES, dist.Gamma(2.0, 1.0))
    assert isinstance(Stack(ou(), gamma).initial, SideBySide)
    nested = Stack(Stack(brownian(), ou()), gamma, Stack(ou(), brownian(2))).initial
    assert isinstance(nested, PartlyFixed) and len(nested.law.parts) == 3
    assert nested.is_drawn == (False, True, True, True, False, False)
    assert nested.sample((3,))[:, ~nested._drawn].unique().numel() == 2  # 0.4 twice, and 0.9


def test_a_start_without_a_mean():
    base = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    start = dist.TransformedDistribution(base, [dist.transforms.SigmoidTransform()])
    z = Stack(brownian(), BrownianMotion(1.0, TIMES, start)).sample((5,))[:, 0]
    assert (z[:, 0] == 0.4).all() and ((z[:, 1] > 0) & (z[:, 1] < 1)).all()


def test_precision_is_promoted():
    """A start in single precision beside a law in double precision does not round the law."""
    point = BrownianMotion(0.6, TIMES, torch.tensor([0.1], dtype=torch.float32))
    z = Stack(point, ou()).sample((3,))
    assert z.dtype == torch.float64
    assert (z[:, 0, 1] != z[:, 0, 1].float().double()).all()
    assert torch.isfinite(Stack(point, ou()).log_prob(z)).all()


def test_refusals():
    with pytest.raises(ValueError, match="Stack needs at least one process"):
        Stack()
    with pytest.raises(ValueError, match="process 1 is on another than process 0; build all"):
        Stack(ou(), BrownianMotion(1.0, 2 * TIMES, 0.0))
    with pytest.raises(ValueError, match="process 2 is on another"):
        Stack(ou(), ou(), BrownianMotion(1.0, TIMES[:-1], 0.0))
    with pytest.raises(TypeError, match="with noise, found ODEPath"):
        Stack(ou(), ODEPath(lambda t, z: -z, torch.zeros(1), TIMES))
    for wrapped in (GeometricBrownianMotion(0.3, TIMES), ou().mask(True), ou(RATES).to_event(1)):
        with pytest.raises(TypeError, match=f"found {type(wrapped).__name__}; .* path inside"):
            Stack(ou(), wrapped)
    with pytest.raises(ValueError, match=r"batch shapes .* found \[\(2,\), \(3,\)\]; add"):
        Stack(ou().expand((2,)), ou(RATES))


def test_a_control_with_a_matrix():
    p = Stack(ou(), double_well())
    q = ControlledPath(p, Split(True), contraction=True)
    z = q.rsample((3,))
    t, dt = p.step_times(1)
    mean, scale = q.transition(t, dt, z.movedim(-2, 0)[:-1])
    steps = dist.MultivariateNormal(mean, scale_tril=scale).log_prob(z.movedim(-2, 0)[1:])
    close(q.log_prob(z), steps.sum(0) + q.initial.log_prob(z[:, 0]))


def test_nuts():
    """A sum of two processes given its end: its mean is known."""

    def model():
        trend = BrownianMotion(1.0, torch.linspace(0.0, 1.0, 3), dist.Normal(0.0, 1.0))
        stack = Stack(trend, OrnsteinUhlenbeck(1.0, 0.0, 1.0, trend.times))
        z = pyro.sample("z", stack)
        pyro.sample("y", dist.Normal(z[-1].sum(), 0.5), obs=torch.tensor(2.0))

    mcmc = MCMC(NUTS(model), num_samples=200, warmup_steps=100, disable_progbar=True)
    mcmc.run()
    z = mcmc.get_samples()["z"]
    # Prior variances at the end: 2 and 1/2, the noise 1/4.
    mean, var = 2.0 * 2.5 / 2.75, 2.5 - 2.5**2 / 2.75
    # A hundred independent draws or more among 200.
    assert abs(z[:, -1].sum(-1).mean() - mean) < 4.5 * (var / 100) ** 0.5
