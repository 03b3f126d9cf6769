"""Scores of class probabilities, averaged over weight samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._torchvision import import_with_repair
from .class_inputs import averaged, check_bins, checked, checked_scores

__all__ = [
    "ReliabilityCurve",
    "accuracy",
    "auroc",
    "brier",
    "classification",
    "ece",
    "nll",
    "ood_auroc",
    "predictive_entropy",
    "reliability_curve",
]

_METRICS = "torchmetrics.functional.classification"


class ReliabilityCurve(NamedTuple):
    """Confidence and accuracy in equal bins of confidence, each of shape ``(bins,)``.

    Example::

        >>> import torch
        >>> confidence, accuracy = torch.tensor([0.6, 0.9]), torch.tensor([0.5, 0.8])
        >>> curve = ReliabilityCurve(confidence, accuracy, torch.tensor([20, 60]))
        >>> curve.confidence - curve.accuracy  # too sure by as much
        tensor([0.1000, 0.1000])
    """

    confidence: Tensor
    """Mean probability of the predicted class; NaN in an empty bin."""
    accuracy: Tensor
    """Share of correct predictions; NaN in an empty bin."""
    count: Tensor  # type: ignore[assignment]
    """Number of predictions, 0 in an empty bin. (It hides the method ``tuple.count``.)"""


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of rows whose most probable class is the label.

    Example::

        >>> draws = torch.tensor([[[0.9, 0.1]], [[0.4, 0.6]]])  # two draws, one row
        >>> accuracy(draws, torch.tensor([0]))
        1.0

    :param probs: Probabilities ``(n, classes)``, or ``(samples, n, classes)`` to be averaged first.
    :param labels: Correct classes, integers of shape ``(n,)``.
    :returns: The accuracy, from 0 to 1.
    """
    _, right = _top(*checked(probs, labels))
    return right.mean().item()


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean negative log probability of the label, in nats; ``inf`` if one has probability 0.

    Example::

        >>> f"{nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0])):.4f}"
        '1.0397'

    :param probs: Probabilities ``(n, classes)``, or ``(samples, n, classes)`` to be averaged first.
    :param labels: Correct classes, integers of shape ``(n,)``.
    :returns: The score; lower is better.
    """
    p, labels = checked(probs, labels)
    log_prob = p.gather(-1, labels.unsqueeze(-1)).log().mean().item()
    return 0.0 - log_prob  # a perfect prediction scores 0.0 so, where negation would give -0.0


def brier(probs: Tensor, labels: Tensor) -> float:
    """The Brier score: the squared distance to the one-hot label, averaged over rows.

    The squares are summed over all classes. With two classes the result is twice the score of the
    probability of one of them.

    Example::

        >>> brier(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0]))
        0.8125

    :param probs: Probabilities ``(n, classes)``, or ``(samples, n, classes)`` to be averaged first.
    :param labels: Correct classes, integers of shape ``(n,)``.
    :returns: The score, from 0 to 2; lower is better.
    """
    p, labels = checked(probs, labels)
    onehot = torch.nn.functional.one_hot(labels, p.shape[-1])
    return (p - onehot).square().sum(-1).mean().item()


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean gap between confidence and accuracy over the bins.

    Confidence is the probability of the predicted class. A confidence on the border of two bins
    belongs to the upper bin, and a confidence of 1 to the last bin (torchmetrics alone would put it
    into a bin of its own).

    Needs the extra ``metrics``, as do :func:`classification`, :func:`auroc` and :func:`ood_auroc`.

    Example::

        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> ece(probs, torch.tensor([0, 1]))  # confidence 0.75, accuracy 0.5
        0.25

    :param probs: Probabilities ``(n, classes)``, or ``(samples, n, classes)`` to be averaged first.
    :param labels: Correct classes, integers of shape ``(n,)``.
    :param bins: Number of equal bins of [0, 1].
    :returns: The error, from 0 to 1; lower is better.
    """
    check_bins(bins)
    confidence, right = _top(*checked(probs, labels))
    # torchmetrics' multi-class form is the same, but it sums in float32: with 60 000 rows in one
    # bin its second digit is wrong.
    error = import_with_repair(_METRICS, "ece").binary_calibration_error(
        _below_one(confidence), right.long(), n_bins=bins, norm="l1"
    )
    return error.item()


def reliability_curve(probs: Tensor, labels: Tensor, bins: int = 15) -> ReliabilityCurve:
    """Confidence, accuracy and number of predictions in each bin of confidence.

    :func:`ece` is the sum of ``count / n * |accuracy - confidence|`` over the bins with a count.

    Example::

        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> curve = reliability_curve(probs, torch.tensor([0, 1]), bins=2)
        >>> curve.count.tolist(), curve.confidence.tolist(), curve.accuracy.tolist()
        ([0, 2], [nan, 0.75], [nan, 0.5])

    :param probs: Probabilities ``(n, classes)``, or ``(samples, n, classes)`` to be averaged first.
    :param labels: Correct classes, integers of shape ``(n,)``.
    :param bins: Number of equal bins of [0, 1].
    :returns: A :class:`ReliabilityCurve`, which :func:`~pyro_sde.plotting.plot_reliability` draws.
    """
    check_bins(bins)
    confidence, right = _top(*checked(probs, labels))
    borders = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)
    index = torch.bucketize(_below_one(confidence), borders, right=True) - 1
    count = index.bincount(minlength=bins)
    return ReliabilityCurve(
        index.bincount(confidence, minlength=bins) / count,
        index.bincount(right, minlength=bins) / count,
        count,
    )


