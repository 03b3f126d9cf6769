import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sde import select, time_grid
from pyro_sde.distributions import BrownianMotion


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grid_contains_the_included_times_exactly(dtype):
    include = torch.rand(50, dtype=dtype) * 3
    grid = time_grid(0.0, 3.0, dt=0.05, include=include)
    assert grid.dtype == dtype
    assert torch.isin(include, grid).all()
    assert grid[0] == 0 and grid[-1] == 3
    steps = grid.diff()
    assert (steps > 0).all() and steps.max() <= 0.05 + 1e-6


def test_near_duplicates_are_merged():
    include = torch.tensor([0.5, 0.5, 0.5 + 4e-7, 0.25 + 4e-7, 1.0 - 1e-8])
    grid = time_grid(0.0, 1.0, dt=0.25, include=include)
    expected = torch.tensor([0.0, 0.25 + 4e-7, 0.5, 0.75, 1.0 - 1e-8])
    assert torch.equal(grid, expected)
    path = grid.unsqueeze(-1)
    assert torch.equal(select(path, grid, include)[:, 0], grid[[2, 2, 2, 1, 4]])


def test_equal_steps_divide_the_span():
    grid = time_grid(0.0, 3.0, dt=0.025)
    assert len(grid) == 121
    torch.testing.assert_close(grid.diff(), torch.full((120,), 0.025), rtol=1e-9, atol=0)
    assert len(time_grid(0.0, 1.0, dt=0.3)) == 5  # four steps of 0.25
    assert torch.equal(time_grid(-1.0, 1.0, dt=5.0, include=[]), torch.tensor([-1.0, 1.0]))


def test_large_times_in_single_precision():
    """Around 2e9 float32 cannot tell apart times 128 apart: the tolerance follows."""
    start = 2.0e9
    include = torch.tensor([start + 1e6, start + 2.5e6], dtype=torch.float32)
    grid = time_grid(start, start + 4e6, dt=1e6, include=include)
    assert (grid.diff() > 0).all() and torch.isin(include, grid).all()


@pytest.mark.parametrize("n, dt", [(100, 0.1), (100, 0.01), (100, 0.05), (1001, 0.3)])
def test_a_regular_grid_in_single_precision_is_that_grid(n, dt):
    """Its end may be rounded up: that costs no step, and no point beside each included time."""
    end = dt * (n - 1)
    for times in (torch.linspace(0, end, n).float(), torch.arange(n, dtype=torch.float32) * dt):
        assert torch.equal(time_grid(0.0, float(times.max()), dt=dt, include=times), times)


def test_times_that_single_precision_cannot_hold():
    """Seconds since 1970, a minute apart: float32 has one number in 128 there."""
    minutes = 1.7e9 + 60.0 * torch.arange(100, dtype=torch.float64)
    start, end = float(minutes[0]), float(minutes[-1])
    refused = r"torch.float32 cannot hold a grid.*60: .*Subtract the first time.*float64"
    for include in (minutes.float(), minutes[:1].float()):
        with pytest.raises(ValueError, match=refused):
            time_grid(start, end, dt=60.0, include=include)
    for include in (minutes, minutes.numpy(), minutes.tolist(), minutes.long(), None):
        assert torch.equal(time_grid(start, end, dt=60.0, include=include), minutes)
    since = (minutes - start).float()
    assert torch.equal(time_grid(0.0, end - start, dt=60.0, include=since), since)


def test_select():
    grid = time_grid(0.0, 1.0, dt=0.1, include=[0.33, 0.77])
    path = torch.randn(4, 2, len(grid), 3)
    at = torch.tensor([0.77, 0.0, 0.33, 1.0, 0.33])
    index = [int((grid - t).abs().argmin()) for t in at]
    assert torch.equal(select(path, grid, at), path[:, :, index])
    assert select(path, grid, at[:0]).shape == (4, 2, 0, 3)
    with pytest.raises(ValueError, match=r"2 times that are not on the grid, the first 0.15.*incl"):
        select(path, grid, torch.tensor([0.1, 0.15, 1.2]))
    with pytest.raises(ValueError, match="path has 5 states"):
        select(path[..., :5, :], grid, at)


