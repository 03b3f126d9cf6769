"""Looking at an inference problem: its gradients, its ELBO in parts, a guide at a glance."""

from .explosion import ExplosionWarning
from .gradients import GradientVariance, gradient_variance
from .parts import elbo_parts
from .summary import Summary

__all__ = [
    "ExplosionWarning",
    "GradientVariance",
    "Summary",
    "elbo_parts",
    "gradient_variance",
]
