"""torchsde as a backend, by the name that it had first: see :mod:`pyro_sde.interop.torchsde`."""

from ..interop.torchsde import Joint, sample

__all__ = ["Joint", "sample"]
