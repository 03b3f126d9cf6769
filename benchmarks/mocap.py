"""Walking, predicted from three frames: latent SDE and latent ODE on CMU motion capture.

The benchmark of Li et al. (2020): 16 sequences of 300 frames of 50 joint angles to learn from, 4 to
test on, of each of which the first 3 frames are given. The error is the mean square of the mean of
50 sampled paths, over the other 297 frames. The defaults are the rule: they were chosen by --cv,
four folds of the training sequences, which does not look at the test. Finished runs are kept: start
the same command again to go on.

Run: python benchmarks/mocap.py --data mocap35.mat
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from common import INK, POSTERIOR, plt
from gait import GIVEN, at, predict, train
from store import Store

FOLDS = 4
SETS = {"train": "Xtr", "val": "Xval", "test": "Xtest"}
PACES = torch.linspace(0.88, 1.12, 49)
SHOWN = (41, 38, 26)  # dimensions in the figure: a knee, a hip, a shoulder


def load(path: Path) -> dict[str, Tensor]:
    """Sequences of shape (S, 300, 50)."""
    from scipy.io import loadmat

    file = loadmat(path)
    return {name: torch.tensor(file[key]).float() for name, key in SETS.items()}


def errors(predicted: Tensor, x: Tensor) -> dict[str, list[float]]:
    """Mean squares of each sequence, over what had to be predicted and over all frames."""
    square = (predicted - x).square().mean(-1)
    parts = {"future": square[:, GIVEN:], "all": square, "last third": square[:, -100:]}
    return {name: part.mean(-1).tolist() for name, part in parts.items()}


def paced(predicted: Tensor, x: Tensor) -> dict[str, list[float]]:
    """Mean squares if the prediction of each sequence were played at the pace that suits it best.

    :param predicted: Frames of each sequence, as many as the fastest pace needs.
    """
    rows, frames = torch.arange(len(x)), torch.arange(x.shape[1]).expand(len(x), -1)
    played = (at(predicted, rows, pace * frames) - x for pace in PACES)
    errors = torch.stack([p[:, GIVEN:].square().mean((1, 2)) for p in played])
    best = errors.min(0)
    return {"at its pace": best.values.tolist(), "pace": PACES[best.indices].tolist()}


def calibration(samples: Tensor, band: Tensor, x: Tensor) -> dict[str, list[float]]:
    """Of each sequence: the share of it inside of the band, and the variance of the paths."""
    inside = ((band[0] <= x) & (x <= band[1])).float()
    found = {"coverage": inside, "spread": samples.var(0)}
    return {name: part[:, GIVEN:].mean((1, 2)).tolist() for name, part in found.items()}


def baselines(known: Tensor, x: Tensor) -> dict[str, dict[str, list[float]]]:
    """Rest, standing still, and the known sequence that began most alike."""
    distance = torch.cdist(x[:, :GIVEN].flatten(1), known[:, :GIVEN].flatten(1))
    predictions = {
        "zero": torch.zeros_like(x),
        "hold the third frame": x[:, GIVEN - 1 : GIVEN].expand_as(x),
        "nearest training sequence": known[distance.argmin(-1)],
    }
    return {name: errors(p, x) for name, p in predictions.items()}


def run(kind: str, seed: int, fold: int | None, data: dict[str, Tensor], args: Any, store: Store):
    """Train and judge: on the test sequences, or on those of a fold that were kept back."""
    task = {"kind": kind, "seed": seed, "fold": fold, "rule": rule(args)}
    found = store.get(task)
    if found is not None:
        return found
    x, judged = data["train"], "test"
    sets = dict(data)
    if fold is not None:
        held = torch.arange(len(x)) % FOLDS == fold
        x, sets, judged = x[~held], {"val": data["val"], "held out": x[held]}, "held out"
    model, guide, seconds = train(kind, x, seed, args)
    noise = model.noise().detach()
    result = {"task": task, "seconds": seconds, "noise": noise.mean().item()}
    result["parameters"] = sum(p.numel() for m in (model, guide) for p in m.parameters())
    for name in ("val", judged):
        torch.manual_seed(seed)
        x, n = sets[name], sets[name].shape[1]
        samples = predict(model, guide, x, args, n)
        noisy = samples + noise * torch.randn_like(samples)
        band = torch.quantile(noisy, torch.tensor([0.05, 0.95]), dim=0)
        result[name] = errors(samples.mean(0), x) | calibration(samples, band, x)
        longer = predict(model, guide, x, args, math.ceil(PACES[-1] * n))
        result[name] |= paced(longer.mean(0), x)
    if fold is None:
        torch.save((samples.mean(0), band), args.out / f"{kind}-{seed}.pt")
    print(f"{kind}, seed {seed}, fold {fold}: {statistics.mean(result[judged]['future']):.2f}")
    return store.add(result)


def _cell(values: list[float]) -> str:
    text = f"{statistics.mean(values):.2f}"
    return text + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def table(runs: dict[str, list[dict]], base: dict[str, dict], judged: str) -> str:
    """One row a model: means and standard deviations over the seeds."""
    count = len(next(iter(base.values()))["future"])
    head = ["model", "seeds", "MSE, 297 frames", "MSE, 300 frames"]
    head += [f"sequence {i}" for i in range(count)]
    head += ["all at their pace", "validation", "parameters", "s / run"]
    rows = [head, ["---"] * len(head)]
    for name, found in base.items():
        each = [f"{e:.2f}" for e in found["future"]]
        overall = [_cell([statistics.mean(found[k])]) for k in ("future", "all")]
        rows.append([name, "-", *overall, *each, "-", "-", "-", "-"])
    for kind, results in runs.items():
        row = [f"latent {kind.upper()}", str(len(results))]
        for key in ("future", "all"):
            row.append(_cell([statistics.mean(r[judged][key]) for r in results]))
        row += [_cell([r[judged]["future"][i] for r in results]) for i in range(count)]
        row.append(_cell([statistics.mean(r[judged]["at its pace"]) for r in results]))
        row.append(_cell([statistics.mean(r["val"]["future"]) for r in results]))
        row += [str(results[0]["parameters"])]
        rows.append([*row, f"{statistics.mean(r['seconds'] for r in results):.0f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def difference(runs: dict[str, list[dict]]) -> str:
    """How much larger the error of the first kind is, seed by seed."""
    (a, first), (b, second) = runs.items()
    gaps = [
        statistics.mean(x["test"]["future"]) - statistics.mean(y["test"]["future"])
        for x, y in zip(first, second, strict=True)
    ]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{a} less {b}: {statistics.mean(gaps):+.2f}, standard error {error:.2f}"


def figure(x: Tensor, args: argparse.Namespace) -> None:
    """Three joints of one test sequence, and what the first seed of each kind foresaw."""
    fig, axes = plt.subplots(
        len(SHOWN), len(args.kind), figsize=(5 * len(args.kind), 6), sharex=True, sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    frames = torch.arange(x.shape[1])
    for column, kind in zip(axes.T, args.kind, strict=True):
        mean, band = torch.load(args.out / f"{kind}-{args.seeds[0]}.pt", weights_only=True)
        for ax, j in zip(column, SHOWN, strict=True):
            low, high = band[:, args.sequence, :, j]
            ax.fill_between(frames, low, high, color=POSTERIOR, alpha=0.2, lw=0, label="90 %")
            ax.plot(frames, mean[args.sequence, :, j], color=POSTERIOR, label="mean of 50 paths")
            ax.plot(frames, x[args.sequence, :, j], color=INK, lw=1, ls="--", label="measured")
            ax.axvline(GIVEN - 1, color=INK, lw=0.5)
            ax.set_ylabel(f"dimension {j}, degrees")
            ax.spines[["top", "right"]].set_visible(False)
        column[0].set_title(f"latent {kind.upper()}, test sequence {args.sequence}", fontsize=11)
        column[-1].set_xlabel("frame (left of the line: given)")
    what = axes[0, 0].get_legend_handles_labels()
    fig.legend(*what, loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    args.figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(args.figure, dpi=130)
    plt.close(fig)
    print(f"figure: {args.figure}")


def main(args: argparse.Namespace) -> dict[str, list[dict]]:
    torch.set_num_threads(args.threads)
    data, store = load(args.data), Store(args.out / "runs.jsonl")
    if args.cv:
        return cross_validate(data, args, store)
    runs = {k: [run(k, s, None, data, args, store) for s in args.seeds] for k in args.kind}
    print(table(runs, baselines(data["train"], data["test"]), "test"))
    if len(runs) == 2 and len(args.seeds) > 1:
        print(difference(runs))
    figure(data["test"], args)
    return runs


def cross_validate(data: dict[str, Tensor], args: argparse.Namespace, store: Store) -> dict:
    """Each training sequence predicted by a model that has not seen it."""
    runs: dict[str, list[dict]] = {}
    for kind in args.kind:
        folds = {
            (seed, fold): run(kind, seed, fold, data, args, store)
            for seed in args.seeds
            for fold in range(FOLDS)
        }
        runs[kind] = list(folds.values())
        each = [
            [folds[seed, i % FOLDS]["held out"]["future"][i // FOLDS] for seed in args.seeds]
            for i in range(len(data["train"]))
        ]
        val = [statistics.mean(r["val"]["future"]) for r in runs[kind]]
        at_pace = [statistics.mean(r["held out"]["at its pace"]) for r in runs[kind]]
        mean = _cell([statistics.mean(e) for e in zip(*each, strict=True)])
        print(f"{kind}: cross-validated MSE {mean}, {len(args.seeds)} seed(s); ", end="")
        print(f"each at its own pace {statistics.mean(at_pace):.2f}; ", end="")
        print(f"validation sequences {statistics.mean(val):.2f}; each training sequence:")
        print("  " + ", ".join(f"{i}: {statistics.mean(e):.1f}" for i, e in enumerate(each)))
    return runs


RULE: dict[str, tuple[Any, str]] = {
    "dim": (6, "dimension of the state"),
    "hidden": (64, "width of all layers"),
    "context": (16, "size of what the control knows of a series"),
    "diffusion": (0.1, "of the prior, before training"),
    "floor": (1e-3, "below which it does not fall"),
    "stride": (5, "frames from one state of the path to the next"),
    "iterations": (800, "steps of training"),
    "batch": (128, "windows in a step"),
    "shift": (150.0, "windows begin at any frame up to this one"),
    "speed": (1.0, "median speed at which they are played"),
    "warp": (0.0, "standard deviation of its logarithm"),
    "common": (1, "1: they go on at the mean pace of all walkers; 0: each at its own"),
    "jitter": (0.05, "noise on each of the frames that the encoder reads, in units of the spread"),
    "offset": (0.05, "noise on all three alike"),
    "hide": (0.5, "share of the joints that the encoder does not see, others for every path"),
    "lr": (7e-3, "largest learning rate"),
    "kl": (1.0, "weight of the KL"),
    "copies": (1, "paths of a window in its bound"),
    "power": (1.0, "of their weights: 1 weighs by importance, 0 would be the ELBO"),
    "joints": (0, "1: noise of each joint"),
    "contraction": (0, "1: the posterior shrinks the noise of the steps"),
    "stateful": (0, "1: a diffusion with hidden units"),
    "anneal": (100, "steps until it has that weight"),
    "samples": (50, "paths of which the mean is the prediction"),
}


def rule(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in RULE}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", type=Path, required=True, help="mocap35.mat")
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    p.add_argument("--kind", nargs="+", choices=["sde", "ode"], default=["sde", "ode"])
    p.add_argument("--cv", action="store_true", help="cross-validate, without the test sequences")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks/out/mocap")
    p.add_argument("--figure", type=Path, default=ROOT / "benchmarks/results/mocap.png")
    p.add_argument("--sequence", type=int, default=0, help="of the test, in the figure")
    group = p.add_argument_group("the rule")
    for name, (value, text) in RULE.items():
        group.add_argument(f"--{name}", type=type(value), default=value, help=f"{text} ({value})")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
