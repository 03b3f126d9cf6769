"""The parts of an ELBO: their sum is minus the loss, and each is what it says."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch.distributions import kl_divergence

from pyro_sde import AutoSDE, TraceMeanFieldSDE_ELBO, TraceSDE_ELBO, anneal_kl, girsanov, time_grid
from pyro_sde.diagnostics import elbo_parts
from pyro_sde.distributions import ControlledPath, OrnsteinUhlenbeck
from pyro_sde.infer import record_parts

from ..guides.models import GRID, MODELS, SERIES, Y, mixed, series, shaken, simple

every_elbo = pytest.mark.parametrize("ELBO", [TraceSDE_ELBO, TraceMeanFieldSDE_ELBO])
every_estimator = pytest.mark.parametrize("estimator", ["stl", "full", "kl"])


def masked(y):
    keep = torch.tensor([True, False, True, True])
    with pyro.plate("series", 4, dim=-1), pyro.poutine.mask(mask=keep):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, scale.unsqueeze(-1), GRID))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.3), obs=y[:, -1])


CASES = {name: (model, (y,)) for name, (model, y) in MODELS.items()} | {
    "subsampled": (series, (SERIES, 2)),
    "scaled": (pyro.poutine.scale(mixed, 0.01), (Y,)),
    "masked": (masked, (SERIES,)),
}
PARTICLES = {
    "one": {},
    "loop": {"num_particles": 3},
    "vectorised": {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 2},
}


def evaluate(elbo, model, guide, args, how="differentiable_loss"):
    with record_parts() as parts:
        loss = torch.as_tensor(getattr(elbo, how)(model, guide, *args))
    return loss.item(), parts


@every_elbo
@every_estimator
@pytest.mark.parametrize("particles", PARTICLES)
@pytest.mark.parametrize("case", CASES)
def test_the_parts_sum_to_minus_the_loss(ELBO, estimator, particles, case):
    model, args = CASES[case]
    guide = shaken(model, *args)
    elbo = ELBO(path_estimator=estimator, **PARTICLES[particles])
    for how in ("loss", "differentiable_loss", "loss_and_grads"):
        loss, parts = evaluate(elbo, model, guide, args, how)
        # The same terms in another order: some roundings.
        assert parts.elbo == pytest.approx(-loss, rel=1e-12)
        assert set(parts.kl) == {*guide.path_sites, *guide.other_sites}
        assert list(parts.log_likelihood) == ["y"]
        for name in guide.path_sites:
            p = parts.paths[name]
            assert p.start + p.path + p.martingale == pytest.approx(parts.kl[name], rel=1e-12)
            assert p.steps.sum().item() == pytest.approx(p.path, rel=1e-12)
            if estimator == "kl":
                assert abs(p.martingale) < 1e-12 * abs(p.path)
            else:
                assert abs(p.martingale) > 1e-9 * abs(p.path)


@every_elbo
def test_recording_changes_nothing(ELBO):
    guide = shaken(mixed, Y)
    elbo = ELBO(num_particles=2)
    torch.manual_seed(1)
    expected = elbo.differentiable_loss(mixed, guide, Y)
    torch.manual_seed(1)
    with record_parts():
        found = elbo.differentiable_loss(mixed, guide, Y)
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(x, list(guide.parameters())) for x in (found, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("contraction", [False, True])
def test_a_path_in_its_parts(contraction):
    """Against Girsanov's terms of the very draw, step by step, and the KL of its start."""
    guide = shaken(simple, Y, contraction=contraction)
    elbo = TraceSDE_ELBO()
    torch.manual_seed(1)
    _, parts = evaluate(elbo, simple, guide, (Y,))
    torch.manual_seed(1)
    (traces,) = elbo._get_traces(simple, guide, (Y,), {})
    p, q = (t.nodes["z"] for t in traces)
    found = parts.paths["z"]
    quadratic, martingale = girsanov(q["fn"], p["fn"], q["value"])
    assert found.path == pytest.approx(quadratic.item(), rel=1e-12)
    assert found.martingale == pytest.approx(martingale.item(), rel=1e-9)
    z0 = q["value"][..., 0, :]
    start = q["fn"].initial.log_prob(z0) - p["fn"].initial.log_prob(z0)
    assert found.start == pytest.approx(start.item(), rel=1e-9)
    dt = found.times.diff()
    if not contraction:
        u = q["fn"].control(found.times[:-1].unsqueeze(-1), q["value"][:-1])
        assert torch.allclose(found.steps, 0.5 * (u.square().sum(-1) * dt))
    assert found.intensity == pytest.approx(found.path / len(dt), rel=1e-12)


