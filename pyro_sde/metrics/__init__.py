"""Metrics: scores of class probabilities, and of predictive draws."""

from .classes import (
    ReliabilityCurve,
    accuracy,
    auroc,
    brier,
    classification,
    ece,
    nll,
    ood_auroc,
    predictive_entropy,
    reliability_curve,
)
from .forecasts import coverage, crps, interval

__all__ = [
    "ReliabilityCurve",
    "accuracy",
    "auroc",
    "brier",
    "classification",
    "coverage",
    "crps",
    "ece",
    "interval",
    "nll",
    "ood_auroc",
    "predictive_entropy",
    "reliability_curve",
]
