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
    """The convolutional vector field of Xu et al. (2022).

    It consists of a convolution, a strided convolution, a transposed convolution and a convolution,
    all of them time-conditional, with a smooth activation between them. It keeps any height and
    width.

    Example::

        >>> ConvField(3)(torch.tensor(0.5), torch.zeros(2, 3, 7, 7)).shape
        torch.Size([2, 3, 7, 7])

    :param channels: Channels of h, including those of an augmentation.
    :param hidden: Channels of the hidden layers.
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
        """The field at a time and a batch of states.

        :param t: The time.
        :param h: States of shape ``(..., channels, height, width)``.
        :returns: A tensor of the shape of ``h``.
        """
        act, size = ACTIVATIONS[self.activation], h.shape[-2:]
        h = act(self.first(t, h))
        h = act(self.down(t, h))
        h = act(self.up(t, h, size))
        return self.last(t, h)
