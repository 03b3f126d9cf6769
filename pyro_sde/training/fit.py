"""The training loop: SVI with mini-batches, annealing, validation and checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from tqdm.auto import tqdm

from .._threads import one_thread
from ..infer import TraceSDE_ELBO
from . import snapshot
from .arguments import check_numbers, check_objects, weight_of
from .batches import Batches
from .checkpoint_file import CheckpointFile
from .default_elbo import default_elbo
from .fingerprint import fingerprint
from .generators import check_generators
from .history import History
from .loop import Training
from .ranks import join_ranks
from .run import check_posterior, match_posterior, run_steps
from .save_times import SaveTimes
from .schedules import make_schedule
from .state import needs_metric

__all__ = ["fit"]

STEPS = 1500


@one_thread("fit")
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
    save_every: int | str | timedelta | None = None,
    keep: int = 2,
    resume: bool = False,
    allow_other_data: bool = False,
    max_rejected: int = 0,
    seed: int | None = None,
    match: bool = True,
    progress: bool = True,
    distributed: bool = True,
    checkpoint_every: int | None = None,
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
    parameter. Ctrl-C or SIGTERM ends the training after the current step; ``fit`` then saves and
    returns. A second one interrupts at once.

    ``resume=True`` continues a run that was killed from its last checkpoint, exactly as if it had
    not been killed: parameters, optimiser, random numbers (also those of torch generators that
    model and guide have) and the order of batches are the same. Learning rate, schedule, clipping
    and the number of steps may change. A run that has finished is loaded and not trained further.
    A state is saved when its loss and gradient have been found finite. While ``fit`` runs, no
    other training can write to its file.

    With mini-batches the plate of the model must say how many rows there are in all, so that Pyro
    scales the likelihood: ``pyro.plate("data", n, subsample_size=len(y))``. A model that takes a
    batch for all of the data is an error. So is a loss that depends on parameters that Pyro does
    not know, such as those of a torch module without ``pyro.module``, because they would not be
    trained. Where the model must know which rows it has been given (AutoSDE must, for paths inside
    of the plate without an encoder), make the row numbers a part of the data::

        def model(index, y):                                # data = (torch.arange(n), y)
            with pyro.plate("series", n, subsample=index):
                ...

    Started by ``torchrun``, or in a process group, all processes train together. Each must call
    ``fit`` with the same model and all of the data. It sees its part of every batch, or all of the
    data with noise of its own, and the gradients and losses are averaged: that is the training of
    one process on the same batches. Parameters and history are the same in all processes.
    ``checkpoint``, ``resume``, ``seed`` and ``progress`` are those of rank 0, which alone writes,
    prints and makes the importance check. If a process fails, the others raise a
    :class:`~pyro_sde.distributed.RankError`: at once, or if it hangs after the time limit of
    :func:`~pyro_sde.distributed.join`, ten minutes.

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
        and columns of tables become tensors, in torch's default dtype if they are floating point
        numbers, and NaN where their mask hides something.
    :param steps: The number of steps, 1500 if neither this nor ``epochs`` is given.
    :param epochs: The number of passes over the data, in the place of ``steps``; without
        ``batch_size`` an epoch is a step.
    :param batch_size: The number of rows (first dimension) of every tensor in ``data`` that a step
        sees, in all processes together. What is left over at the end of an epoch, less than a
        batch, is dropped; each epoch shuffles the rows anew.
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
    :param save_every: The most that a killed run loses: a number of steps, by default 100, or a
        time, as ``"30 s"``, ``"5 min"``, ``"1 h"`` or a ``datetime.timedelta``.
    :param keep: How many checkpoints to keep. The one before the last has ``.1`` after its name;
        it stays while the last ones are worse than the start of the training.
    :param resume: Continue from ``checkpoint``, if that file exists.
    :param allow_other_data: Whether a training may be resumed with data that are not those of the
        checkpoint.
    :param max_rejected: How many steps in a row may be rejected because their loss or gradient is
        not finite, before that raises :class:`~pyro_sde.training.Diverged`.
    :param seed: The seed of all random numbers and of the order of batches. By default the random
        state is used as it is, and the order follows torch's seed.
    :param match: Whether to match the latents that are not paths to weighted draws at the end. The
        intervals become those of the posterior, and the ELBO falls a little. Matching needs all of
        the data at once, and a KL of weight 1.
    :param progress: Whether to show a progress bar, and at the end one line of the importance check
        (:func:`~pyro_sde.diagnostics.importance`), which takes a few seconds at most.
    :param distributed: Whether to train together with the other processes of ``torchrun``, or of
        the process group, if there are any. False trains in this process alone.
    :param checkpoint_every: The former name of ``save_every``.
    :returns: The :class:`~pyro_sde.History` of the training. The parameters are trained in place.
    """
    check_objects(model, guide, optim, elbo)
    check_numbers(steps=steps, epochs=epochs, batch_size=batch_size, lr=lr, clip=clip, seed=seed)
    check_numbers(every=every, patience=patience, validation_draws=validation_draws)
    check_numbers(keep=keep, max_rejected=max_rejected)
    seed = None if seed is None else int(seed)
    batches = Batches(data, batch_size)
    if steps is not None and epochs is not None:
        raise ValueError("give either steps or epochs")
    steps = STEPS if steps is None and epochs is None else steps
    total = steps if steps is not None else (epochs or 0) * len(batches)
    if save_every is not None and checkpoint_every is not None:
        raise ValueError("checkpoint_every is the former name of save_every: give save_every alone")
    times = SaveTimes(save_every if checkpoint_every is None else checkpoint_every)
    if validation is None and (every is not None or patience is not None):
        raise ValueError("every and patience need validation: give its data, or leave both out")
    if optim is not None and (lr is not None or schedule is not None):
        raise ValueError(
            "optim has a learning rate of its own: give either optim, or lr and schedule"
        )
    if checkpoint is None and (resume or allow_other_data):
        what = "resume" if resume else "allow_other_data"
        raise ValueError(f"{what}=True needs a file to continue from: give checkpoint, a path")
    factor = make_schedule(schedule, total)
    if optim is None:
        lr = 0.02 if lr is None else lr
        optim = _adam(lr, factor)
    elif needs_metric(optim) and validation is None:
        raise ValueError(
            "ReduceLROnPlateau looks at the loss of a validation: give validation, its data, or "
            "use lr and schedule"
        )
    training = Training(
        model,
        guide,
        TraceSDE_ELBO(),
        optim,
        batches,
        lr,
        factor,
        weight_of(anneal),
        clip,
        validation,
        validation_draws,
        max_rejected=max_rejected,
    )
    with ExitStack() as stack:
        ranks = training.ranks = stack.enter_context(join_ranks(distributed))
        batches.divide(ranks.rank, ranks.world)
        progress = progress and ranks.rank == 0
        checkpoint, resume, seed = ranks.from_first(lambda: (checkpoint, resume, seed))
        if checkpoint is not None:
            _check_resumable(model, guide)
            file = training.file = CheckpointFile(checkpoint, keep)
            ranks.from_first(lambda: stack.enter_context(file).path)
        if checkpoint is not None or ranks.world > 1:
            training.data = fingerprint(batches.args, batches.kwargs, validation)
        ranks.check_same(
            data=f"of digest {training.data[:12]}",
            steps=total,
            batch_size=batch_size,
            lr=lr,
            schedule=schedule,
            clip=clip,
            anneal=anneal,
            every=every,
            patience=patience,
            validation_draws=validation_draws,
            max_rejected=max_rejected,
            match=match,
        )
        is_new = training.file is None or not ranks.from_first(training.file.path.exists)
        if not is_new:
            if not resume:
                raise FileExistsError(
                    f"checkpoint {checkpoint} exists already: continue from it with resume=True, "
                    "move it away, or give another path"
                )
            batches.seed = seed or 0
            snapshot.restore(training, seed, allow_other_data)
        else:
            seed = ranks.seed(seed)
            batches.seed = torch.initial_seed() % 2**62 if seed is None else seed
            if seed is not None:
                pyro.set_rng_seed(seed)
        if elbo is not None:
            training.elbo = elbo
        elif batch_size is None:
            training.elbo = default_elbo(model, guide, batches.args, batches.kwargs)
        if is_new:
            ranks.begin(training)
        if every is None:
            every = len(batches) if batch_size is not None else max(1, total // 20)
        history = run_steps(training, total, every, patience, times, progress)
        training.go_to_best()
        if history.stopped == "interrupted":
            return history
        if match and batch_size is None and training.weight(training.step) == 1.0 and total > 0:
            match_posterior(training, progress)
    if progress:
        history.importance, line = check_posterior(training)
        tqdm.write(line, file=sys.stderr)
    return history


def _check_resumable(model: Callable, guide: Callable) -> None:
    if pyro.settings.get("module_local_params"):
        raise NotImplementedError(
            "checkpoint needs the parameters in Pyro's param store, and module_local_params keeps "
            "them out of it: call pyro.settings.set(module_local_params=False)"
        )
    check_generators(model=model, guide=guide)


def _adam(lr: float, factor: Callable[[int], float]) -> PyroOptim:
    return PyroLRScheduler(
        torch.optim.lr_scheduler.LambdaLR,
        {
            "optimizer": torch.optim.Adam,
            "optim_args": {"lr": lr, "betas": (0.9, 0.99)},
            "lr_lambda": factor,
        },
    )