@every_elbo
@pytest.mark.parametrize("rest", [AutoNormal, AutoMultivariateNormal])
def test_other_latents_and_scales(ELBO, rest):
    """A scale around the model scales everything, what the guide has beside its sites too."""
    guide = shaken(mixed, Y, other_guide=rest)
    torch.manual_seed(1)
    _, parts = evaluate(ELBO(), mixed, guide, (Y,))
    halved = pyro.poutine.scale(mixed, 0.5)
    other = AutoSDE(halved, name="half", other_guide=rest).setup(Y)
    other.load_state_dict(guide.state_dict())
    torch.manual_seed(1)
    _, half = evaluate(ELBO(), halved, other, (Y,))
    for whole, found in ((parts.kl, half.kl), (parts.log_likelihood, half.log_likelihood)):
        assert [*found.values()] == pytest.approx([v / 2 for v in whole.values()], rel=1e-9)
    assert half.paths["z"].path == pytest.approx(parts.paths["z"].path / 2)
    assert half.paths["z"].intensity == pytest.approx(parts.paths["z"].intensity)
    torch.manual_seed(1)
    with anneal_kl(0.5):
        _, annealed = evaluate(ELBO(), mixed, guide, (Y,))
    assert [*annealed.kl.values()] == pytest.approx([*half.kl.values()])
    assert annealed.log_likelihood == pytest.approx(parts.log_likelihood)


def test_an_analytic_kl_is_counted_as_such():
    def model(y):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("taste", -x.square().sum())
        pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)

    def guide(y):
        pyro.sample("x", dist.Normal(torch.ones(2), 0.5).to_event(1))

    loss, parts = evaluate(TraceMeanFieldSDE_ELBO(), model, guide, (torch.zeros(2),))
    kl = kl_divergence(dist.Normal(1.0, 0.5), dist.Normal(0.0, 1.0)) * 2
    assert parts.kl == pytest.approx({"x": kl.item()})
    assert set(parts.log_likelihood) == {"taste", "y"}
    assert parts.elbo == pytest.approx(-loss, rel=1e-12)


def test_joint_guides_and_recomputed_paths():
    """A joint guide is split among its latents; recomputed paths tell their steps too."""
    grid = time_grid(0.0, 1.0, dt=0.1)

    def model():
        x = pyro.sample("x", dist.LogNormal(0.0, 1.0))
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, x.unsqueeze(-1), grid))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=torch.tensor(0.3))

    loss, parts = evaluate(
        TraceSDE_ELBO(), model, AutoSDE(model, other_guide=AutoMultivariateNormal), ()
    )
    assert set(parts.kl) == {"x", "z"} and parts.elbo == pytest.approx(-loss, rel=1e-12)

    def path():
        return OrnsteinUhlenbeck(1.0, 0.0, 1.0, grid)

    def recomputed():
        pyro.sample("z", ControlledPath(path(), lambda t, z: z - t, memory="recompute"))

    loss, parts = evaluate(TraceSDE_ELBO(), lambda: pyro.sample("z", path()), recomputed, ())
    assert parts.paths["z"].steps.sum().item() == pytest.approx(parts.paths["z"].path)
    assert parts.elbo == pytest.approx(-loss, rel=1e-12)


def test_elbo_parts_averages_and_the_last_evaluation_counts():
    guide = shaken(simple, Y)
    torch.manual_seed(1)
    both = elbo_parts(simple, guide, Y, num_particles=2)
    torch.manual_seed(1)
    each = [elbo_parts(simple, guide, Y) for _ in range(2)]
    assert both.kl["z"] == pytest.approx(sum(p.kl["z"] for p in each) / 2)
    assert torch.allclose(both.paths["z"].steps, sum(p.paths["z"].steps for p in each) / 2)
    assert both.paths["z"].intensity == pytest.approx(sum(p.paths["z"].intensity for p in each) / 2)
    svi = SVI(simple, guide, pyro.optim.Adam({"lr": 0.0}), TraceSDE_ELBO())
    with record_parts() as parts:
        losses = [svi.step(Y) for _ in range(2)]
    assert parts.elbo == pytest.approx(-losses[1]) and losses[0] != losses[1]


def test_refusals():
    guide = shaken(simple, Y)
    with pytest.raises(TypeError, match="Trace_ELBO does not record its parts; use TraceSDE_ELBO"):
        elbo_parts(simple, guide, Y, elbo=Trace_ELBO())
    with pytest.raises(ValueError, match="num_particles belongs to the ELBO"):
        elbo_parts(simple, guide, Y, elbo=TraceSDE_ELBO(), num_particles=3)
