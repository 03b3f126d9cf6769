"""The former name of :mod:`pyro_sde.interop.torchsde`, torchsde as a backend."""

from ..interop.torchsde import Joint, sample

__all__ = ["Joint", "sample"]
