"""Metrics of class probabilities: by hand, and by brute force from their definitions."""

import math

import pytest
import torch

from pyro_sde._torchvision import import_with_repair
from pyro_sde.metrics import (
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

from .class_cases import LABELS, PROBS

DTYPES = [torch.float32, torch.float64]


def random_case(n=200, classes=5, samples=None, dtype=torch.float64, sharp=2.0):
    shape = (n, classes) if samples is None else (samples, n, classes)
    probs = (sharp * torch.randn(shape, dtype=dtype)).softmax(-1)
    return probs, torch.randint(classes, (n,))


def brute_ece(probs, labels, bins):
    """The definition, in plain Python: bins closed below, and the last one above too."""
    borders = torch.linspace(0, 1, bins + 1, dtype=torch.float64).tolist()
    content = [[] for _ in range(bins)]
    for row, label in zip(probs.double().tolist(), labels.tolist(), strict=True):
        confidence = max(row)
        bin_ = max(b for b in range(bins) if borders[b] <= confidence)
        content[bin_].append((confidence, float(row.index(confidence) == label)))
    total = 0.0
    for rows in content:
        if rows:
            confidence = sum(c for c, _ in rows) / len(rows)
            right = sum(r for _, r in rows) / len(rows)
            total += len(rows) / len(labels) * abs(right - confidence)
    return total


def brute_auroc(inner, outer):
    """Over all pairs: above counts 1, a tie half."""
    a, b = inner.double().unsqueeze(0), outer.double().unsqueeze(1)
    return ((b > a).double() + 0.5 * (b == a).double()).mean().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_hand(dtype):
    probs = PROBS.to(dtype)
    assert accuracy(probs, LABELS) == 3 / 4
    # Labels have probabilities 3/4, 3/4, 1/4 and 1.
    assert nll(probs, LABELS) == pytest.approx((2 * math.log(4 / 3) + math.log(4)) / 4, rel=1e-14)
    # Row by row: 1/16 + 1/16, then 1/64 + 1/16 + 1/64, then 1/4 + 1/16 + 9/16, then 0.
    assert brier(probs, LABELS) == pytest.approx((2 / 16 + 6 / 64 + 14 / 16) / 4, rel=1e-14)
    # Two bins: all four are in [0.5, 1], with mean confidence 3/4 and accuracy 3/4.
    assert ece(probs, LABELS, bins=2) == 0
    # Four bins: 0.5 alone in [0.5, 0.75), wrong; the rest in [0.75, 1], mean 5/6, all right.
    assert ece(probs, LABELS, bins=4) == pytest.approx(1 / 4 * 1 / 2 + 3 / 4 * 1 / 6, rel=1e-14)
    # 15 bins: 0.5 in the eighth, 0.75 in the twelfth with gap 1/4, 1 in the last with gap 0.
    assert ece(probs, LABELS) == pytest.approx(1 / 4 * 1 / 2 + 2 / 4 * 1 / 4, rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reliability_by_hand(dtype):
    curve = reliability_curve(PROBS.to(dtype), LABELS, bins=4)
    assert isinstance(curve, ReliabilityCurve)
    assert curve._fields == ("confidence", "accuracy", "count")
    nan = math.nan
    torch.testing.assert_close(
        curve.confidence, torch.tensor([nan, nan, 0.5, 2.5 / 3]), equal_nan=True
    )
    torch.testing.assert_close(curve.accuracy, torch.tensor([nan, nan, 0.0, 1.0]), equal_nan=True)
    assert curve.count.tolist() == [0, 0, 1, 3] and curve.count.dtype == torch.int64
    curve = reliability_curve(PROBS.to(dtype), LABELS)
    assert [int(b) for b in curve.count.nonzero()] == [7, 11, 14]
    # On the border of two bins: the upper one. 0.75 is the lower end of the last of four.
    assert reliability_curve(PROBS[:2], LABELS[:2], bins=4).count.tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy_by_hand(dtype):
    entropy = predictive_entropy(PROBS.to(dtype))
    # With a = log 2 and b = log 4/3: halves give a/2, quarters 2a/4, eighths 3a/8, 3/4 gives 3b/4.
    a, b = math.log(2), math.log(4 / 3)
    hand = [3 / 4 * b + a / 2, 3 / 4 * b + 2 * 3 * a / 8, a / 2 + 2 * 2 * a / 4, 0.0]
    assert entropy.tolist() == pytest.approx(hand, rel=1e-14)
    assert entropy.dtype == torch.float64
    assert math.copysign(1, entropy[-1].item()) == 1
    uniform = torch.full((1, 7), 1 / 7, dtype=dtype)
    assert predictive_entropy(uniform).item() == pytest.approx(math.log(7), abs=1e-6)


def test_auroc_by_hand():
    # Pairs out - in: 2-1, 2-3, 3-1, 3-3, 5-1, 5-3, of which 4 above, one below, one tied.
    assert auroc(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 3.0, 5.0])) == pytest.approx(4.5 / 6)
    assert auroc(torch.tensor([1.0, 2.0]), torch.tensor([3.0])) == 1
    assert auroc(torch.tensor([3.0]), torch.tensor([1.0, 2.0])) == 0
    assert auroc(torch.tensor([2.0, 2.0]), torch.tensor([2.0])) == 0.5
    inf = math.inf
    assert auroc(torch.tensor([-inf, 0.0]), torch.tensor([inf, -inf])) == pytest.approx(2.5 / 4)
    assert auroc(torch.tensor([1, 2]), torch.tensor([2, 3])) == 0.875


