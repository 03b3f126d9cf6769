"""Drift and diffusion that are learned."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO
from pyro_sde.distributions import SDEPath
from pyro_sde.nn import NeuralDiffusion, NeuralDrift


def test_drift():
    drift = NeuralDrift(3, (8, 8))
    z = torch.randn(4, 5, 3)
    assert drift(torch.zeros(1), z).shape == z.shape
    assert torch.equal(drift(torch.zeros(1), z), drift(torch.ones(1), z))
    timed = NeuralDrift(3, (8,), time=True)
    t = torch.rand(4, 1, 1)
    assert (timed(t, z) - timed(t + 1, z)).abs().min() > 0
    torch.testing.assert_close(timed(t, z)[2], timed(t[2], z[2]))
    with pytest.raises(ValueError, match="at least one width"):
        NeuralDrift(3, ())


@pytest.mark.parametrize("hidden", [0, 8])
def test_diffusion_is_positive_and_of_each_coordinate_alone(hidden):
    g = NeuralDiffusion(3, hidden, scale=0.7, floor=0.01)
    z = torch.randn(6, 3)
    torch.testing.assert_close(g(torch.zeros(1), z).expand(6, 3), torch.full((6, 3), 0.7))
    with torch.no_grad():
        for p in g.parameters():
            p.add_(3 * torch.randn_like(p))
    assert (g(torch.zeros(1), 1e3 * z) > 0.01).all()
    if hidden:
        jacobian = torch.autograd.functional.jacobian(lambda x: g(torch.zeros(1), x), z[0])
        assert (jacobian.diagonal() != 0).any()
        assert (jacobian - jacobian.diagonal().diag() == 0).all()
    with pytest.raises(ValueError, match=r"floor the smaller: found 0\.5, 0\.1"):
        NeuralDiffusion(1, scale=0.1, floor=0.5)


NOISE = 0.2


class Prior(PyroModule):
    def __init__(self):
        super().__init__()
        self.drift, self.diffusion = NeuralDrift(1, (4,)), NeuralDiffusion(1, 0)

    def forward(self, times, values):
        grid = torch.cat([torch.zeros(1), times[0]])
        with pyro.plate("series", len(times)):
            z = pyro.sample("z", SDEPath(self.drift, self.diffusion, torch.zeros(1), grid))
            pyro.sample("y", dist.Normal(z[..., 1:, :], NOISE).to_event(2), obs=values)


def test_a_prior_is_learned_with_its_guide():
    """Brownian motion of diffusion 1.5 under noise: what model and guide learn together is where
    the exact evidence is largest, and a drift with it that hardly pushes."""
    times = torch.linspace(0.25, 1, 4)
    z = (1.5 * 0.5 * torch.randn(200, 4)).cumsum(-1)
    values = (z + NOISE * torch.randn(200, 4)).unsqueeze(-1)
    scales = torch.linspace(1.0, 2.0, 201).view(-1, 1, 1)
    cov = scales**2 * torch.minimum(times.unsqueeze(-1), times) + NOISE**2 * torch.eye(4)
    evidence = dist.MultivariateNormal(torch.zeros(4), cov.unsqueeze(1)).log_prob(values[..., 0])
    best = scales[evidence.sum(-1).argmax()].item()

    model, args = Prior(), (times.expand(200, 4), values)
    guide = AutoSDE(model, encoder=GRUEncoder(1, 16, 8), contraction=True)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.99}), TraceSDE_ELBO())
    for _ in range(250):
        svi.step(*args)
    found = model.diffusion(torch.zeros(1), torch.zeros(1)).item()
    assert found == pytest.approx(best, abs=0.1)
    gap = (evidence.sum(-1).max() + svi.evaluate_loss(*args)) / values.numel()
    assert gap < 0.05  # a drift may win a little over Brownian motion
