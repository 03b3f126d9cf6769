"""Predictions at other times: how the model is asked for them."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_sde import AutoSDE, GRUEncoder, forecast, select, time_grid
from pyro_sde.distributions import BrownianMotion, GeometricBrownianMotion
from pyro_sde.simulation import base

TIMES = torch.tensor([0.3, 1.0], dtype=torch.float64)
VALUES = torch.tensor([0.5, 2.0], dtype=torch.float64)


def model(times, values=None, noise=1e-3):
    """Brownian motion that is seen almost exactly."""
    grid = time_grid(0.0, max(1.0, float(times.max())), dt=0.1, include=times)
    z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
    mean = select(z, grid, times)[..., 0]
    return pyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=values)


class Pinned(torch.nn.Module):
    """The drift of the bridge from the last observation's past to it."""

    def forward(self, t, z):
        end = torch.where(t < 0.3 - 1e-9, 0.3, 1.0)
        goal = torch.where(t < 0.3 - 1e-9, 0.5, 2.0)
        u = (goal - z) / (end - t).clamp(min=1e-9)
        log_c = torch.where(end - t < 0.1 + 1e-9, -9.0, 0.0) + torch.zeros_like(z)
        return torch.where(t < 1.0 - 1e-9, u, 100.0), log_c


def bridge():
    return AutoSDE(model, control=Pinned(), contraction=True)


@pytest.mark.parametrize(("parallel", "as_dict"), [(False, False), (True, True)])
def test_posterior_up_to_the_data_and_prior_after_them(parallel, as_dict):
    """A guide that pins the path to the data: through both points, then Brownian motion; what the
    control says beyond the last observation (100 here) is not asked."""
    data = {"times": TIMES, "values": VALUES} if as_dict else (TIMES, VALUES)
    later, draws = torch.tensor([0.3, 1.0, 1.5, 3.0]), 2000 if parallel else 200
    found = forecast(model, bridge(), data, later, draws, parallel=parallel)
    assert found.samples.shape == (draws, 4) and found.paths["z"].shape == (draws, 4, 1)
    assert torch.equal(found.times, later)
    mean, sd = found.mean, found.samples.std(0)
    torch.testing.assert_close(mean[:2], VALUES, atol=0.02, rtol=0)
    exact = torch.tensor([0.5, 2.0]).sqrt()
    assert ((mean[2:] - 2.0).abs() < 4.5 * exact / draws**0.5).all()
    assert ((sd[2:] / exact - 1).abs() < 4.5 / (2 * draws) ** 0.5).all()
    lower, upper = found.interval(0.8)
    assert (lower < upper).all() and torch.equal(found.quantile(0.5), found.quantile([0.5])[0])
    # The noise of an observation comes on top of the path.
    assert (found.samples - found.paths["z"][..., 0]).std() == pytest.approx(1e-3, rel=0.2)


def test_a_seed_reproduces_and_changes_are_passed_on():
    guide = bridge()
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        runs.append(forecast(model, guide, (TIMES, VALUES), [2.0], 3).samples)
    assert torch.equal(*runs)
    noisy = forecast(model, guide, (TIMES, VALUES), [1.0], 200, noise=3.0)
    assert noisy.samples.std() == pytest.approx(3.0, rel=0.25)


def test_the_guide_is_as_it_was():
    guide = bridge()
    guide.setup(TIMES, VALUES)
    torch.manual_seed(0)
    before = guide(TIMES, VALUES)["z"]
    with pytest.raises(ValueError, match="times must be finite"):
        forecast(model, guide, (TIMES, VALUES), [float("nan")], 2)
    with pytest.raises(RuntimeError):  # inside of the model
        forecast(model, guide, (TIMES, VALUES), [2.0], 2, noise=torch.ones(7))
    torch.manual_seed(0)
    assert torch.equal(guide(TIMES, VALUES)["z"], before)


def test_other_paths_and_latents():
    """A transformed path, and a latent of the rest guide."""

    def positive(times, values=None):
        grid = time_grid(0.0, float(times.max()), dt=0.25, include=times)
        noise = pyro.sample("noise", dist.LogNormal(-2.0, 0.1))
        z = pyro.sample("z", GeometricBrownianMotion(0.2, grid, torch.ones(1)))
        y = select(z, grid, times)[..., 0]
        pyro.sample("y", dist.Gamma(noise**-2, noise**-2 / y).to_event(1), obs=values)

    guide = AutoSDE(positive).setup(TIMES, VALUES)
    found = forecast(positive, guide, (TIMES, VALUES), [1.5, 2.0], 20)
    assert (found.samples > 0).all() and (found.paths["z"] > 0).all()


def test_a_path_that_the_series_share_ends_with_the_last_of_them():
    """As many series as states: an end of its own for each state would go unnoticed."""

    def shared(times, values=None):
        grid = time_grid(0.0, max(1.0, float(times.max())), dt=0.1, include=times)
        z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(2)))
        with pyro.plate("series", len(times)):
            mean = select(z, grid, times)[..., 0]
            pyro.sample("y", dist.Normal(mean, 0.1).to_event(1), obs=values)

    times = torch.tensor([[0.2, 0.5], [0.6, 1.0]])
    guide = AutoSDE(shared, control=lambda t, z: torch.full_like(z, 50.0))
    found = forecast(shared, guide, (times, torch.zeros(2, 2)), [1.0, 2.0], 20)
    z = found.paths["z"]
    assert z.shape[-2:] == (2, 2) and ((z[..., 0, :] - 50).abs() < 6).all()
    assert ((z[..., 1, :] - z[..., 0, :]).abs() < 6).all()


