"""Diagnostics: gradient variance, the parts of the ELBO, importance checks and reweighting, and
simulation-based calibration."""

from .calibration_check import CalibrationCheck, RankCheck
from .explosion import ExplosionWarning
from .gradients import GradientVariance, gradient_variance
from .importance import importance
from .importance_check import Estimate, ImportanceCheck, SiteCheck
from .parts import elbo_parts
from .reweighting import reweight
from .sbc import sbc
from .summary import Summary

__all__ = [
    "CalibrationCheck",
    "Estimate",
    "ExplosionWarning",
    "GradientVariance",
    "ImportanceCheck",
    "RankCheck",
    "SiteCheck",
    "Summary",
    "elbo_parts",
    "gradient_variance",
    "importance",
    "reweight",
    "sbc",
]
