"""Does the posterior earn its name? SDE-BNNs against an ODEnet and mean-field on shifted digits.

The classifiers of image_classification.py (same network, augmentation and minutes; what that
program has trained is not trained again), judged by NLL and ECE on clean, rotated, blurred and
noisy digits and by the AUROC of their entropy against letters and clothes. Of the Bayesian ones
also the KL from prior to posterior by site and by depth, and the spread of the weights over depth.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import kl_divergence

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import image_classification
from common import INK, OTHER, POSTERIOR, THIRD, plt
from common.classify import Bayesian, predict
from common.images import Data, Images, add_noise, blur, load, load_idx, rotate

from pyro_sde import AutoSDE, metrics
from pyro_sde.distributions.wrapping import unwrap
from pyro_sde.infer.comparison import log_ratio

MODELS = [
    "odenet",
    "mfvi-odenet",
    "sdebnn-stl",
    "sdebnn-normal",
    "sdebnn-contraction",
    "sdebnn-normal-contraction",
]
SHIFTS = {
    "clean": lambda x: x,
    "rotated": lambda x: rotate(x, 30.0),
    "blurred": lambda x: blur(x, 1.5),
    "noisy": lambda x: add_noise(x, 0.4),
}
STRANGERS = ("notMNIST", "FashionMNIST")


def shifted(name: str, images: Images) -> Tensor:
    """Numbers from 0 to 1."""
    return SHIFTS[name](images.x.float() / 255)


@torch.no_grad()
def kl_by_depth(classifier: Bayesian, x: Tensor, y: Tensor, draws: int) -> dict[str, list[float]]:
    """For each site, nats in its start and in each step; of a site that is no path, in all."""
    total: dict[str, list[float]] = {}
    for _ in range(draws):
        guide = classifier.guide
        if isinstance(guide, AutoSDE):
            guide(x, y)
            model_trace, guide_trace = guide.get_traces()
        else:
            guide_trace = poutine.trace(guide).get_trace(x, y)
            model = poutine.replay(classifier.model, guide_trace)
            model_trace = poutine.trace(model).get_trace(x, y)
        for name, site in guide_trace.nodes.items():
            prior = model_trace.nodes.get(name)
            if site["type"] != "sample" or prior is None or prior["is_observed"]:
                continue
            q, p = unwrap(site["fn"]), unwrap(prior["fn"])
            if q is None or p is None:  # AutoNormal's own Normal is beside the site
                normal = guide_trace.nodes[f"{name}_unconstrained"]["fn"]
                parts = [float(kl_divergence(normal, prior["fn"]).sum())]
            else:
                ratio = log_ratio(q.path, p.path, site["value"])
                first = 0.0
                if not isinstance(p.path.initial, Tensor):
                    first = float(kl_divergence(q.path.initial, p.path.initial).sum())
                kl = ratio.kl_by_step()
                parts = [first, *kl.reshape(len(kl), -1).sum(-1).tolist()]
            old = total.get(name, [0.0] * len(parts))
            total[name] = [a + b / draws for a, b in zip(old, parts, strict=True)]
    return total


@torch.no_grad()
def spread(classifier: Bayesian, x: Tensor, draws: int = 30) -> dict[str, dict[str, list[float]]]:
    """Root mean squares over the weights of their posterior mean and standard deviation."""
    samples: dict[str, list[Tensor]] = {}
    for _ in range(draws):
        for name, w in classifier.guide(x).items():
            samples.setdefault(name, []).append(w)
    result = {}
    for name, values in samples.items():
        w = torch.stack(values)
        w = w if w.dim() == 3 else w.reshape(draws, 1, -1)
        moments = {"mean": w.mean(0), "sd": w.std(0)}
        result[name] = {k: m.square().mean(-1).sqrt().tolist() for k, m in moments.items()}
    return result


def judge(name: str, data: Data, seed: int, args: argparse.Namespace) -> dict:
    """All figures of one trained classifier, from disk if they are there."""
    path = args.out / "study" / f"{name}-{seed}.json"
    classifier, trained = image_classification.run(name, data, seed, args)
    if path.exists():
        return json.loads(path.read_text())
    result: dict = {"model": name, "seed": seed, "accuracy (all, clean)": trained["accuracy"]}
    images = Images(data.test.x[: args.images], data.test.y[: args.images])
    probs = {}
    for kind in SHIFTS:
        torch.manual_seed(seed)
        p = probs[kind] = predict(classifier, shifted(kind, images), args.draws, data.normalise)
        result[kind] = metrics.classification(p, images.y)
    for kind in STRANGERS:
        torch.manual_seed(seed)
        x = load_idx(args.data_root, kind, False).x[: args.images]
        q = predict(classifier, x, args.draws, data.normalise)
        result[kind] = metrics.ood_auroc(probs["clean"], q)
    if isinstance(classifier, Bayesian):
        x, y = data.normalise(data.train.x[:1]), data.train.y[:1]
        result["kl"] = kl_by_depth(classifier, x, y, 10)
        result["spread"] = spread(classifier, x)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return result


def table(results: list[dict], names: list[str]) -> str:
    """One table of the scores, one of the strangers, the KL by site and the weights' spread."""
    shifts = {f"{k}, {m.upper()}": (k, m) for k in SHIFTS for m in ("nll", "ece")}
    scores = ["model", "seeds", "accuracy, %", *shifts]
    inside = ["model", *(f"AUROC {k}" for k in STRANGERS), "KL of w_0", "KL of the path"]
    inside += ["mean of w_0", "mean of w_1", "sd of w_0", "sd of w_1"]
    rows, more = [scores, ["---"] * len(scores)], [inside, ["---"] * len(inside)]
    for name in names:
        found = [r for r in results if r["model"] == name]
        if not found:
            continue
        accuracy = [100 * r["accuracy (all, clean)"] for r in found]
        cells = [
            _cell([r[k][m] for r in found], 3 if m == "nll" else 4) for k, m in shifts.values()
        ]
        rows.append([name, str(len(found)), _cell(accuracy, 2), *cells])
        strangers = [_cell([r[k] for r in found], 3) for k in STRANGERS]
        parts = ["-"] * 6
        if "kl" in found[0]:
            start = [sum(v[0] for v in r["kl"].values()) for r in found]
            path = [sum(sum(v[1:]) for v in r["kl"].values()) for r in found]
            parts = [_cell(start, 0), _cell(path, 0)]
            for moment in ("mean", "sd"):
                ends = [next(iter(r["spread"].values()))[moment] for r in found]
                parts += [f"{statistics.mean(e[k] for e in ends):.3f}" for k in (0, -1)]
        more.append([name, *strangers, *parts])
    tables = ["\n".join("| " + " | ".join(row) + " |" for row in t) for t in (rows, more)]
    return "\n\n".join(tables)


