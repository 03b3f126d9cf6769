"""Training that diverges: what is not finite, and the error that says so."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "Diverged",
    "NotFinite",
    "RejectedWarning",
    "first_not_finite",
    "gradient_norm",
    "most_changed",
    "spoilt_gradient",
]


class NotFinite(Exception):
    """A step that failed, on all ranks if it failed on one: it is rejected, or training has
    diverged.

    :param problem: What is wrong.
    :param parameter: The name of the offending parameter, if it is known.
    """

    def __init__(self, problem: str, parameter: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.parameter = problem, parameter


class Diverged(RuntimeError):
    """The loss, a gradient or a parameter is not finite, or the model cannot be evaluated with the
    parameters that training has led to.

    Example::

        >>> import pyro, torch
        >>> from pyro_sde import fit
        >>> pyro.clear_param_store()
        >>> def model():
        ...     pyro.factor("f", -pyro.param("a", torch.tensor(0.0)).sqrt())
        >>> try:
        ...     history = fit(model, lambda: None, steps=1, progress=False)
        ... except Diverged as e:
        ...     print(str(e).split(". ")[0])
        ...     print(e.step, e.parameter, e.checkpoint)
        the gradient of a is not finite in step 1
        1 a None

    :param message: The message.
    :param step: The number of the step that failed, from 1.
    :param norm: The norm of the last finite gradient; NaN if there was none.
    :param parameter: The name of the offending parameter: the first that is not finite, or whose
        gradient is not, and otherwise the one that has changed most. None where it is not known.
    :param checkpoint: The last good checkpoint, from which ``fit(..., resume=True)`` continues;
        None if there is none.
    """

    def __init__(
        self,
        message: str,
        step: int = 0,
        norm: float = math.nan,
        parameter: str | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.step, self.norm = step, norm
        self.parameter, self.checkpoint = parameter, checkpoint

    def __reduce__(self) -> tuple:
        details = self.step, self.norm, self.parameter, self.checkpoint
        return type(self), (str(self), *details)


class RejectedWarning(UserWarning):
    """Warns that ``fit(..., max_rejected=...)`` has rejected a step whose loss or gradient is not
    finite: it has changed no parameter. There is one warning a training;
    ``History.rejected`` is the number of such steps.

    Example::

        >>> import pyro, torch, warnings
        >>> from pyro_sde import fit
        >>> pyro.clear_param_store()
        >>> calls = []
        >>> def model():
        ...     a = pyro.param("a", torch.tensor(2.0))
        ...     calls.append(a)
        ...     pyro.factor("f", -a.square() * (math.nan if len(calls) == 2 else 1.0))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", RejectedWarning)
        ...     options = {"elbo": pyro.infer.Trace_ELBO(), "max_rejected": 1, "progress": False}
        ...     history = fit(model, lambda: None, steps=3, **options)
        >>> history.rejected, [str(w.message)[:22] for w in caught if w.category is RejectedWarning]
        (1, ['step 2 was rejected: t'])
    """


def gradient_norm(gradients: list[Tensor]) -> float:
    """The Euclidean norm of all gradients together, not finite only where one of them is not."""
    if not gradients:
        return 0.0
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not math.isfinite(norm):  # the sum of squares overflows before the gradient does
        largest = float(torch.nn.utils.get_total_norm(gradients, math.inf))
        if math.isfinite(largest):
            return largest * float(torch.nn.utils.get_total_norm([g / largest for g in gradients]))
    return norm


def first_not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first tensor that is not finite; None if all are."""
    return next((k for k, x in tensors.items() if not bool(x.isfinite().all())), None)


def spoilt_gradient(gradients: dict[str, Tensor]) -> tuple[str, str] | tuple[None, None]:
    """The name of the first gradient that must not reach an optimiser, and the reason.

    Adam and its relatives average the square of the gradient. Where that overflows, their steps are
    zero from then on.
    """
    name = first_not_finite(gradients)
    if name is not None:
        return name, f"the gradient of {name} is not finite"
    name = first_not_finite({k: g.square() for k, g in gradients.items()})
    if name is not None:
        return name, f"the gradient of {name} is so large that its square overflows"
    return None, None


def most_changed(now: dict[str, Tensor], before: dict[str, Tensor]) -> str | None:
    """The name of the tensor that differs most from what it was, in units of 1 + |x|."""
    change = {
        k: float(((now[k].detach() - x) / (1 + x.abs())).abs().max())
        for k, x in before.items()
        if k in now and x.numel()
    }
    return max(change, key=change.__getitem__, default=None)
