"""What three frames tell of a walker's pace: a regression over walkers that it has not seen.

Of each training sequence (and, in a second table, the validation sequences too) the period is
fitted, with four harmonics. Then a Gaussian process learns the logarithm of the period from
posture and velocity in windows of three frames, and predicts it for the walker that was left out.
R² is the share of the variance that it explains: 0 is no better than the mean of the others. Last,
how well one shape does, the same for all walkers, fitted to three folds of the training sequences
and judged by the fourth: by how much a network gains on that. The test sequences are not looked at.

Run: python benchmarks/mocap_pace.py --data mocap35.mat
"""

import argparse
import itertools
from pathlib import Path

import torch
from gait import GIVEN, period, waves
from mocap import FOLDS, load
from torch import Tensor

EVERY, LAST = 5, 150  # windows begin at every fifth frame up to the last
LENGTHS, NOISES = (3.0, 6.0, 12.0, 25.0), (0.1, 1.0, 10.0)
PHASES, ROUNDS, DETAIL = torch.arange(0, 1, 0.005), 4, 6  # six harmonics make a shape


def features(x: Tensor) -> Tensor:
    """Posture and velocity, in units of their spread, of windows (walkers, windows, 2 joints)."""
    moving = x.std((0, 1)) > 0.3
    x = x[..., moving] / x[..., moving].std((0, 1))
    starts = torch.arange(0, LAST, EVERY)
    velocity = (x[:, starts + GIVEN - 1] - x[:, starts]) / (GIVEN - 1)
    return torch.cat([x[:, starts], velocity / velocity.std((0, 1)).clamp(min=1e-9)], -1)


def explained(inputs: Tensor, y: Tensor, length: float, noise: float) -> tuple[float, float]:
    """R² over walkers left out one at a time: of all their windows, and of the first alone."""
    missed, spread = [], []
    for i in range(len(y)):
        others = torch.arange(len(y)) != i
        known = inputs[others].flatten(0, 1)
        mean = y[others].mean()
        target = (y[others] - mean).repeat_interleave(inputs.shape[1])
        kernel = (-torch.cdist(known, known).square() / (2 * length**2)).exp()
        kernel.diagonal().add_(noise)
        cross = (-torch.cdist(inputs[i], known).square() / (2 * length**2)).exp()
        missed.append((mean + cross @ torch.linalg.solve(kernel, target) - y[i]).square())
        spread.append((mean - y[i]).square())
    error, total = torch.stack(missed), torch.stack(spread).mean()
    return float(1 - error.mean() / total), float(1 - error[:, 0].mean() / total)


def in_step(x: Tensor, shape: Tensor, length: Tensor) -> Tensor:
    """Squares (phases, frames) of what a walk differs by from one of that shape and length,
    from every phase on."""
    cycles = PHASES.unsqueeze(-1) + torch.arange(len(x)) / length
    played = waves(cycles.flatten(), DETAIL).to(x) @ shape
    return (played.unflatten(0, cycles.shape) - x).square().mean(-1)


def fitted(x: Tensor, periods: Tensor, phases: Tensor) -> Tensor:
    """The coefficients of the waves that suit walkers who begin at these phases."""
    cycles = phases.unsqueeze(-1) + torch.arange(x.shape[1]) / periods.unsqueeze(-1)
    basis = waves(cycles.flatten(), DETAIL).to(x)
    return torch.linalg.lstsq(basis, x.flatten(0, 1)).solution


def common_shape(x: Tensor, periods: Tensor) -> Tensor:
    """Of one walker at first; then of all, each from the phase at which it suits them best."""
    shape = fitted(x[:1], periods[:1], torch.zeros(1))
    for _ in range(ROUNDS):
        each = zip(x, periods, strict=True)
        best = torch.stack([in_step(walk, shape, p).mean(-1).argmin() for walk, p in each])
        shape = fitted(x, periods, PHASES[best])
    return shape


def one_shape(x: Tensor, periods: Tensor) -> dict[str, float]:
    """Mean square errors over walkers that it was not fitted to, by what is known of them."""
    names = ("phase by three frames, mean pace", "phase by three frames, own pace")
    found: dict[str, list[Tensor]] = {name: [] for name in (*names, "best phase, own pace")}
    for i, (walk, own) in enumerate(zip(x, periods, strict=True)):
        known = torch.arange(len(x)) % FOLDS != i % FOLDS
        shape = common_shape(x[known], periods[known])
        for name, p in zip(names, (periods[known].mean(), own), strict=True):
            square = in_step(walk, shape, p)
            future = square[:, GIVEN:].mean(-1)
            found[name].append(future[square[:, :GIVEN].mean(-1).argmin()])
        found["best phase, own pace"].append(future.min())
    return {name: float(torch.stack(errors).mean()) for name, errors in found.items()}


def main(args: argparse.Namespace) -> dict[str, float]:
    data = {name: x.double() for name, x in load(args.data).items()}
    walkers = torch.cat([data["train"], data["val"]])
    periods = torch.tensor([period(x) for x in walkers], dtype=torch.float64)
    n, best = len(data["train"]), {}
    print("periods, frames: " + ", ".join(f"{p:g}" for p in periods[:n]), end="; validation: ")
    print(", ".join(f"{p:g}" for p in periods[n:]))
    for name, count in (("training", n), ("training and validation", len(walkers))):
        inputs, y = features(walkers[:count]), periods[:count].log()
        print(f"\n{name}, {count} walkers: R² of the period of one left out")
        print("| length | noise | all windows | the first frames |\n|---|---|---|---|")
        found = []
        for length, noise in itertools.product(LENGTHS, NOISES):
            found.append(explained(inputs, y, length, noise))
            print(f"| {length:g} | {noise:g} | {found[-1][0]:.3f} | {found[-1][1]:.3f} |")
        best[name] = max(max(f) for f in found)
    print(f"\none shape for all, {FOLDS} folds of {n} walkers: mean square error")
    for name, error in one_shape(data["train"], periods[:n]).items():
        print(f"  {name}: {error:.2f}")
        best[name] = error
    return best


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", type=Path, required=True, help="mocap35.mat")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
