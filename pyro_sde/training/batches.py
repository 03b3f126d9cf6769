"""Mini-batches, whose order depends only on a seed and the number of the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._arrays import as_arguments, label_of

__all__ = ["Batches", "name_missing"]


def name_missing(args: tuple, kwargs: dict[str, Any]) -> str | None:
    """A message about NaN in the arguments of a model; None if they have none."""
    found = _first_bad(args, kwargs, torch.isnan)
    return found and (
        f"{found}. If values are missing, mask them: values, mask = "
        "pyro_sde.fill_missing(values), and the likelihood is dist.Normal(...).mask(mask)"
    )


def _not_finite(x: Tensor) -> Tensor:
    return ~x.isfinite()


def _first_bad(
    args: tuple, kwargs: dict[str, Any], is_bad: Callable[[Tensor], Tensor] = _not_finite
) -> str | None:
    """Where the arguments of a model have bad numbers; None if they have none."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for name, x in named.items():
        bad = is_bad(x) if isinstance(x, Tensor) and x.is_floating_point() else torch.zeros(0)
        if bool(bad.any()):
            kind = "NaN" if bool(x[bad][0].isnan()) else "infinite entries"
            place = f", the first at {bad.nonzero()[0].tolist()}" if x.dim() else ""
            return f"{label_of(name)} has {int(bad.sum())} {kind}{place}"
    return None


class Batches:
    """The arguments of the model at every step.

    :param data: See :func:`~pyro_sde._arrays.as_arguments`.
    :param size: Rows in a batch, of all ranks; None for all of the data in every step.
    """

    rank, world = 0, 1

    def __init__(self, data: Any, size: int | None) -> None:
        self.args, self.kwargs = as_arguments(data)
        self.size, self.seed = size, 0
        self.rows: int | None = None
        self._order: tuple[int, Tensor] | None = None
        if size is None:
            return
        tensors = {k: x for k, x in self._named().items() if _has_rows(x)}
        lengths = {k: len(x) for k, x in tensors.items()}
        if not lengths:
            raise ValueError("batch_size takes rows of the tensors in data, and data has no tensor")
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"with batch_size, the tensors in data must have the same number of rows: found "
                f"{lengths}. A tensor that all rows share (a grid, say) does not belong in data: "
                "let the model close over it, or bind it with functools.partial"
            )
        self.rows = next(iter(lengths.values()))
        if not self.rows:
            shapes = {k: tuple(x.shape) for k, x in tensors.items()}
            raise ValueError(f"data has no rows: found tensors of the shapes {shapes}")
        if not 1 <= size <= self.rows:
            raise ValueError(f"batch_size must be 1 to {self.rows}, the rows of data: found {size}")

    def _named(self) -> dict[Any, Any]:
        return {**dict(enumerate(self.args)), **self.kwargs}

    def __len__(self) -> int:
        """The steps in an epoch; rows that are left over are dropped until the next shuffle."""
        return 1 if self.rows is None or self.size is None else self.rows // self.size

    def divide(self, rank: int, world: int) -> None:
        """Let every rank see its part of each batch."""
        if self.size is not None and self.size % world:
            raise ValueError(
                f"batch_size={self.size} is of all {world} processes together, and must be a "
                f"multiple of {world}, so that all have parts of one size"
            )
        self.rank, self.world = rank, world

    @property
    def part(self) -> int | None:
        """Rows of a batch that this rank sees; None if it sees all of the data."""
        return None if self.size is None else self.size // self.world

    def __call__(self, step: int, whole: bool = False) -> tuple[tuple, dict[str, Any]]:
        """The arguments in a step.

        :param step: The number of the step, from 0.
        :param whole: Whether to take the batch of all ranks, not only the part of this one.
        """
        if self.rows is None or self.size is None:
            return self.args, self.kwargs
        epoch, k = divmod(step, len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._shuffle(epoch)
        index = self._order[1][k * self.size : (k + 1) * self.size]
        if not whole:
            index = index[self.rank :: self.world]

        def take(x: Any) -> Any:
            return x[index.to(x.device)] if _has_rows(x) else x

        return tuple(map(take, self.args)), {k: take(x) for k, x in self.kwargs.items()}

    def name_missing(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """A message about NaN in arguments of the model, with its place in all of the data if they
        are a mini-batch."""
        found = name_missing(args, kwargs)
        return found and (name_missing(self.args, self.kwargs) or found)

    def name_bad_rows(self, step: int) -> str | None:
        """A message about numbers of a mini-batch that are not finite, with their place in the
        data; None if there are none."""
        if self.size is None or _first_bad(*self(step)) is None:
            return None
        return _first_bad(self.args, self.kwargs)

    def _shuffle(self, epoch: int) -> Tensor:
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
