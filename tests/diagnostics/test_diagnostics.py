import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO

from pyro_sde.diagnostics import gradient_variance


def test_variance_of_a_known_gradient():
    """loss = loc * x with x ~ N(0, 4): the gradient is x, its variance 4."""

    def model():
        loc = pyro.param("loc", torch.tensor(1.0))
        x = torch.randn(()) * 2
        pyro.factor("f", -loc * x)

    loc = pyro.param("loc", torch.tensor(1.0)).unconstrained()
    loc.grad = torch.tensor(3.0)
    result = gradient_variance(Trace_ELBO(), model, lambda: None, num_samples=4000)
    # The standard error of a variance is var * sqrt(2 / n).
    assert abs(result.variance["loc"].item() - 4) < 5 * 4 * (2 / 4000) ** 0.5
    assert abs(result.average["loc"].item()) < 5 * (4 / 4000) ** 0.5
    assert result.mean == pytest.approx(result.variance["loc"].item())
    assert loc.grad.item() == 3.0 and loc.item() == 1.0


def test_mean_is_over_all_entries():
    def model():
        a, b = pyro.param("a", torch.zeros(3)), pyro.param("b", torch.zeros(()))
        pyro.factor("f", (a * torch.randn(3)).sum() + 10 * b)

    result = gradient_variance(Trace_ELBO(), model, lambda: None, num_samples=50)
    assert result.variance["b"].item() == pytest.approx(0.0, abs=1e-20)
    assert result.mean == pytest.approx(result.variance["a"].sum().item() / 4)


def test_no_parameters():
    with pytest.raises(ValueError, match="neither model nor guide has a parameter"):
        gradient_variance(
            Trace_ELBO(),
            lambda: pyro.sample("x", dist.Normal(0.0, 1.0)),
            lambda: pyro.sample("x", dist.Normal(0.0, 1.0)),
        )
