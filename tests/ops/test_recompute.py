"""What is computed again in the backward pass: what it is allowed to use."""

import pytest
import torch

from pyro_sde._ops.recompute import LocalVjp, Recomputed, run_recomputed


def test_what_was_not_seen_is_refused():
    """Every path of a step's graph must end in its arguments or in what it is known to use."""
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    computed = (a * b).exp()
    one = torch.ones(())
    for fn, others in ((lambda x: (a * x,), [b]), (lambda x: (computed * x,), [a])):
        with pytest.raises(RuntimeError, match="a parameter that it was not seen to use"):
            LocalVjp(others)(fn, [one], [one])
    vjp = LocalVjp([computed])
    _, (grad_x,) = vjp(lambda x: (computed * x,), [one], [one])
    assert grad_x == computed and vjp.grads == [one]


def test_without_gradients_nothing_is_recorded():
    class Identity(Recomputed):
        def forward(self, x):
            return (x.sin(),), ()

    with torch.no_grad():
        assert run_recomputed(Identity(), torch.ones(1, requires_grad=True))[0].grad_fn is None
