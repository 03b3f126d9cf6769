"""The energies of a solution: closed forms, every mode, and what they are to the ELBO."""

import pyro
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock
from pyro_sde.nn.energy import with_energies
from pyro_sde.solvers import integrate

from .test_memory import Net, X, Y, gap


def energies(field, h0, n=400, event_dim=1):
    times = torch.linspace(0, 1, n + 1)
    f, start, apart = with_energies(field, ["kinetic", "r2"], event_dim, h0)
    return apart(integrate(f, start, None, times, method="rk4"))


def test_a_linear_field():
    """dh/dt = a h: h' = a h, h'' = a^2 h, the integrals of h^2 a^2 and h^2 a^4."""
    a, h0 = 0.7, torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    h, e = energies(lambda t, h, w: a * h, h0)
    growth = torch.tensor(a).exp()
    torch.testing.assert_close(h, h0 * growth, rtol=1e-9, atol=0)
    square = h0.square().mean(-1) * (growth**2 - 1) / (2 * a)
    torch.testing.assert_close(
        e, torch.stack([a**2 * square, a**4 * square], -1), rtol=1e-9, atol=0
    )


def test_a_field_of_time():
    """dh/dt = t^2: the integrals of t^4 and of (2 t)^2. Images, one energy for each."""
    _, e = energies(lambda t, h, w: t**2 * torch.ones_like(h), torch.zeros(3, 2, 4, 4), 400, 3)
    assert e.shape == (3, 2)
    torch.testing.assert_close(e, torch.tensor([0.2, 4 / 3]).expand(3, 2), rtol=1e-5, atol=0)


def factor_of(net, guide):
    torch.manual_seed(0)
    model_trace, _ = next(iter(TraceSDE_ELBO()._get_traces(net, guide, (X, Y), {})))
    return {
        name: site["log_prob_sum"]
        for name, site in model_trace.nodes.items()
        if name.endswith("_energy")
    }


def test_the_factor():
    """Proportional to the weights, one for each block, by the mean over the batch."""
    found = []
    for regularise in ({"kinetic": 3.0}, {"r2": 2.0}, {"kinetic": 3.0, "r2": 2.0}, {}):
        torch.manual_seed(0)
        pyro.clear_param_store()
        net = Net(regularise=regularise)
        guide = AutoSDE(net).setup(X, Y)
        found.append(factor_of(net, guide))
    kinetic, r2, both, none = found
    assert none == {} and set(both) == {"image.w_energy", "block.w_energy"}
    for name in both:
        assert kinetic[name] < 0 and r2[name] < 0
        torch.testing.assert_close(both[name], kinetic[name] + r2[name], rtol=1e-9, atol=0)


def test_a_block_by_hand():
    """Euler steps of the field at the drawn weights, times the weight."""
    torch.manual_seed(0)
    linear = nn.Linear(2, 2)
    block = SDEBlock(linear, steps=5, scale=0.4, regularise={"kinetic": 7.0})
    trace = poutine.trace(block).get_trace(X)
    w = trace.nodes["w"]["value"]
    h, total = X, 0.0
    for i in range(5):
        f = h @ w[i, :4].reshape(2, 2).T + w[i, 4:]
        total = total + f.square().mean(-1) / 5
        h = h + f / 5
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], h, rtol=1e-9, atol=1e-12)
    expected = -7.0 * total.mean()
    torch.testing.assert_close(trace.nodes["w_energy"]["fn"].log_factor, expected)
    rows = poutine.condition(block, {"w": w})  # a batch of two dimensions is one of six rows
    again = poutine.trace(rows).get_trace(X.reshape(3, 2, 2)).nodes["w_energy"]["fn"]
    torch.testing.assert_close(again.log_factor, expected)


@pytest.mark.parametrize(
    ("method", "memory"), [("euler", "recompute"), ("reversible_heun", "reversible")]
)
@pytest.mark.parametrize("particles", [1, 3])
def test_every_memory_mode(method, memory, particles):
    results = []
    for mode in (memory, "graph"):
        torch.manual_seed(0)
        pyro.clear_param_store()
        net = Net(method=method, memory=mode, regularise={"kinetic": 3.0, "r2": 2.0})
        guide = AutoSDE(net).setup(X, Y)
        for p in guide.parameters():
            nn.init.normal_(p, 0.0, 0.3)
        elbo = TraceSDE_ELBO(num_particles=particles, vectorize_particles=particles > 1)
        torch.manual_seed(1)
        loss = elbo.differentiable_loss(net, guide, X, Y)
        results.append(torch.autograd.grad(loss, [*net.parameters(), *guide.parameters()]))
    assert gap(*results) < 1e-10


def test_outside_of_inference_there_is_no_factor():
    block = SDEBlock(nn.Linear(2, 2), steps=2, regularise={"kinetic": 1.0})
    block(X)  # a warning, which is an error here, were it an observed site
    with pytest.raises(ValueError, match=r"regularise knows kinetic, r2: found \['r3'\]"):
        SDEBlock(nn.Linear(2, 2), regularise={"r3": 1.0})
