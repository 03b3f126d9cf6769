"""Laws of every path distribution."""

import copy
import io
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sde import girsanov
from pyro_sde.distributions import BrownianMotion, ControlledPath, OrnsteinUhlenbeck, SDEPath

from ..cases import PROCESSES, TIMES

every_process = pytest.mark.parametrize("make", PROCESSES.values(), ids=PROCESSES.keys())


def by_steps(path, value):
    """The density as a product of Normals, one step and one start at a time."""
    z = value[..., 0, :]
    log_p = torch.zeros(value.shape[:-2])
    if not isinstance(path.initial, torch.Tensor):
        log_p = log_p + path.initial.log_prob(z)
    for i in range(len(TIMES) - 1):
        mean, scale = path.transition(TIMES[i], TIMES[i + 1] - TIMES[i], value[..., i, :])
        log_p = log_p + dist.Normal(mean, scale).log_prob(value[..., i + 1, :]).sum(-1)
    return log_p


@every_process
@pytest.mark.parametrize("sample_shape", [(), (3,), (2, 3)])
def test_density_is_the_product_of_its_steps(make, sample_shape):
    path = make()
    value = path.sample(sample_shape)
    assert value.shape == torch.Size(sample_shape) + path.batch_shape + path.event_shape
    torch.testing.assert_close(path.log_prob(value), by_steps(path, value), rtol=1e-12, atol=1e-12)


@every_process
def test_batch_as_large_as_the_grid_does_not_mix_time_and_batch(make):
    path = make().expand((len(TIMES),))
    value = path.sample()
    rows = torch.stack([make().log_prob(v) for v in value])
    torch.testing.assert_close(path.log_prob(value), rows, rtol=1e-12, atol=1e-12)


@every_process
def test_expand(make):
    path = make().expand((2, 3))
    assert path.batch_shape == (2, 3)
    value = path.sample((4,))
    assert value.shape == (4, 2, 3, *path.event_shape)
    assert path.log_prob(value).shape == (4, 2, 3)
    # Rows are independent draws, not copies.
    assert value[..., -1, 0].flatten().unique().numel() == 24
    with pytest.raises(ValueError, match="expand"):
        path.expand((5,))


@every_process
def test_gradients_of_sample_and_density(make):
    """Reparametrised samples and densities against float64 finite differences."""
    with torch.no_grad():
        value = make().sample()
    store = pyro.get_param_store()
    names = list(store.keys())
    leaves = [store[n].detach().clone().requires_grad_() for n in names]

    def build(*xs):
        with pyro.poutine.substitute(data=dict(zip(names, xs, strict=True))):
            return make()

    def draw(*xs):
        pyro.set_rng_seed(3)
        return build(*xs).rsample()

    # A learned start moves the path's first state with it.
    def density(v, *xs):
        path = build(*xs)
        if isinstance(path.initial, torch.Tensor):
            v = torch.cat([path.initial.expand(v[:1].shape), v[1:]])
        return path.log_prob(v)

    slopes = torch.autograd.grad(draw(*leaves).sum(), leaves)
    assert all((g != 0).any() for g in slopes)
    assert torch.autograd.gradcheck(draw, leaves)
    assert torch.autograd.gradcheck(density, [value.requires_grad_(), *leaves])


@every_process
def test_seed_reproduces_and_copies_agree(make):
    with torch.no_grad():  # only leaves can be copied
        path = make()
    pyro.set_rng_seed(5)
    value = path.sample((2,))
    pyro.set_rng_seed(5)
    assert torch.equal(path.sample((2,)), value)
    twin = copy.deepcopy(path.expand((2,)))
    assert torch.equal(twin.log_prob(value), path.log_prob(value))


def test_pickle():
    path = OrnsteinUhlenbeck(torch.tensor([1.0, 2.0]), 0.0, 0.5, TIMES)
    value = path.rsample()
    file = io.BytesIO(pickle.dumps(path))
    assert torch.equal(pickle.load(file).log_prob(value), path.log_prob(value))


@pytest.mark.parametrize("name", ["ou", "ou_2d_fixed_start", "brownian"])
def test_moments(name):
    """Sampled means and variances within 5 standard errors of the closed forms."""
    path, n = PROCESSES[name](), 20_000
    with torch.no_grad():
        value = path.sample((n,))
        mean, var = path.mean, path.variance
        assert mean.shape == var.shape == path.event_shape
        assert ((value.mean(0) - mean).abs() <= 5 * (var / n).sqrt() + 1e-12).all()
        assert ((value.var(0) - var).abs() <= 5 * var * math.sqrt(2 / n) + 1e-12).all()


