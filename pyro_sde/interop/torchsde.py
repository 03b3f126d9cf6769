"""torchsde as a backend: its solvers for paths, and the algorithm of Xu et al. for blocks."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pyro
import torch
import torchsde
from pyro.poutine.runtime import _PYRO_STACK, am_i_wrapped
from torch import Tensor, nn
from torch.distributions import kl_divergence

from ..distributions.path import PathDistribution
from ..distributions.wrapping import unwrap
from ..nn.block import SDEBlock

__all__ = ["Joint", "sample"]

STRATONOVICH = ("midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")

LEVY_AREA = {"srk": "space-time", "log_ode": "foster"}
"""The approximation of Lévy areas that a method needs, besides the increments of the noise."""


def _sde_type(method: str | None) -> str:
    return "stratonovich" if method in STRATONOVICH else "ito"


class _SDE(nn.Module):
    """Drift and diffusion of rows, in the form that torchsde needs."""

    noise_type = "diagonal"

    def __init__(self, f: Callable, g: Callable, sde_type: str) -> None:
        super().__init__()
        self.f, self.g, self.sde_type = f, g, sde_type


def _brownian(times: Tensor, like: Tensor, dt: float, method: str | None) -> Any:
    """Noise of the shape of ``like``, seeded by torch's random numbers."""
    return torchsde.BrownianInterval(
        float(times[0]),
        float(times[-1]),
        size=tuple(like.shape),
        dtype=like.dtype,
        device=like.device,
        dt=dt,
        levy_area_approximation=LEVY_AREA.get(method or "srk", "none"),
        entropy=int(torch.randint(2**31 - 1, ())),
    )