def _cell(values: list[float], digits: int) -> str:
    text = f"{statistics.mean(values):.{digits}f}"
    return text + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


STYLES = {
    "sdebnn-stl": (POSTERIOR, "o"),
    "sdebnn-contraction": ("#56b4e9", "s"),
    "sdebnn-normal": (OTHER, "o"),
    "sdebnn-normal-contraction": ("#d55e00", "s"),
    "sdebnn-penalised": (THIRD, "^"),
    "sdebnn-rich": ("#cc79a7", "D"),
    "sdebnn-distance": (INK, "v"),
}


def figure(results: list[dict], names: list[str], path: Path) -> None:
    """KL, standard deviation and mean over depth, of the first seed of each SDE-BNN."""
    first = min(r["seed"] for r in results)
    found = {r["model"]: r for r in results if r["seed"] == first and r["model"] in names}
    found = {name: found[name] for name in STYLES if name in found}
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
    fig.suptitle(f"Posterior of the weights of MNIST SDE-BNNs over depth, seed {first}")
    for k, (name, r) in enumerate(found.items()):
        ((_, kl),) = r["kl"].items()
        ((_, s),) = r["spread"].items()
        n = len(kl) - 1
        times = [i / n for i in range(n + 1)]
        color, marker = STYLES[name]
        # Where lines coincide, the wider ones are seen at the borders of those above them.
        style: dict = {"color": color, "lw": 6.2 - 0.9 * k, "label": name}
        left.plot([t + 0.5 / n for t in times[:-1]], kl[1:], marker=marker, ms=8 - 0.6 * k, **style)
        middle.plot(times, s["sd"], **style)
        right.plot(times, s["mean"], **style)
    left.set(xlabel="depth", ylabel="nats in a step", yscale="log", title="KL from the prior")
    middle.set(xlabel="depth", ylabel="root mean square over the weights", ylim=(0, None))
    middle.set_title("standard deviation")
    right.set(xlabel="depth", ylim=(0, None), title="mean")
    for ax in (left, middle, right):
        ax.spines[["top", "right"]].set_visible(False)
    what = left.get_legend_handles_labels()
    fig.legend(*what, loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)
    print(f"figure: {path}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--data-root", type=Path, default=ROOT / "data")
    p.add_argument("--models", nargs="+", default=MODELS)
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    p.add_argument("--minutes", type=float, default=5.0, help="of training, for each")
    p.add_argument("--samples", type=int, default=20, help="draws of the weights, whole test set")
    p.add_argument("--draws", type=int, default=10, help="draws of the weights, shifted images")
    p.add_argument("--images", type=int, default=5000, help="of every shifted and strange set")
    p.add_argument("--subset", type=int, help="use so many training images only")
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks/out", help="checkpoints, results")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> list[dict]:
    torch.set_num_threads(args.threads)
    data = load("MNIST", args.data_root, args.subset)
    for seed in args.seeds:
        for name in args.models:
            judge(name, data, seed, args)
    found = [json.loads(p.read_text()) for p in sorted((args.out / "study").glob("*.json"))]
    print(table(found, args.models))
    figure(found, args.models, args.out / "study" / "posterior_study.png")
    return found


if __name__ == "__main__":
    main(parse())
