"""Precision as a dial at test time: figure 6a of Xu et al. (2022).

Two MNIST SDE-BNNs, trained on one coarse grid with and without a regulariser (Kelly et al. 2020),
predict with error control: accuracy, NLL, ECE and evaluations of the field against the tolerance.
The same seed draws the same weights at every tolerance.
"""

import argparse
import statistics

import pyro
import torch
from baselines.build import sde_bnn
from common import OTHER, POSTERIOR, finish, plt, save
from common.classify import predict
from common.fit import fit
from common.images import Data, Images, load
from common.report import image_parser
from tqdm import tqdm

from pyro_sde import metrics, tolerance


def train(name: str, data: Data, args: argparse.Namespace) -> torch.nn.Module:
    """The classifier, from its checkpoint if there is one."""
    torch.manual_seed(args.seed)
    pyro.clear_param_store()
    weights = {"kinetic": args.kinetic, "r2": args.r2} if name == "regularised" else {}
    size = len(data.train)
    regularise = {k: v * size for k, v in weights.items() if v}
    classifier = sde_bnn(
        data, estimator=args.estimator, scale=args.scale, steps=args.steps, regularise=regularise
    )
    keys = ("epochs", "subset", "batch", "lr", "scale", "steps", "estimator", "seed")
    config = {"name": name, "weights": weights} | {k: getattr(args, k) for k in keys}
    path = args.out / f"precision-{name}-{args.seed}.pt"
    print(f"{name}:", flush=True)
    fit(
        classifier, data, path, config, seed=args.seed, epochs=args.epochs, batch=args.batch,
        lr=args.lr,
    )  # fmt: skip
    return classifier


def judge(
    classifier: torch.nn.Module, images: Images, data: Data, tol: float | None, samples: int
) -> tuple[dict[str, float], torch.Tensor]:
    """Scores and evaluations of the field in a pass; on the grid of training without ``tol``."""
    pyro.set_rng_seed(0)
    block = next(m for m in classifier.modules() if hasattr(m, "evaluations"))
    if tol is None:
        p = predict(classifier, images.x, samples, data.normalise)
        return metrics.classification(p, images.y) | {"evaluations": block.evaluations}, p
    with tolerance(rtol=tol, atol=tol) as solved:
        p = predict(classifier, images.x, samples, data.normalise)
    counts = [s.evaluations for s in solved.solves if s.kind == "block"]
    return metrics.classification(p, images.y) | {"evaluations": statistics.mean(counts)}, p


def main(args: argparse.Namespace) -> dict[str, list[dict]]:
    torch.set_num_threads(args.threads)
    data = load("MNIST", args.data_root, args.subset)
    images = Images(data.test.x[: args.images], data.test.y[: args.images])
    results: dict[str, list[dict]] = {}
    print(f"grid: {args.steps} Euler steps; tolerances: rtol = atol")
    for name in ("plain", "regularised"):
        classifier = train(name, data, args)
        finest = None
        rows = []
        for tol in tqdm([*sorted(args.tolerances), None], desc="tolerances"):
            scores, p = judge(classifier, images, data, tol, args.samples)
            finest = p if finest is None else finest
            scores["distance"] = float((p - finest).abs().sum(-1).mean() / 2)
            rows.append({"tolerance": tol} | scores)
        results[name] = rows
    columns = ["accuracy", "nll", "ece", "evaluations", "distance"]
    print("| model | tolerance | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for name, rows in results.items():
        for row in rows:
            cells = [f"{row[c]:.1f}" if c == "evaluations" else f"{row[c]:.4f}" for c in columns]
            tol = "grid" if row["tolerance"] is None else f"{row['tolerance']:g}"
            print(f"| {name} | {tol} | {' | '.join(cells)} |")
    print("distance: total variation of the predictions from those at the tightest tolerance")
    figure(results, args)
    return results


def figure(results: dict[str, list[dict]], args: argparse.Namespace) -> None:
    parts = {
        "error, %": "accuracy",
        "NLL, nats": "nll",
        "ECE": "ece",
        "evaluations of the field": "evaluations",
    }
    fig, axes = plt.subplots(2, 2, figsize=(8, 6), sharex=True, layout="constrained")
    fig.suptitle(f"Tolerance at test time, two MNIST SDE-BNNs, {args.images} images")
    for ax, (label, key) in zip(axes.flat, parts.items(), strict=True):
        for (name, rows), color in zip(results.items(), (POSTERIOR, OTHER), strict=True):
            tols = [r["tolerance"] for r in rows if r["tolerance"] is not None]
            values = [100 * (1 - r[key]) if key == "accuracy" else r[key] for r in rows]
            ax.plot(tols, values[:-1], "o-", ms=4, color=color, label=f"{name}, by tolerance")
            grid = f"{name}, on the {args.steps} steps of training"
            ax.axhline(values[-1], ls=":", lw=1.6, color=color, label=grid)
        ax.set(xscale="log", yscale="log" if key == "evaluations" else "linear")
        finish(ax, 0, ylabel=label)
    axes[0, 0].invert_xaxis()  # shared
    for ax in axes[1]:
        ax.set_xlabel("tolerance, from loose to tight")
    what = axes[0, 0].get_legend_handles_labels()
    fig.legend(*what, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save(fig, args, "precision.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = image_parser(__doc__, epochs=5)
    p.set_defaults(samples=5)
    p.add_argument("--images", type=int, default=1000, help="of the test set")
    p.add_argument("--kinetic", type=float, default=0.01, help="weight of the kinetic energy")
    p.add_argument("--r2", type=float, default=0.001, help="weight of the second derivative")
    p.add_argument(
        "--tolerances", nargs="+", type=float, default=[1.0, 0.3, 0.1, 0.03, 0.01, 0.003]
    )
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
