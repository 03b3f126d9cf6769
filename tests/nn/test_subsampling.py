"""The plate scales the likelihood; the KL of the weights counts once."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule

from pyro_sde import TraceMeanFieldSDE_ELBO, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock

from ..cases import assert_same, loss_and_gradients
from ..guides.models import shaken
from .nets import Chain, X, Y, mlp, run_with

PAIRS = [torch.tensor(pair) for pair in itertools.combinations(range(4), 2)]


def build(initial="point"):
    model = Chain(
        a=SDEBlock(mlp(), steps=3, initial=initial), b=SDEBlock(mlp(), steps=4, initial=initial)
    )
    return model, shaken(model, X, Y)


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("initial", ["point", "normal"])
@pytest.mark.parametrize("estimator", ["stl", "full", "kl"])
def test_mini_batches_are_unbiased_by_enumeration(estimator, initial, particles):
    """The mean over all six pairs is the loss and the gradient of all data, on the same noise."""
    model, guide = build(initial)
    for kind in (TraceSDE_ELBO, TraceMeanFieldSDE_ELBO):
        elbo = kind(
            path_estimator=estimator,
            num_particles=particles,
            vectorize_particles=particles > 1,
            max_plate_nesting=1,
        )
        whole = loss_and_gradients(elbo, model, guide, X, Y)
        parts = [loss_and_gradients(elbo, model, guide, X, Y, pair) for pair in PAIRS]
        assert max(p[0] for p in parts) - min(p[0] for p in parts) > 1
        mean = {k: sum(p[1][k] for p in parts) / len(parts) for k in whole[1]}
        assert_same(whole, (sum(p[0] for p in parts) / len(parts), mean))


@pytest.mark.parametrize("pair", [0, 5])
def test_the_loss_is_the_kl_once_and_the_likelihood_twice(pair):
    model, guide = build()
    index = PAIRS[pair]
    elbo = TraceSDE_ELBO(path_estimator="kl", max_plate_nesting=1)
    model_trace, guide_trace = next(elbo._get_traces(model, guide, (X, Y, index), {}))
    loss = (guide_trace.log_prob_sum() - model_trace.log_prob_sum()).item()
    kls = [guide_trace.nodes[name]["path_divergence"].item() for name in ("a.w", "b.w")]
    draws = {name: guide_trace.nodes[name]["value"].detach() for name in ("a.w", "b.w")}
    h = run_with(model, draws, X[index], Y[index])
    assert min(kls) > 0.1 and guide_trace.nodes["a.w"]["scale"] == 1.0
    expected = sum(kls) - 2 * dist.Normal(h, 0.3).log_prob(Y[index]).sum().item()
    assert abs(loss - expected) < 1e-10 * abs(expected)


class Loader(PyroModule):
    """The usual mini-batch: data cut by a loader, a plate of the size of the whole set."""

    def __init__(self):
        super().__init__()
        self.block = SDEBlock(mlp(), steps=3)

    def forward(self, x, y, size):
        h = self.block(x)
        with pyro.plate("data", size, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(h, 0.3).to_event(1), obs=y)


def test_a_loader_s_mini_batches():
    """The loss is linear in the size of the whole set, and at size 0 it is the KL."""
    model = Loader()
    guide = shaken(model, X, Y, 4)
    elbo = TraceSDE_ELBO(path_estimator="kl", max_plate_nesting=1)
    losses = [loss_and_gradients(elbo, model, guide, X, Y, size)[0] for size in (4, 8, 40)]
    pyro.set_rng_seed(7)  # as the losses were drawn
    _, guide_trace = next(elbo._get_traces(model, guide, (X, Y, 4), {}))
    kl = guide_trace.nodes["block.w"]["path_divergence"].item()
    assert kl > 0.1 and losses[1] - losses[0] > 1
    assert 2 * losses[0] - losses[1] == pytest.approx(kl, rel=1e-10)
    assert losses[2] - losses[0] == pytest.approx(9 * (losses[1] - losses[0]), rel=1e-10)
