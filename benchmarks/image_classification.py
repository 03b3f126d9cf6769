"""Table 1 of Xu et al. (2022) on this machine: nine classifiers, the same data, the same minutes.

All have one stem, one head, one augmentation, one optimiser and one number of evaluations of a
field; they differ in what happens between stem and head, and in what is inferred. A minute is a
minute of one processor spent in training steps, so that two runs side by side, or another program
on the machine, take nothing from one another. Killed runs are resumed, finished ones kept: start
the same command again, or one command for each seed side by side.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from baselines import build
from common import INK, OTHER, POSTERIOR, THIRD, plt
from common.fit import evaluate, fit
from common.images import Data, load
from matplotlib.ticker import LogLocator

MODELS = {
    "MNIST": [
        "resnet",
        "odenet",
        "hyper-odenet",
        "mfvi-resnet",
        "mfvi-odenet",
        "mfvi-hyper-odenet",
        "ensemble",
        "sdebnn-kl",
        "sdebnn-stl",
    ],
    "CIFAR10": ["resnet", "odenet", "mfvi-odenet", "sdebnn-kl", "sdebnn-stl"],
}
BATCH = 128
SHIFTS = {"MNIST": {"pixels": 2, "flip": False}, "CIFAR10": {"pixels": 4, "flip": True}}


def run(name: str, data: Data, seed: int, args: argparse.Namespace) -> tuple[Any, dict]:
    """One classifier trained (or loaded, if it is already), and its scores on the test images."""
    pyro.clear_param_store()
    folder = args.out / data.name
    path = folder / f"{name}-{seed}.pt"
    classifier = build(name, data, seed)
    config = {
        "model": name,
        "seed": seed,
        "minutes": args.minutes,
        "lr": args.lr,
        "images": len(data.train),
    }
    print(f"{data.name}, {name}, seed {seed}", flush=True)
    history = fit(
        classifier,
        data,
        path,
        config,
        seed=seed,
        minutes=args.minutes,
        batch=BATCH,
        lr=args.lr,
        **SHIFTS[data.name],
    )
    result_path = path.with_suffix(".json")
    if result_path.exists():
        return classifier, json.loads(result_path.read_text())
    torch.manual_seed(seed)
    scores, _ = evaluate(classifier, data.test, data, args.samples)
    last, per_epoch = history[-1], max(len(data.train) // BATCH, 1)
    result = config | scores
    result |= {
        "samples": args.samples,
        "parameters": sum(p.numel() for p in classifier.parameters()),
        "epochs": last["steps"] / per_epoch,
        "seconds per epoch": last["seconds"] * per_epoch / last["steps"],
        "evaluations": sum(getattr(m, "evaluations", 0) for m in classifier.modules()),
        "history": history,
    }
    result_path.write_text(json.dumps(result))
    print(f"  accuracy {100 * scores['accuracy']:.2f} %, NLL {scores['nll']:.4f}, ", end="")
    print(f"ECE {scores['ece']:.4f}", flush=True)
    return classifier, result


def table(results: list[dict], names: list[str]) -> str:
    """One row a model: means over the seeds, and the spread between them where there are two."""
    columns = {
        "accuracy, %": ("accuracy", 100, 2),
        "NLL": ("nll", 1, 4),
        "ECE": ("ece", 1, 4),
        "Brier": ("brier", 1, 4),
        "parameters": ("parameters", 1, 0),
        "s / epoch": ("seconds per epoch", 1, 1),
        "epochs": ("epochs", 1, 1),
        "evaluations": ("evaluations", 1, 0),
    }
    lines = ["| model | seeds | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 2)]
    for name in names:
        rows = [r for r in results if r["model"] == name]
        if not rows:
            continue
        cells = []
        for key, factor, digits in columns.values():
            values = [factor * r[key] for r in rows]
            cell = f"{statistics.mean(values):.{digits}f}"
            if len(values) > 1 and key in ("accuracy", "nll", "ece", "brier"):
                cell += f" ± {statistics.stdev(values):.{digits}f}"
            cells.append(cell)
        lines.append(f"| {name} | {len(rows)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(results: list[dict], names: list[str], path: Path) -> None:
    """Learning curves: a panel for each kind of network, a colour for each kind of inference."""
    shown = [r for r in results if r["model"] in names]
    panels = {k: [n for n in v if n in names] for k, v in panels_of(names).items()}
    panels = {k: v for k, v in panels.items() if any(r["model"] in v for r in shown)}
    fig, axes = plt.subplots(
        1, len(panels), figsize=(3.4 * len(panels), 4), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    seeds, minutes = {r["seed"] for r in shown}, max(r["minutes"] for r in shown)
    spread = f"; mean and range of {len(seeds)} seeds" if len(seeds) > 1 else ", one seed"
    fig.suptitle(f"{path.parent.name}, {minutes:g} minutes of training each{spread}")
    for ax, (title, group) in zip(axes[0], panels.items(), strict=True):
        for name in group:
            runs = [r["history"] for r in shown if r["model"] == name]
            if runs:
                t, low, mean, high = learning_curve(runs)
                ax.plot(t, mean, "-", lw=1.6, color=colour(name), label=name)
                ax.fill_between(t, low, high, color=colour(name), alpha=0.2, lw=0)
        ax.set(xlabel="minutes of training", yscale="log")
        ax.set_title(title, fontsize=10)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 6)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    axes[0, 0].set_ylabel("validation error, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)
    print(f"figure: {path}")


def panels_of(names: list[str]) -> dict[str, list[str]]:
    """At most six curves in each."""
    varying = [n for n in names if "hyper" in n or "sdebnn" in n]
    constant = [n for n in names if n not in varying and ("odenet" in n or n == "ensemble")]
    rest = [n for n in names if n not in varying + constant]
    titles = (
        "residual network",
        "ODE, constant weights",
        "ODE, weights vary with depth",
    )
    return dict(zip(titles, (rest, constant, varying), strict=True))


def colour(name: str) -> str:
    if "sdebnn" in name:
        return POSTERIOR if "stl" in name else "#56b4e9"
    return THIRD if name == "ensemble" else OTHER if "mfvi" in name else INK


def learning_curve(runs: list[list[dict]]) -> tuple[Any, ...]:
    """Minutes, and the least, the mean and the largest error in per cent, between evaluations."""
    times = [[h["seconds"] / 60 for h in run] for run in runs]
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    t = np.linspace(start, end, 60)
    errors = [[100 * (1 - h["accuracy"]) for h in run] for run in runs]
    found = np.stack([np.interp(t, x, y) for x, y in zip(times, errors, strict=True)])
    return t, found.min(0), found.mean(0), found.max(0)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data", choices=list(MODELS), default="MNIST")
    p.add_argument("--data-root", type=Path, default=ROOT / "data", help="where MNIST/raw is, say")
    p.add_argument("--models", nargs="+", help="by default those of the paper's table")
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    p.add_argument("--minutes", type=float, default=5.0, help="of training, for each")
    p.add_argument("--samples", type=int, default=20, help="draws of the weights, for the test")
    p.add_argument("--subset", type=int, help="use so many training images only")
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks/out", help="checkpoints, results")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(args.threads)
    names = args.models or MODELS[args.data]
    data = load(args.data, args.data_root, args.subset)
    for name in names:
        for seed in args.seeds:
            run(name, data, seed, args)
    found = [json.loads(p.read_text()) for p in sorted((args.out / args.data).glob("*.json"))]
    print(f"\n{args.data}, {args.minutes:g} minutes each, {args.samples} draws of the weights\n")
    print(table(found, names))
    figure(found, names, args.out / args.data / "learning_curves.png")
    return found


if __name__ == "__main__":
    main(parse())
