"""The training loop: SVI with mini-batches, annealing, validation and checkpoints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from tqdm.auto import tqdm

from ..diagnostics import ImportanceCheck
from ..diagnostics.importance import importance_line
from ..infer import TraceSDE_ELBO, kl_weight
from .batches import Batches
from .default_elbo import default_elbo
from .history import History
from .interrupt import Interrupt
from .loop import Training
from .matching import Matching, has_joint_latents, match_latents
from .schedules import make_schedule

__all__ = ["fit"]

STEPS = 1500
CHECK_SAMPLES, CHECK_SECONDS = 4000, 5.0
"""The number of draws of the importance check at the end, and its time limit in seconds."""


def fit(
    model: Callable,
    guide: Callable,
    data: Any = (),
    *,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    schedule: str | Callable[[int], float] | None = None,
    optim: PyroOptim | None = None,
    elbo: Any = None,
    clip: float | None = None,
    anneal: int | Callable[[int], float] = 0,
    validation: Any = None,
    every: int | None = None,
    patience: int | None = None,
    validation_draws: int = 10,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    seed: int | None = None,
    match: bool = True,
    progress: bool = True,
) -> History:
    """Train a model and its guide with SVI, for a number of steps or epochs; by default 1500 steps.

    This is the loop that ``fit`` runs. Write it yourself where you need another one::

        pyro.set_rng_seed(seed)
        optim = PyroLRScheduler(torch.optim.lr_scheduler.LambdaLR, {
            "optimizer": torch.optim.Adam, "lr_lambda": schedule,
            "optim_args": {"lr": lr, "betas": (0.9, 0.99)}})
        elbo = TraceSDE_ELBO(num_particles=16, vectorize_particles=True)
        svi = SVI(model, guide, optim, elbo)
        for i in range(steps):
            with anneal_kl(kl_weight(i, anneal)):
                svi.step(*data)
            optim.step()

    The parameters of both loops are the same, bit for bit, with ``match=False``. By default ``fit``
    ends by matching the law of the latents that are not paths to weighted draws; without that, the
    posterior would be too narrow. See :func:`~pyro_sde.training.match_latents`. Mini-batches,
    gradient clipping, early stopping at the best validation and checkpoints are optional. A loss
    or gradient that is not finite raises :class:`~pyro_sde.training.Diverged` before it reaches a
    parameter. Ctrl-C ends the training after the current step; ``fit`` then saves and returns. A
    second Ctrl-C interrupts at once.

    ``resume=True`` continues a run that was killed from its last checkpoint, exactly as if it had
    not been killed: parameters, optimiser, random numbers and the order of batches are the same.
    Learning rate, schedule, clipping and the number of steps may change. A run that has finished is
    loaded and not trained further.

    With mini-batches the plate of the model must say how many rows there are in all, so that Pyro
    scales the likelihood: ``pyro.plate("data", n, subsample_size=len(y))``. A model that takes a
    batch for all of the data is an error. So is a loss that depends on parameters that Pyro does
    not know, such as those of a torch module without ``pyro.module``, because they would not be
    trained. Where the model must know which rows it has been given (AutoSDE must, for paths inside
    of the plate without an encoder), make the row numbers a part of the data::

        def model(index, y):                                # data = (torch.arange(n), y)
            with pyro.plate("series", n, subsample=index):
                ...

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_sde import AutoSDE
        >>> from pyro_sde.distributions import OrnsteinUhlenbeck
        >>> pyro.clear_param_store()
        >>> def model(y):
        ...     z = pyro.sample("z", OrnsteinUhlenbeck(1.0, 0.0, 1.0, torch.linspace(0, 1, 9)))
        ...     pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)
        >>> history = fit(model, AutoSDE(model), torch.tensor(1.0), steps=20, progress=False)
        >>> len(history.elbo), list(history.kl_by_site)
        (20, ['z'])

    :param model: The model: a function with parameters in Pyro's store, or a PyroModule.
    :param guide: The guide, of any kind.
    :param data: The arguments of both: a tuple, a dict by name, or a single argument. NumPy arrays
        become tensors, and floating point numbers get torch's default dtype.
    :param steps: The number of steps, 1500 if neither this nor ``epochs`` is given.
    :param epochs: The number of passes over the data, in the place of ``steps``; without
        ``batch_size`` an epoch is a step.
    :param batch_size: The number of rows (first dimension) of every tensor in ``data`` that a step
        sees. What is left over at the end of an epoch, less than a batch, is dropped; each epoch
        shuffles the rows anew.
    :param lr: The largest learning rate of Adam, by default 0.02. Adam averages squared gradients
        over 100 steps, because the first gradients, from the prior to the data, are the largest.
    :param schedule: ``"cosine"`` (the default), ``"constant"``, ``"one_cycle"``, or a function from
        the step to a factor of the learning rate.
    :param optim: A Pyro optimiser, which replaces ``lr`` and ``schedule``.
    :param elbo: The ELBO, by default :class:`~pyro_sde.TraceSDE_ELBO`. It has 16 vectorised
        particles for an :class:`~pyro_sde.AutoSDE` whose model allows them and has at most 2048
        latent numbers, if there are no mini-batches. Otherwise it has one particle.
    :param clip: The largest norm of the gradient of all parameters together.
    :param anneal: The number of steps in which the weight of the KL rises to 1, or a function from
        the step to a weight; see :class:`~pyro_sde.anneal_kl`.
    :param validation: Validation data, in the form of ``data``. ``fit`` keeps the parameters with
        the best ELBO on them.
    :param every: Steps between validations; by default an epoch, or a twentieth of all steps.
    :param patience: Stop after this many validations without an improvement.
    :param validation_draws: How many evaluations of the ELBO a validation averages.
    :param checkpoint: The file to save checkpoints to.
    :param checkpoint_every: Steps between checkpoints, the most that a killed run loses.
    :param resume: Continue from ``checkpoint``, if that file exists.
    :param seed: The seed of all random numbers and of the order of batches. By default the random
        state is used as it is, and the order follows torch's seed.
    :param match: Whether to match the latents that are not paths to weighted draws at the end. The
        intervals become those of the posterior, and the ELBO falls a little. Matching needs all of
        the data at once, and a KL of weight 1.
    :param progress: Whether to show a progress bar, and at the end one line of the importance check
        (:func:`~pyro_sde.diagnostics.importance`), which takes a few seconds at most.
    :returns: The :class:`~pyro_sde.History` of the training. The parameters are trained in place.
    """
    batches = Batches(data, batch_size)
    if steps is not None and epochs is not None:
        raise ValueError("give either steps or epochs")
    steps = STEPS if steps is None and epochs is None else steps
    total = steps if steps is not None else (epochs or 0) * len(batches)
    _check_positive(checkpoint_every=checkpoint_every, validation_draws=validation_draws)
    _check_positive(every=every, patience=patience, clip=clip, lr=lr)
    if validation is None and (every is not None or patience is not None):
        raise ValueError("every and patience need validation: give its data, or leave both out")
    if optim is not None and (lr is not None or schedule is not None):
        raise ValueError(
            "optim has a learning rate of its own: give either optim, or lr and schedule"
        )
    file = None if checkpoint is None else Path(checkpoint)
    if resume and file is None:
        raise ValueError("resume=True needs a file to continue from: give checkpoint, a path")
    if file is not None and pyro.settings.get("module_local_params"):
        raise NotImplementedError(
            "checkpoint needs the parameters in Pyro's param store, and module_local_params keeps "
            "them out of it: call pyro.settings.set(module_local_params=False)"
        )
    goes_on = file is not None and file.exists()
    if goes_on and not resume:
        raise FileExistsError(
            f"checkpoint {file} exists already: continue from it with resume=True, move it away, "
            "or give another path"
        )
    factor = make_schedule(schedule, total)
    if optim is None:
        lr = 0.02 if lr is None else lr
        optim = _adam(lr, factor)
    training = Training(
        model,
        guide,
        TraceSDE_ELBO(),
        optim,
        batches,
        lr,
        factor,
        anneal if callable(anneal) else lambda step: kl_weight(step, anneal),
        clip,
        validation,
        validation_draws,
        file,
    )
    if goes_on:
        batches.seed = seed or 0
        training.restore(seed)
    else:
        batches.seed = torch.initial_seed() % 2**62 if seed is None else seed
        if seed is not None:
            pyro.set_rng_seed(seed)
    if elbo is not None:
        training.elbo = elbo
    elif batch_size is None:
        training.elbo = default_elbo(model, guide, batches.args, batches.kwargs)
    if every is None:
        every = len(batches) if batch_size is not None else max(1, total // 20)
    history = _run(training, total, every, patience, checkpoint_every, progress)
    training.go_to_best()
    if history.stopped == "interrupted":
        return history
    if match and batch_size is None and training.weight(training.step) == 1.0 and total > 0:
        _match(training, progress)
    if progress:
        history.importance, line = _check(training)
        tqdm.write(line, file=sys.stderr)
    return history


def _adam(lr: float, factor: Callable[[int], float]) -> PyroOptim:
    return PyroLRScheduler(
        torch.optim.lr_scheduler.LambdaLR,
        {
            "optimizer": torch.optim.Adam,
            "optim_args": {"lr": lr, "betas": (0.9, 0.99)},
            "lr_lambda": factor,
        },
    )


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive: found {value!r}")


def _run(
    training: Training,
    total: int,
    every: int,
    patience: int | None,
    checkpoint_every: int,
    progress: bool,
) -> History:
    history, first = training.history, training.step
    bar = tqdm(
        total=total, initial=first, desc="fit", unit="step", mininterval=0.2, disable=not progress
    )
    with bar, Interrupt() as interrupt:
        while training.step < total and not interrupt.came:
            if _is_out_of_patience(history, patience):
                break
            training.take_step()
            if training.validation is not None and (
                training.step % every == 0 or training.step == total
            ):
                training.validate()
            if training.step % checkpoint_every == 0:
                training.save()
            bar.update()
            if training.step % 10 == 0 or training.step == total:
                bar.set_postfix(_figures(history), refresh=False)
    if training.step > first:
        training.save()
    history.stopped = "steps"
    if training.step < total:
        history.stopped = "interrupted" if interrupt.came else "patience"
    return history


def _match(training: Training, progress: bool) -> None:
    if not has_joint_latents(training.guide):
        return
    args, kwargs = training.batches(0)
    try:
        found = match_latents(training.model, training.guide, *args, **kwargs)
    except KeyboardInterrupt:
        found = Matching(0, 0.0, math.nan, {}, "matching was interrupted")
    training.history.matching = found
    if progress:
        tqdm.write(str(found), file=sys.stderr)


def _check(training: Training) -> tuple[ImportanceCheck | None, str]:
    """The importance check of the posterior, and the line that is printed about it."""
    if training.batches.size is not None:
        why = "the evidence of a mini-batch is not that of the data"
        return None, f"importance check: not made, because {why}"
    args, kwargs = training.batches(0)
    return importance_line(
        training.model, training.guide, args, kwargs, CHECK_SAMPLES, CHECK_SECONDS
    )


def _is_out_of_patience(history: History, patience: int | None) -> bool:
    if patience is None or history.best is None:
        return False
    return sum(step > history.best[0] for step, _ in history.validation) >= patience


def _figures(history: History, last: int = 50) -> dict[str, str]:
    found = {"ELBO": history.elbo, "KL": history.kl, "likelihood": history.log_likelihood}
    text = {k: f"{sum(v[-last:]) / len(v[-last:]):.5g}" for k, v in found.items()}
    if history.validation:
        text["validation"] = f"{history.validation[-1][1]:.5g}"
    return text
