"""What the image examples share: their options, and what they show at the end."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_sde import metrics
from pyro_sde.plotting import plot_reliability

from . import EXACT, INK, POSTERIOR, plt, save
from .classify import predict
from .fit import Diverged, evaluate, fit
from .images import Data, load_idx

HERE = Path(__file__).parent.parent


def image_parser(doc: str, *, epochs: int) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=doc.strip().split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--data-root", type=Path, default=HERE.parent / "data")
    p.add_argument("--epochs", type=int, default=epochs)
    p.add_argument("--subset", type=int, help="use so many training images only")
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=4e-3, help="largest learning rate")
    p.add_argument("--scale", type=float, default=0.1, help="diffusion of the prior's weights")
    p.add_argument("--steps", type=int, default=5, help="steps of the solver, for each block")
    p.add_argument("--estimator", choices=["stl", "full", "kl"], default="stl")
    p.add_argument("--samples", type=int, default=20, help="draws of the weights, for the test")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--out", type=Path, default=HERE / "out", help="folder for checkpoint and figure"
    )
    return p


def train_and_report(
    name: str, classifier: nn.Module, data: Data, args: argparse.Namespace, **options: Any
) -> dict[str, float]:
    """Train, judge on the test images, draw, and print the row of a table.

    :param name: Of the checkpoint and the figure.
    :param options: Those of :func:`common.fit.fit`.
    """
    keys = ("epochs", "subset", "batch", "lr", "scale", "steps", "estimator", "seed")
    config = {"name": name} | {k: getattr(args, k) for k in keys}
    checkpoint = args.out / f"{name}-{args.seed}.pt"
    try:
        history = fit(
            classifier,
            data,
            checkpoint,
            config,
            seed=args.seed,
            epochs=args.epochs,
            batch=args.batch,
            lr=args.lr,
            **options,
        )
    except Diverged as e:
        sys.exit(f"{e}.")
    torch.manual_seed(args.seed)
    scores, p = evaluate(classifier, data.test, data, args.samples)
    strangers = {
        kind: predict(classifier, load_idx(args.data_root, kind, False).x, 10, data.normalise)
        for kind in ("notMNIST", "FashionMNIST")
        if data.name == "MNIST" and (args.data_root / kind).is_dir()
    }
    scores |= {f"AUROC {kind}": metrics.ood_auroc(p, q) for kind, q in strangers.items()}
    scores["minutes"] = history[-1]["seconds"] / 60
    parameters = sum(q.numel() for q in classifier.parameters())
    figure(name, history, p, data.test.y, strangers, scores, args)
    print(f"checkpoint: {checkpoint}")
    print("| model | seed | epochs | parameters | " + " | ".join(scores) + " |")
    print("|" + "---|" * (4 + len(scores)))
    row = [name, args.seed, args.epochs, parameters, *(f"{v:.4f}" for v in scores.values())]
    print("| " + " | ".join(map(str, row)) + " |")
    return scores


def figure(
    name: str,
    history: list[dict],
    p: Tensor,
    labels: Tensor,
    strangers: dict[str, Tensor],
    scores: dict[str, float],
    args: argparse.Namespace,
) -> None:
    """The learning curve, the reliability diagram and the entropies of the predictions."""
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    epochs = [h["epoch"] for h in history]
    left.plot(epochs, [100 * (1 - h["accuracy"]) for h in history], ".-", color=POSTERIOR)
    left.axhline(100 * (1 - scores["accuracy"]), color=INK, lw=0.8, ls="--")
    left.set(xlabel="epoch", ylabel="error, %", yscale="log", title="validation (line: test)")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    plot_reliability(p, labels, ax=middle)
    for kind, q, colour in zip(
        ["test images", *strangers], [p, *strangers.values()], [POSTERIOR, EXACT, "#edae49"],
        strict=False,
    ):  # fmt: skip
        right.hist(
            metrics.predictive_entropy(q), bins=40, range=(0, 2.31), density=True, alpha=0.6,
            label=kind, color=colour,
        )  # fmt: skip
    right.set(
        xlabel="entropy of the prediction, nats", yscale="log", title="what it knows it knows"
    )
    right.legend()
    save(fig, args, f"{name}.png")
