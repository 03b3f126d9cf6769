"""Mean-field variational inference: Normal priors on weights, AutoNormal as the guide."""

import math

import pyro.distributions as dist
from pyro.nn import PyroSample
from pyro.nn.module import to_pyro_module_
from torch import nn


def bayesian_(module: nn.Module) -> nn.Module:
    """Turns every parameter of ``module`` into a sample site with the prior N(0, 1 / fan in)."""
    to_pyro_module_(module)
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        fan_in = weight[0].numel() if weight is not None else 1
        for name, p in list(layer.named_parameters(recurse=False)):
            prior = dist.Normal(p.new_zeros(p.shape), 1 / math.sqrt(fan_in)).to_event(p.dim())
            delattr(layer, name)
            setattr(layer, name, PyroSample(prior))
    return module