def sample(
    path: Any,
    sample_shape: Any = (),
    *,
    method: str | None = None,
    dt: float | None = None,
    brownian: Any = None,
    **options: Any,
) -> Tensor:
    """Draw a path with a solver of torchsde.

    The draw has gradients, as that of ``rsample`` has, but no density, because it is not a
    Gaussian chain on the grid. Methods for Itô and for Stratonovich equations both solve the Itô
    equation.

    Example::

        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> path = OrnsteinUhlenbeck(1.0, 0.0, 0.5, torch.linspace(0.0, 1.0, 5), torch.ones(2))
        >>> sample(path, (10,), method="srk", dt=0.05).shape
        torch.Size([10, 5, 2])

    :param path: Any path distribution, also under elementwise transforms.
    :param sample_shape: The shape of the sample, as in ``rsample``.
    :param method: A method of torchsde: ``"euler"``, ``"milstein"``, ``"srk"``, ``"midpoint"``,
        ``"heun"``, ``"reversible_heun"``, ...; by default torchsde's choice.
    :param dt: The step, or the first step; by default the shortest step of the grid.
    :param brownian: A torchsde.BrownianInterval of shape (rows, D); by default a new one, seeded by
        torch.
    :param options: Options of ``torchsde.sdeint``: ``adaptive=True``, ``rtol``, ``atol``, ...
    :returns: Paths of shape ``sample_shape + batch_shape + (T, D)``.
    """
    wrapped = unwrap(path)
    if wrapped is None:
        raise TypeError(f"path must be a path distribution, found {type(path).__name__}")
    law: PathDistribution = wrapped.path
    if law.times.dim() > 1:
        raise ValueError(
            f"torchsde solves on one grid, and path has times of shape {tuple(law.times.shape)}: "
            "draw each series separately"
        )
    z0 = law._draw_initial(torch.Size(sample_shape))
    shape = z0.shape

    def coefficients(t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        found = law.coefficients(t, z)
        if any(x.shape != z.shape for x in found):
            raise ValueError(
                f"coefficients of {type(law).__name__} must return a drift and a diffusion of the "
                f"shape of the state, {tuple(z.shape)}, for noise that is diagonal: found "
                f"{[tuple(x.shape) for x in found]}"
            )
        return found

    def f(t: Tensor, rows: Tensor) -> Tensor:
        drift, _ = coefficients(t, rows.reshape(shape))
        if kind == "stratonovich":
            drift = drift - _ito_correction(law, t, rows.reshape(shape))
        return drift.reshape(rows.shape)

    def g(t: Tensor, rows: Tensor) -> Tensor:
        return coefficients(t, rows.reshape(shape))[1].reshape(rows.shape)

    kind = _sde_type(method)
    rows = z0.reshape(-1, shape[-1])
    times = law.times.to(rows.dtype)
    dt = float(times.diff().min()) if dt is None else dt
    if brownian is None:
        brownian = _brownian(times, rows, dt, method)
    out = torchsde.sdeint(
        _SDE(f, g, kind), rows, times, bm=brownian, method=method, dt=dt, **options
    )
    value = out.reshape(-1, *shape).movedim(0, -2)
    for transform in wrapped.transforms:
        value = transform(value)
    return value


def _ito_correction(law: PathDistribution, t: Tensor, z: Tensor) -> Tensor | float:
    """The Itô drift less the Stratonovich drift of the same equation, for diagonal noise: half of
    g_i times its derivative with respect to z_i."""
    attached = torch.is_grad_enabled()
    with torch.enable_grad():
        z = z if z.requires_grad else z.detach().requires_grad_()
        scale = law.coefficients(t, z)[1]
        if not scale.requires_grad:
            return 0.0
        slopes = []
        for i, g in enumerate(scale.unbind(-1)):  # the noise may depend on other entries too
            (slope,) = torch.autograd.grad(
                g.sum(), z, create_graph=attached, retain_graph=True, allow_unused=True
            )
            if slope is None:  # no entry depends on the state
                return 0.0
            slopes.append(slope[..., i])
    return 0.5 * scale * torch.stack(slopes, -1)


class Joint(nn.Module):
    r"""A model whose blocks are solved as in Xu et al. (2022), equation 11.

    Hidden units, weights and KL are one state [h, w, kl] in one call of torchsde, by default with
    its stochastic adjoint. The path estimator is "kl": the solver computes
    :math:`\tfrac12 \int |u|^2 dt`, which enters as a factor, and the guide of this model is empty.
    The parameters are those of ``model`` and ``guide``, which may be trained or used with
    :class:`~pyro_sde.TraceSDE_ELBO` before and after.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, Trace_ELBO
        >>> from pyro.nn import PyroModule
        >>> from pyro_sde import AutoSDE
        >>> from pyro_sde.nn import SDEBlock
        >>> class Net(PyroModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.block = SDEBlock(torch.nn.Linear(2, 2), steps=5)
        ...
        ...     def forward(self, x, y):
        ...         mean = self.block(x)[:, 0]
        ...         with pyro.plate("data", len(x)):
        ...             pyro.sample("y", dist.Normal(mean, 0.1), obs=y)
        >>> data = torch.ones(3, 2), torch.zeros(3)
        >>> model = Net()
        >>> guide = AutoSDE(model, contraction=None).setup(*data)
        >>> joint = Joint(model, guide, method="midpoint", dt=0.1)
        >>> optim = pyro.optim.Adam({"lr": 1e-2})
        >>> svi = SVI(joint, lambda *args: None, optim, Trace_ELBO())
        >>> svi.step(*data) > 0
        True

    :param model: A Pyro model with :class:`~pyro_sde.nn.SDEBlock` for its latent paths.
    :param guide: An AutoSDE of that model, set up, without contraction.
    :param method: A method of torchsde. Methods for Itô and for Stratonovich equations solve the
        same equation, because the noise is additive.
    :param dt: The step; by default that of the block's grid.
    :param brownian: A function from the first state, of shape (1, entries of h + weights + 1), to a
        torchsde.BrownianInterval; by default a new one, seeded by torch.
    :param adjoint: Whether the gradient comes from the stochastic adjoint, with constant memory and
        an error of its own, or from the graph of the solution.
    :param options: Options of ``torchsde.sdeint`` or ``sdeint_adjoint``.
    """

    def __init__(
        self,
        model: nn.Module,
        guide: Any,
        *,
        method: str = "midpoint",
        dt: float | None = None,
        adjoint: bool = True,
        brownian: Callable[[Tensor], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not guide.path_sites:
            raise ValueError("the guide has no parameters yet: call guide.setup(*args) first")
        contracted = [
            name for name in guide.path_sites if attrgetter(name)(guide.paths).contraction
        ]
        if contracted:
            raise ValueError(
                f"the guide contracts the noise of {contracted}, so it is not an SDE: build it "
                "with AutoSDE(model, contraction=None)"
            )
        self.model, self.guide = model, guide
        self.method, self.dt, self.adjoint, self.options = method, dt, adjoint, options
        self.brownian = brownian

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with its blocks solved by torchsde.

        :param args: Arguments of the model.
        :param kwargs: Keyword arguments of the model.
        :returns: What the model returns.
        """
        self._solved: set[str] = set()
        with SDEBlock.solved_by(self._solve):
            return self.model(*args, **kwargs)

    def _solve(self, block: Any, h: Tensor) -> Tensor:
        name = block._pyro_get_fullname(block.name)
        if any(getattr(frame, "name", None) == "num_particles_vectorized" for frame in _PYRO_STACK):
            raise NotImplementedError(
                "Joint has one path of weights: use num_particles without vectorize_particles"
            )
        block._refuse_data_plates(name)
        if block.regularise:
            raise NotImplementedError(
                f"Joint does not support energies, and the block of site {name!r} has "
                f"regularise={block.regularise}: leave regularise out, or train the model itself"
            )
        if name in self._solved:
            raise NotImplementedError(
                f"the block of site {name!r} is called twice, and its second solution would have "
                "other weights: train the model itself, with TraceSDE_ELBO"
            )
        self._solved.add(name)
        posterior = attrgetter(name)(self.guide.paths)
        q = posterior(block.prior())
        w0 = q._draw_initial(torch.Size())
        kl0 = w0.new_zeros(())
        if not isinstance(q.initial, Tensor):
            kl0 = kl_divergence(q.initial, q.prior.initial)
        field, check_unchanged = block._field()
        shape, sizes = h.shape, [h.numel(), w0.numel(), 1]

        def f(t: Tensor, state: Tensor) -> Tensor:
            h, w, _ = state[0].split(sizes)
            f_p, g = q.prior.coefficients(t, w)
            u, _ = q.evaluate(t.reshape(1), w)
            dh = field(t, h.view(shape), w).reshape(-1)
            kl = 0.5 * u.square().sum().reshape(1)
            return torch.cat([dh, torch.addcmul(f_p, g, u), kl]).unsqueeze(0)

        def g(t: Tensor, state: Tensor) -> Tensor:
            _, w, _ = state[0].split(sizes)
            zero = state.new_zeros(sizes[0])
            return torch.cat([zero, q.prior.coefficients(t, w)[1], zero[:1]]).unsqueeze(0)

        start = torch.cat([h.reshape(-1), w0, w0.new_zeros(1)]).unsqueeze(0)
        times = block.times[[0, -1]]
        dt = float(block.times.diff().min()) if self.dt is None else self.dt
        make = self.brownian
        noise = _brownian(times, start, dt, self.method) if make is None else make(start)
        options = dict(self.options, bm=noise, method=self.method, dt=dt)
        sde = _SDE(f, g, _sde_type(self.method))
        if self.adjoint:
            options["adjoint_params"] = tuple(
                p
                for p in [*posterior.control.parameters(), q.prior.rate, q.prior.scale]
                if p.requires_grad
            )
            end = torchsde.sdeint_adjoint(sde, start, times, **options)
        else:
            end = torchsde.sdeint(sde, start, times, **options)
        check_unchanged()
        h, _, kl = end[-1, 0].split(sizes)
        if am_i_wrapped():
            pyro.factor(f"{name}_kl", -(kl.squeeze(-1) + kl0))
        return h.view(shape)