def test_the_encoder_reads_what_the_guide_says():
    """With observations= the posterior of a forecast is that of a call, not of the raw values."""

    def seen(times, values=None):
        grid = time_grid(0.0, 2.0, dt=0.1, include=times)
        with pyro.plate("series", len(times)):
            z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
            mean = select(z, grid, times)
            pyro.sample("y", dist.Normal(mean, 0.1).to_event(2), obs=values)

    def with_time(times, values=None):
        return times, torch.cat([values, times.unsqueeze(-1)], -1)

    encoder = GRUEncoder(2, hidden=8, context=4)
    guide = AutoSDE(seen, encoder=encoder, observations=with_time)
    data = TIMES.expand(3, 2), torch.randn(3, 2, 1)
    guide.setup(*data)
    with torch.no_grad():
        for p in guide.parameters():
            p.add_(0.3 * torch.randn_like(p))
    draws = 400
    found = forecast(seen, guide, data, [0.7, 2.0], draws, parallel=True)
    calls = torch.stack([guide(*data)["z"] for _ in range(draws)])
    grid = time_grid(0.0, 2.0, dt=0.1, include=TIMES)
    here = select(calls, grid, torch.tensor([0.7]))
    gap = (found.paths["z"][:, :, :1] - here).mean(0)
    error = here.std(0) * (2 / draws) ** 0.5
    assert (gap.abs() < 4.5 * error).all()


def test_refusals():
    guide = bridge()
    with pytest.raises(TypeError, match="guide must be an AutoSDE, found AutoNormal"):
        forecast(model, AutoNormal(model), (TIMES, VALUES), [2.0])
    with pytest.raises(ValueError, match=r"needs a model with arguments called times and values"):
        forecast(model, guide, (TIMES,), [2.0])

    def fixed(times, values=None):
        grid = time_grid(0.0, 1.0, dt=0.1, include=TIMES)
        z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
        mean = select(z, grid, times)[..., 0]
        pyro.sample("y", dist.Normal(mean, 0.1).to_event(1), obs=values)

    pyro.clear_param_store()
    with pytest.raises(ValueError, match="1 times that are not on the grid, the first 2"):
        forecast(fixed, AutoSDE(fixed), (TIMES, VALUES), [2.0])

    def two(times, values=None):
        model(times, values)
        pyro.sample("other", dist.Normal(0.0, 1.0), obs=None if values is None else values[0])

    pyro.clear_param_store()
    guide = AutoSDE(two)
    with pytest.raises(ValueError, match=r"draws \['y', 'other'\]: say which"):
        forecast(two, guide, (TIMES, VALUES), [2.0])
    assert forecast(two, guide, (TIMES, VALUES), [2.0], 3, site="y").samples.shape == (3, 1)


def counted(module):
    """How often a module is called from now on."""
    calls = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("contraction", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_network_that_ends_with_the_data_is_one_operation(contraction, parallel, monkeypatch):
    """The path of a forecast is fused, and is the one that single steps would make."""
    guide = AutoSDE(model, contraction=contraction).setup(TIMES, VALUES)
    for p in guide.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    later, chosen, found, choose = torch.tensor([1.5, 3.0]), [], [], base.choose

    def recorded(task):
        chosen.append(choose(task))
        return chosen[-1]

    for chooser in (recorded, lambda task: "loop"):
        monkeypatch.setattr(base, "choose", chooser)
        pyro.set_rng_seed(1)
        found.append(forecast(model, guide, (TIMES, VALUES), later, 5, parallel=parallel).samples)
    assert set(chosen) == {"fused"}
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    # After the last observation the control is zero, and the path is Brownian motion.
    with guide.given((TIMES, VALUES, None)), torch.no_grad():
        trace = pyro.poutine.trace(guide).get_trace(torch.cat([TIMES, later]))
    q = trace.nodes["z"]["fn"]
    noise = torch.randn(len(q.times) - 1, 1)
    for chooser in (choose, lambda task: "loop"):
        monkeypatch.setattr(base, "choose", chooser)
        steps = q.draw(torch.zeros(1), noise).value.diff(dim=-2)
        free = noise * q.times.diff().sqrt().unsqueeze(-1)
        is_free = (steps - free).abs().squeeze(-1) < 1e-12
        assert torch.equal(is_free, q.times[:-1] >= TIMES[-1])


@pytest.mark.parametrize("parallel", [False, True])
def test_the_encoder_runs_once_a_call(parallel):
    def series(times, values=None):
        grid = time_grid(0.0, max(1.0, float(times.max())), dt=0.1, include=times)
        with pyro.plate("series", 3, dim=-1):
            z = pyro.sample("z", BrownianMotion(1.0, grid, torch.zeros(1)))
            x = select(z, grid, times)[..., 0]
            pyro.sample("y", dist.Normal(x, 0.1).to_event(1), obs=values)

    times, values = TIMES.expand(3, 2), torch.randn(3, 2)
    guide = AutoSDE(series, encoder=GRUEncoder(1, 8, 4)).setup(times, values)
    calls = counted(guide.encoder)
    before = forecast(series, guide, (times, values), torch.tensor([2.0]), 6, parallel=parallel)
    assert len(calls) == 1
    with torch.no_grad():
        for p in guide.encoder.parameters():
            p.add_(0.5)
    with guide.given((times, values, None)), torch.no_grad():
        guide(times, values)
        guide(times, values)
        assert len(calls) == 2
        guide.encoder.out.bias += 1.0  # an encoder that has changed reads again
        guide(times, values)
        assert len(calls) == 3
    with guide.given((times, values, None)):  # so that each call has a graph of its own
        for _ in range(2):
            guide(times, values)["z"].sum().backward()
    assert len(calls) == 5 and before.samples.shape[0] == 6
