"""Random ordinary differential equations: dh/dt = field(t, h; w_t) along a given path w."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import check_memory
from .._compiling import chunks, compiled
from .._errors import SolutionError
from .._ops.common import inside_func
from .._ops.recompute import Grads, LocalVjp, run_recomputed
from .reversible import GridSolution, ReversibleHeun, reversible_heun, states_of

__all__ = ["METHODS", "evaluations", "integrate"]

Step = Callable[[Callable, Tensor, Tensor, Tensor, Any, Any], Tensor]


def _euler(f: Callable, t: Tensor, dt: Tensor, h: Tensor, w: Any, w_next: Any) -> Tensor:
    return torch.addcmul(h, dt, f(t, h, w))


def _heun(f: Callable, t: Tensor, dt: Tensor, h: Tensor, w: Any, w_next: Any) -> Tensor:
    k = f(t, h, w)
    return torch.addcmul(h, 0.5 * dt, k + f(t + dt, torch.addcmul(h, dt, k), w_next))


def _midpoint(f: Callable, t: Tensor, dt: Tensor, h: Tensor, w: Any, w_next: Any) -> Tensor:
    halfway = torch.addcmul(h, 0.5 * dt, f(t, h, w))
    return torch.addcmul(h, dt, f(t + 0.5 * dt, halfway, _between(w, w_next)))


def _rk4(f: Callable, t: Tensor, dt: Tensor, h: Tensor, w: Any, w_next: Any) -> Tensor:
    half, middle = t + 0.5 * dt, _between(w, w_next)
    k1 = f(t, h, w)
    k2 = f(half, h + 0.5 * dt * k1, middle)
    k3 = f(half, h + 0.5 * dt * k2, middle)
    k4 = f(t + dt, h + dt * k3, w_next)
    return h + dt / 6 * (k1 + 2 * (k2 + k3) + k4)


def _between(w: Any, w_next: Any) -> Any:
    return None if w is None else torch.lerp(w, w_next, 0.5)


_STEPS: dict[str, tuple[Step, int]] = {
    "euler": (_euler, 1),
    "heun": (_heun, 2),
    "midpoint": (_midpoint, 2),
    "rk4": (_rk4, 4),
}
"""The steps by name, and the evaluations of the field in one step."""

REVERSIBLE = "reversible_heun"
METHODS = (*_STEPS, REVERSIBLE)
"""The names of the methods of :func:`integrate`."""


def check_method(method: str, memory: str = "graph", compile: bool = False) -> None:
    if compile and (memory != "graph" or method == REVERSIBLE):
        raise ValueError(
            'compile=True needs memory="graph" and a method other than "reversible_heun": found '
            f"memory={memory!r}, method={method!r}"
        )
    if method not in METHODS:
        raise ValueError(f"method must be one of {sorted(METHODS)}: found {method!r}")
    if (
        check_memory(memory, "graph", "recompute", "reversible") == "reversible"
        and method != REVERSIBLE
    ):
        raise ValueError(
            f'memory="reversible" needs a method that can be run backwards: found {method!r}; use '
            f'method="{REVERSIBLE}", of second order with one evaluation per step, or '
            'memory="recompute"'
        )


def evaluations(method: str, steps: int) -> int:
    """How often ``method`` evaluates the field in a number of steps.

    Example::

        >>> from pyro_sde.solvers import METHODS, evaluations
        >>> {method: evaluations(method, 20) for method in METHODS}
        {'euler': 20, 'heun': 40, 'midpoint': 40, 'rk4': 80, 'reversible_heun': 21}

    :param method: One of ``METHODS``.
    :param steps: The number of steps.
    :returns: The number of evaluations.
    """
    check_method(method)
    return steps + 1 if method == REVERSIBLE else _STEPS[method][1] * steps


def integrate(
    field: Callable[[Tensor, Tensor, Any], Tensor],
    h0: Tensor,
    path: Tensor | None,
    times: Tensor,
    *,
    method: str = "euler",
    memory: str = "graph",
    compile: bool = False,
) -> Tensor:
    r"""Solve :math:`dh/dt = \mathrm{field}(t, h, w_t)` from :math:`h(t_0) = h_0` to the last of
    ``times``, with one step of ``method`` between neighbouring times.

    The path is rough and is known only at the times of the grid, so no method has a strong order
    above 1. A method of higher order reduces the deterministic part of the error, which dominates
    while the noise is small.

    The gradient is that of the computed solution for every value of ``memory``:

    - ``"graph"``: ordinary autograd. Memory grows with the number of steps times all tensors that
      one step keeps.
    - ``"recompute"``: the states are kept, and each step is computed again in the backward pass.
    - ``"reversible"``: not even the states are kept, because the backward pass reconstructs them,
      the last one first. It needs ``method="reversible_heun"``, and steps so short that the field's
      Lipschitz constant times a step is below 1; with longer steps the method is unstable.

    Gradients of gradients, and gradients with respect to the times, need ``"graph"``. Tensors that
    the field closes over get their gradients with every value of ``memory``.

    Example::

        >>> times = torch.linspace(0.0, 1.0, 101)
        >>> h = integrate(lambda t, h, w: -h, torch.ones(1), None, times, method="heun")
        >>> bool((h - torch.exp(torch.tensor(-1.0))).abs() < 1e-5)
        True

    :param field: A function called as ``field(t, h, w)`` that returns the shape of ``h``. It may
        close over tensors that need a gradient.
    :param h0: The state at ``times[0]``.
    :param path: w on the grid, of shape ``(..., T, D)``. With None, ``field`` is called with None.
    :param times: The grid, increasing, of shape ``(T,)``.
    :param method: ``"euler"``, ``"heun"``, ``"midpoint"``, ``"rk4"`` or ``"reversible_heun"``.
    :param memory: ``"graph"``, ``"recompute"`` or ``"reversible"``.
    :param compile: Whether torch.compile compiles the steps, in chunks. It needs ``memory="graph"``
        and a method other than ``"reversible_heun"``.
    :returns: The state at the last time, of the shape of ``h0``.
    """
    check_method(method, memory, compile)
    if path is not None and path.shape[-2] != len(times):
        raise ValueError(
            f"path has {path.shape[-2]} states, times {len(times)}: pass the grid that the path "
            "was drawn on"
        )
    if compile:
        h = _solve_in_chunks(field, h0, path, times, method)
    else:
        h = _solve(field, h0, path, times, method, memory)
    if not inside_func() and not math.isfinite(h.detach().sum()):
        _say_where(field, h0, path, times, method)
    return h


def _solve(
    field: Callable, h: Tensor, path: Tensor | None, times: Tensor, method: str, memory: str
) -> Tensor:
    if memory != "graph" and torch.is_grad_enabled():
        if times.requires_grad:
            raise ValueError('gradients with respect to times need memory="graph"')
        solver = _solver(field, times, method, keep=memory == "recompute")
        return run_recomputed(solver, h, *(() if path is None else (path,)))[0]
    # One unbind, not one index a step: the backward pass of an index fills a whole path with zeros.
    w = states_of([] if path is None else [path], len(times))
    t, dt = times.unbind(0), times.diff().unbind(0)
    if method == REVERSIBLE:
        return reversible_heun(field, h, w, t, dt)[0]
    step, _ = _STEPS[method]
    for i in range(len(dt)):
        h = step(field, t[i], dt[i], h, w[i], w[i + 1])
    return h


def _solve_in_chunks(
    field: Callable, h: Tensor, path: Tensor | None, times: Tensor, method: str
) -> Tensor:
    # In the form that h has after the first chunk, so that the first chunk is not compiled twice.
    h = h.contiguous() if 0 in h.stride() else h
    h = h.detach().requires_grad_() if torch.is_grad_enabled() and not h.requires_grad else h
    dt = times.diff()
    for at in chunks(len(dt)):
        w = None if path is None else path[..., at.start : at.stop + 1, :]
        h = _compiled_steps(_STEPS[method][0], field, times[at], dt[at], h, w)
    return h


def _several_steps(
    step: Step, field: Callable, t: Tensor, dt: Tensor, h: Tensor, path: Tensor | None
) -> Tensor:
    w = states_of([] if path is None else [path], len(t) + 1)
    for i in range(len(t)):
        h = step(field, t[i], dt[i], h, w[i], w[i + 1])
    return h


_compiled_steps = compiled(_several_steps)


def _solver(field: Callable, times: Tensor, method: str, keep: bool) -> GridSolution:
    if method == REVERSIBLE:
        return ReversibleHeun(field, times, keep)
    return _Steps(field, times, _STEPS[method][0])


@torch.no_grad()
def _say_where(field: Callable, h: Tensor, path: Tensor | None, times: Tensor, method: str) -> None:
    """Solve again, and raise at the first state that is not finite."""
    solver = _solver(field, times, method, keep=True)
    (end,), states = solver.forward(h, *(() if path is None else (path,)))
    dt = solver.dt
    states = (*states[: len(dt)], end)
    for i, state in enumerate(states):
        if not bool(torch.isfinite(state).all()):
            norm = float(states[i - 1].abs().max()) if i else float("nan")
            length = float(dt[max(i - 1, 0)])
            raise SolutionError(
                f"the solution is not finite at t={float(times[i]):g}, after a step of "
                f"{length:.3g} ({i} of {len(dt)}) from a state whose largest entry was "
                f"{norm:.3g}: the field blows up. Bound it, take more steps, or train with a lower "
                "learning rate"
            )


class _Steps(GridSolution):
    """A one-step method from its states."""

    def __init__(self, field: Callable, times: Tensor, step: Step) -> None:
        super().__init__(field, times)
        self.step = step

    def forward(self, *inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        h, w = inputs[0], states_of(inputs[1:], len(self.t))
        states = []
        for i, dt in enumerate(self.dt):
            states.append(h)
            h = self.step(self.field, self.t[i], dt, h, w[i], w[i + 1])
        return (h,), tuple(states)

    def backward(
        self, inputs: Sequence[Tensor], saved: Sequence[Tensor], grads: Grads, vjp: LocalVjp
    ) -> Grads:
        w, grad_path = self.along(inputs)
        (grad_h,) = grads
        for i in range(len(self.dt) - 1, -1, -1):

            def step(h: Tensor, *w: Tensor, i: int = i) -> tuple[Tensor]:
                a, b = w or (None, None)
                return (self.step(self.field, self.t[i], self.dt[i], h, a, b),)

            ends = [w[i], w[i + 1]] if grad_path else []
            _, (grad_h, *grad_w) = vjp(step, [saved[i], *ends], [grad_h])
            for k, g in enumerate(grad_w):
                grad_path[0].select(-2, i + k).add_(g)
        return grad_h, *grad_path