def predictive_entropy(probs: Tensor) -> Tensor:
    """The entropy of each row in nats, from 0 for a certain prediction to ``log(classes)``.

    With a leading dimension of weight samples it is the entropy of their average, so disagreement
    between samples counts as uncertainty.

    Example::

        >>> [f"{h:.4f}" for h in predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))]
        ['0.6931', '0.0000']

    :param probs: Probabilities ``(n, classes)``, or ``(samples, n, classes)`` to be averaged first.
    :returns: Entropies of shape ``(n,)``, in float64.
    """
    return _entropy(averaged(probs))


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """The probability that an outlier scores above an inlier, where ties count half.

    It is the area under the ROC curve of a threshold that separates ``scores_out`` from
    ``scores_in``.

    Example::

        >>> auroc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))  # 3 pairs right, 1 tied
        0.875

    :param scores_in: Scores of in-distribution inputs, of shape ``(n,)``. Infinite ones are fine.
    :param scores_out: Scores of out-of-distribution inputs, of shape ``(m,)``.
    :returns: The area: 0.5 for a useless score, 1 for a score that separates the two.
    """
    inner, outer = checked_scores(scores_in, "scores_in"), checked_scores(scores_out, "scores_out")
    outer = outer.to(inner.device)
    # Ranks in [0, 1], because torchmetrics applies a sigmoid to other scores and so ties large ones
    distinct, rank = torch.cat([inner, outer]).unique(return_inverse=True)
    target = torch.cat([torch.zeros_like(inner), torch.ones_like(outer)]).long()
    metrics = import_with_repair(_METRICS, "auroc")
    return metrics.binary_auroc(rank.double() / distinct.numel(), target).item()


def ood_auroc(probs_in: Tensor, probs_out: Tensor) -> float:
    """:func:`auroc` of :func:`predictive_entropy`: whether predictions are less certain on
    out-of-distribution inputs.

    Example::

        >>> ood_auroc(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]]))
        1.0

    :param probs_in: Probabilities on in-distribution inputs, of shape ``(n, classes)`` or
        ``(samples, n, classes)``, which is averaged over the samples first.
    :param probs_out: Probabilities on out-of-distribution inputs, of shape ``(m, classes)`` or
        ``(samples, m, classes)``, averaged likewise.
    :returns: The area under the ROC curve, from 0 to 1.
    """
    inner, outer = averaged(probs_in, "probs_in"), averaged(probs_out, "probs_out")
    if inner.shape[-1] != outer.shape[-1]:
        raise ValueError(
            f"probs_in has {inner.shape[-1]} classes, probs_out {outer.shape[-1]}: entropies "
            "compare only over the same classes"
        )
    import_with_repair(_METRICS, "ood_auroc")  # here, to name this function if it is missing
    return auroc(_entropy(inner), _entropy(outer))


def classification(probs: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float]:
    """The four scores :func:`accuracy`, :func:`nll`, :func:`ece` and :func:`brier`.

    All are computed in float64, whatever the dtype of the input.

    Example::

        >>> scores = classification(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        >>> {name: f"{score:.3f}" for name, score in scores.items()}
        {'accuracy': '1.000', 'nll': '0.693', 'ece': '0.500', 'brier': '0.500'}

    :param probs: Probabilities ``(n, classes)``, or ``(samples, n, classes)`` to be averaged first.
    :param labels: Correct classes, integers of shape ``(n,)``.
    :param bins: Number of equal bins of [0, 1], for the calibration error.
    :returns: A dict from the name of each score to its value.
    """
    check_bins(bins)
    p, labels = checked(probs, labels)
    import_with_repair(_METRICS, "classification")  # here, to name this function if it is missing
    return {
        "accuracy": accuracy(p, labels),
        "nll": nll(p, labels),
        "ece": ece(p, labels, bins),
        "brier": brier(p, labels),
    }


def _top(p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence in the predicted class, and 1 where that class is correct, else 0."""
    confidence, predicted = p.max(-1)
    return confidence, (predicted == labels).to(p.dtype)


def _below_one(confidence: Tensor) -> Tensor:
    """``confidence``, with 1 reduced by one rounding error so that it falls into the last bin."""
    return confidence.clamp(max=1 - torch.finfo(confidence.dtype).eps / 2)


def _entropy(p: Tensor) -> Tensor:
    # Sorted, since the same probabilities in another order must be a tie to the last digit.
    return torch.special.entr(p.sort(-1).values).sum(-1)
