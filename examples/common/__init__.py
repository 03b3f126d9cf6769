"""What the examples share: a training loop with a progress bar, exact 1-D answers, figures."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import torch
from PIL import Image
from pyro.infer import SVI
from torch import Tensor
from tqdm import trange

from pyro_sde import anneal_kl, kl_weight

matplotlib.use("Agg")

import matplotlib.pyplot as plt

INK, POSTERIOR, EXACT = "#222222", "#2f6db3", "#d1495b"
OTHER, THIRD = "#e69f00", "#009e73"  # what a posterior is compared with


def parser(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every example has."""
    p = argparse.ArgumentParser(
        description=doc.strip().split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--iterations", type=int, default=defaults.get("iterations", 1000))
    p.add_argument("--particles", type=int, default=defaults.get("particles", 32))
    p.add_argument(
        "--lr", type=float, default=defaults.get("lr", 1e-2), help="largest learning rate"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent.parent / "out",
        help="folder for the figure",
    )
    return p


def train(
    model: Callable,
    guide: Callable,
    elbo: Any,
    args: argparse.Namespace,
    *data: Any,
    each: Callable[[int], None] | None = None,
    anneal: int = 0,
    clip: float | None = None,
) -> list[float]:
    """A plain SVI loop: Adam with a one-cycle rate.

    :param each: Called before every step.
    :param anneal: In how many steps the weight of the KL rises to 1.
    :param clip: The largest norm of the gradient of a parameter.
    """
    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
    n = args.iterations
    optim = pyro.optim.OneCycleLR(
        {
            "optimizer": torch.optim.Adam,
            "optim_args": {"lr": args.lr},
            "max_lr": args.lr,
            "total_steps": n + 1,
        },
        None if clip is None else {"clip_norm": clip},
    )
    svi = SVI(model, guide, optim, elbo)
    losses = []
    with trange(n, desc="training", unit="step", mininterval=0.2) as bar:
        for i in bar:
            if each is not None:
                each(i)
            with anneal_kl(kl_weight(i, anneal)):
                losses.append(svi.step(*data))
            optim.step()
            if i % 10 == 0:
                bar.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
    return losses


def minimise(
    name: str, loss: Callable[[], Tensor], parameters: Iterable[Tensor], n: int, lr: float
) -> None:
    """Adam with a one-cycle rate and clipped gradients, for any loss that has parameters."""
    parameters = list(parameters)
    optimiser = torch.optim.Adam(parameters, lr)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=n + 1)
    with trange(n, desc=name, unit="step", mininterval=1.0) as bar:
        for i in bar:
            value = loss()
            optimiser.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            rate.step()
            if i % 10 == 0:
                bar.set_postfix(loss=f"{value.item():.3f}")


def exact_filter(
    start: tuple[float, float],
    transition: Callable[[float], tuple[float, float, float]],
    times: Tensor,
    t0: float,
    log_likelihood: Callable[[Tensor], Tensor],
    width: float = 8.0,
    points: int = 1200,
) -> tuple[float, Tensor, Tensor]:
    """Evidence and posterior marginals of a scalar linear Gaussian process with any likelihood,
    by quadrature: forward and backward over a fine grid of states.

    :param start: Mean and standard deviation at ``t0``.
    :param transition: From a time step to (factor, shift, standard deviation).
    :param times: Increasing observation times.
    :param log_likelihood: From states ``(points, 1)`` to log p(y_i | z) ``(points, n)``.
    :param width: Half the width of the grid of states.
    :returns: Log evidence, states ``(points,)``, marginals ``(n, points)`` at the times.
    """
    z = torch.linspace(-width, width, points, dtype=torch.float64)
    dz = z[1] - z[0]
    log_l = log_likelihood(z.unsqueeze(-1)).double()

    def move(mean: Tensor, sd: float) -> Tensor:
        kernel = torch.exp(-0.5 * ((z - mean.unsqueeze(-1)) / sd) ** 2)
        return kernel / (sd * (2 * torch.pi) ** 0.5) * dz

    kernels, previous = [], float(t0)
    for t in times.tolist():
        factor, shift, sd = transition(t - previous)
        kernels.append(move(factor * z + shift, sd))
        previous = t
    m, s = start
    p = torch.exp(-0.5 * ((z - m) / s) ** 2)
    p = p / p.sum()
    evidence, forward = 0.0, []
    for i, kernel in enumerate(kernels):
        p = (p @ kernel) * log_l[:, i].exp()
        evidence += float(p.sum().log())
        p = p / p.sum()
        forward.append(p)
    backward = torch.ones_like(z)
    marginals = []
    for i in range(len(kernels) - 1, -1, -1):
        q = forward[i] * backward
        marginals.append(q / (q.sum() * dz))
        backward = kernels[i] @ (log_l[:, i].exp() * backward)
        backward = backward / backward.max()
    return evidence, z, torch.stack(marginals[::-1])


def quantiles(z: Tensor, density: Tensor, levels: list[float]) -> Tensor:
    """Quantiles of densities ``(n, points)`` on the grid ``z``, of shape ``(levels, n)``."""
    cdf = density.cumsum(-1)
    cdf = cdf / cdf[:, -1:]
    return torch.stack([z[(cdf < level).sum(-1)] for level in levels])


def exponent(sizes: Iterable[float], values: Iterable[float]) -> float:
    """With what power of the size the value grows: the slope of the least squares line through
    the logarithms."""
    x, y = (torch.tensor([*v], dtype=torch.float64).log() for v in (sizes, values))
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def finish(ax: Any, ncols: int = 3, **labels: str) -> None:
    """Labels, two spines, and the legend above the axes, where no curve can be.

    :param ncols: Columns of the legend; 0 for none.
    """
    ax.set(**labels)
    ax.spines[["top", "right"]].set_visible(False)
    if ncols and ax.get_legend_handles_labels()[0]:
        place = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "borderaxespad": 0.2}
        ax.legend(frameon=False, fontsize=8, ncols=ncols, **place)


def save(figure: Any, args: argparse.Namespace, name: str) -> Path:
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / name
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    with Image.open(path) as image:  # 256 colours: a third of the size
        small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"figure: {path}")
    return path
