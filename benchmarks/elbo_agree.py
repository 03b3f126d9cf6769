"""Whether the programs of elbo_step.py compute the same."""

import dataclasses
from typing import Any

import pyro
import torch
from contestants import Latent
from elbo_jax import NAMES, Jax
from elbo_problem import NOISE, RATE, SCALE, Problem, Y
from torch import Tensor

__all__ = ["agree", "for_jax"]


def for_jax(latent: Latent) -> dict[str, Any]:
    """What the jax programs need to know."""
    weights = [w.tolist() for w in latent.net.parameters()]
    problem = dataclasses.asdict(latent.problem)
    return {"problem": problem, "weights": weights, "constants": [RATE, SCALE, NOISE, Y]}


def agree(problem: Problem, jax: Jax | None = None) -> dict[str, float]:
    """The losses of all on the same noise and weights, in double precision.

    They and, but for "stl" and adjoints, the gradients by the last layer must be those of the
    bare loop; with exact steps for ours, with Euler's for the libraries.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        latent = Latent(problem)
        return _ours(latent) | _theirs(latent, jax)
    finally:
        torch.set_default_dtype(before)


def _ours(latent: Latent) -> dict[str, float]:
    pyro.clear_param_store()
    last = latent.net.net[-1]
    mine = getattr(latent.control, "last", last).weight
    losses = {}
    for estimator in ("kl", "full", "stl"):
        name = f'pyro_sde, "{estimator}"'
        pyro.set_rng_seed(0)
        loss = latent.ours(estimator)()
        pyro.set_rng_seed(0)
        bare = latent.bare(martingale=estimator != "kl")
        losses[name] = loss.item()
        _same(name, loss, bare)
        if estimator != "stl":  # whose gradient is another one, of the same mean
            _same(name, _gradient(loss, mine), _gradient(bare, last.weight))
    return losses


def _theirs(latent: Latent, jax: Jax | None) -> dict[str, float]:
    p, last = latent.problem, latent.net.net[-1].weight
    noise = torch.randn(p.steps, p.batch, p.dim)
    bare = latent.bare(noise, exact=False)
    gradient = _gradient(bare, last)
    losses = {"bare PyTorch loop, Euler": bare.item()}
    adjoint = latent.torchsde(hint=True, adjoint=True, noise=noise)
    rtol = 1e-3  # their steps are longer by 1e-5
    losses["torchsde, adjoint"] = adjoint.item()
    _same("torchsde, adjoint", adjoint, bare, rtol)
    plain = {
        "torchsde": latent.torchsde(hint=True, noise=noise),
        "torchsde, KL by hand": latent.torchsde_by_hand(noise),
    }
    for name, loss in plain.items():
        losses[name] = loss.item()
        _same(name, loss, bare, rtol)
        _same(name, _gradient(loss, last), gradient, rtol)
    if jax is not None:
        jax.ask("set", **for_jax(latent))
        for name in NAMES[1:]:  # the first differs from the second in its noise
            answer = jax.ask("check", name=name, noise=noise.tolist())
            losses[name] = answer["loss"]
            _same(name, torch.tensor(answer["loss"]), bare)
            _same(name, torch.tensor(answer["gradient"]), gradient)
    return losses


def _gradient(loss: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(loss, by, retain_graph=True)[0]


def _same(name: str, found: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    found, expected = found.detach(), expected.detach()
    if not float((found - expected).norm()) <= rtol * float(expected.norm()):
        raise AssertionError(f"{name} computes something else: {found}, the bare loop {expected}")
