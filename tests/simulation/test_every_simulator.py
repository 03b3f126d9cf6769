"""Every simulator x law x control x estimator: the path made from (z_0, noise), its log ratio and
all gradients are those of the reference loop over ``transition``."""

import itertools

import pytest
import torch

from pyro_sde import tolerance
from pyro_sde._compiling import compiled
from pyro_sde.distributions import ControlledPath, PathDistribution
from pyro_sde.infer.girsanov import path_divergence
from pyro_sde.simulation import Adaptive, Checkpointed, Compiled, Fused, Loop
from pyro_sde.simulation.base import LinearSteps, choose

from ..cases import needs_compiler
from .fused_cases import simulator_of
from .reference import (
    CONTROLS,
    CONTROLS_IN_3,
    GRID,
    LAWS,
    LAWS_IN_3,
    D,
    parameters,
    reference,
)

FUSED_LAWS = ("ou", "brownian", "learned", "stack")
ROWS = 3


def expected_simulator(law, control, options):
    if options.get("memory") == "recompute":
        return Checkpointed
    is_network = control.startswith("network")
    if options.get("compile") and is_network:
        return Compiled
    return Fused if is_network and law in FUSED_LAWS else Loop


def losses(value, term):
    """A number that all states, and all terms of a batch, take part in differently."""
    weights = torch.linspace(1, 2, value[0].numel()).reshape(value.shape[1:])
    return (value.sin() * weights).sum() + (term * torch.linspace(1, 3, len(term))).sum()


def check(law, control, options, comparison, estimator, laws=LAWS, controls=CONTROLS):
    values, make = laws[law]
    module, wrap, contraction = controls[control]
    torch.manual_seed(3)
    noise = torch.randn(len(GRID) - 1, ROWS, len(values[0]))
    inputs = parameters(*values, module)
    path, terms = reference(laws[law], controls[control], noise)
    found = []
    p = make(*values)
    q = ControlledPath(p, wrap(module), contraction=contraction, **options)
    torch.manual_seed(3)
    value = q.rsample((ROWS,))
    assert simulator_of(q) is expected_simulator(law, control, options)
    if comparison == "of another prior":
        p = make(*values)
    if comparison == "of a copy":
        value = value.clone()
    found = [(value, path_divergence(q, p, value, estimator)), (path, terms[estimator])]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(losses(*x), inputs, allow_unused=True) for x in found]
    for a, b in zip(*grads, strict=True):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        torch.testing.assert_close(a.expand(b.shape), b.expand(a.shape), rtol=1e-8, atol=1e-8)
    assert sum(g is not None and bool(g.abs().max() > 0) for g in grads[0]) > len(inputs) // 2


@pytest.mark.parametrize("comparison", ["of the draw", "of a copy", "of another prior"])
@pytest.mark.parametrize("memory", ["graph", "recompute"])
@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("law", LAWS)
def test_a_path_that_is_pushed(law, control, memory, comparison):
    for estimator in ("kl", "full", "stl"):
        check(law, control, {"memory": memory}, comparison, estimator)


@pytest.mark.parametrize("memory", ["graph", "recompute"])
@pytest.mark.parametrize("control", CONTROLS_IN_3)
@pytest.mark.parametrize("law", LAWS_IN_3)
def test_a_path_in_three_dimensions(law, control, memory):
    for estimator, comparison in itertools.product(
        ("kl", "full", "stl"), ("of the draw", "of a copy", "of another prior")
    ):
        options = {"memory": memory}
        check(law, control, options, comparison, estimator, LAWS_IN_3, CONTROLS_IN_3)


@pytest.fixture
def compiler():
    """Forgets after the test: torch compiles for no more than eight combinations of shapes."""
    yield
    torch.compiler.reset()


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "law, control",
    [
        ("ou", "network that ends, diagonal"),
        ("own", "network"),
        ("ou", "network with context, full"),
    ],
)
def test_a_path_that_is_compiled(law, control, compiler):
    for estimator in ("kl", "full", "stl"):
        check(law, control, {"compile": True}, "of the draw", estimator)
    assert not compiled.broken  # or these were ordinary steps


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "law, control", [("ou", "network that ends, full"), ("double well", "network, full")]
)
def test_a_path_in_three_dimensions_that_is_compiled(law, control, compiler):
    options = {"compile": True}
    for estimator in ("kl", "full", "stl"):
        check(law, control, options, "of the draw", estimator, LAWS_IN_3, CONTROLS_IN_3)
    assert not compiled.broken


