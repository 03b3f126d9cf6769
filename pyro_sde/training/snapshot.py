"""The state of a training in a checkpoint, and back."""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from . import state as states
from .checkpoint import CheckpointError, encode_checkpoint, load_checkpoint
from .divergence import first_not_finite
from .entries import check_entries
from .generators import generator_states, keep_all_random_states, set_generators
from .history import History
from .late_parameters import LateParameters
from .optimiser_form import check_optimiser

__all__ = ["KIND", "Moment", "build", "good_checkpoint", "restore", "save", "state_of"]

KIND = "pyro_sde.fit"


@dataclass
class Moment:
    """What the evaluation of an ELBO changes, as it is before: a checkpoint is written after the
    evaluation that proves it good, and continues with that evaluation."""

    random: dict[str, Any]
    buffers: dict[str, Tensor]
    parameters: set[str]
    """Those that have appeared. The evaluation draws the initial values of others."""
    gradients: list[str]
    """The parameters that have a gradient. Pyro leaves gradients of zero after each step, which
    Adam treats unlike None."""

    @classmethod
    def of(cls, training: Any) -> Moment:
        both = {"model": training.model, "guide": training.guide}
        buffers = {k: x.clone() for k, x in states.buffers_of(**both).items()}
        gradients = [k for k, p in training.parameters.items() if p.grad is not None]
        random = states.random_state() | {"generators": generator_states(**both)}
        return cls(random, buffers, set(training.parameters), gradients)


def settings_of(training: Any) -> dict[str, Any]:
    """The settings that must not change when a training is resumed."""
    return {
        "optim": states.optimiser_name(training.optim),
        "batch_size": training.batches.size,
        "rows": training.batches.rows,
        "seed": training.batches.seed,
        "processes": training.ranks.world,
    }


def save(training: Any, moment: Moment, elbo: float) -> None:
    """Write a checkpoint; refuse parameters or optimisers that are not finite.

    :param training: The training.
    :param moment: What the evaluation has changed that gave ``elbo``.
    :param elbo: The ELBO of the parameters that are saved.
    """
    if training.file is None or training.saved == training.step:
        return
    state = state_of(training, moment, elbo)
    for name, x in state["parameters"].items():
        parts = states.tensors_in(state["optimiser"][name], "the optimiser's state")
        where = first_not_finite({"it": x, **dict(parts)})
        if where is not None:
            problem = name if where == "it" else f"{where} of {name}"
            raise training.diverged(f"{problem} is not finite, and no checkpoint was written", name)
    # A generation that is worse than the start of the training must not displace a good one.
    if training.ranks.rank == 0:
        training.file.write(encode_checkpoint(state, KIND), rotate=training.is_saved_good)
    training.saved, training.is_saved_good = training.step, state["is_good"]


def state_of(training: Any, moment: Moment, elbo: float) -> dict[str, Any]:
    """What a checkpoint holds.

    :param training: The training, after an evaluation that has found its parameters good.
    :param moment: What that evaluation has changed since.
    :param elbo: The ELBO that it has found.
    """
    now = training.tensors()
    parameters, buffers = now["parameters"], now["buffers"] | moment.buffers
    if moment.parameters:  # the first evaluation of all makes the initial ones
        parameters = {k: x for k, x in parameters.items() if k in moment.parameters}
        buffers = moment.buffers
    optimiser: dict[str, Any] = {k: {} for k in parameters} | training.optim.get_state()
    if training.late is not None:
        parameters |= training.late.values
        optimiser |= training.optim._state_waiting_to_be_consumed
    random, *others = training.ranks.gather(moment.random)
    return {
        "step": training.step,
        "parameters": parameters,
        "buffers": buffers,
        "late": sorted(training.late_names & parameters.keys()),
        "gradients": [k for k in moment.gradients if optimiser.get(k)],
        "optimiser": optimiser,
        "lr": states.base_rate(training.optim),
        "random": random,
        "random_of_other_ranks": others,
        "history": training.history.state(),
        "best": training.best,
        "settings": settings_of(training),
        "data": training.data,
        "is_good": not _is_worse_than_start([*training.history.elbo, elbo]),
    }


