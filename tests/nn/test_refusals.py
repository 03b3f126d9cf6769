"""What a block refuses, and that it says why."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import ConvField, SDEBlock

from .nets import Chain, TimeField, X, mlp

P = 3


def runs(block):
    """The block as it is, and with particles."""
    return block, pyro.plate("num_particles_vectorized", P, dim=-2)(block)


@pytest.mark.parametrize("field", [mlp, TimeField])
def test_wrong_channels(field):
    for run in runs(SDEBlock(field(3), steps=2)):
        with pytest.raises(ValueError, match=r"fails on h of shape \(4, 2\), 0 channels of aug"):
            run(X)
    for run in runs(SDEBlock(field(3), steps=2, augment=2)):
        with pytest.raises(ValueError, match=r"fails on h of shape \(4, 4\), 2 channels of aug"):
            run(X)
    for run in runs(SDEBlock(ConvField(3, 2), steps=2)):
        with pytest.raises(ValueError, match=r"fails on h of shape \(4, 2, 5, 5\)"):
            run(torch.randn(4, 2, 5, 5))


def test_a_field_that_changes_the_shape():
    for run in runs(SDEBlock(nn.Linear(2, 3), steps=2)):
        with pytest.raises(ValueError, match=r"keep the shape.*\(4, 3\) from \(4, 2\)"):
            run(X)
    # One that broadcasts would go unnoticed otherwise.
    for run in runs(SDEBlock(nn.Linear(2, 1), steps=2)):
        with pytest.raises(ValueError, match=r"keep the shape.*\(4, 1\) from \(4, 2\)"):
            run(X)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2),
        nn.BatchNorm2d(2).eval(),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.InstanceNorm2d(2, track_running_stats=True),
    ],
)
def test_batch_norm(norm):
    for field, where in ((nn.Sequential(nn.Linear(2, 2), norm), r"\(1\)"), (norm, "field itself")):
        with pytest.raises(ValueError, match=rf"{type(norm).__name__} \(?{where}.*Lipschitz"):
            SDEBlock(field)


class Counting(nn.Module):
    """Writes to its buffer in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h):
        self.calls += 1
        return self.layer(h)


class Averaging(Counting):
    """Puts another tensor in the place of its buffer."""

    def forward(self, h):
        self.calls = 0.9 * self.calls + 0.1
        return self.layer(h)


@pytest.mark.parametrize("prepare", ["fresh", "cast", "again"])
@pytest.mark.parametrize("field", [Counting, Averaging])
def test_a_field_that_writes_to_its_buffers(field, prepare):
    block = SDEBlock(field(), steps=2)
    x = X
    if prepare == "cast":
        block, x = block.float(), X.float()
    for run in runs(block):
        for _ in range(2 if prepare == "again" else 1):
            with pytest.raises(ValueError, match="changed one of its buffers"):
                run(x)


