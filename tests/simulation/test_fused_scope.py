"""Which paths are one operation, which go by steps, and which are refused."""

import itertools

import pytest
import torch
from torch import nn

from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck, SDEPath
from pyro_sde.guides.controls import DAMPING
from pyro_sde.nn import NeuralDiffusion, NeuralDrift
from pyro_sde.simulation import Fused, Loop

from .fused_cases import CONTRACTIONS, GRID, control_of, ou, simulator_of


def test_what_is_not_one_operation_goes_by_steps():
    control, contracting = control_of(2), control_of(2, contraction=True)
    _, prior = ou(2)

    def kind(*args):
        q = ControlledPath(prior(), *args)
        q.rsample()
        return simulator_of(q)

    log_c = lambda t, z: -z.square()  # noqa: E731
    assert kind(control, None) is kind(contracting, None, True) is Fused
    assert kind(control, None, log_c) is Loop


class Bent(NeuralDrift):
    def forward(self, t, z):
        return super().forward(t, z) - z**3


class Noisier(NeuralDiffusion):
    def forward(self, t, z):
        return super().forward(t, z) + z.abs()


class OnAGridOfItsOwn(nn.Linear):
    def forward(self, t, z):
        return super().forward(z)

    def on_grid(self, t):
        return "something else"


def hooked(module):
    module.register_forward_hook(lambda module, args, out: 2 * out)
    return module


@pytest.mark.parametrize(
    "drift, diffusion",
    [
        (lambda t, z: -z, NeuralDiffusion(2, 0)),
        (NeuralDrift(2, (4,)), NeuralDiffusion(2, 3)),
        (NeuralDrift(2, (4,)), lambda t, z: 0.5),
        (NeuralDrift(2, (4,)), Noisier(2, 0)),
        (NeuralDrift(2, (4,)), hooked(NeuralDiffusion(2, 0))),
        (NeuralDrift(2, (4,), activation=nn.ReLU), 0.5),
        (NeuralDrift(2, (4,), activation=lambda: nn.Softplus(beta=2)), 0.5),
        (Bent(2, (4,)), 0.5),
        (OnAGridOfItsOwn(2, 2), 0.5),
        (hooked(NeuralDrift(2, (4,))), 0.5),
    ],
)
def test_a_prior_that_is_more_than_layers_goes_by_steps(drift, diffusion):
    drift, diffusion = (f.double() if isinstance(f, nn.Module) else f for f in (drift, diffusion))
    q = ControlledPath(SDEPath(drift, diffusion, torch.zeros(2), GRID), control_of(2))
    q.rsample()
    assert simulator_of(q) is Loop


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_inside_of_torch_func(contraction):
    """A custom operation has no rule for forward derivatives."""
    control, contracts = control_of(2, contraction=contraction), contraction is not None

    def end(start):
        p = OrnsteinUhlenbeck(1.0, 0.0, 0.7, GRID, start, validate_args=False)
        torch.manual_seed(0)
        q = ControlledPath(p, control, contraction=contracts, validate_args=False)
        return q.rsample()[-1].sum()

    start, h = torch.tensor([0.3, -0.2]), torch.tensor([1e-6, 0.0])
    difference = (end(start + h) - end(start - h)) / 2e-6
    found = torch.func.grad(end)(start)[0]
    torch.testing.assert_close(found, difference, rtol=1e-6, atol=1e-6)
    rows = torch.stack([start, start + 1])
    many = torch.func.vmap(torch.func.grad(end), randomness="same")(rows)
    torch.testing.assert_close(many[0, 0], found, rtol=1e-10, atol=1e-10)


def test_refusals():
    _, prior = ou(2)
    with pytest.raises(ValueError, match=r"must return a pair \(u, log c\), found Tensor"):
        ControlledPath(prior(), control_of(2), contraction=True).rsample()
    with pytest.raises(ValueError, match=r"control.* returned shape"):
        net = control_of(2)
        net.last = torch.nn.Linear(6, 3)
        ControlledPath(prior(), net).rsample()
    with pytest.raises(ValueError, match=r"drift.* returned shape"):
        drift = NeuralDrift(2, (4,)).double()
        drift.net[-1] = nn.Linear(4, 1).double()
        ControlledPath(SDEPath(drift, 0.5, torch.zeros(2), GRID), control_of(2)).rsample()
    with pytest.raises(ValueError, match=r"the drift of ControlledPath .* at t=0,"):
        drift = NeuralDrift(2, (4,)).double()
        with torch.no_grad():
            drift.net[-1].bias[1] = torch.nan
        ControlledPath(SDEPath(drift, 0.5, torch.zeros(2), GRID), control_of(2)).rsample()
    broken = control_of(2)
    with torch.no_grad():
        broken.last.bias[1] = torch.nan
    with pytest.raises(ValueError, match=r"the control of ControlledPath .* at t=0,"):
        ControlledPath(prior(), broken).rsample()
    for contraction, memory in itertools.product(CONTRACTIONS[1:], ("graph", "recompute")):
        shrinking = control_of(2, contraction=contraction)
        with torch.no_grad():
            shrinking.last.bias[2:4] = -2000.0 / DAMPING
        with pytest.raises(ValueError, match="scale of ControlledPath must be positive: found 0"):
            ControlledPath(prior(), shrinking, contraction=True, memory=memory).rsample()