def test_ood_auroc_by_hand():
    inner = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.3, 0.2]])
    # The first is the second of the inliers in another order: above one, tied with one.
    outer = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
    assert ood_auroc(inner, outer) == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert ood_auroc(outer, inner) == pytest.approx(0.5 / 4)
    # Entropies of 8 equal classes exceed 1; two draws that disagree make a fair coin.
    uniform = torch.full((1, 8), 1 / 8)
    sure = torch.eye(8)
    disagree = torch.stack([sure[:1], sure[1:2]])
    assert ood_auroc(sure, uniform) == 1
    assert ood_auroc(disagree, uniform) == 1
    assert ood_auroc(sure, disagree) == 1
    assert ood_auroc(disagree, disagree) == 0.5


def test_the_order_of_classes_never_breaks_a_tie():
    """Votes of ten draws: few distinct entropies, met with the classes in every order."""
    votes = torch.randint(5, (10, 60))
    probs = torch.nn.functional.one_hot(votes, 5).double()
    shuffled = torch.stack([row[:, torch.randperm(5)] for row in probs.unbind(1)], 1)
    assert torch.equal(predictive_entropy(probs), predictive_entropy(shuffled))
    assert ood_auroc(probs, shuffled) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ece_is_its_definition(dtype, bins):
    for sharp in (0.5, 2.0, 30.0):  # the last saturates: confidences of exactly 1
        probs, labels = random_case(dtype=dtype, sharp=sharp)
        value = ece(probs, labels, bins)
        assert value == pytest.approx(brute_ece(probs, labels, bins), abs=1e-12)
        curve = reliability_curve(probs, labels, bins)
        assert all(part.shape == (bins,) for part in curve)
        assert curve.count.sum() == len(labels)
        empty = curve.count == 0
        assert torch.equal(curve.confidence.isnan(), empty)
        assert torch.equal(curve.accuracy.isnan(), empty)
        gap = (curve.count / len(labels) * (curve.accuracy - curve.confidence).abs()).nansum()
        assert value == pytest.approx(gap.item(), abs=1e-12)


