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
from .forecasts import CalibrationCurve, calibration_curve, coverage, crps, interval

__all__ = [
    "CalibrationCurve",
    "ReliabilityCurve",
    "accuracy",
    "auroc",
    "brier",
    "calibration_curve",
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
