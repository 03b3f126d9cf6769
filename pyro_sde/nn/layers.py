"""Layers with the time as an additional input channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ConcatConv2d", "ConcatConvTranspose2d", "ConcatLinear"]


def _with_time(t: Tensor | float, h: Tensor, dim: int) -> Tensor:
    """``h`` with an additional channel that is filled with ``t``."""
    t = torch.as_tensor(t, dtype=h.dtype, device=h.device)
    return torch.cat([t.expand_as(h.narrow(dim, 0, 1)), h], dim)


class ConcatLinear(nn.Linear):
    """A linear layer of (t, h), called as ``layer(t, h)``.

    Example::

        >>> ConcatLinear(2, 3)(torch.tensor(0.5), torch.zeros(7, 2)).shape
        torch.Size([7, 3])

    :param in_features: Features of h, without the time.
    :param out_features: Features of the output.
    :param kwargs: Keyword arguments of ``nn.Linear``.
    """

    def __init__(self, in_features: int, out_features: int, **kwargs: Any) -> None:
        super().__init__(in_features + 1, out_features, **kwargs)

    def forward(self, t: Tensor | float, h: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the layer to (t, h).

        :param t: The time, a number or a tensor that broadcasts against ``h[..., :1]``.
        :param h: A tensor of shape ``(..., in_features)``.
        :returns: A tensor of shape ``(..., out_features)``.
        """
        return super().forward(_with_time(t, h, -1))


class ConcatConv2d(nn.Conv2d):
    """A convolution of (t, h), called as ``layer(t, h)``.

    Example::

        >>> ConcatConv2d(2, 3, 3, padding=1)(torch.tensor(0.5), torch.zeros(7, 2, 8, 8)).shape
        torch.Size([7, 3, 8, 8])

    :param in_channels: Channels of h, without the time.
    :param out_channels: Channels of the output.
    :param args: Further arguments of ``nn.Conv2d``, ``kernel_size`` first.
    :param kwargs: Keyword arguments of ``nn.Conv2d``.
    """

    def __init__(self, in_channels: int, out_channels: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(in_channels + 1, out_channels, *args, **kwargs)

    def forward(self, t: Tensor | float, h: Tensor) -> Tensor:  # type: ignore[override]
        """Apply the layer to (t, h).

        :param t: The time, a number or a tensor that broadcasts against one channel of ``h``.
        :param h: Images of shape ``(..., in_channels, height, width)``.
        :returns: Images with ``out_channels``.
        """
        return super().forward(_with_time(t, h, -3))


class ConcatConvTranspose2d(nn.ConvTranspose2d):
    """A transposed convolution of (t, h), called as ``layer(t, h)`` or
    ``layer(t, h, output_size)``.

    Example::

        >>> layer = ConcatConvTranspose2d(2, 3, 3, stride=2, padding=1)
        >>> layer(torch.tensor(0.5), torch.zeros(7, 2, 4, 4), (8, 8)).shape
        torch.Size([7, 3, 8, 8])

    :param in_channels: Channels of h, without the time.
    :param out_channels: Channels of the output.
    :param args: Further arguments of ``nn.ConvTranspose2d``, ``kernel_size`` first.
    :param kwargs: Keyword arguments of ``nn.ConvTranspose2d``.
    """

    def __init__(self, in_channels: int, out_channels: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(in_channels + 1, out_channels, *args, **kwargs)

    def forward(  # type: ignore[override]
        self, t: Tensor | float, h: Tensor, output_size: Any = None
    ) -> Tensor:
        """Apply the layer to (t, h).

        :param t: The time, a number or a tensor that broadcasts against one channel of ``h``.
        :param h: Images of shape ``(..., in_channels, height, width)``.
        :param output_size: Height and width of the output, where the stride leaves them open.
        :returns: Images with ``out_channels``.
        """
        return super().forward(_with_time(t, h, -3), output_size)