def test_select_with_a_grid_for_every_series():
    times = torch.stack([torch.linspace(0, 1, 5), torch.linspace(0, 2, 5)])
    at = torch.tensor([[0.25, 1.0], [0.5, 0.0]])
    path = torch.randn(7, 2, 5, 3)
    values = select(path, times, at)
    assert values.shape == (7, 2, 2, 3)
    assert torch.equal(values[:, 0], path[:, 0, [1, 4]])
    assert torch.equal(values[:, 1], path[:, 1, [1, 0]])


@pytest.mark.parametrize("outer", [None, -2])
@pytest.mark.parametrize("plate_dim", [-1, -2])
@pytest.mark.parametrize("named", [True, False])
def test_select_into_a_plate(outer, plate_dim, named):
    """Observations in a plate of their own, the path outside of it, particles or not."""
    if outer is not None:
        outer = plate_dim - 1
    grid = time_grid(0.0, 1.0, dt=0.25)
    at = torch.tensor([0.25, 0.5, 1.0])

    def model():
        z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
        with pyro.plate("obs", 3, dim=plate_dim):
            loc = select(z, grid, at, plate_dim=plate_dim if named else None)[..., 0]
            return pyro.sample("y", dist.Normal(loc, 0.1))

    particles = pyro.plate("particles", 5, dim=outer) if outer else pyro.plate("p", 1, dim=-4)
    with particles:
        trace = pyro.poutine.trace(model).get_trace()
    y = trace.nodes["y"]["fn"]
    expected = ((5,) if outer else ()) + (3,) + (1,) * (-plate_dim - 1)
    assert y.batch_shape[-len(expected) :] == expected
    rows = trace.nodes["z"]["value"].reshape(-1, 5, 1)
    assert torch.equal(y.mean.reshape(len(rows), 3), rows[:, [1, 2, 4], 0])
    with pytest.raises(ValueError, match="must be negative"):
        select(trace.nodes["z"]["value"], grid, at, plate_dim=0)


def test_select_leaves_times_that_are_no_plate():
    """Plates that the path was drawn in, of another size, of particles, or run as a loop."""
    grid, at = time_grid(0.0, 1.0, dt=0.25), torch.tensor([0.25, 0.5, 1.0])
    with pyro.plate("series", 3, dim=-2):
        z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
        assert select(z, grid, at).shape == (3, 1, 3, 1)
    path = torch.randn(5, 1)
    with pyro.plate("others", 4, dim=-2), pyro.plate("num_particles_vectorized", 3, dim=-3):
        assert torch.equal(select(path, grid, at), path[[1, 2, 4]])
    for _ in pyro.plate("loop", 3):
        assert torch.equal(select(path, grid, at), path[[1, 2, 4]])
    with pyro.plate("one", 1, dim=-2):  # one series that is observed once, say
        assert torch.equal(select(path, grid, at[:1]), path[[1]])


def test_select_in_two_plates():
    """One of which has the series in it already; if none has, there is nothing to tell by."""
    grid, at = time_grid(0.0, 1.0, dt=0.25), torch.tensor([0.25, 0.5, 1.0])
    with pyro.plate("series", 3, dim=-1):
        z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
        with pyro.plate("obs", 3, dim=-2):
            found = select(z, grid, at)
            assert torch.equal(found, z[:, [1, 2, 4]].movedim(-2, 0))
            with pytest.raises(ValueError, match=r"\['obs', 'series'\].*plate_dim="):
                select(z[0], grid, at)
            assert select(z[0], grid, at, plate_dim=-2).shape == (3, 1, 1)


def test_select_times_of_many_series_from_one_path():
    """A path that series share, looked at by each at times of its own."""
    times = torch.linspace(0, 1, 5)
    path = torch.randn(5, 2)
    at = torch.tensor([[0.25, 1.0], [0.5, 0.0], [0.75, 0.75]])
    found = select(path, times, at)
    assert torch.equal(found, path[torch.tensor([[1, 4], [2, 0], [3, 3]])])
    particles = torch.stack([path, -path]).unsqueeze(1)
    assert torch.equal(select(particles, times, at), torch.stack([found, -found]))
