"""A residual network of infinite depth whose weights are a process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro.distributions import Normal
from pyro.nn.module import PyroModule, PyroParam
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK, am_i_wrapped
from torch import Tensor, nn

from .._scopes import Scope
from ..distributions import OrnsteinUhlenbeck
from ..simulation.tolerance import current_tolerance
from ..solvers import evaluations, integrate
from ..solvers.adaptive import integrate_adaptively
from ..solvers.integrate import check_method
from ..times import PARTICLES
from .energy import ENERGIES, with_energies
from .functional_field import FunctionalField

__all__ = ["SDEBlock"]

Solver = Callable[[Any, Tensor], Tensor]

_solvers: Scope[Solver] = Scope("pyro_sde_block_solver")


class SDEBlock(PyroModule):
    r"""The map from h(0) to h(1) of a network with uncertain weights at every depth,

    .. math:: dh = \mathrm{field}(t, h; w_t)\,dt, \qquad dw = -\mathrm{rate}\,w\,dt
        + \mathrm{scale}\,dB

    The weights of ``field``, with their Ornstein-Uhlenbeck prior, are an ordinary sample site
    (``"block.w"`` for a block at ``self.block``). Each particle has one path of weights, which the
    batch shares. So call the block outside of the data plate: the plate then scales the
    likelihood, and the KL of the weights counts once. A block that a model calls twice has the same
    weights both times.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.nn import PyroModule
        >>> from pyro_sde import AutoSDE
        >>> from torch import nn
        >>> class Net(PyroModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         field = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 3))
        ...         self.block = SDEBlock(field, augment=2)
        ...         self.head = nn.Linear(3, 1)
        ...
        ...     def forward(self, x, y=None, size=None):  # size: of all data, if x is a mini-batch
        ...         mean = self.head(self.block(x)).squeeze(-1)
        ...         with pyro.plate("data", size or len(x), subsample_size=len(x)):
        ...             return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)
        >>> x = torch.linspace(-1.0, 1.0, 5).unsqueeze(-1)
        >>> guide = AutoSDE(Net()).setup(x, torch.zeros(5))
        >>> guide.path_sites, guide(x)["block.w"].shape  # 21 times, 451 weights
        (('block.w',), torch.Size([21, 451]))

    Inside of :class:`~pyro_sde.tolerance` weights and hidden units are solved together with
    adaptive steps, driven by the noise of the weights. With vectorised particles the output has
    their dimensions at the left, before the batch.

    :param field: Any module called as ``field(t, h)`` or ``field(h)`` that keeps the shape of h.
        It is copied, and its parameters become the process, unless they need no gradient.
    :param rate: Speed at which the prior's weights return to zero. Zero is Brownian motion.
    :param scale: The diffusion of the weights: a number, a tensor, or a parameter to be learned.
    :param steps: The number of steps of the solver, and of the weights, from time 0 to 1.
    :param augment: The number of channels (features) of zeros to add to h.
    :param initial: ``"point"``: :math:`w_0` is a parameter, which begins as the module was
        initialised. Or ``"normal"``: :math:`w_0` is inferred, too, with the prior N(0, 1 / fan in).
    :param method: ``"euler"``, ``"heun"``, ``"midpoint"``, ``"rk4"`` or ``"reversible_heun"``.
    :param memory: What training keeps of the solution of h: ``"graph"``, ``"recompute"`` or
        ``"reversible"`` (with ``method="reversible_heun"``); see
        :func:`~pyro_sde.solvers.integrate`. The last two also keep only states and noise of the
        weights.
    :param regularise: Weights of ``"kinetic"`` and ``"r2"``, the means over the batch of the
        integrals of :math:`|h'|^2` and :math:`|h''|^2`. Their weighted sum is a factor
        ``"block.w_energy"`` of the model, in nats for the whole data set. Dynamics that are easy to
        solve need fewer evaluations inside of :class:`~pyro_sde.tolerance`.
    :param name: The name of the site.
    :param event_dim: How many of the last dimensions of h are one input of the field, which
        distinguishes a batch from particles: by default 3 if the field has two-dimensional
        convolutions, and 1 if it has linear layers only.
    :param compile: Whether torch.compile compiles the steps of h, in about half a minute for each
        new combination of shapes. Without a C++ compiler there is a warning instead.
    """

    rate: Any
    scale: Any
    times: Tensor
    start_scale: Tensor

    def __init__(
        self,
        field: nn.Module,
        *,
        rate: Any = 1.0,
        scale: Any = 0.1,
        steps: int = 20,
        augment: int = 0,
        initial: str = "point",
        method: str = "euler",
        memory: str = "graph",
        regularise: Mapping[str, float] | None = None,
        name: str = "w",
        event_dim: int | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if initial not in ("point", "normal"):
            raise ValueError(f'initial must be "point" or "normal": found {initial!r}')
        check_method(method, memory, compile)
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an integer of at least 1: found {steps!r}")
        if not isinstance(augment, int) or augment < 0:
            raise ValueError(f"augment must be an integer of at least 0: found {augment!r}")
        self.skeleton = FunctionalField(field)
        self.augment, self.method, self.name, self.initial = augment, method, name, initial
        self.memory, self._compiles = memory, compile
        self.regularise = dict(regularise or {})
        if not set(self.regularise) <= set(ENERGIES):
            raise ValueError(
                f"regularise knows {', '.join(ENERGIES)}: found {sorted(self.regularise)}"
            )
        self.channel_dim = -self.skeleton.event_dim
        self.event_dim = self.skeleton.event_dim if event_dim is None else event_dim
        start, start_scale = self.skeleton.take_initial()
        times = torch.linspace(0, 1, steps + 1, dtype=start.dtype, device=start.device)
        self.register_buffer("times", times, persistent=False)
        # Named after the site: two blocks in a model that is not a PyroModule share a namespace.
        self._start_name = f"{name}_0"
        if initial == "point":
            self.register_parameter(self._start_name, nn.Parameter(start))
        else:
            self.register_buffer(self._start_name, start)
        self.register_buffer("start_scale", start_scale, persistent=False)
        self._assign("rate", rate)
        self._assign("scale", scale)

    def _assign(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.dim() > 1:
            raise ValueError(
                f"{name} must be a number or have one entry for each of {self.dim} weights: "
                f"found shape {tuple(value.shape)}"
            )
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
        elif isinstance(value, nn.Parameter | PyroParam):
            setattr(self, name, value)
        else:
            setattr(self, name, float(value))

    @property
    def start(self) -> Tensor:
        """:math:`w_0`, as initialised or learned."""
        return getattr(self, self._start_name)

    @property
    def dim(self) -> int:
        """The number of weights."""
        return self._modules["skeleton"].dim  # type: ignore

    @property
    def evaluations(self) -> int:
        """How often the field is evaluated in one pass."""
        return evaluations(self.method, len(self.times) - 1)

    @staticmethod
    @contextmanager
    def solved_by(solver: Solver) -> Iterator[None]:
        """A context in which ``solver(block, h)`` draws the weights and returns the output of
        every block.

        :param solver: Called with the block and its augmented input.
        """
        _solvers.enter(solver)
        try:
            yield
        finally:
            _solvers.leave(solver)

    def prior(self) -> OrnsteinUhlenbeck:
        """The prior of the weights.

        :returns: An Ornstein-Uhlenbeck process of shape ``(steps + 1, number of weights)``.
        """
        initial: Any = self.start
        if self.initial == "normal":
            initial = Normal(torch.zeros_like(initial), self.start_scale).to_event(1)
        memory = "graph" if self.memory == "graph" else "recompute"
        return OrnsteinUhlenbeck(self.rate, 0.0, self.scale, self.times, initial, memory)

    def forward(self, h: Tensor) -> Tensor:
        """Draw the weights, and solve the equation of the hidden units.

        :param h: h(0) without augmentation, a batch of inputs of the field.
        :returns: h(1), of the shape of the augmented ``h``, after dimensions of particles.
        """
        self._check_input(h)
        if self.augment:
            zeros = list(h.shape)
            zeros[self.channel_dim] = self.augment
            h = torch.cat([h, h.new_zeros(zeros)], self.channel_dim)
        solver = _solvers.current
        if solver is not None:
            return solver(self, h)
        w = self._weights()
        lead = torch.Size(w.shape[:-2])
        while lead and lead[-1] == 1:  # dimensions that Pyro leaves for the model's own plates
            lead = torch.Size(lead[:-1])
        particles = w.shape[:-2]
        if not lead:
            return self._solve(h, w.reshape(w.shape[-2:]), particles)
        has_lead = h.dim() - self.event_dim > 1
        if has_lead and h.shape[: len(lead)] != lead:
            raise ValueError(
                f"h has shape {tuple(h.shape)}, of which the last {self.event_dim} dimensions are "
                f"one input of the field; the weights have particles of shape {tuple(lead)}, so h "
                f"must begin with {tuple(lead)} or have no such dimension. If one input of the "
                "field has more dimensions, pass event_dim="
            )
        if not has_lead:
            h = h.expand(lead + h.shape)
        shape = h.shape
        h = h.reshape(lead.numel(), *shape[len(lead) :])
        w = w.reshape(lead.numel(), *w.shape[-2:])
        return self._solve(h, w, particles).reshape(shape)

    def _weights(self) -> Tensor:
        name = self._pyro_get_fullname(self.name)
        w = self._pyro_context.get(name)
        if w is not None:
            return w
        self._refuse_data_plates(name)
        infer: Any = {"weights": True}
        if self.initial != "point":
            infer["start"] = (self.start, 0.1 * self.start_scale)
        w = pyro.sample(name, self.prior(), infer=infer)
        self._check_finite(name, w.detach())
        self._pyro_context.set(name, w)
        return w

    def _refuse_data_plates(self, name: str) -> None:
        for frame in _PYRO_STACK:
            if (
                isinstance(frame, IndepMessenger)
                and frame.dim == -1
                and frame.name not in PARTICLES
            ):
                raise ValueError(
                    f"site {name!r} is inside the plate {frame.name!r}: every datum would have "
                    "weights of its own, and their KL would be scaled with the likelihood. Call "
                    "the block before `with pyro.plate(...)`, and sample the data inside"
                )

    def _check_finite(self, name: str, w: Tensor) -> None:
        if math.isfinite(w.sum()):  # only if all terms are, and without a mask of them
            return
        finite = torch.isfinite(w).all(-1).reshape(-1, w.shape[-2]).all(0)
        if not bool(finite.all()):
            t = float(self.times[~finite][0])
            raise ValueError(
                f"the weights of site {name!r} are not finite at t={t:g}: a parameter has become "
                "NaN or infinite. Go back to the last good checkpoint and train with a lower "
                "learning rate or clipped gradients"
            )

    def _check_input(self, h: Tensor) -> None:
        if not isinstance(h, Tensor) or not h.is_floating_point():
            found = h.dtype if isinstance(h, Tensor) else type(h).__name__
            raise TypeError(f"h must be a tensor of floating point numbers, found {found}")
        if h.numel() == 0:
            raise ValueError(
                f"h is empty, of shape {tuple(h.shape)}: drop the last, empty mini-batch"
            )
        if h.dim() <= self.event_dim:
            raise ValueError(
                f"h must have a batch dimension before the {self.event_dim} of one input: found "
                f"shape {tuple(h.shape)}; add one with h.unsqueeze(0)"
            )

    def _solve(self, h: Tensor, w: Tensor, particles: torch.Size) -> Tensor:
        field, check_unchanged = self._field()
        if w.dim() > 2:
            field = torch.func.vmap(field, in_dims=(None, 0, 0))
        tol = current_tolerance()
        names = list(self.regularise) if tol is None and am_i_wrapped() else []
        apart = None
        if names:
            field, h, apart = with_energies(field, names, self.event_dim, h)
        if tol is None:
            options: Any = {"method": self.method, "memory": self.memory}
            h = integrate(field, h, w, self.times, compile=self._compiles, **options)
        else:
            h = integrate_adaptively(field, h, w, tol)
        check_unchanged()
        if apart is not None:
            h, energies = apart(h)
            weights = energies.new_tensor([self.regularise[name] for name in names])
            mean = (energies * weights).sum(-1).reshape(*particles, -1).mean(-1)
            pyro.factor(self._pyro_get_fullname(f"{self.name}_energy"), -mean)
        return h

    def _field(self) -> tuple[Any, Any]:
        """dh/dt as a function of (t, h, w), and a check that it is one: it changes no buffer."""
        # Not self.skeleton, because Pyro would register the rest of the field.
        skeleton: Any = self._modules["skeleton"]
        before = skeleton.buffer_state()
        call = skeleton.call_purely if self._compiles else skeleton

        def field(t: Tensor, h: Tensor, w: Tensor) -> Tensor:
            try:
                out = call(t, h, w)
            except RuntimeError as e:
                raise ValueError(
                    f"field fails on h of shape {tuple(h.shape)}, {self.augment} channels of "
                    f"augmentation included: {e} (h is {h.dtype}, the weights {w.dtype})"
                ) from e
            if out.shape != h.shape:
                raise ValueError(
                    f"field must keep the shape of h, because dh/dt is added to h: found "
                    f"{tuple(out.shape)} from {tuple(h.shape)}"
                )
            return out

        def check_unchanged() -> None:
            if skeleton.has_changed(before):
                raise ValueError(
                    "field has changed one of its buffers while it was being evaluated: it must be "
                    "a function of (t, h) alone, because a solver may evaluate it any number of "
                    "times. Remove running statistics, or put the field's module into eval mode"
                )

        return field, check_unchanged

    def extra_repr(self) -> str:
        return (
            f"weights={self.dim}, steps={len(self.times) - 1}, method={self.method!r}, "
            f"initial={self.initial!r}, augment={self.augment}"
        )
