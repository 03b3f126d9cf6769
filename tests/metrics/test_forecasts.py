"""Scores of predictive draws: by hand, from the definition, and in closed form."""

import math

import pytest
import torch

from pyro_sde.metrics import calibration_curve, coverage, crps, interval


def brute_crps(samples, observed):
    """All pairs of distinct draws."""
    m = len(samples)
    pairs = (samples.unsqueeze(0) - samples.unsqueeze(1)).abs().sum((0, 1)) / (m * (m - 1))
    return ((samples - observed).abs().mean(0) - pairs / 2).mean().item()


@pytest.mark.parametrize("m", [2, 3, 10, 77])
@pytest.mark.parametrize("shape", [(), (1,), (4, 3)])
def test_crps_is_its_definition(m, shape):
    samples, observed = torch.randn(m, *shape), torch.randn(shape)
    if m == 10:
        samples[3] = samples[7]  # a tie
    assert crps(samples, observed) == pytest.approx(brute_crps(samples, observed), abs=1e-14)


def test_crps_of_a_gaussian():
    """z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi) times the scale; unbiased from 2 draws on."""
    loc, scale, y = 1.0, 2.0, torch.tensor([0.5, 1.0, 6.0])
    z = (y - loc) / scale
    normal = torch.distributions.Normal(0.0, 1.0)
    exact = z * (2 * normal.cdf(z) - 1) + 2 * normal.log_prob(z).exp() - 1 / math.sqrt(math.pi)
    exact = scale * exact.mean().item()
    for m in (2, 5):
        scores = torch.tensor([crps(loc + scale * torch.randn(m, 3), y) for _ in range(4000)])
        error = scores.std().item() / math.sqrt(len(scores))
        # Counting each draw against itself would add scale / (m sqrt(pi)): 0.56 and 0.23.
        assert error < 0.02 and abs(scores.mean().item() - exact) < 4 * error
    # A term of the mean, |x - y| - |x - x'| / 2, has a deviation below 2 scale.
    many = crps(loc + scale * torch.randn(100_000, 3), y)
    assert many == pytest.approx(exact, abs=4 * 2 * scale / math.sqrt(100_000))


def test_crps_by_hand():
    samples = torch.tensor([[0.0, 5.0], [4.0, 5.0], [1.0, 5.0]])
    # |0 - 2| + |4 - 2| + |1 - 2| = 5, and pairs 4, 1, 3; then an error of 2 that is sure.
    expected = ((5 / 3 - 8 / 3 / 2) + 2) / 2
    assert crps(samples, torch.tensor([2.0, 3.0])) == pytest.approx(expected, abs=1e-15)
    assert crps(samples.float(), torch.tensor([2, 3])) == pytest.approx(expected, abs=1e-15)


def test_crps_far_from_zero():
    """A common offset of 2^30 cancels before it costs digits."""
    samples, observed = torch.randint(1000, (50, 20)) / 256, torch.randint(1000, (20,)) / 256
    assert crps(samples + 2**30, observed + 2**30) == pytest.approx(
        crps(samples, observed), abs=1e-14
    )


def test_masked_entries_do_not_matter():
    samples, observed = torch.randn(40, 5, 6, 2), torch.randn(5, 6, 2)
    for mask in (torch.rand(5, 6, 2) < 0.5, torch.rand(5, 6) < 0.5):
        x, y = samples.clone(), observed.clone()
        x[:, ~mask], y[~mask] = math.nan, math.nan
        few, seen = samples[:, mask], observed[mask]
        assert crps(x, y, mask) == pytest.approx(crps(few, seen), abs=1e-14)
        assert coverage(x, y, 0.5, mask) == coverage(few, seen, 0.5)
        with pytest.raises(ValueError, match=r"samples has .* of .* entries not finite: mask"):
            crps(x, observed)
        with pytest.raises(ValueError, match=r"observed has .* of .* entries not finite: mask"):
            coverage(samples, y)


