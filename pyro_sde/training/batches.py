"""Mini-batches, whose order depends only on a seed and the number of the epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import as_tensor

__all__ = ["Batches", "as_arguments", "name_missing"]


def as_arguments(data: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a model, from what ``fit`` calls its data.

    :param data: A tuple of positional arguments, a dict of named ones, or a single argument.
    :returns: Positional and named arguments, with NumPy arrays as tensors.
    """
    if isinstance(data, dict):
        return (), {name: as_tensor(x) for name, x in data.items()}
    return tuple(map(as_tensor, data if isinstance(data, tuple) else (data,))), {}


def name_missing(args: tuple, kwargs: dict[str, Any]) -> str | None:
    """A message about NaN in the arguments of a model; None if they have none."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for name, x in named.items():
        if isinstance(x, Tensor) and bool(x.isnan().any()):
            which = f"argument {name} of the data" if isinstance(name, int) else repr(name)
            return (
                f"{which} has {int(x.isnan().sum())} NaN. If values are missing, mask them: "
                "values, mask = pyro_sde.fill_missing(values), and the likelihood is "
                "dist.Normal(...).mask(mask)"
            )
    return None


class Batches:
    """The arguments of the model at every step.

    :param data: See :func:`as_arguments`.
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

    def _shuffle(self, epoch: int) -> Tensor:
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