def test_inputs():
    block, images = SDEBlock(mlp(), steps=2), SDEBlock(ConvField(2, 2), steps=2)
    for empty in (X[:0], torch.zeros(4, 0)):
        with pytest.raises(ValueError, match="h is empty, of shape"):
            block(empty)
    with pytest.raises(ValueError, match=r"batch dimension before the 1 .*\(2,\).*unsqueeze\(0\)"):
        block(X[0])
    with pytest.raises(ValueError, match=r"batch dimension before the 3 of one input"):
        images(torch.randn(2, 5, 5))
    for wrong, found in ((X.long(), "torch.int64"), (X > 0, "torch.bool"), ([[1.0, 2.0]], "list")):
        with pytest.raises(TypeError, match=f"floating point numbers, found {found}"):
            block(wrong)
    with pytest.raises(ValueError, match="field fails on h"):
        block(X.float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("validation", [True, False])
def test_weights_that_are_not_finite(validation, bad):
    """With Pyro's validation the draw is refused, without it the block looks for itself."""
    model = Chain(a=SDEBlock(mlp(), steps=4))
    guide = AutoSDE(model).setup(X, X)
    with torch.no_grad():
        model.a.start[3] = bad
    messages = {True: "non-finite state at t=0", False: "'a.w' are not finite at t=0"}
    with pyro.validation_enabled(validation):
        for run in (model, lambda x: guide(x, X)):
            with pytest.raises(ValueError, match=messages[validation]):
                run(X)
        vectorised = TraceSDE_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
        with pytest.raises(ValueError, match=messages[validation]):
            vectorised.loss(model, guide, X, X)


def test_weights_that_diverge_later():
    block = SDEBlock(mlp(), steps=4)
    w = torch.zeros(5, block.dim)
    w[3:, 7] = float("inf")
    for value in (w, torch.stack([torch.zeros_like(w), w]).unsqueeze(1)):
        with pytest.raises(ValueError, match=r"site 'w' are not finite at t=0.75.*checkpoint"):
            poutine.condition(block, data={"w": value})(X)


class Inside(PyroModule):
    """Calls its block inside of the plate."""

    def __init__(self):
        super().__init__()
        self.block = SDEBlock(mlp(), steps=2)

    def forward(self, x):
        with pyro.plate("data", len(x), subsample_size=2) as i:
            h = self.block(x[i])
            return pyro.sample("y", dist.Normal(h, 1.0).to_event(1))


def test_a_block_inside_of_the_data_plate():
    message = r"'block.w' is inside the plate 'data'.*Call the block before"
    for run in runs(Inside()):
        with pytest.raises(ValueError, match=message):
            run(X)
    with pytest.raises(ValueError, match=message):
        AutoSDE(Inside()).setup(X)
    with pytest.raises(ValueError, match=message), pyro.plate("outer", 5, dim=-2):
        Inside()(X)


def test_arguments():
    for options, message in (
        ({"initial": "zero"}, "initial must be .*found 'zero'"),
        ({"method": "rk5"}, r"one of \['euler', .*\]: found 'rk5'"),
        ({"memory": "none"}, "memory must be one of graph, recompute, reversible: found 'none'"),
        ({"memory": "reversible"}, 'found .euler.; use method="reversible_heun"'),
        ({"steps": 0}, "steps must be an integer of at least 1: found 0"),
        ({"steps": 2.0}, "steps must be an integer of at least 1: found 2.0"),
        ({"augment": -1}, "augment must be an integer of at least 0: found -1"),
        ({"augment": 1.0}, "augment must be an integer of at least 0: found 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            SDEBlock(mlp(), **options)
    for scale in (0.0, -0.1, torch.zeros(17)):
        with pytest.raises(ValueError, match="scale must be positive"):
            SDEBlock(mlp(), scale=scale)(X)
    with pytest.raises(ValueError, match="must broadcast"):
        SDEBlock(mlp(), scale=torch.ones(5))(X)


def test_a_learned_scale_that_has_gone_negative():
    with pytest.raises(ValueError, match="scale must be positive: found -1; a learned scale needs"):
        SDEBlock(mlp(), scale=nn.Parameter(torch.tensor(-1.0)))(X)


class ThreeArguments(nn.Linear):
    def forward(self, t, h, context):
        return super().forward(h)


class NoArguments(nn.Linear):
    def forward(self, *args):
        return super().forward(args[-1])


def test_fields():
    frozen = mlp().requires_grad_(False)
    for empty in (nn.Tanh(), nn.Sequential(), frozen):
        with pytest.raises(ValueError, match="no parameters that need a gradient"):
            SDEBlock(empty)
    for thing, found in ((torch.tanh, "builtin_function"), (nn.Linear, "type"), (None, "None")):
        with pytest.raises(TypeError, match=f"field must be an nn.Module, found {found}"):
            SDEBlock(thing)
    with pytest.raises(TypeError, match=r"3 required arguments, \['t', 'h', 'context'\]"):
        SDEBlock(ThreeArguments(2, 2))
    with pytest.raises(TypeError, match=r"0 required arguments, \[\]"):
        SDEBlock(NoArguments(2, 2))
