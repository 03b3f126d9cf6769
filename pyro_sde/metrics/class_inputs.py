"""What scores of class probabilities accept, and how they refuse the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arrays import as_numbers

__all__ = ["averaged", "check_bins", "checked", "checked_scores"]


def averaged(probs: Tensor, name: str = "probs") -> Tensor:
    """Probabilities of shape ``(n, classes)`` in float64 and in [0, 1]."""
    probs = as_numbers(probs, name).detach()
    shape = tuple(probs.shape)
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{name} must have shape (n, classes) or (samples, n, classes): found {shape}"
        )
    if 0 in shape:
        raise ValueError(f"{name} is empty, of shape {shape}: pass at least one prediction")
    if shape[-1] < 2:
        raise ValueError(
            f"{name} must have a column for each of at least 2 classes: found shape {shape}; "
            "pass torch.stack([1 - p, p], -1) for the probability p of one event"
        )
    # Checked before averaging, which would hide a bad draw among good ones.
    missing = probs.isnan()
    if bool(missing.any()):
        raise ValueError(
            f"{name} has {int(missing.sum())} NaN among {probs.numel()} entries: drop these "
            "predictions, or correct the model that made them"
        )
    if bool((probs < 0).any()):
        raise ValueError(
            f"{name} has negative entries, the lowest {probs.min().item():g}: apply softmax first "
            "if these are logits"
        )
    sums = probs.sum(-1, dtype=torch.float64).flatten()
    worst = sums[(sums - 1).abs().argmax()].item()
    if not abs(worst - 1) <= 1e-3:
        raise ValueError(
            f"{name} must sum to 1 over its last dimension: found a sum of {worst:g}; apply "
            "softmax first if these are logits"
        )
    if len(shape) == 3:
        probs = probs.mean(0, dtype=torch.float64)
    # Rounding may leave them above 1, which torchmetrics would take for logits.
    return probs.double().clamp(max=1.0)


def checked(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    p = averaged(probs)
    labels = as_numbers(labels, "labels").to(p.device)
    n, classes = p.shape
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels must be integers: found {labels.dtype}; pass the index of each correct class, "
            "as labels.long() if these are whole numbers"
        )
    if tuple(labels.shape) != (n,):
        raise ValueError(
            f"labels must have shape ({n},), one for each row of probs: found {tuple(labels.shape)}"
        )
    labels = labels.long()
    outside = labels[(labels < 0) | (labels >= classes)]
    if outside.numel():
        raise ValueError(
            f"labels has {outside.numel()} values outside 0..{classes - 1}, the first "
            f"{outside[0].item()}: number the {classes} classes of probs from 0"
        )
    return p, labels


def check_bins(bins: int) -> None:
    if not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a positive integer: found {bins!r}")


def checked_scores(scores: Tensor, name: str) -> Tensor:
    scores = as_numbers(scores, name).detach().double()
    if scores.dim() != 1:
        raise ValueError(
            f"{name} must have shape (n,), one for each input: found {tuple(scores.shape)}"
        )
    if not scores.numel():
        raise ValueError(f"{name} is empty: pass at least one score")
    missing = int(scores.isnan().sum())
    if missing:
        raise ValueError(
            f"{name} has {missing} NaN among {scores.numel()} entries, which cannot be ranked: "
            "drop them"
        )
    return scores
