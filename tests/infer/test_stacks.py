"""The ELBOs of a Stack: in plates, with particles, from a start that is partly fixed."""

from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_sde import TraceSDE_ELBO
from pyro_sde.distributions import Stack

from ..cases import assert_same, loss_and_gradients
from ..distributions.test_stack import RATES, STACKS, correlated, double_well, ou
from ..guides.models import shaken


def problem(parts, *sizes):
    """A model of a stack in plates of the given sizes, the last innermost."""

    def model():
        stack = Stack(*parts())
        with ExitStack() as plates:
            for i, n in enumerate(reversed(sizes)):
                plates.enter_context(pyro.plate(f"p{i}", n, dim=-1 - i))
            z = pyro.sample("z", stack)
            a = sum(x.sum(-1) for x in stack.split(z))
            pyro.sample("y", dist.Normal(a[..., -1], 0.3), obs=torch.ones(sizes))

    return model


LAYOUTS = {
    "partly fixed": (STACKS["OU, Brownian"], ()),
    "nested": (STACKS["nested"], ()),
    "only one has a batch": (STACKS["different batches"], (3,)),
    "broadcast": (STACKS["batches that broadcast"], (2, 3)),
    "correlated": (lambda: [correlated(), ou(RATES)], (3,)),
    "recompute": (lambda: [ou(memory="recompute"), double_well()], (2,)),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@pytest.mark.parametrize("particles", [1, 4])
def test_full_is_stock_trace_elbo(layout, particles):
    parts, sizes = LAYOUTS[layout]
    model = problem(parts, *sizes)
    guide = shaken(model)
    options = {"max_plate_nesting": len(sizes), "num_particles": particles}
    options["vectorize_particles"] = particles > 1
    full = TraceSDE_ELBO(path_estimator="full", **options)
    ours = loss_and_gradients(full, model, guide)
    assert sum(bool(g.abs().max() > 0) for g in ours[1].values()) > 5
    assert_same(ours, loss_and_gradients(Trace_ELBO(**options), model, guide))


@pytest.mark.parametrize("layout", ["partly fixed", "correlated"])
def test_the_estimators_have_one_mean_gradient(layout):
    parts, sizes = LAYOUTS[layout]
    model = problem(parts, *sizes)
    guide, means = shaken(model), {}
    weight = guide.paths.z.control.last.bias
    for estimator in ("kl", "full", "stl"):
        elbo = TraceSDE_ELBO(
            path_estimator=estimator,
            num_particles=500,
            vectorize_particles=True,
            max_plate_nesting=len(sizes),
        )
        draws = [
            torch.autograd.grad(elbo.differentiable_loss(model, guide), weight)[0]
            for _ in range(20)
        ]
        means[estimator] = torch.stack(draws).mean(0), torch.stack(draws).std(0) / 20**0.5
    for estimator in ("full", "stl"):
        (a, da), (b, db) = means["kl"], means[estimator]
        # Errors of 20 draws are Student's, and there are up to 9 entries: 5.5 is one in 1000.
        assert ((a - b).abs() < 5.5 * (da**2 + db**2).sqrt()).all()