def _is_worse_than_start(elbo: list[float]) -> bool:
    n = min(10, len(elbo) // 2)
    first, last = ([x for x in part if math.isfinite(x)] for part in (elbo[:n], elbo[-n:]))
    return bool(first and last) and statistics.median(last) < min(first)


def good_checkpoint(training: Any) -> tuple[Path, int] | None:
    """The last checkpoint that is not worse than the start of the training, and its step; None if
    there is none. If that is the previous generation, or the start, it takes the place of the last
    one."""
    file = training.file
    if file is None:
        return None
    if training.saved is None or not training.is_saved_good:
        state = None
        with suppress(CheckpointError, OSError):
            state = load_checkpoint(file.generation(1), KIND)
            check_entries(file.generation(1), state)
        try:
            if state and state["settings"] == settings_of(training) and state["is_good"]:
                file.go_back()
            elif training.start is not None:
                state = training.start
                file.write(encode_checkpoint(state, KIND), rotate=False)
            else:
                return None
        except OSError:  # the training has failed, and that is the error
            return None
        training.saved, training.is_saved_good = state["step"], True
    return file.given, training.saved


def build(training: Any) -> dict[str, Tensor]:
    """Run the ELBO once, on the whole of the first batch, so that parameters that the first call
    creates exist. The random state is left as it was.

    :returns: The unconstrained parameters that were met.
    """
    both = {"model": training.model, "guide": training.guide}
    args, kwargs = training.batches(0, whole=True)
    watch = poutine.trace(param_only=True)
    with keep_all_random_states(**both), torch.no_grad(), watch as capture:
        training.elbo.loss(training.model, training.guide, *args, **kwargs)
    return states.met_parameters(capture)


def restore(training: Any, seed: int | None, allow_other_data: bool) -> None:
    """Continue from the checkpoint. If it belongs to another training, nothing is changed.

    :param training: The training, before its first step.
    :param seed: The seed that the user gave; None takes that of the checkpoint.
    :param allow_other_data: Whether the data may differ from those of the checkpoint.
    """
    path = training.file.given
    state = training.ranks.from_first(lambda: load_checkpoint(path, KIND))
    check_entries(path, state)
    if seed is None:
        training.batches.seed = state["settings"]["seed"]
    mine = settings_of(training)
    other = {k: (state["settings"].get(k), v) for k, v in mine.items()}
    other = {k: pair for k, pair in other.items() if pair[0] != pair[1]}
    if other:
        raise CheckpointError(
            f"{path} was made with other settings, as pairs (in the file, now): {other}. "
            "Nothing was loaded; use the settings of the file, or another path to begin anew"
        )
    if state["data"] != training.data and not allow_other_data:
        raise CheckpointError(
            f"{path} was made with other data, of the same shapes perhaps. Nothing was loaded; "
            "give the data of that training, allow_other_data=True if it is to continue with "
            "these, or another path to begin anew"
        )
    _Restoring(training, path, state).run()


class _Restoring:
    """The steps of loading a state, all of which are undone if one of them fails."""

    def __init__(self, training: Any, path: Path, state: dict[str, Any]) -> None:
        self.training, self.path, self.state = training, path, state
        self.both = {"model": training.model, "guide": training.guide}

    def run(self) -> None:
        before = set(pyro.get_param_store().keys())
        random = states.random_state(), generator_states(**self.both)
        buffers, present = states.buffers_of(**self.both), self._parameters_of_store()
        before_build = {**buffers, **present}
        values = {k: x.detach().clone() for k, x in before_build.items()}
        optim = self.training.optim
        kept = optim.optim_objs, optim.grad_clip, optim._state_waiting_to_be_consumed
        copies = [dict(x) for x in kept]
        # The parameters may be those with which a training has diverged.
        states.copy_into(present, {k: self.state["parameters"][k] for k in present})
        try:
            found = build(self.training)
        except BaseException:
            states.copy_into(before_build, values)
            raise
        gradients = {k: p.grad for k, p in found.items()}
        values = {k: x.detach().clone() for k, x in found.items()} | values
        part = "parameters"
        try:
            for part in ("parameters", "buffers", "optimiser", "history", "random"):
                getattr(self, f"_put_{part}")(found, states.buffers_of(**self.both))
        except Exception as e:
            states.copy_into({**found, **before_build}, values)
            for name, p in found.items():
                p.grad = gradients[name]
            for x, copy in zip(kept, copies, strict=True):
                x.clear()
                x.update(copy)
            states.set_random_state(random[0])
            set_generators(random[1], **self.both)
            states.forget_parameters(set(found) - before)
            if isinstance(e, CheckpointError):
                raise
            raise CheckpointError(
                f"{self.path} is not the checkpoint of a training: entry {part} cannot be used "
                f"({type(e).__name__}: {e}). Nothing was loaded; use the pyro_sde that wrote it, "
                "or begin anew with another path"
            ) from e

    def _parameters_of_store(self) -> dict[str, Tensor]:
        """The parameters of the checkpoint that Pyro knows already, unconstrained."""
        store: Any = pyro.get_param_store()
        saved = self.state["parameters"]
        found = {k: store[k].unconstrained() for k in store.keys() & saved.keys()}
        return {
            k: p for k, p in found.items() if (p.shape, p.dtype) == (saved[k].shape, saved[k].dtype)
        }

    def _put_parameters(self, found: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        training, state = self.training, self.state
        values = dict(state["parameters"])
        missing = (set(state["late"]) & set(values)) - set(found)
        late = LateParameters(self.path, **self.both)
        late.values = {k: values.pop(k) for k in sorted(missing)}
        states.check_same(self.path, "parameters", values, found)
        states.check_same(self.path, "buffers", state["buffers"], buffers)
        best = state["best"]
        if best is not None:
            every = {**found, **late.values}
            some = {
                k: x for k, x in every.items() if k in best["parameters"] or k not in state["late"]
            }
            states.check_same(self.path, "best parameters", best["parameters"], some)
            states.check_same(self.path, "best buffers", best["buffers"], buffers)
        states.copy_into(found, values)
        for name, p in found.items():
            p.grad = torch.zeros_like(p) if name in state["gradients"] else None
        training.parameters, training.best = found, best
        training.late, training.late_names = late, set(state["late"])

    def _put_buffers(self, found: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        states.copy_into(buffers, self.state["buffers"])

    def _put_optimiser(self, found: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        training = self.training
        restored = self.state["optimiser"]
        check_optimiser(self.path, training.optim, self.state)
        states.restore_optimiser(
            training.optim, restored, self.state["lr"], training.lr, training.schedule
        )
        for name, p in found.items():
            states.make_optimiser(training.optim, name, p)

    def _put_history(self, found: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        training, state = self.training, self.state
        training.history = History.from_state(state["history"])
        training.step = training.saved = training.resumed = state["step"]
        training.is_saved_good = state["is_good"]
        training.best_data = max(training.history.log_likelihood, default=-math.inf)

    def _put_random(self, found: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        of_ranks = [self.state["random"], *self.state["random_of_other_ranks"]]
        random = dict(of_ranks[self.training.ranks.rank])
        generators = random.pop("generators")
        here = generator_states(**self.both)
        if generators.keys() != here.keys():
            raise CheckpointError(
                f"{self.path} is of another model or guide: it has the torch generators "
                f"{sorted(generators)}, and this one {sorted(here)}. Nothing was loaded; give "
                "another path to begin anew"
            )
        states.set_random_state(random)
        set_generators(generators, **self.both)
