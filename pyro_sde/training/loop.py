"""The state of a training, and what it consists of: steps and validations."""

from __future__ import annotations

import math
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

from .._arrays import as_arguments
from .._errors import SolutionError
from ..diagnostics.explosion import ExplosionWarning, explosion
from ..guides.amortisation import times_of
from ..infer import anneal_kl, record_parts
from ..infer.finite import NonFiniteLoss
from . import snapshot
from . import state as states
from .batches import Batches, name_missing
from .checkpoint import CheckpointError
from .checkpoint_file import CheckpointFile
from .divergence import (
    Diverged,
    NotFinite,
    RejectedWarning,
    first_not_finite,
    gradient_norm,
    most_changed,
    spoilt_gradient,
)
from .first_step import FirstStep
from .generators import keep_all_random_states
from .history import History
from .late_parameters import LateParameters, make_late_optimiser
from .ranks import Ranks
from .shared_step import Evaluation

__all__ = ["Training"]

_NOT_FINITE = re.compile(r"\b(nan|inf|not finite|non-finite)\b")
FAILURES = ValueError, ArithmeticError, RuntimeError, AssertionError
"""What models and distributions raise where they cannot be evaluated."""
LARGE = 1e18
"""A norm of the gradient from which on its square may overflow."""
REMEMBER_EVERY = 100
"""Steps between copies of the parameters that are known to be good."""


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
    file: CheckpointFile | None = None
    data: str = ""
    """The fingerprint of the data, for checkpoints."""
    max_rejected: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    history: History = field(default_factory=History)
    best: dict[str, Any] | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    late_names: set[str] = field(default_factory=set)
    """The parameters that the first step did not meet."""
    late: LateParameters | None = None
    """Parameters of a checkpoint that have not appeared since it was loaded."""
    start: dict[str, Any] | None = None
    """The state of the first step, for a divergence before a good checkpoint is written."""
    saved: int | None = None
    """The step of the last checkpoint."""
    is_saved_good: bool = True
    has_warned: bool = False
    norm: float = math.nan
    """The norm of the last finite gradient."""
    best_data: float = -math.inf
    resumed: int = 0
    _good: dict[str, Tensor] = field(default_factory=dict)
    _rejected: int = 0
    _is_checked: bool = False

    def take_step(self, save: bool = False) -> None:
        """Evaluate the ELBO and change the parameters.

        :param save: Whether to save a checkpoint of the state before this step. That is done
            between the two, when the state is known to have a finite loss and gradient.
        """
        args, kwargs = self.batches(self.step)
        is_start = self.start is None and self.saved is None
        is_kept = self.file is not None and (save or is_start)
        moment = snapshot.Moment.of(self) if is_kept else None
        weight = self.weight(self.step)
        first = None
        if not self._is_checked:
            first = FirstStep(times_of(self.model, args, kwargs))

        def evaluate() -> Evaluation:
            weighing = nullcontext() if weight == 1.0 else anneal_kl(weight)
            watching = poutine.trace(param_only=True)
            with (
                record_parts() as parts,
                watching as capture,
                weighing,
                first or nullcontext(),
                self.late or nullcontext(),
            ):
                loss = self._loss_and_grads(args, kwargs)
            found = states.met_parameters(capture)
            if first is not None:
                first.check(self.batches, list(found.values()), model=self.model, guide=self.guide)
            return Evaluation(loss, parts, found)

        try:
            found = self.ranks.average(self, evaluate)
            self._meet(found.found)
            self._check(found.loss, found.found)
        except NotFinite as e:
            if self._rejected >= self.max_rejected:
                raise self.diverged(e.problem, e.parameter) from e.__cause__
            self._reject(e.problem)
            return
        self._is_checked, self._rejected = True, 0
        if moment is not None:
            elbo = found.terms(weight)[0]
            if is_start:
                self.start = snapshot.state_of(self, moment, elbo)
            if save:
                snapshot.save(self, moment, elbo)
        if save or self.step % REMEMBER_EVERY == 0:
            self._good = {k: p.detach().clone() for k, p in self.parameters.items()}
        params = list(dict.fromkeys(found.found.values()))
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(params, self.clip)
        self.optim(params)
        lr = states.present_rate(self.optim)
        zero_grads(params)
        self._step_schedule()
        self.step += 1
        self._record(found, weight, lr)

    def _meet(self, found: dict[str, Tensor]) -> None:
        if self.parameters:
            self.late_names |= found.keys() - self.parameters.keys()
        self.parameters.update(found)
        for name in found.keys() & self.late.values.keys() if self.late is not None else ():
            del self.late.values[name]  # type: ignore[union-attr]
            make_late_optimiser(self, name, found[name])

    def _step_schedule(self, metric: float | None = None) -> None:
        """Let the scheduler of the optimiser know of a step, or of a validation if it needs one."""
        if isinstance(self.optim, PyroLRScheduler) and states.needs_metric(self.optim) == (
            metric is not None
        ):
            self.optim.step(*(() if metric is None else (metric,)))

    def _loss_and_grads(self, args: tuple, kwargs: dict) -> float:
        try:
            return float(self.elbo.loss_and_grads(self.model, self.guide, *args, **kwargs))
        except (torch.OutOfMemoryError, CheckpointError):
            raise
        except FAILURES as e:
            missing = self.batches.name_bad_rows(self.step) if "is observed at" in str(e) else None
            if missing is None and _NOT_FINITE.search(str(e)):
                missing = self.batches.name_missing(args, kwargs)
            if missing is not None:
                raise ValueError(f"{missing}. The model fails: {e}") from e
            is_loss = isinstance(e, NonFiniteLoss)
            if not is_loss and not self._is_due_to_parameters(e, args, kwargs):
                raise
            zero_grads(self.parameters.values())
            reason = str(e).split("\nTrace Shapes")[0]  # Pyro adds a table of all sites
            problem = reason if is_loss else f"the model could not be evaluated ({reason})"
            raise NotFinite(problem) from e

    def _is_due_to_parameters(self, e: Exception, args: tuple, kwargs: dict) -> bool:
        """Whether an error comes from what training has made of the parameters, and not from the
        model or the data: with the good parameters of before there is none."""
        if self.step == self.resumed:
            return False  # before the first step, the model or the data caused it
        if _NOT_FINITE.search(str(e)) or isinstance(e, SolutionError):
            return True
        if first_not_finite(self.parameters) is not None:
            return True
        now = {k: self.parameters[k].detach().clone() for k in self._good}
        try:
            states.copy_into(self.parameters, self._good)
            return math.isfinite(self._loss(args, kwargs))
        except Exception:
            return False
        finally:
            states.copy_into(self.parameters, now)

    def _loss(self, args: tuple, kwargs: dict, draws: int = 1) -> float:
        """A mean of losses that leaves random numbers, buffers and the param store as they were."""
        both = {"model": self.model, "guide": self.guide}
        before = {k: x.clone() for k, x in states.buffers_of(**both).items()}
        known = set(pyro.get_param_store().keys())
        try:
            with keep_all_random_states(**both), torch.no_grad(), self.late or nullcontext():
                losses = [
                    float(self.elbo.loss(self.model, self.guide, *args, **kwargs))
                    for _ in range(draws)
                ]
            return sum(losses) / draws
        finally:
            # Training draws the initial values of parameters that appear here for the first time.
            states.forget_parameters(set(pyro.get_param_store().keys()) - known)
            states.copy_into(states.buffers_of(**both), before)

    def _check(self, loss: float, params: dict[str, Tensor]) -> None:
        grads = {k: p.grad for k, p in params.items() if p.grad is not None}
        norm = gradient_norm(list(grads.values()))
        name, problem = (None, None) if norm < LARGE else spoilt_gradient(grads)
        if math.isfinite(loss) and problem is None:
            self.norm = norm
            return
        zero_grads(params.values())
        problem = problem if math.isfinite(loss) else f"the loss became {loss}"
        raise NotFinite(str(problem), name)

    def check_end(self) -> None:
        """Refuse parameters that the last step has spoilt, and save good ones."""
        name = first_not_finite(self.parameters)
        if name is not None:
            raise self.diverged(f"{name} is not finite after the update", name, self.step)
        if self.file is not None and self.saved != self.step:
            moment = snapshot.Moment.of(self)
            loss = self._loss_of_update("the loss", *self.batches(self.step))
            snapshot.save(self, moment, -loss)

    def _loss_of_update(self, what: str, args: tuple, kwargs: dict, draws: int = 1) -> float:
        """A loss that is not of a step; training has diverged where it cannot be evaluated."""

        def evaluate() -> float:
            try:
                return self._loss(args, kwargs, draws)
            except FAILURES as e:
                if name_missing(args, kwargs) or not self._is_due_to_parameters(e, args, kwargs):
                    raise
                raise NotFinite(f"{what} could not be evaluated after the update ({e})") from e

        try:
            loss = self.ranks.mean(self, evaluate)
        except NotFinite as e:
            raise self.diverged(e.problem, step=self.step) from e.__cause__
        if not math.isfinite(loss):
            raise self.diverged(f"{what} became {loss} after the update", step=self.step)
        return loss

    def diverged(
        self, problem: str, parameter: str | None = None, step: int | None = None
    ) -> Diverged:
        """The error that ends a training, which names the last good checkpoint.

        :param problem: What is wrong.
        :param parameter: The name of the offending parameter, if it is known.
        :param step: The step that failed; by default the next one.
        """
        step = self.step + 1 if step is None else step
        spoilt = first_not_finite(self.parameters)
        parameter = spoilt or parameter or most_changed(self.parameters, self._good)
        good, self.saved, self.is_saved_good = self.ranks.from_first(
            lambda: (snapshot.good_checkpoint(self), self.saved, self.is_saved_good)
        )
        kept = "There is no checkpoint yet"
        if good is not None:
            kept = f"The last checkpoint, after step {good[1]}, is {good[0]}"
        elif self.file is not None and self.saved is not None:
            kept = f"The only checkpoint, {self.file.given}, is of a training that was failing"
        missing = self.batches.name_missing(*self.batches(self.step))
        missing = missing or self.batches.name_bad_rows(self.step)
        if missing is not None:
            problem = f"{missing}; {problem}"
        if parameter is not None and parameter not in problem:
            how = "is not finite" if spoilt else "has changed most"
            kept = f"Among the parameters, {parameter} {how}. {kept}"
        if math.isfinite(self.norm):
            kept = f"The norm of the last finite gradient was {self.norm:.3g}. {kept}"
        message = (
            f"{problem} in step {step}. The parameters are those after step {self.step}. "
            f"{kept}. Try a lower learning rate, clipping, smaller steps of the grid or a larger "
            "scale of the prior"
        )
        return Diverged(message, step, self.norm, parameter, good and good[0])

    def _reject(self, problem: str) -> None:
        """Count a step that changes nothing."""
        if self.history.rejected == 0 and self.ranks.rank == 0:
            message = f"step {self.step + 1} was rejected: {problem}"
            warnings.warn(message, RejectedWarning, stacklevel=5)
        self._rejected += 1
        self.history.rejected += 1
        self._step_schedule()
        self.step += 1
        self.history.add(self.step, math.nan, None, math.nan, states.present_rate(self.optim))

    def _record(self, found: Evaluation, weight: float, lr: float) -> None:
        elbo, kl, data = found.terms(weight)
        self.history.add(self.step, elbo, kl, data, lr)
        if not self.has_warned and found.parts.paths and self.ranks.rank == 0:
            self.best_data = max(self.best_data, data)
            message = explosion(found.parts, weight, self.best_data)
            if message is not None:
                self.has_warned = True
                warnings.warn(f"step {self.step}: {message}", ExplosionWarning, stacklevel=4)

    def validate(self) -> float:
        """The mean ELBO of the validation data, always with the same random numbers."""
        args, kwargs = as_arguments(self.validation)
        with keep_all_random_states(model=self.model, guide=self.guide):
            pyro.set_rng_seed(0)
            draws = self.validation_draws
            elbo = -self._loss_of_update("the validation loss", args, kwargs, draws)
        if states.needs_metric(self.optim):
            self._step_schedule(-elbo)
        self.history.validation.append((self.step, elbo))
        if self.history.best == (self.step, elbo):
            self.best = {"step": self.step, **self.tensors()}
        return elbo

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        both = self.parameters, states.buffers_of(model=self.model, guide=self.guide)
        copies = ({k: x.detach().clone() for k, x in part.items()} for part in both)
        return dict(zip(("parameters", "buffers"), copies, strict=True))

    def go_to_best(self) -> None:
        if self.best is not None:
            buffers = states.buffers_of(model=self.model, guide=self.guide)
            states.copy_into(self.parameters, self.best["parameters"])
            states.copy_into(buffers, self.best["buffers"])