@pytest.mark.parametrize("bins", [2, 3, 5, 8, 10, 15])
def test_ece_on_every_border(bins):
    """Confidences at each border from 1/2 to 1, and just beside it, with random labels."""
    borders = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    top = torch.cat([borders, borders.nextafter(torch.tensor(0.0)), borders * (1 - 1e-9)])
    top = top[top > 0.5]
    probs = torch.stack([1 - top, top], -1)
    for _ in range(5):
        labels = torch.randint(2, (len(top),))
        assert ece(probs, labels, bins) == pytest.approx(brute_ece(probs, labels, bins), abs=1e-12)
        curve = reliability_curve(probs, labels, bins)
        gap = (curve.count / len(top) * (curve.accuracy - curve.confidence).abs()).nansum()
        assert ece(probs, labels, bins) == pytest.approx(gap.item(), abs=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_confidence_of_one_shares_the_last_bin(dtype):
    """1 (wrong) and 0.96875 (right) in one bin: |0.5 - 0.984375|; in two it would be 0.515625."""
    probs = torch.tensor([[1.0, 0.0], [0.96875, 0.03125]], dtype=dtype)
    labels = torch.tensor([1, 0])
    assert ece(probs, labels) == pytest.approx(0.484375, abs=1e-12)
    curve = reliability_curve(probs, labels)
    assert curve.count[-1] == 2
    assert curve.confidence[-1].item() == 0.984375


def test_ece_of_many_rows_in_one_bin():
    """The sums do not drift, as they would in float32: there by 0.0007 of 0.01."""
    n = 60_000
    probs = torch.tensor([0.99, 0.01], dtype=torch.float64).expand(n, 2)
    labels = torch.zeros(n, dtype=torch.long)
    labels[: n // 50] = 1
    assert ece(probs, labels) == pytest.approx(0.01, abs=1e-9)


def test_against_torchmetrics():
    """Its own multi-class functions, away from the borders and rounding that they stumble on."""
    metrics = import_with_repair("torchmetrics.functional.classification", "auroc")
    probs, labels = random_case(n=500)
    assert ece(probs, labels) == pytest.approx(
        metrics.multiclass_calibration_error(probs, labels, 5, n_bins=15).item(), abs=1e-5
    )
    assert accuracy(probs, labels) == pytest.approx(
        metrics.multiclass_accuracy(probs, labels, 5, average="micro").item(), abs=1e-6
    )
    inner, outer = torch.rand(50), torch.rand(70) ** 0.5
    target = torch.cat([torch.zeros(50), torch.ones(70)]).long()
    direct = metrics.binary_auroc(torch.cat([inner, outer]), target).item()
    assert auroc(inner, outer) == pytest.approx(direct, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nll_brier_and_entropy_are_their_definitions(dtype):
    probs, labels = random_case(dtype=dtype)
    rows = probs.double().tolist()
    n = len(rows)
    log_loss = -sum(math.log(r[k]) for r, k in zip(rows, labels.tolist(), strict=True)) / n
    assert nll(probs, labels) == pytest.approx(log_loss, rel=1e-12)
    distance = sum(
        (q - (j == k)) ** 2
        for r, k in zip(rows, labels.tolist(), strict=True)
        for j, q in enumerate(r)
    )
    assert brier(probs, labels) == pytest.approx(distance / n, rel=1e-12)
    right = sum(r.index(max(r)) == k for r, k in zip(rows, labels.tolist(), strict=True))
    assert accuracy(probs, labels) == right / n
    entropies = [-sum(q * math.log(q) for q in r) for r in rows]
    assert predictive_entropy(probs).tolist() == pytest.approx(entropies, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["few values", "entropies", "large", "minute", "shifted"])
def test_auroc_is_its_definition(kind, dtype):
    """Of scores that a sigmoid, or a scaling into [0, 1], would tie in float32."""
    inner, outer = torch.randn(60, dtype=dtype), 0.7 + torch.randn(90, dtype=dtype)
    change = {
        "few values": torch.round,
        "entropies": lambda s: 2.3 * s.sigmoid(),
        "large": lambda s: 1e3 + 1e2 * s,
        "minute": lambda s: s * 1e-30,
        "shifted": lambda s: s.abs() * torch.where(s > 0, 1e30, -1e-30).to(dtype),
    }[kind]
    inner, outer = change(inner), change(outer)
    assert auroc(inner, outer) == pytest.approx(brute_auroc(inner, outer), abs=1e-6)
    assert auroc(inner, outer) + auroc(outer, inner) == pytest.approx(1, abs=1e-6)
    assert auroc(inner.requires_grad_(), outer.double()) == pytest.approx(
        brute_auroc(inner, outer), abs=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_ood_auroc_is_that_of_the_entropy(dtype):
    inner, _ = random_case(n=80, classes=10, samples=4, dtype=dtype, sharp=4.0)
    outer, _ = random_case(n=50, classes=10, samples=4, dtype=dtype, sharp=2.0)
    entropy = [predictive_entropy(p) for p in (inner, outer)]
    assert entropy[1].max() > 1
    assert ood_auroc(inner, outer) == pytest.approx(brute_auroc(*entropy), abs=1e-6)
    assert ood_auroc(inner, outer) == auroc(*entropy) > 0.6


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_are_averaged_first(dtype):
    probs, labels = random_case(samples=6, dtype=dtype)
    average = probs.double().mean(0)
    for metric in (accuracy, nll, ece, brier):
        assert metric(probs, labels) == pytest.approx(metric(average, labels), rel=1e-12)
        assert metric(probs[:1], labels) == metric(probs[0], labels)
    for ours, theirs in zip(
        reliability_curve(probs, labels), reliability_curve(average, labels), strict=True
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    torch.testing.assert_close(predictive_entropy(probs), predictive_entropy(average))
    # Not the average of the metrics: by convexity lower in two of them, by chance unlike in one.
    each = {m: sum(m(p, labels) for p in probs) / 6 for m in (nll, brier, ece)}
    assert nll(probs, labels) < each[nll] - 0.1
    assert brier(probs, labels) < each[brier] - 0.05
    assert abs(ece(probs, labels) - each[ece]) > 0.05


def test_two_draws_that_disagree_by_hand():
    """Sure of 0, sure of 1: each draw is off by 0 or 1, their average is a calibrated coin."""
    draws = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]])
    labels = torch.tensor([0, 1])
    assert ece(draws, labels) == 0
    assert [ece(draw, labels) for draw in draws] == pytest.approx([0.5, 0.5])
    assert nll(draws, labels) == pytest.approx(math.log(2))
    assert nll(draws[0], labels) == math.inf
    assert brier(draws, labels) == 0.5


def test_classification_collects_the_four():
    probs, labels = random_case(samples=3)
    scores = classification(probs, labels, bins=7)
    assert list(scores) == ["accuracy", "nll", "ece", "brier"]
    assert all(type(score) is float for score in scores.values())
    assert scores == pytest.approx(
        {
            "accuracy": accuracy(probs, labels),
            "nll": nll(probs, labels),
            "ece": ece(probs, labels, 7),
            "brier": brier(probs, labels),
        },
        rel=1e-12,
    )
    assert scores["ece"] != ece(probs, labels)
    assert classification(probs, labels)["ece"] == pytest.approx(ece(probs, labels), rel=1e-12)
