"""Vector fields for images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layers import ConcatConv2d, ConcatConvTranspose2d

__all__ = ["ConvField"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "softplus": nn.functional.softplus,
}


class ConvField(nn.Module):
    """The convolutional field of Xu et al. (2022): convolution, strided convolution, transposed
    convolution, convolution, all of them time-conditional, with a smooth activation between.

    Any height and width come back as they were.

    Example::

        >>> ConvField(3)(torch.tensor(0.5), torch.zeros(2, 3, 7, 7)).shape
        torch.Size([2, 3, 7, 7])

    :param channels: Channels of h, those of an augmentation included.
    :param hidden: Channels inside.
    :param activation: ``"tanh"`` or ``"softplus"``.
    """

    def __init__(self, channels: int, hidden: int = 32, activation: str = "tanh") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(ACTIVATIONS)}: found {activation!r}"
            )
        self.activation = activation
        self.first = ConcatConv2d(channels, hidden, 3, padding=1)
        self.down = ConcatConv2d(hidden, hidden, 3, stride=2, padding=1)
        self.up = ConcatConvTranspose2d(hidden, hidden, 3, stride=2, padding=1)
        self.last = ConcatConv2d(hidden, channels, 3, padding=1)

    def forward(self, t: Tensor | float, h: Tensor) -> Tensor:
        act, size = ACTIVATIONS[self.activation], h.shape[-2:]
        h = act(self.first(t, h))
        h = act(self.down(t, h))
        h = act(self.up(t, h, size))
        return self.last(t, h)
