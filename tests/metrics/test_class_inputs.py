"""Probabilities, labels and scores: what may be given, and what is refused."""

import math

import pytest
import torch

from pyro_sde.metrics import (
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

from .class_cases import LABELS, PROBS

OF_LABELS = [accuracy, nll, ece, brier, reliability_curve, classification]


def test_extreme_probabilities():
    sure = torch.eye(3)
    labels = torch.arange(3)
    assert classification(sure, labels) == pytest.approx(
        {"accuracy": 1.0, "nll": 0.0, "ece": 0.0, "brier": 0.0}, abs=1e-12
    )
    assert math.copysign(1, nll(sure, labels)) == 1
    wrong = labels.roll(1)
    assert nll(sure, wrong) == math.inf
    assert nll(sure, torch.tensor([0, 1, 0])) == math.inf
    assert brier(sure, wrong) == 2
    assert ece(sure, wrong) == pytest.approx(1)


def test_rounding_above_one_is_not_taken_for_logits():
    """As averages in float32 may come out. A softmax would make the confidence 0.73 or less."""
    probs = torch.tensor([[1.0 + 3e-7, 0.0], [1.0005, 0.0]], dtype=torch.float32)
    labels = torch.tensor([0, 0])
    assert classification(probs, labels) == pytest.approx(
        {"accuracy": 1.0, "nll": 0.0, "ece": 0.0, "brier": 0.0}, abs=1e-12
    )
    assert predictive_entropy(probs).tolist() == [0, 0]
    assert ood_auroc(probs, probs) == 0.5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integer_labels_and_plain_lists(dtype):
    assert accuracy(PROBS, LABELS.to(dtype)) == 0.75
    assert nll(PROBS, LABELS.to(dtype)) == nll(PROBS, LABELS)
    assert ece(PROBS.tolist(), LABELS.tolist(), 4) == ece(PROBS, LABELS, 4)


def test_gradients_are_left_behind():
    probs = PROBS.clone().requires_grad_()
    assert classification(probs, LABELS) == classification(PROBS, LABELS)
    assert not predictive_entropy(probs).requires_grad
    assert not reliability_curve(probs, LABELS).confidence.requires_grad


def test_the_input_is_left_as_it_was():
    probs, labels = PROBS.clone(), LABELS.clone()
    classification(probs, labels)
    ood_auroc(probs, probs)
    assert torch.equal(probs, PROBS) and torch.equal(labels, LABELS)


BAD_PROBS = {
    "one dimension": (PROBS[0], r"must have shape \(n, classes\) .*found \(3,\)"),
    "four dimensions": (PROBS[None, None], r"must have shape .*found \(1, 1, 4, 3\)"),
    "no rows": (PROBS[:0], r"is empty, of shape \(0, 3\): pass at least one prediction"),
    "no samples": (PROBS[None][:0], r"is empty, of shape \(0, 4, 3\)"),
    "one class": (torch.ones(4, 1), r"at least 2 classes: found shape \(4, 1\); pass torch.stack"),
    "nan": (PROBS.clone().fill_diagonal_(math.nan), "has 3 NaN among 12 entries: drop"),
    "negative": (
        torch.tensor([[1.25, -0.25]]).expand(4, 2),
        "negative entries, the lowest -0.25: apply softmax first if these are logits",
    ),
    "logits": (
        torch.tensor([[0.5, 2.0]]).expand(4, 2),
        "must sum to 1 over its last dimension: found a sum of 2.5; apply softmax first",
    ),
    "sum below": (PROBS * 0.998, r"found a sum of 0\.998"),
    "sum above": (PROBS * 1.002, r"found a sum of 1\.002"),
    "infinite": (PROBS + math.inf, "found a sum of inf"),
    # Their average is in order; one draw is not.
    "one bad draw": (torch.stack([PROBS * 1.5, PROBS * 0.5]), r"found a sum of (1|0)\.5"),
    "one negative draw": (
        torch.tensor([[[1.25, -0.25]], [[0.25, 0.75]]]).expand(2, 4, 2),
        "the lowest -0.25",
    ),
}


@pytest.mark.parametrize("probs, message", BAD_PROBS.values(), ids=BAD_PROBS)
def test_bad_probs(probs, message):
    for metric in OF_LABELS:
        with pytest.raises(ValueError, match=f"^probs .*{message}"):
            metric(probs, LABELS)
    with pytest.raises(ValueError, match=f"^probs .*{message}"):
        predictive_entropy(probs)
    with pytest.raises(ValueError, match=r"^probs_in "):
        ood_auroc(probs, PROBS)
    with pytest.raises(ValueError, match=r"^probs_out "):
        ood_auroc(PROBS, probs)


@pytest.mark.parametrize("factor", [0.9995, 1.0005])
def test_sums_within_the_tolerance_pass(factor):
    assert accuracy(PROBS * factor, LABELS) == 0.75


BAD_LABELS = {
    "float": (LABELS.double(), r"must be integers: found torch.float64; .*labels.long\(\)"),
    "bool": (LABELS > 1, "must be integers: found torch.bool"),
    "one-hot": (torch.eye(3)[LABELS].long(), r"must have shape \(4,\), .*: found \(4, 3\)"),
    "column": (LABELS[:, None], r"must have shape \(4,\), .*: found \(4, 1\)"),
    "short": (LABELS[:3], r"must have shape \(4,\), one for each row of probs: found \(3,\)"),
    "one": (LABELS[0], r"must have shape \(4,\), .*: found \(\)"),
    "high": (LABELS + 1, r"has 2 values outside 0\.\.2, the first 3: number the 3 classes"),
    "low": (LABELS - 1, r"has 1 values outside 0\.\.2, the first -1: number"),
}


@pytest.mark.parametrize("labels, message", BAD_LABELS.values(), ids=BAD_LABELS)
def test_bad_labels(labels, message):
    for metric in OF_LABELS:
        with pytest.raises(ValueError, match=f"^labels {message}"):
            metric(PROBS, labels)
        with pytest.raises(ValueError, match=f"^labels {message}"):
            metric(PROBS.expand(2, 4, 3), labels)


@pytest.mark.parametrize("bins", [0, -1, 2.0, None])
def test_bad_bins(bins):
    for metric in (ece, reliability_curve, classification):
        with pytest.raises(ValueError, match=r"^bins must be a positive integer: found "):
            metric(PROBS, LABELS, bins)


BAD_SCORES = {
    "empty": (torch.zeros(0), "is empty: pass at least one score"),
    "nan": (torch.tensor([1.0, math.nan, 2.0]), "has 1 NaN among 3 entries, .*: drop them"),
    "two dimensions": (torch.zeros(2, 3), r"must have shape \(n,\), .*: found \(2, 3\)"),
    "scalar": (torch.tensor(1.0), r"must have shape \(n,\), .*: found \(\)"),
}


@pytest.mark.parametrize("scores, message", BAD_SCORES.values(), ids=BAD_SCORES)
def test_bad_scores(scores, message):
    with pytest.raises(ValueError, match=f"^scores_in {message}"):
        auroc(scores, torch.ones(2))
    with pytest.raises(ValueError, match=f"^scores_out {message}"):
        auroc(torch.ones(2), scores)


def test_entropies_of_unlike_classes_are_not_compared():
    with pytest.raises(ValueError, match="probs_in has 3 classes, probs_out 2: "):
        ood_auroc(PROBS, torch.tensor([[0.5, 0.5]]))