def test_interval_by_hand():
    draws = torch.stack([torch.randperm(19) + 1.0, 10 * (torch.randperm(19) + 1.0)], -1)
    for level, low in [(0.9, 1.0), (0.8, 2.0), (0.5, 5.0), (0.85, 1.5)]:
        lower, upper = interval(draws, level)
        torch.testing.assert_close(lower, torch.tensor([low, 10 * low]))
        torch.testing.assert_close(upper, torch.tensor([20 - low, 10 * (20 - low)]))
    assert all(end.dtype == torch.float32 for end in interval(draws.float(), 0.5))
    # The ends belong to the interval.
    assert coverage(draws[:, 0].unsqueeze(-1).expand(19, 3), torch.tensor([1.0, 19.0, 19.5])) == (
        pytest.approx(2 / 3)
    )


@pytest.mark.parametrize("m, level", [(19, 0.9), (39, 0.5), (100, 0.9), (64, 0.8)])
def test_coverage_of_a_calibrated_prediction(m, level):
    """An observation that is one more draw is inside with probability ``level``."""
    n = 40_000
    # Uniform: there the ends that lie between two draws are exact as well.
    draws = torch.distributions.Uniform(0.0, 1.0).sample((m + 1, n))
    error = math.sqrt(level * (1 - level) / n)
    assert coverage(draws[1:], draws[0], level) == pytest.approx(level, abs=4 * error)


def test_what_cannot_be_scored():
    samples, observed = torch.randn(30, 4, 2), torch.randn(4, 2)
    mask = torch.ones(4, 2, dtype=torch.bool)
    for args, message in [
        ((samples[:, :3], observed), r"\(m, 4, 2\): found \(30, 3, 2\)"),
        ((samples, observed, mask.double()), "mask must be boolean"),
        ((samples, observed, mask[:, :1]), r"mask must have the shape of observed, \(4, 2\)"),
        ((samples, observed, ~mask), "no value was observed"),
        ((samples[:1], observed), "samples has 1 draw"),
    ]:
        with pytest.raises(ValueError, match=message):
            crps(*args)
    for level in (0.0, 1.0, -1, math.nan):
        with pytest.raises(ValueError, match="level must be between 0 and 1"):
            coverage(samples, observed, level)
    with pytest.raises(ValueError, match=r"30 draws, too few for a level of 0.95: .* least 39"):
        coverage(samples, observed, 0.95)
    coverage(torch.randn(39, 4, 2), observed, 0.95)
    with pytest.raises(ValueError, match="samples has 8 of 240 entries not finite"):
        crps(samples.index_fill(0, torch.tensor([3]), math.inf), observed)
    with pytest.raises(ValueError, match="samples has 1 of 30 entries not finite"):
        interval(samples.index_fill(0, torch.tensor([3]), math.nan)[:, 0, 0])


@pytest.mark.parametrize("m", [1, 2, 7, 19, 1000])
def test_calibration_of_every_rank_once(m):
    """An observation in each of the m + 1 gaps between draws: calibrated, whatever the levels."""
    draws = torch.arange(1.0, m + 1).unsqueeze(-1).expand(m, m + 1)
    curve = calibration_curve(draws[torch.randperm(m)], torch.arange(m + 1) + 0.5)
    torch.testing.assert_close(curve.share, curve.level, rtol=0, atol=1e-12)
    assert len(curve.level) == min(19, m) and curve.count == m + 1
    assert (curve.level.diff() > 0).all()


def test_calibration_of_counts():
    """Ties are shared among their ranks: draws and data of one discrete law are calibrated."""
    n, m = 20_000, 39
    counts = torch.poisson(torch.full((m + 1, n), 1.5))
    curve = calibration_curve(counts[1:], counts[0])
    # A share of n observations has a standard error below sqrt(p (1 - p) / n) = 0.0036.
    assert (curve.share - curve.level).abs().max() < 4 * 0.0036
    sure = calibration_curve(torch.ones(m, 3), torch.ones(3))  # all the same: any rank
    torch.testing.assert_close(sure.share, sure.level)
