"""The default control."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_sde import AutoSDE, GRUEncoder, MLPControl, girsanov
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck

GRID = torch.tensor([0.0, 0.1, 0.25, 0.3, 0.6, 1.0, 1.1, 1.5], dtype=torch.float64)


def shaken(*args, **options):
    control = MLPControl(*args, **options)
    with torch.no_grad():
        for p in control.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return control


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("context", [0, 5])
def test_on_grid_is_the_control(context, contraction):
    control = shaken(2, times=GRID, context=context, contraction=contraction)
    z, t = torch.randn(4, 3, 2), GRID[:-1].reshape(-1, 1, 1, 1)
    extra = (torch.randn(3, context),) if context else ()
    step = control.on_grid(t, *extra)
    whole = control(t, z.expand(7, 4, 3, 2), *extra)
    for i in range(7):
        for got, one, all_ in zip(
            *(x if contraction else (x,) for x in (step.at(i, z), control(t[i], z, *extra), whole)),
            strict=True,
        ):
            assert got.shape == z.shape
            torch.testing.assert_close(got, one, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(got, all_[i], rtol=1e-12, atol=1e-12)


def test_a_path_asks_for_the_grid_once(monkeypatch):
    control = shaken(1, times=GRID)
    calls = []
    monkeypatch.setattr(MLPControl, "forward", lambda *_: calls.append("forward"))
    real = control.on_grid
    control.on_grid = lambda t: calls.append("grid") or real(t)
    ControlledPath(BrownianMotion(1.0, GRID, torch.zeros(1)), control).rsample((3,))
    assert calls == ["grid"]


@pytest.mark.parametrize(
    "hook, factor",
    [
        (lambda c: c.register_forward_hook(lambda _, args, out: 3 * out), 3),
        (lambda c: c.register_forward_pre_hook(lambda _, args: (args[0], 0 * args[1])), None),
    ],
)
def test_hooks_are_called(hook, factor):
    control = shaken(1, times=GRID)
    hook(control)
    q = ControlledPath(BrownianMotion(1.0, GRID, torch.zeros(1)), control)
    z = q.rsample()
    control._forward_hooks.clear()
    control._forward_pre_hooks.clear()
    t = GRID[:-1].unsqueeze(-1)
    expected = factor * control(t, z[:-1]) if factor else control(t, torch.zeros(7, 1))
    found = girsanov(q, q.prior, z).quadratic
    torch.testing.assert_close(found, 0.5 * (expected.square() * GRID.diff().unsqueeze(-1)).sum())


class Bounded(MLPControl):
    """At most 0.1 in size."""

    def forward(self, t, z, context=None):
        return 0.1 * torch.tanh(super().forward(t, z, context))


def pushes(path):
    """The control along a path of Brownian motion, by the same noise without it."""
    torch.manual_seed(0)
    pushed = path.rsample()
    torch.manual_seed(0)
    return (pushed - path.prior.rsample()).diff(dim=-2) / GRID.diff().unsqueeze(-1)


def test_a_subclass_decides_by_its_forward():
    """Also where it reads a context, and ends with the data."""
    times, values = torch.tensor([[0.3, 0.6]]), torch.ones(1, 2, 1)

    def model(times, values):
        with pyro.plate("series", 1):
            z = pyro.sample("z", BrownianMotion(1.0, GRID, torch.zeros(1)))
            pyro.sample("y", dist.Normal(z[:, [3, 4]], 0.1).to_event(2), obs=values)

    guide = AutoSDE(model, encoder=GRUEncoder(1, 8, 3), control=Bounded)
    guide.setup(times, values)
    alone = Bounded(1, times=GRID)
    with torch.no_grad():
        for p in [*guide.parameters(), *alone.parameters()]:
            p.add_(torch.randn_like(p))
    found = [pushes(ControlledPath(BrownianMotion(1.0, GRID, torch.zeros(1)), alone))]
    found.append(pushes(poutine.trace(guide).get_trace(times, values).nodes["z"]["fn"]))
    with guide.given((times, values)):
        found.append(pushes(poutine.trace(guide).get_trace(times, values).nodes["z"]["fn"]))
    assert all(1e-3 < u.abs().max() < 0.1 + 1e-9 for u in found)
    assert (found[1][:, 4:] != 0).all() and (found[2][:, 4:].abs() < 1e-9).all()


def test_starts_at_zero_and_reads_time_between_the_steps():
    assert (MLPControl(3, times=GRID)(GRID[:1], torch.randn(5, 3)) == 0).all()
    control = shaken(1, times=GRID)
    z = torch.zeros(1)
    ends = control.time_features(GRID[3:4]), control.time_features(GRID[4:5])
    middle = control.time_features((GRID[3:4] + GRID[4:5]) / 2)
    n = control.embedding.shape[-1]
    torch.testing.assert_close(middle[-n:], (ends[0][-n:] + ends[1][-n:]) / 2)
    # After the start of the last step, and outside of the grid, the embedding is held.
    for t in (1.2, 1.5, 9.0):
        held = control.time_features(torch.tensor([t]))[-n:]
        torch.testing.assert_close(held, control.embedding[-1])
    torch.testing.assert_close(
        control.time_features(torch.tensor([-1.0]))[-n:], control.embedding[0]
    )
    assert control(torch.tensor([0.2]), z) != control(torch.tensor([0.7]), z)


def test_a_pair_of_times_is_a_span_without_steps():
    control = MLPControl(2, times=(0.0, 3.0), features=5)
    assert control.embedding is None and control.time_features(torch.tensor([1.0])).shape == (11,)


def test_bottleneck_is_linear_in_the_dimension():
    def size(dim):
        control = MLPControl(dim, hidden=(2, 128, 2), times=GRID)
        return sum(p.numel() for p in control.parameters())

    per_weight = (size(20_000) - size(10_000)) / 10_000
    assert per_weight == 2 + 2 + 1  # in, out and a bias


def test_features_of_its_own_grid_are_those_of_any():
    """What is remembered of the grid is what is computed; another grid loaded is another grid."""
    grid = torch.tensor([0.0, 0.1, 0.4, 1.0])
    control, other = MLPControl(1, times=grid), MLPControl(1, times=grid**2)
    with torch.no_grad():
        for c in (control, other):
            c.embedding.normal_()
    for _ in range(2):  # the second time from memory
        t = grid[:-1].reshape(3, 1, 1)
        torch.testing.assert_close(control.time_features(t), control._features(t))
        control.time_features(t).sum().backward()
        assert (control.embedding.grad == 1).all()
        control.embedding.grad = None
    control.load_state_dict(other.state_dict())
    t = (grid**2)[:-1].unsqueeze(-1)
    torch.testing.assert_close(control.time_features(t), other._features(t))


def test_training_after_inference_mode():
    """Tensors of inference mode, which no gradient may pass, are not what is remembered."""
    grid = torch.linspace(0, 1, 5)
    control = MLPControl(1, times=grid)
    prior = OrnsteinUhlenbeck(1.0, 0.0, 0.5, grid)
    with torch.inference_mode():
        ControlledPath(prior, control).sample()
        made_here = MLPControl(1, times=grid.clone())  # its times have no version to go by
        assert ControlledPath(prior, made_here).sample().shape == (5, 1)
    ControlledPath(prior, control).rsample().sum().backward()
    assert control.last.bias.grad is not None


def test_the_state_is_measured_from_the_median_of_the_prior():
    """As a control without units sees (z - loc) / scale; spreads between 1/5 and 5 stay."""
    times = torch.linspace(0.0, 1.0, 6)
    control = MLPControl(3, (8,), times=times)
    torch.nn.init.normal_(control.last.weight)
    plain = MLPControl(3, (8,), times=times)
    plain.load_state_dict(control.state_dict())
    states = torch.tensor([20.0, -3.0, 0.0]) + torch.randn(5000, 3) * torch.tensor([1.0, 100, 1e-3])
    control.take_units(states)
    loc, scale = control.state_loc, control.state_scale
    assert (loc - torch.tensor([20.0, -3.0, 0.0])).abs().max() < 10
    assert scale[0] == 1 and 15 < scale[1] < 25 and 4e-3 < scale[2] < 6e-3
    t, z = times[:-1].unsqueeze(-1).unsqueeze(-1), states[:4]
    expected = plain(t[2], (z - loc) / scale)
    torch.testing.assert_close(control(t[2], z), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(control.on_grid(t).at(2, z), expected, rtol=1e-4, atol=1e-4)
