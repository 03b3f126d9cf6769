"""Looking at an inference problem: its gradients, and what its ELBO consists of."""

from .gradients import GradientVariance, gradient_variance
from .parts import elbo_parts

__all__ = ["GradientVariance", "elbo_parts", "gradient_variance"]
