"""Training memory that does not grow with depth: figure 5 of Xu et al. (2022).

One training step of the MNIST SDE-BNN, each in a process of its own, for three ways to remember
and for torchsde's stochastic adjoint: peak memory against the number of steps, the error of the
gradient against that of the whole graph of the same solver, and training on the same seed.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pyro
import torch
from baselines.networks import network
from common import EXACT, OTHER, POSTERIOR, finish, parser, plt, save
from common.classify import Categorical
from common.images import load
from matplotlib.ticker import LogLocator
from pyro.infer import Trace_ELBO
from tqdm import tqdm

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.interop.torchsde import Joint
from pyro_sde.nn import SDEBlock

SIZE = 60_000
MODES = ("graph", "recompute", "reversible", "adjoint")
NAMES = {"adjoint": "torchsde, adjoint"}
COLORS = {"graph": "0.55", "recompute": OTHER, "reversible": POSTERIOR, "adjoint": EXACT}
MARKERS = ("s", "^", "o", "D")


class Training:
    """The model of sdebnn_mnist.py with a linear head, in one of the modes.

    :param whole: Take the gradient from the graph all the same, for comparison.
    """

    def __init__(self, mode: str, steps: int, seed: int, whole: bool = False) -> None:
        torch.manual_seed(seed)
        pyro.clear_param_store()
        memory = "graph" if whole or mode == "adjoint" else mode
        options = {"steps": steps, "method": "reversible_heun", "memory": memory}
        net = network("MNIST", lambda f: SDEBlock(f, **options), 1.65)
        self.model = Categorical(net, SIZE)
        self.guide = AutoSDE(self.model)
        self.guide.setup(torch.randn(2, 1, 28, 28), torch.zeros(2, dtype=torch.long))
        self.parameters = [*self.model.parameters(), *self.guide.parameters()]
        self.elbo, self.seed = TraceSDE_ELBO(path_estimator="kl"), seed
        if mode == "adjoint":
            self.joint = Joint(self.model, self.guide, method="midpoint", adjoint=not whole)
            self.elbo = Trace_ELBO()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        joint = getattr(self, "joint", None)
        model, guide = (joint, lambda *_: None) if joint else (self.model, self.guide)
        return self.elbo.differentiable_loss(model, guide, x, y) / SIZE


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, 1, 28, 28), torch.randint(0, 10, (n,))


def measure(mode: str, steps: int, n: int) -> dict[str, float]:
    """Peak resident memory in MB of two training steps, and the seconds of the faster one."""
    training, (x, y) = Training(mode, steps, 0), batch(n)
    optimiser = torch.optim.Adam(training.parameters, 1e-3)
    seconds = []
    for _ in range(2):
        start = time.process_time()
        training.loss(x, y).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        seconds.append(time.process_time() - start)
    return {"memory": peak_memory(), "seconds": min(seconds)}


def peak_memory() -> float:
    """Of this process, in MB. Its ru_maxrss may be that of the program that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [x for x in status.read_text().splitlines() if x.startswith("VmHWM")]
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def gradient_error(mode: str, steps: int, n: int) -> float:
    """The norm of the gradient's difference from the whole graph's, on the same noise."""
    found, (x, y) = [], batch(n)
    for whole in (True, False):
        training = Training(mode, steps, 0, whole)
        torch.manual_seed(1)
        gradient = torch.autograd.grad(training.loss(x, y), training.parameters, allow_unused=True)
        found.append(torch.cat([g.flatten() for g in gradient if g is not None]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def train(mode: str, args: argparse.Namespace) -> list[float]:
    data = load("MNIST", args.data_root, args.subset)
    training = Training(mode, args.depth, args.seed)
    optimiser = torch.optim.Adam(training.parameters, args.lr)
    losses = []
    torch.manual_seed(args.seed)
    for _ in tqdm(range(args.iterations), desc=f"training, {mode}", mininterval=1.0):
        index = torch.randint(len(data.train), (args.batch,))
        loss = training.loss(data.normalise(data.train.x[index]), data.train.y[index])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> dict[str, dict]:
    torch.set_num_threads(args.threads)
    if args.measure is not None:
        mode, steps = args.measure
        print(json.dumps(measure(mode, int(steps), args.batch)))
        return {}
    costs: dict[str, dict] = {}
    for mode, steps in tqdm([(m, s) for m in MODES for s in args.steps], desc="memory"):
        child = [sys.executable, __file__, "--measure", mode, str(steps)]
        child += ["--batch", str(args.batch), "--threads", str(args.threads)]
        out = subprocess.run(child, check=True, capture_output=True, text=True).stdout
        costs.setdefault(mode, {})[steps] = json.loads(out.splitlines()[-1])
    errors = {
        mode: [gradient_error(mode, steps, 16) for steps in args.steps]
        for mode in tqdm(MODES[1:], desc="gradients")
    }
    curves = {mode: train(mode, args) for mode in MODES}
    print("| mode | " + " | ".join(f"{s} steps" for s in args.steps) + " | last / first | error |")
    print("|---" * (len(args.steps) + 3) + "|")
    for mode, cost in costs.items():
        cells = [f"{c['memory']:.0f} MB, {c['seconds']:.2f} s" for c in cost.values()]
        ratio = cost[args.steps[-1]]["memory"] / cost[args.steps[0]]["memory"]
        error = f"{errors[mode][-1]:.1e}" if mode in errors else "0"
        print(f"| {NAMES.get(mode, mode)} | {' | '.join(cells)} | {ratio:.2f} | {error} |")
    figure(costs, errors, curves, args)
    return {"costs": costs, "errors": errors, "curves": curves}


def figure(costs: dict, errors: dict, curves: dict, args: argparse.Namespace) -> None:
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
    fig.suptitle(
        f"The gradient of an MNIST SDE-BNN, {args.batch} images: what it keeps in memory, its error"
    )
    for k, mode in enumerate(MODES):
        style = {"color": COLORS[mode], "label": NAMES.get(mode, mode)}
        points = style | {"marker": MARKERS[k], "ms": 5}
        left.plot(args.steps, [c["memory"] for c in costs[mode].values()], **points)
        if mode in errors:
            middle.plot(args.steps, errors[mode], **points)
        # Those that lie on one another are seen at the borders of the ones above them.
        right.plot(curves[mode], lw=(6, 3.5, 1.2, 1)[k], ls="--" if k == 3 else "-", **style)
    left.set(title="peak memory of a training step", ylim=(0, None))
    finish(left, 0, xlabel="steps of the solver", ylabel="MB")
    middle.set(title="error of the gradient", xscale="log", yscale="log")
    middle.set_xticks(args.steps, labels=[str(n) for n in args.steps])
    middle.minorticks_off()
    finish(middle, 0, xlabel="steps of the solver", ylabel="relative to the graph's gradient")
    right.set(title=f"training with {args.depth} steps of the solver", yscale="log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.minorticks_off()
    finish(right, 0, xlabel="iteration", ylabel="loss per image, nats")
    what = left.get_legend_handles_labels()
    fig.legend(*what, loc="outside lower center", ncols=len(MODES), frameon=False)
    save(fig, args, "memory.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=60, lr=4e-3)
    root = Path(__file__).parent.parent / "data"
    p.add_argument("--data-root", type=Path, default=root)
    p.add_argument("--subset", type=int, help="use so many training images only")
    p.add_argument("--steps", nargs="+", type=int, default=[20, 50, 100, 200])
    p.add_argument("--depth", type=int, default=10, help="steps of the training curves")
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