@pytest.mark.parametrize("memory", ["graph", "recompute"])
@pytest.mark.parametrize("law", LAWS)
def test_a_path_by_itself(law, memory):
    values, make = LAWS[law]
    noise = torch.randn(len(GRID) - 1, ROWS, D)
    path = make(*values, memory=memory)
    draw = path.draw(values[0].expand(ROWS, D), noise)
    assert type(draw.simulator) is (Loop if memory == "graph" else Checkpointed)
    z, states = values[0].expand(ROWS, D), [values[0].expand(ROWS, D)]
    for i, eps in enumerate(noise):
        mean, scale = path.transition(GRID[i].reshape(1), GRID[i + 1 : i + 2] - GRID[i], z)
        matrix = scale if scale.dim() > z.dim() else scale.expand_as(z).diag_embed()
        z = mean + (matrix @ eps.unsqueeze(-1)).squeeze(-1)
        states.append(z)
    expected = torch.stack(states, -2)
    torch.testing.assert_close(draw.value, expected, rtol=1e-12, atol=1e-12)
    inputs = parameters(*values)
    grads = [
        torch.autograd.grad(x.sin().sum(), inputs, allow_unused=True)
        for x in (draw.value, expected)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("law", LAWS)
def test_the_density_is_that_of_the_steps(law):
    values, make = LAWS[law]
    path = make(*values)
    z = path.sample((ROWS,))
    module, wrap, contraction = CONTROLS["triangular"]
    q = ControlledPath(path, wrap(module), contraction=contraction)
    total = path_divergence(q, path, z, "full")
    torch.testing.assert_close(total, q.log_prob(z) - path.log_prob(z), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("law", ["ou", "own", "child of OU", "correlated"])
def test_a_loose_tolerance_is_one_step_an_interval(law):
    """Then the path on the grid is that of the noise on the grid, by two half steps."""
    values, make = LAWS[law]
    path = make(*values)
    with tolerance(rtol=1e3), torch.no_grad():
        draw = path.draw(values[0].expand(ROWS, D))
        value = path.rsample((ROWS,))
    assert isinstance(draw.simulator, Adaptive) and draw.noise is None
    assert value.shape == (ROWS, len(GRID), D) and path.last_draw(value) is None


def test_any_simulator_that_can_draw_a_path_draws_the_same():
    values, make = LAWS["ou"]
    module = CONTROLS["network"][0]
    noise = torch.randn(len(GRID) - 1, ROWS, D)
    q = ControlledPath(make(*values), module)
    task = q._task(values[0].expand(ROWS, D))
    assert choose(task) == "fused"
    paths = [s(task, noise).value for s in (Fused(), Loop(), Checkpointed())]
    for a, b in itertools.pairwise(paths):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_contraction_that_is_a_number():
    values, make = LAWS["ou"]
    p, noise = make(*values), torch.randn(len(GRID) - 1, D)
    found = [
        ControlledPath(p, lambda t, z: -z, contraction=c).draw(values[0], noise)
        for c in (lambda t, z: -0.3, lambda t, z: torch.full_like(z, -0.3))
    ]
    for part in (lambda d: d.value, lambda d: d.ratio.kl(), lambda d: d.ratio.stopped()):
        torch.testing.assert_close(*map(part, found), rtol=1e-12, atol=1e-12)


def test_refusals():
    values, make = LAWS["ou"]
    full = lambda t, z: (torch.zeros_like(z), torch.ones(*z.shape, D))  # noqa: E731
    with pytest.raises(ValueError, match="entries above the diagonal"):
        ControlledPath(make(*values), full, contraction=True).rsample()
    with pytest.raises(ValueError, match=r"contraction\(t, z\) returned shape"):
        wide = lambda t, z: (torch.zeros_like(z), torch.zeros(*z.shape, D + 1))  # noqa: E731
        ControlledPath(make(*values), wide, contraction=True).rsample()
    with tolerance(), pytest.raises(ValueError, match="draws the noise that it refines"):
        make(*values).draw(values[0], torch.zeros(len(GRID) - 1, D))

    class Covariance(type(make(*values))):
        def transition(self, t, dt, z):
            return z, torch.tensor([[1.0, 0.2], [0.2, 1.0]]).expand(*z.shape, D)

    path = Covariance(1.0, 0.0, 1.0, GRID, torch.zeros(D))
    with pytest.raises(ValueError, match="matrix with entries above its diagonal"):
        path.log_prob(torch.zeros(len(GRID), D))
    with pytest.raises(ValueError, match="matrix with entries above its diagonal"):
        path.rsample()

    class Steps(torch.nn.Linear):
        def on_grid(self, t):
            return lambda i, z: z

    with pytest.raises(TypeError, match=r"on_grid of Steps returned a function; it must"):
        ControlledPath(make(*values), Steps(D, D)).rsample()


def test_linear_steps_with_a_matrix_are_left_to_the_transition():
    """Three dimensions are those of a batch of D vectors, or of a matrix."""

    class Coupled(PathDistribution):
        matrix = torch.tensor([[0.5, 0.0], [0.3, 0.4]], dtype=torch.float64)

        def transition(self, t, dt, z):
            return z, (self.matrix * dt.sqrt().unsqueeze(-1)).expand(*z.shape, D)

        def linear_steps(self):
            _, dt = self.step_times(0)
            scale = self.matrix * dt.sqrt().unsqueeze(-1)
            return LinearSteps(torch.ones_like(dt), torch.zeros_like(dt), scale)

    path = Coupled(GRID, torch.zeros(D, dtype=torch.float64))
    noise = torch.randn(len(GRID) - 1, 2, D)
    steps = noise @ Coupled.matrix.mT * GRID.diff().sqrt().reshape(-1, 1, 1)
    found = path.draw(torch.zeros(2, D), noise).value.movedim(-2, 0)
    torch.testing.assert_close(found[1:], steps.cumsum(0), rtol=1e-12, atol=1e-12)
