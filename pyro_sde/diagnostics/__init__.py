"""Diagnostics: gradient variance, the parts of the ELBO, importance checks and reweighting."""

from .explosion import ExplosionWarning
from .gradients import GradientVariance, gradient_variance
from .importance import importance
from .importance_check import Estimate, ImportanceCheck, SiteCheck
from .parts import elbo_parts
from .reweighting import reweight
from .summary import Summary

__all__ = [
    "Estimate",
    "ExplosionWarning",
    "GradientVariance",
    "ImportanceCheck",
    "SiteCheck",
    "Summary",
    "elbo_parts",
    "gradient_variance",
    "importance",
    "reweight",
]
