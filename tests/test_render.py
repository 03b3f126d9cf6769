"""pyro.render_model sees what a path depends on, and what depends on it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.inspect import get_model_relations

from pyro_sde import AutoSDE
from pyro_sde.distributions import (
    BrownianMotion,
    GeometricBrownianMotion,
    ODEPath,
    OrnsteinUhlenbeck,
    PoissonProcess,
    SDEPath,
)
from pyro_sde.nn import SDEBlock

from .guides.models import SERIES, Y, series, simple
from .nn.nets import mlp

GRID = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)


def start():
    return dist.Normal(torch.zeros(1), 1.0).to_event(1)


def latent(name):
    return pyro.sample(name, dist.LogNormal(0.0, 0.1)).unsqueeze(-1)


PATHS = {
    "ou": (lambda: OrnsteinUhlenbeck(latent("a"), 0.0, latent("b"), GRID), "OrnsteinUhlenbeck"),
    "brownian": (
        lambda: BrownianMotion(latent("a"), GRID, start(), drift=latent("b")),
        "BrownianMotion",
    ),
    "geometric": (
        lambda: GeometricBrownianMotion(latent("a"), GRID, 1.0, drift=latent("b")),
        "GeometricBrownianMotion",
    ),
    "masked": (
        lambda: OrnsteinUhlenbeck(latent("a"), 0.0, latent("b"), GRID).mask(True),
        "OrnsteinUhlenbeck",
    ),
}


def closed_over(memory=None):
    a, b = latent("a"), latent("b")
    if memory == "ode":
        return ODEPath(lambda t, z: -a * z + b, start(), GRID)
    return SDEPath(lambda t, z: -a * z, lambda t, z: b, start(), GRID, memory=memory)


PATHS |= {
    "sde": (lambda: closed_over("graph"), "SDEPath"),
    "lean": (lambda: closed_over("recompute"), "SDEPath"),
    "ode": (lambda: closed_over("ode"), "ODEPath"),
}


@pytest.mark.parametrize("case", PATHS)
def test_dependencies_of_paths(case):
    make, kind = PATHS[case]

    def model(y):
        noise = pyro.param("noise", torch.tensor(1.0), constraint=dist.constraints.positive)
        z = pyro.sample("z", make())
        pyro.sample("y", dist.Normal(z[..., -1, 0], noise), obs=y)

    y = torch.tensor(0.0)
    found = get_model_relations(model, (y,))
    assert found["sample_sample"] == {"a": [], "b": [], "z": ["a", "b"], "y": ["z"]}
    assert found["sample_dist"]["z"] == kind and found["observed"] == ["y"]
    graph = pyro.render_model(model, (y,), render_params=True, render_distributions=True).source
    for edge in ("a -> z", "b -> z", "z -> y", "noise -> y", f"z ~ {kind}"):
        assert edge in graph


def test_plates_points_and_nets():
    graph = pyro.render_model(series, (SERIES, 2)).source
    assert "cluster_series" in graph and "scale -> z" in graph and "shift -> y" in graph

    def points(times):
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, GRID))
        pyro.sample("y", PoissonProcess(z[..., 0].exp(), GRID), obs=times)

    assert "z -> y" in pyro.render_model(points, (torch.tensor([0.2, 0.5]),)).source

    class Net(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.block = SDEBlock(mlp(), steps=3)

        def forward(self, x, y):
            h = self.block(x)
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(h[..., 0], 1.0), obs=y)

    found = get_model_relations(Net(), (torch.ones(4, 2), torch.zeros(4)))
    assert found["sample_sample"] == {"block.w": [], "y": ["block.w"]}


def test_guides():
    """A guide shows its latents; the likelihood is the model's."""
    graph = pyro.render_model(AutoSDE(simple), (Y,)).source
    assert "z [label=z fillcolor=white" in graph
