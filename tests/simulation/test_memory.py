"""Paths of which only states and noise are kept: every estimator, value and gradient as before."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.infer.girsanov import ESTIMATORS
from pyro_sde.simulation import Checkpointed, checkpointed

from ..cases import PROCESSES, TIMES, Net, assert_same, loss_and_gradients
from ..infer.problems import LAYOUTS, Problem


class Remembering(Problem):
    """A :class:`Problem` whose processes keep what ``memory`` says."""

    def __init__(self, *args, memory):
        super().__init__(*args)
        make = self.make

        def remembering():
            path = make()
            path.memory = memory
            return path

        self.make = remembering


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("process", PROCESSES)
def test_a_pair_of_paths(process, layout, contraction):
    """q and p built apart, so that it is their transitions that are compared."""
    torch.manual_seed(0)
    lean = Remembering(process, "cauchy", layout, contraction, memory="recompute")
    plain = Remembering(process, "cauchy", layout, contraction, memory="graph")
    plain.net = lean.net
    for estimator in ESTIMATORS:
        elbo = TraceSDE_ELBO(path_estimator=estimator, **lean.options)
        a = loss_and_gradients(elbo, lean.model, lean.guide)
        b = loss_and_gradients(elbo, plain.model, plain.guide)
        assert_same(a, b, 1e-12)


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("process", PROCESSES)
def test_the_autoguide(process, contraction):
    """q is p with a control, whose parts come with the draw."""
    results = []
    for memory in ("recompute", "graph"):
        torch.manual_seed(0)
        pyro.clear_param_store()
        problem = Remembering(process, "poisson", "plain", memory=memory)
        guide = AutoSDE(problem.model, contraction=contraction)
        guide.setup()
        for p in guide.parameters():  # away from zero, where many terms vanish
            torch.nn.init.normal_(p, 0.0, 0.3)
        for estimator in ESTIMATORS:
            elbo = TraceSDE_ELBO(path_estimator=estimator, max_plate_nesting=0)
            results.append(loss_and_gradients(elbo, problem.model, guide))
        simulator = guide.trace.nodes["z"]["fn"]._record.last.simulator
        assert isinstance(simulator, Checkpointed) == (memory == "recompute")
    for a, b in zip(results[:3], results[3:], strict=True):
        assert_same(a, b, 1e-12)


def test_another_discretisation_of_the_same_diffusion():
    """The scales differ, the diffusion does not: the ratio of the scales is counted."""

    def losses(memory, estimator, wrong=1.0):
        gain = torch.tensor(0.7, requires_grad=True)

        def model():
            pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 0.5, TIMES, torch.ones(1), memory))

        def guide():
            drift = lambda t, z: -gain * z  # noqa: E731
            pyro.sample("z", SDEPath(drift, lambda t, z: 0.5 * wrong, torch.ones(1), TIMES, memory))

        pyro.set_rng_seed(3)
        loss = TraceSDE_ELBO(path_estimator=estimator).differentiable_loss(model, guide)
        return loss.item(), torch.autograd.grad(loss, gain)[0].item()

    for estimator in ESTIMATORS:
        assert losses("recompute", estimator) == pytest.approx(
            losses("graph", estimator), abs=1e-12
        )
        with pytest.raises(ValueError, match="the guide's diffusion differs"):
            losses("recompute", estimator, wrong=1.01)


def kept(memory, steps, estimator):
    """Bytes in tensors that the loss keeps alive, from a long path with a wide control."""
    torch.manual_seed(0)
    net, times = Net(2), torch.linspace(0, 1, steps + 1)
    net.layers[0], net.layers[2] = torch.nn.Linear(3, 500), torch.nn.Linear(500, 2)
    saved = []

    def pack(x):
        saved.append(x.untyped_storage())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        prior = OrnsteinUhlenbeck(1.0, 0.0, 1.0, times, torch.zeros(2), memory=memory)
        q = ControlledPath(prior, net)

        def model():
            pyro.sample("z", prior.expand([4]).to_event(1))

        def guide():
            pyro.sample("z", q.expand([4]).to_event(1))

        loss = TraceSDE_ELBO(path_estimator=estimator).differentiable_loss(model, guide)
    storages = {s.data_ptr(): s.nbytes() for s in saved}
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert loss.requires_grad
    return sum(n for ptr, n in storages.items() if ptr not in parameters)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_of_the_control_is_kept(estimator):
    """500 hidden units of 4 paths a step in the graph; a few states and coefficients without."""
    more = kept("graph", 200, estimator) - kept("graph", 100, estimator)
    less = kept("recompute", 200, estimator) - kept("recompute", 100, estimator)
    assert more > 100 * 4 * 500 * 8
    # States, noise, their gradients' share and a time a step: some tens of numbers for 4 x 2.
    assert less < 100 * 4 * 2 * 8 * 10


def test_memory_goes_from_prior_to_posterior():
    prior = BrownianMotion(1.0, TIMES, torch.zeros(1), memory="recompute")
    assert ControlledPath(prior, lambda t, z: z).memory == "recompute"
    assert ControlledPath(prior, lambda t, z: z, memory="graph").memory == "graph"
    assert prior.expand([3]).memory == "recompute"
    assert GeometricBrownianMotion(1.0, TIMES, memory="recompute").base_dist.memory == "recompute"


def test_draws_are_the_same():
    for make in PROCESSES.values():
        graph, lean = make(), make()
        lean.memory = "recompute"
        torch.manual_seed(1)
        a = graph.rsample((3,))
        torch.manual_seed(1)
        b = lean.rsample((3,))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.manual_seed(1)
            torch.testing.assert_close(lean.rsample((3,)), b, rtol=0, atol=0)


def test_errors_name_time_and_part():
    bad = torch.tensor(float("nan"))
    late = lambda t, z: torch.where(t > 0.2, bad, z)  # noqa: E731
    prior = OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES, torch.zeros(1), memory="recompute")
    with pytest.raises(ValueError, match=r"the control of ControlledPath .* at t=0.25"):
        ControlledPath(prior, late, validate_args=True).rsample()
    with pytest.raises(ValueError, match=r"the drift of SDEPath .* at t=0.25"):
        path = SDEPath(late, lambda t, z: 1.0, torch.zeros(1), TIMES, "recompute", True)
        path.rsample()
    negative = lambda t, z: torch.where(t > 0.2, -1.0, 1.0)  # noqa: E731
    with pytest.raises(ValueError, match=r"must be positive: found .* at t=0.25"):
        SDEPath(lambda t, z: z, negative, torch.zeros(1), TIMES, "recompute", True).rsample()
    with pytest.raises(ValueError, match="memory must be one of graph, recompute: found 'rev"):
        OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES, memory="reversible")


def test_a_transformed_path():
    """The cached transform gives back the drawn path, and with it its parts."""
    prior = OrnsteinUhlenbeck(1.0, 0.0, 1.0, TIMES, torch.zeros(1), memory="recompute")
    results = []
    for memory in ("recompute", "graph"):
        prior.memory = memory
        torch.manual_seed(0)
        pyro.clear_param_store()

        def model():
            x = pyro.sample(
                "x", dist.TransformedDistribution(prior, [dist.transforms.ExpTransform()])
            )
            pyro.sample("y", dist.Normal(x[..., -1, 0], 0.1), obs=torch.tensor(2.0))

        guide = AutoSDE(model)
        guide.setup()
        for p in guide.parameters():
            torch.nn.init.normal_(p, 0.0, 0.3)
        results.append(loss_and_gradients(TraceSDE_ELBO(), model, guide))
    assert_same(*results, 1e-12)


@pytest.mark.parametrize("drift", [lambda s: s + 1, lambda s: s.square(), torch.sin])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_parameter_computed_from_another(drift, is_leaf):
    """A step that closes over both: the second is no way around for the gradient of the first."""
    slopes = []
    for memory in ("recompute", "graph"):
        s = torch.tensor([0.7], requires_grad=True)
        scale = s if is_leaf else 1.5 * s
        torch.manual_seed(0)
        path = BrownianMotion(scale, TIMES, torch.zeros(1), drift(scale), memory=memory)
        slopes.append(torch.autograd.grad(path.rsample().square().sum(), s)[0])
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("contraction", [None, "diagonal", "full"])
def test_the_terms_of_many_steps_at_once(contraction, monkeypatch):
    """They are those of each step by itself, and of two or three at once."""
    control = MLPControl(2, (4,), times=TIMES, contraction=contraction).double()
    for p in control.parameters():
        torch.nn.init.normal_(p, std=0.5)
    prior = OrnsteinUhlenbeck(1.0, 0.0, 0.5, TIMES, torch.ones(2))
    q = ControlledPath(prior, control, contraction=contraction is not None, memory="recompute")
    noise, found = torch.randn(len(TIMES) - 1, 3, 2), []
    for block in (1, 13, 2**18):
        monkeypatch.setattr(checkpointed, "BLOCK", block)
        ratio = q.draw(torch.ones(3, 2), noise).ratio
        found.append([ratio.kl_by_step(), ratio.martingale(), ratio.stopped()])
    for terms in found[1:]:
        for a, b in zip(found[0], terms, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert found[0][0].shape == (len(TIMES) - 1, 3)
