"""Bad input is refused: the argument, the value found, the remedy."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, JitTrace_ELBO, JitTraceMeanField_ELBO, Trace_ELBO, TraceEnum_ELBO
from torch.distributions.transforms import ExpTransform

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO, girsanov, time_grid
from pyro_sde.diagnostics import gradient_variance
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)

GRID = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)


def brownian(times=GRID, **options):
    return BrownianMotion(**{"scale": 1.0, "times": times, "initial": torch.zeros(1), **options})


def raises(message, f, error=ValueError):
    with pytest.raises(error, match=message):
        f()


@pytest.mark.parametrize(
    "times, message",
    [
        (torch.tensor([0.0, 0.5, 0.3]), r"times\[2\]=0.3 follows times\[1\]=0.5.*time_grid"),
        (torch.tensor([0.0, 0.5, 0.5]), r"times must increase strictly"),
        (torch.tensor([[0.0, 1.0], [2.0, 1.0]]), r"times\[1, 1\]=1 follows times\[1, 0\]=2"),
        (torch.tensor([0.0, math.nan]), "times must be finite"),
        (torch.tensor([0.0, math.inf]), "times must be finite"),
        (torch.tensor([0.0]), r"at least two points.*\(1,\)"),
        (torch.tensor(0.0), "at least two points"),
    ],
)
def test_times(times, message):
    raises(message, lambda: brownian(times))


def test_parameters():
    raises("scale must be positive: found 0", lambda: brownian(scale=0.0))
    raises("scale must be positive: found -1", lambda: brownian(scale=torch.tensor([1.0, -1.0])))
    raises("scale must be positive", lambda: OrnsteinUhlenbeck(1.0, 0.0, -2.0, GRID))
    raises("rate must be finite", lambda: OrnsteinUhlenbeck(math.nan, 0.0, 1.0, GRID))
    raises("needs rate > 0: found rate=0", lambda: OrnsteinUhlenbeck(0.0, 0.0, 1.0, GRID))
    raises("initial must be positive: found -1", lambda: GeometricBrownianMotion(1.0, GRID, -1.0))


def test_shapes():
    raises(
        "must broadcast to batch_shape",
        lambda: OrnsteinUhlenbeck(torch.ones(2), torch.ones(3), 1.0, GRID),
    )
    raises("must broadcast together", lambda: brownian(scale=torch.ones(2), initial=torch.ones(3)))
    raises(
        "must broadcast together",
        lambda: brownian(GRID.expand(4, 6), scale=torch.ones(3, 1)),
    )
    start = dist.Normal(torch.zeros(3), 1.0)
    raises(r"event_shape \(D,\).*to_event\(1\)", lambda: brownian(initial=start))
    start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    raises(r"R\^1.*R\^2", lambda: brownian(scale=torch.ones(2), initial=start))
    raises("no rsample", lambda: brownian(initial=dist.Poisson(torch.ones(1)).to_event(1)))


@pytest.mark.parametrize("what", ["drift", "diffusion", "control", "contraction"])
def test_wrong_shapes_from_callables(what):
    def wrong(t, z):
        return torch.zeros(3)

    def make(f):
        one = lambda t, z: torch.ones_like(z)  # noqa: E731
        if what == "drift":
            return SDEPath(f, one, torch.zeros(2), GRID)
        if what == "diffusion":
            return SDEPath(one, f, torch.zeros(2), GRID)
        prior = brownian(initial=torch.zeros(2))
        if what == "control":
            return ControlledPath(prior, f)
        return ControlledPath(prior, one, contraction=f)

    match = rf"{what}\(t, z\) returned shape \(3,\) at t=0 for a state of shape \(2,\)"
    raises(match, lambda: make(wrong).rsample())
    raises(
        rf"{what}\(t, z\) returned shape \(3,\)", lambda: make(wrong).log_prob(torch.zeros(6, 2))
    )


def test_a_drift_that_is_the_same_in_all_dimensions_says_so():
    start = torch.zeros(2)
    narrow = SDEPath(lambda t, z: z[..., :1], 1.0, start, GRID)
    raises(
        r"returned shape \(1,\) .* same in all 2 dimensions, return it .expand_as", narrow.rsample
    )
    wide = SDEPath(lambda t, z: z[..., :1].expand_as(z), 1.0, start, GRID)
    assert wide.rsample().shape == (6, 2)
    assert SDEPath(lambda t, z: 2.0, 1.0, start, GRID).rsample().shape == (6, 2)  # a constant


@pytest.mark.parametrize("kind", ["constant", "function", "batch"])
def test_a_matrix_is_no_diffusion(kind):
    matrix = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    diffusion = matrix
    if kind != "constant":
        diffusion = lambda t, z: matrix.expand(*z.shape, 2)  # noqa: E731
    start = torch.zeros(3, 2) if kind == "batch" else torch.zeros(2)
    raises(
        "diagonal of the matrix that multiplies dB.*PathDistribution.*lower-triangular",
        lambda: SDEPath(lambda t, z: -z, diffusion, start, GRID).rsample(),
    )
    batch = SDEPath(lambda t, z: -z, matrix + 1, torch.zeros(2), GRID)  # positive: rows of a batch
    assert batch.batch_shape == (2,)


@pytest.mark.parametrize("what", ["drift", "control"])
def test_errors_of_torch_in_a_step_get_advice(what):
    def path(f):
        if what == "drift":
            return SDEPath(f, 1.0, torch.zeros(2), GRID)
        return ControlledPath(brownian(initial=torch.zeros(2)), f)

    layer = torch.nn.Linear(3, 2)
    raises(r"shape \(2,\): mat1 .*must take states in R\^2", path(lambda t, z: layer(z)).rsample)
    raises(r"fails: .* positional argument.*arguments, \(t, z\)", path(lambda z: z).rsample)
    for wrong, name in ((None, "NoneType"), ((layer, layer), "tuple")):
        f = lambda t, z, wrong=wrong: wrong  # noqa: E731
        raises(rf"{what}\(t, z\) returned a {name}; it must return", path(f).rsample, TypeError)

    def broken(t, z):
        raise RuntimeError("the user's own")

    raises("^the user's own", path(broken).rsample, RuntimeError)


def test_a_path_of_another_batch():
    p = brownian(initial=torch.zeros(3, 1))
    raises(
        r"value has shape \(2, 6, 1\), a path of this distribution \(3, 6, 1\)",
        lambda: p.log_prob(torch.zeros(2, 6, 1)),
    )


def test_arrays_of_numpy_are_parameters():
    two = torch.ones(2)
    for arrays in (True, False):
        f = (lambda x: x.numpy()) if arrays else (lambda x: x)
        pyro.set_rng_seed(0)
        paths = [
            OrnsteinUhlenbeck(f(two), f(0 * two), f(2 * two), f(GRID)),
            SDEPath(lambda t, z: -z, f(2 * two), f(two), f(GRID)),
            SDEPath(lambda t, z: -z, f(2 * two)[0], f(two), f(GRID)),
        ]
        values = torch.stack([p.sample() for p in paths])
        expected = values if arrays else expected  # noqa: F821
        assert torch.equal(values, expected)


def test_nan_names_the_time():
    def late(t, z):
        return torch.where(t > 0.5, torch.full_like(z, math.nan), z)

    raises("drift.*non-finite value at t=0.6", SDEPath(late, lambda t, z: 1.0, 0.0, GRID).rsample)
    raises("control.*non-finite value at t=0.6", ControlledPath(brownian(), late).rsample)
    explode = SDEPath(lambda t, z: 1e200 * (1 + z**3), lambda t, z: 1.0, torch.zeros(4, 1), GRID)
    raises("drift.*non-finite value at t=", explode.rsample)
    bad = SDEPath(lambda t, z: z, lambda t, z: 0.5 - t, torch.zeros(1), GRID)
    raises("scale of SDEPath must be positive: found -0.04.* at t=0.6", bad.rsample)
    raises("scale of SDEPath must be positive", lambda: bad.log_prob(torch.zeros(6, 1)))


def test_arguments_of_the_wrong_kind():
    raises("drift must be a callable", lambda: SDEPath(1.0, 1.0, 0.0, GRID), TypeError)
    raises("control must be a callable", lambda: ControlledPath(brownian(), 1.0), TypeError)
    wrapped = dist.TransformedDistribution(brownian(), [ExpTransform()])
    raises("control the path inside", lambda: ControlledPath(wrapped, lambda t, z: z), TypeError)
    both = ControlledPath(brownian(), lambda t, z: z, contraction=True)
    raises(r"must return a pair \(u, log c\)", both.rsample)
    raises("path_estimator must be one of.*'lst'", lambda: TraceSDE_ELBO(path_estimator="lst"))
    raises("hidden must name", lambda: MLPControl(1, hidden=()))
    raises("times must be an increasing grid", lambda: MLPControl(1, times=(1.0, 1.0)))
    raises(
        "num_samples must be at least 2", lambda: gradient_variance(None, None, None, num_samples=1)
    )


def test_fixed_starts():
    p = brownian(initial=torch.ones(1))
    raises("starts 1.* away from initial.*Distribution", lambda: p.log_prob(torch.zeros(6, 1)))
    loose = brownian(initial=torch.ones(1), validate_args=False)
    assert loose.log_prob(torch.zeros(6, 1)) == -math.inf
    for start in (dist.Normal(0.0, 1.0), torch.zeros(1)):
        q = ControlledPath(brownian(), lambda t, z: z, initial=start)
        raises("starts at a fixed point.*KL is infinite", functools.partial(elbo_of, q, p))


def elbo_of(q, p, **options):
    elbo = TraceSDE_ELBO(max_plate_nesting=0, **options)
    return elbo.loss(lambda: pyro.sample("z", p), lambda: pyro.sample("z", q))


@pytest.mark.parametrize("estimator", ["kl", "full", "stl"])
def test_different_diffusion(estimator):
    p = brownian()
    q = SDEPath(lambda t, z: -z, lambda t, z: 1.01, torch.zeros(1), GRID)
    raises(
        "diffusion differs.*by up to 0.01.*step 0.*infinite.*ControlledPath",
        lambda: elbo_of(q, p, path_estimator=estimator),
    )
    raises("diffusion differs", lambda: girsanov(q, p, q.sample()))


def test_pairs_that_do_not_match():
    q = ControlledPath(brownian(2 * GRID), lambda t, z: z)
    raises("different time grids", lambda: elbo_of(q, brownian()))
    up = functools.partial(dist.TransformedDistribution, transforms=[ExpTransform()])
    raises(
        "have different transforms", lambda: girsanov(up(brownian()), brownian(), torch.ones(6, 1))
    )
    raises("must both be path", lambda: girsanov(dist.Normal(0, 1), brownian(), GRID), TypeError)
    p = brownian().expand((2,))
    raises("different masks", lambda: girsanov(p, p.mask(torch.tensor([True, False])), p.sample()))
    with pytest.raises(ValueError, match="different values of scale in model"):
        TraceSDE_ELBO(max_plate_nesting=0).loss(
            pyro.poutine.scale(lambda: pyro.sample("z", brownian()), 0.5),
            lambda: pyro.sample("z", brownian()),
        )
    mix = torch.distributions.transforms.SoftmaxTransform()
    bad = lambda: pyro.sample("z", dist.TransformedDistribution(brownian(), [mix]))  # noqa: E731
    raises("only be transformed elementwise", lambda: AutoSDE(bad).setup())


def model():
    z = pyro.sample("z", brownian())
    pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=torch.tensor(0.5))


def guide():
    gain = pyro.param("gain", torch.tensor(0.5))
    pyro.sample("z", ControlledPath(brownian(), lambda t, z: -gain * z))


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(
    "elbo", [TraceEnum_ELBO, JitTrace_ELBO, JitTraceMeanField_ELBO], ids=lambda e: e.__name__
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_elbos_that_would_ignore_the_estimators(elbo, auto):
    q = AutoSDE(model) if auto else guide
    # Of messengers in TraceEnum_ELBO, Pyro itself says so before we can.
    by_pyro = auto and elbo is TraceEnum_ELBO
    raises(
        "does not support GuideMessenger" if by_pyro else "Use TraceSDE_ELBO",
        lambda: elbo(max_plate_nesting=0).loss_and_grads(model, q),
        NotImplementedError,
    )


def test_mixing_with_an_unsupported_elbo():
    from pyro_sde.infer.elbo import _PathELBO

    raises("build on Trace_ELBO", lambda: type("E", (_PathELBO, TraceEnum_ELBO), {}), TypeError)
    raises("build on Trace_ELBO", lambda: type("E", (_PathELBO, JitTrace_ELBO), {}), TypeError)
    assert type("E", (_PathELBO, Trace_ELBO), {})().path_estimator == "stl"


def test_nothing_is_lost_when_a_control_fails():
    """An error in the middle of training leaves guide and store as they were."""
    broken = False

    def control(t, z):
        return torch.full_like(z, math.nan) if broken else -gain * z

    gain = torch.nn.Parameter(torch.ones(()))
    q = AutoSDE(model, control=control)
    elbo = TraceSDE_ELBO(max_plate_nesting=0)
    elbo.loss(model, q)
    broken = True
    raises("non-finite value at t=0", lambda: elbo.loss(model, q))
    broken = False
    assert math.isfinite(elbo.loss(model, q))


def test_time_grid_arguments():
    raises("start must be below end", lambda: time_grid(1.0, 1.0, dt=0.1))
    raises("dt must be positive: found 0", lambda: time_grid(0.0, 1.0, dt=0.0))
    raises(
        r"2 times outside \[0, 1\], the first -0.5",
        lambda: time_grid(0, 1, dt=0.1, include=[-0.5, 2.0]),
    )
    raises("include must be finite", lambda: time_grid(0, 1, dt=0.1, include=[math.nan]))


@pytest.mark.parametrize("train", ["svi", "setup"])
@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ([0.5, 0.1], TypeError, r"site 'y' is observed at a list: pass a tensor"),
        (torch.tensor([0.5, math.nan]), ValueError, r"site 'y'.*1 values that are NaN.*fill_miss"),
        (torch.zeros(2, 1), ValueError, r"site 'y'.*shape \(2, 1\).*expanded to more numbers"),
    ],
)
def test_data_that_a_plain_loop_would_take(data, error, match, train):
    grid = torch.linspace(0.0, 1.0, 5)

    def model(y):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid))
        pyro.sample("y", dist.Normal(z[..., [2, 4], 0], 0.1).to_event(1), obs=y)

    guide = AutoSDE(model)
    with pytest.raises(error, match=match):
        if train == "setup":
            guide.setup(data)
        else:
            SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceSDE_ELBO()).step(data)
