"""The processes that train together: what they exchange, and how they end together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import pyro.poutine as poutine
import torch
import torch.distributed
from pyro.infer.util import zero_grads
from torch import Tensor, nn

from ..distributed import RankError, place, reason_of, seed_rank, training_group
from ..infer import ElboTerms
from . import snapshot
from . import state as states
from .divergence import NotFinite
from .fingerprint import fingerprint
from .generators import own_generators
from .interrupt import Interrupt
from .save_times import SaveTimes
from .shared_step import Evaluation, Layout

__all__ = ["RankGroup", "Ranks", "join_ranks"]

T = TypeVar("T")


class Ranks:
    """A process that trains alone, and what others need in the place of its methods: all ranks
    call these in the same order."""

    rank, world = 0, 1

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def check_same(self, **values: Any) -> None:
        """Refuse ranks whose arguments differ; functions are not compared."""

    def seed(self, seed: int | None) -> int | None:
        """The seed of a new run: several ranks need one, and rank 0 draws it if it is None."""
        return seed

    def begin(self, training: Any) -> None:
        """Give all ranks the same parameters, and noise of their own."""

    def from_first(self, f: Callable[[], T]) -> T:
        """What ``f`` returns on rank 0, where alone it is called."""
        return f()

    def gather(self, x: T) -> list[T]:
        """The values of all ranks."""
        return [x]

    def copy_first(self, tensors: dict[str, Tensor]) -> None:
        """Give tensors the values that they have on rank 0."""

    def average(self, training: Any, evaluate: Callable[[], Evaluation]) -> Evaluation:
        """The mean of the evaluations of all ranks, with the mean gradients in the parameters. All
        ranks raise the error of one."""
        return evaluate()

    def mean(self, training: Any, f: Callable[[], float]) -> float:
        """The mean of a number over the ranks. All ranks raise the error of one."""
        return f()

    def is_due(self, times: SaveTimes, step: int) -> bool:
        """Whether to save the state after so many steps."""
        return times.is_due(step)

    def is_interrupted(self, interrupt: Interrupt) -> bool:
        """Whether a signal has come, on any rank, before the last step was made."""
        return interrupt.came


def join_ranks(distributed: bool) -> Ranks:
    """The process group, or a process that trains alone.

    :param distributed: Whether to train with the other processes, if there are any.
    """
    return RankGroup() if distributed else Ranks()


class RankGroup(Ranks):
    """The ranks of a process group. Inside of its context they have a group of their own, which is
    closed when one of them leaves it, so that the others do not wait for that one."""

    def __init__(self) -> None:
        self._layout = Layout()
        self._known: dict[str, Tensor] = {}
        """All parameters that this rank has met."""
        self._interrupt: Interrupt | None = None
        self._is_interrupted = False
        self._problem: Exception | None = None
        """Why the first evaluation, of the whole batch, has failed."""

    def __enter__(self) -> Ranks:
        self._group, self._timeout = training_group()
        if self._group is None:
            return Ranks()
        self.rank, self.world = place()
        self._me = f"rank {self.rank} of {self.world}"
        on_cuda = "nccl" in str(torch.distributed.get_backend(self._group))
        self._device = torch.device("cuda" if on_cuda else "cpu")
        return self

    def __exit__(self, *args: object) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, ValueError):
                torch.distributed.destroy_process_group(group)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A context for messages, in which a rank that does not answer is a ``RankError``."""
        try:
            yield
        except RuntimeError as e:
            reason = reason_of(e)
            again = (
                "Then start all ranks again; with checkpoint and resume=True they continue from "
                "the last checkpoint"
            )
            if re.search("time[d ]*out", reason, re.IGNORECASE):
                raise RankError(
                    f"{self._me} has waited {self._timeout.total_seconds():g} s for another rank "
                    f"({reason}): one hangs, or all are slower than that. Look where the others "
                    "are (py-spy dump --pid), or allow more time by "
                    f"pyro_sde.distributed.join(timeout=...) before fit. {again}"
                ) from e
            raise RankError(
                f"{self._me} has lost the connection to another rank ({reason}), which has failed, "
                "has been killed (for lack of memory, say) or has ended. Look for the error of "
                f"that rank, and mend it. {again}"
            ) from e

    def gather(self, x: T) -> list[T]:
        found: list[Any] = [None] * self.world
        with self._waiting():
            torch.distributed.all_gather_object(found, x, group=self._group)
        return found

    def from_first(self, f: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]
        error = None
        if self.rank == 0:
            try:
                answer[0] = f()
            except Exception as e:
                error, answer[1] = e, f"{type(e).__name__}: {e}"
        with self._waiting():
            torch.distributed.broadcast_object_list(answer, src=0, group=self._group)
        if error is not None:
            raise error
        if answer[1] is not None:
            raise RankError(f"rank 0 has failed, so {self._me} ends, too. {answer[1]}")
        return answer[0]

    def copy_first(self, tensors: dict[str, Tensor]) -> None:
        values = self.from_first(lambda: {k: x.detach().cpu() for k, x in tensors.items()})
        states.copy_into(tensors, values)

    def check_same(self, **values: Any) -> None:
        plain = {k: str(v) for k, v in values.items() if not callable(v)}
        self._refuse_others("arguments", plain)

    def _refuse_others(self, what: str, mine: dict[str, str]) -> None:
        """Refuse ranks that differ from rank 0, all of them in the same way."""
        first, *others = self.gather(mine)
        for rank, other in enumerate(others, 1):
            keys = sorted(k for k in first.keys() | other.keys() if first.get(k) != other.get(k))
            if keys:
                raise ValueError(
                    f"{what} of rank {rank} are not those of rank 0: "
                    + ", ".join(
                        f"{k} is {other.get(k, 'missing')} instead of {first.get(k, 'missing')}"
                        for k in keys[:3]
                    )
                    + ". All processes must be given the same model and all of the data, of which "
                    "fit takes a part of each batch: build or draw them from the same seed "
                    "everywhere, or pass distributed=False to train alone"
                ) from self._problem

    def seed(self, seed: int | None) -> int | None:
        return self.from_first(lambda: int(torch.randint(2**31, ())) if seed is None else seed)

    def begin(self, training: Any) -> None:
        """The first evaluation, which makes parameters, is of the batch of all ranks with the seed
        of all ranks, so the parameters are those of one process."""
        both = {"model": training.model, "guide": training.guide}
        found: dict[str, Tensor] = {}
        try:
            self._known = snapshot.build(training)
            training.parameters = dict(self._known)
            found |= self._known
        except Exception as e:  # the first step says what is wrong with a model
            self._problem = e
        for role, f in both.items():
            inner = poutine.unwrap(f)
            if isinstance(inner, nn.Module):
                found |= {f"{role}.{name}": p for name, p in inner.named_parameters()}
        found |= states.buffers_of(**both)
        self._refuse_others("parameters", {k: states.describe(x) for k, x in found.items()})
        self.copy_first(found)
        seed_rank(training.batches.seed)
        for x in own_generators(**both).values() if self.rank else ():
            if isinstance(x, torch.Generator):
                mixed = np.random.SeedSequence((x.initial_seed(), self.rank))
                x.manual_seed(int(mixed.generate_state(1)[0]))

    def average(self, training: Any, evaluate: Callable[[], Evaluation]) -> Evaluation:
        before, error = _versions(training), None
        try:
            mine = evaluate()
        except Exception as e:
            error, mine = e, Evaluation(0.0, ElboTerms(), {})
        self._known |= training.parameters | mine.found
        flags = {
            "failed": error is not None,
            "is_new": any(self._layout.new_names(mine)),
            "buffers_changed": _versions(training) != before,
            "interrupted": self._interrupt is not None and self._interrupt.came,
        }
        found, total = self._sum(mine, flags)
        if found["is_new"] and not found["failed"]:
            self._extend(mine)
            found, total = self._sum(mine, flags | {"is_new": False})
        self._is_interrupted |= found["interrupted"]
        if found["failed"]:
            zero_grads(mine.found.values())
            self._raise(error)
        if found["buffers_changed"]:
            self.copy_first(states.buffers_of(model=training.model, guide=training.guide))
        total.parts.paths.update(mine.parts.paths)
        return total

    def _sum(self, mine: Evaluation, flags: dict[str, bool]) -> tuple[dict[str, bool], Evaluation]:
        vector = self._layout.pack(mine, flags, self._device)
        with self._waiting():
            torch.distributed.all_reduce(vector, group=self._group)
        return self._layout.unpack(vector.div_(self.world))

    def _extend(self, mine: Evaluation) -> None:
        """Let all ranks know the sites and parameters that one has met for the first time."""
        known = self.gather(self._layout.new_names(mine))
        sites, names = ({k for part in parts for k in part} for parts in zip(*known, strict=True))
        values = {k: self._known[k] for k in names if k in self._known}
        # The values must be the same, too: their gradients have been computed already.
        digests = {k: f"with digest {fingerprint(x)[:6]}" for k, x in values.items()}
        self._refuse_others(
            "parameters", {k: f"{states.describe(x)} {digests[k]}" for k, x in values.items()}
        )
        self._layout.extend(sites, values)

    def _raise(self, error: Exception | None) -> None:
        """Raise the error of one rank on all ranks."""
        told = None
        if error is not None:
            told = type(error).__name__, str(error), getattr(error, "parameter", None)
        all_told = self.gather(told)
        others = [(k, *x) for k, x in enumerate(all_told) if x and x[0] != NotFinite.__name__]
        if others and error is not None and not isinstance(error, NotFinite):
            raise error
        if others:
            rank, kind, message, _ = others[0]
            raise RankError(f"rank {rank} has failed, so {self._me} ends, too. {kind}: {message}")
        _, problem, parameter = next(x for x in all_told if x)
        raise NotFinite(problem, parameter) from error

    def mean(self, training: Any, f: Callable[[], float]) -> float:
        return self.average(training, lambda: Evaluation(f(), ElboTerms(), {})).loss

    def is_due(self, times: SaveTimes, step: int) -> bool:
        due = times.is_due(step)
        # Clocks differ.
        return due if times.steps is not None else self.from_first(lambda: due)

    def is_interrupted(self, interrupt: Interrupt) -> bool:
        self._interrupt = interrupt
        return self._is_interrupted


def _versions(training: Any) -> list[tuple[str, int, int]]:
    """What changes when a buffer does."""
    buffers = states.buffers_of(model=training.model, guide=training.guide)
    return [(k, id(x), x._version) for k, x in buffers.items()]
