"""The state of a training, and what it consists of: steps, validations and checkpoints."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor

from .._errors import SolutionError
from ..diagnostics.explosion import ExplosionWarning, explosion
from ..infer import ElboTerms, anneal_kl, record_parts
from . import state as states
from .batches import Batches, as_arguments, name_missing
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .first_step import FirstStep
from .history import History

__all__ = ["Diverged", "Training"]

KIND = "pyro_sde.fit"
_NOT_FINITE = re.compile(r"\b(nan|inf|not finite|non-finite)\b")


class Diverged(RuntimeError):
    """The loss or a gradient is not finite. The parameters are those before that step.

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
        the gradient of a is not finite in step 1
    """


@dataclass
class Training:
    """The state and settings of a training; :func:`~pyro_sde.fit` describes the settings."""

    model: Callable
    guide: Callable
    elbo: Any
    optim: PyroOptim
    batches: Batches
    lr: float | None
    """The learning rate; None where the optimiser has its own."""
    schedule: Callable[[int], float]
    weight: Callable[[int], float]
    clip: float | None
    validation: Any
    validation_draws: int
    path: str | os.PathLike | None
    step: int = 0
    history: History = field(default_factory=History)
    best: dict[str, Any] | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    saved: int | None = None
    """The step of the last checkpoint."""
    has_warned: bool = False
    _best_data: float = -math.inf
    _is_checked: bool = False

    def take_step(self) -> None:
        args, kwargs = self.batches(self.step)
        weight = self.weight(self.step)
        weighing = nullcontext() if weight == 1.0 else anneal_kl(weight)
        first = None if self._is_checked else FirstStep()
        watching = poutine.trace(param_only=True)
        with record_parts() as parts, watching as capture, weighing, first or nullcontext():
            loss = self._loss_and_grads(args, kwargs)
        found = states.met_parameters(capture)
        if first is not None:
            first.check(self.batches, list(found.values()), model=self.model, guide=self.guide)
            self._is_checked = True
        self.parameters.update(found)
        self._check(loss, found)
        params = list(dict.fromkeys(found.values()))
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(params, self.clip)
        self.optim(params)
        lr = self._rate()
        zero_grads(params)
        if isinstance(self.optim, PyroLRScheduler):
            self.optim.step()
        self.step += 1
        self._record(loss, parts, weight, lr)

    def _loss_and_grads(self, args: tuple, kwargs: dict) -> float:
        try:
            return float(self.elbo.loss_and_grads(self.model, self.guide, *args, **kwargs))
        except (ValueError, ArithmeticError, SolutionError) as e:
            missing = name_missing(args, kwargs) if _NOT_FINITE.search(str(e)) else None
            if missing is not None:
                raise ValueError(f"{missing}. The model fails: {e}") from e
            # A failed check of arguments stands for a NaN. Before the first step, data caused it.
            if self.step == 0 or not (isinstance(e, SolutionError) or _NOT_FINITE.search(str(e))):
                raise
            zero_grads(self.parameters.values())
            raise Diverged(self._diverged(f"the model could not be evaluated ({e})")) from e

    def _check(self, loss: float, params: dict[str, Tensor]) -> None:
        problem = None
        if not math.isfinite(loss):
            problem = f"the loss became {loss}"
        else:
            grads = {k: p.grad for k, p in params.items() if p.grad is not None}
            flags = [g.isfinite().all() for g in grads.values()]
            if flags and not bool(torch.stack(flags).all()):
                name = next(k for k, ok in zip(grads, flags, strict=True) if not ok)
                problem = f"the gradient of {name} is not finite"
        if problem is not None:
            zero_grads(params.values())
            raise Diverged(self._diverged(problem))

    def _diverged(self, problem: str) -> str:
        kept = "There is no checkpoint yet"
        if self.saved is not None:
            kept = f"The last checkpoint, after step {self.saved}, is {self.path}"
        missing = name_missing(*self.batches(self.step))
        if missing is not None:
            problem = f"{missing}; {problem}"
        return (
            f"{problem} in step {self.step + 1}. The parameters are those after step {self.step}. "
            f"{kept}. Try a lower learning rate, clipping, smaller steps of the grid or a larger "
            "scale of the prior"
        )

    def _rate(self) -> float:
        for optimiser in self.optim.optim_objs.values():
            return getattr(optimiser, "optimizer", optimiser).param_groups[0]["lr"]
        return math.nan

    def _record(self, loss: float, parts: ElboTerms, weight: float, lr: float) -> None:
        data, elbo, kl = math.nan, -loss, None
        if parts.kl or parts.log_likelihood:
            kl = {site: value / weight for site, value in parts.kl.items()}
            data = sum(parts.log_likelihood.values(), 0.0)
            elbo = elbo if weight == 1.0 else data - sum(kl.values())
        self.history.add(self.step, elbo, kl, data, lr)
        if not self.has_warned and parts.paths:
            self._best_data = max(self._best_data, data)
            message = explosion(parts, weight, self._best_data)
            if message is not None:
                self.has_warned = True
                warnings.warn(f"step {self.step}: {message}", ExplosionWarning, stacklevel=4)

    def validate(self) -> float:
        """The mean ELBO of the validation data, always with the same random numbers."""
        args, kwargs = as_arguments(self.validation)
        before = self._tensors()["buffers"]
        with states.keep_random_state(), torch.no_grad():
            pyro.set_rng_seed(0)
            losses = [
                float(self.elbo.loss(self.model, self.guide, *args, **kwargs))
                for _ in range(self.validation_draws)
            ]
        states.copy_into(states.buffers_of(model=self.model, guide=self.guide), before)
        elbo = -sum(losses) / len(losses)
        self.history.validation.append((self.step, elbo))
        if self.history.best == (self.step, elbo):
            self.best = {"step": self.step, **self._tensors()}
        return elbo

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        both = self.parameters, states.buffers_of(model=self.model, guide=self.guide)
        copies = ({k: x.detach().clone() for k, x in part.items()} for part in both)
        return dict(zip(("parameters", "buffers"), copies, strict=True))

    def go_to_best(self) -> None:
        if self.best is not None:
            buffers = states.buffers_of(model=self.model, guide=self.guide)
            states.copy_into(self.parameters, self.best["parameters"])
            states.copy_into(buffers, self.best["buffers"])

    def _settings(self) -> dict[str, Any]:
        """The settings that must not change when a training is resumed."""
        return {
            "optim": states.optimiser_name(self.optim),
            "batch_size": self.batches.size,
            "rows": self.batches.rows,
            "seed": self.batches.seed,
        }

    def save(self) -> None:
        if self.path is None or self.saved == self.step:
            return
        save_checkpoint(
            self.path,
            {
                "step": self.step,
                **self._tensors(),
                "gradients": [k for k, p in self.parameters.items() if p.grad is not None],
                "optimiser": self.optim.get_state(),
                "random": states.random_state(),
                "history": self.history.state(),
                "best": self.best,
                "settings": self._settings(),
            },
            KIND,
        )
        self.saved = self.step

    def restore(self, seed: int | None) -> None:
        """Continue from the checkpoint. If it belongs to another training, nothing is changed.

        :param seed: The seed that the user gave; None takes that of the checkpoint.
        """
        state = load_checkpoint(self.path, KIND)  # type: ignore[arg-type]
        if seed is None:
            self.batches.seed = state["settings"]["seed"]
        mine = self._settings()
        other = {k: (state["settings"].get(k), v) for k, v in mine.items()}
        other = {k: pair for k, pair in other.items() if pair[0] != pair[1]}
        if other:
            raise CheckpointError(
                f"{self.path} was made with other settings, as pairs (in the file, now): {other}. "
                "Nothing was loaded; use the settings of the file, or another path to begin anew"
            )
        before = set(pyro.get_param_store().keys())
        found = self._build()
        buffers = states.buffers_of(model=self.model, guide=self.guide)
        try:
            states.check_same(self.path, "parameters", state["parameters"], found)
            states.check_same(self.path, "buffers", state["buffers"], buffers)
        except CheckpointError:
            states.forget_parameters(set(found) - before)
            raise
        states.copy_into(found, state["parameters"])
        states.copy_into(buffers, state["buffers"])
        for name in state["gradients"]:
            # Pyro leaves gradients of zero after each step, which Adam treats unlike None.
            found[name].grad = torch.zeros_like(found[name])
        states.restore_optimiser(self.optim, state["optimiser"], self.lr, self.schedule)
        self.parameters, self.best = found, state["best"]
        self.step = self.saved = state["step"]
        self.history = History.from_state(state["history"])
        self._best_data = max(self.history.log_likelihood, default=-math.inf)
        states.set_random_state(state["random"])

    def _build(self) -> dict[str, Tensor]:
        """Run the ELBO once, so that parameters that the first call creates exist."""
        args, kwargs = self.batches(0)
        watch = poutine.trace(param_only=True)
        with states.keep_random_state(), torch.no_grad(), watch as capture:
            self.elbo.loss(self.model, self.guide, *args, **kwargs)
        return states.met_parameters(capture)