def test_batched_times_and_parameters_equal_their_rows():
    times = torch.stack([TIMES, 2 * TIMES, TIMES + 1])
    rate = torch.tensor([[0.5], [1.0], [2.0]])
    path = OrnsteinUhlenbeck(rate, 0.0, 1.0, times)
    assert path.batch_shape == (3,) and path.event_shape == (6, 1)
    value = path.sample((4,))
    rows = [OrnsteinUhlenbeck(rate[i], 0.0, 1.0, times[i]) for i in range(3)]
    for i, row in enumerate(rows):
        torch.testing.assert_close(path.log_prob(value)[:, i], row.log_prob(value[:, i]))
        torch.testing.assert_close(path.mean[i], row.mean)
        torch.testing.assert_close(path.variance[i], row.variance)
    drift = SDEPath(lambda t, z: -z + t, lambda t, z: 1 + t, torch.zeros(1), times)
    value = drift.sample((2,))
    for i in range(3):
        row = SDEPath(lambda t, z: -z + t, lambda t, z: 1 + t, torch.zeros(1), times[i])
        torch.testing.assert_close(drift.log_prob(value)[:, i], row.log_prob(value[:, i]))


def test_dimension_comes_from_whatever_names_it():
    assert BrownianMotion(1.0, TIMES, 0.0).event_shape == (6, 1)
    assert BrownianMotion(1.0, TIMES, torch.zeros(4)).event_shape == (6, 4)
    assert BrownianMotion(torch.ones(3), TIMES, dist.Normal(0.0, 1.0)).event_shape == (6, 3)
    assert BrownianMotion(torch.ones(2, 3), TIMES, 0.0).batch_shape == (2,)
    assert OrnsteinUhlenbeck(1.0, torch.zeros(5, 3), 1.0, TIMES).sample().shape == (5, 6, 3)
    assert BrownianMotion(1.0, TIMES.float(), torch.zeros(1).float()).sample().dtype == torch.float


def test_density_is_a_pure_function_of_its_value():
    """A path that was just drawn is scored like any other, gradients included."""
    path = OrnsteinUhlenbeck(torch.ones(1).requires_grad_(), 0.0, 1.0, TIMES)
    value = path.rsample()
    (fresh,) = torch.autograd.grad(path.log_prob(value), value, retain_graph=True)
    other = value.detach().requires_grad_()
    (slope,) = torch.autograd.grad(path.log_prob(other), other)
    assert torch.equal(fresh, slope)


@pytest.mark.parametrize("single", ["times", "initial", "parameters"])
@pytest.mark.parametrize("kind", ["ou", "brownian", "sde", "controlled"])
def test_mixed_precision_is_promoted(kind, single):
    """float32 beside float64 in any argument: the path is float64, as tensors promote."""

    def cast(name, x):
        return x.float() if name == single else x

    times, start = cast("times", TIMES), cast("initial", torch.zeros(2))
    one = cast("parameters", torch.ones(2))
    path = {
        "ou": lambda: OrnsteinUhlenbeck(one, 0.0, one, times, initial=start),
        "brownian": lambda: BrownianMotion(one, times, start),
        "sde": lambda: SDEPath(lambda t, z: -one * z, lambda t, z: one, start, times),
        "controlled": lambda: ControlledPath(BrownianMotion(one, times, start), torch.sub),
    }[kind]()
    value = path.rsample((3,))
    assert value.dtype == torch.float64
    assert path.log_prob(value).dtype == torch.float64


@every_process
def test_one_path_under_a_batch_of_processes(make):
    """A value without batch dimensions is scored by every process of the batch, also where the
    number of steps equals the batch."""
    value = make().sample()
    for n in (3, len(TIMES) - 1, len(TIMES)):
        path = make().expand((n,))
        torch.testing.assert_close(path.log_prob(value), make().log_prob(value).expand(n))
    rates = torch.tensor([[0.5], [1.0], [2.0], [3.0], [4.0]])
    path = OrnsteinUhlenbeck(rates, 0.0, 1.0, TIMES)
    value = path.sample()[0]
    rows = [OrnsteinUhlenbeck(r, 0.0, 1.0, TIMES).log_prob(value) for r in rates]
    torch.testing.assert_close(path.log_prob(value), torch.stack(rows))
    q = ControlledPath(path, lambda t, z: -z)
    terms = girsanov(q, path, value)
    torch.testing.assert_close(sum(terms), q.log_prob(value) - path.log_prob(value))
