"""A Bayesian network of infinite depth on a curve with a gap: figure 2 of Xu et al. (2022).

The weights of a residual network follow an Ornstein-Uhlenbeck process over depth, one path of
which is one function; two channels of zeros beside x allow functions that are not monotonic.
Where there are no data the functions should part: the number is the posterior standard deviation
of the function in the gap, divided by that among the data.

The left panel is the prior before training. Training leaves the law of the weights as it is, w_0
included, but it learns the linear head and the noise as numbers. Far outside of the data all
functions become straight lines, surer of themselves than they should be.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from common import EXACT, parser, plt, save, train
from pyro.distributions import constraints
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock
from pyro_sde.plotting import plot_band, plot_paths

LEFT, RIGHT, NOISE = (-4.0, -1.2), (1.6, 4.0), 0.15  # where the data are, and how noisy
LEVELS = torch.tensor([0.025, 0.975])


class Field(nn.Module):
    """The network at one depth. The factor 2 makes the functions of the prior bend more."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(channels, width), nn.Linear(width, channels)

    def forward(self, h: Tensor) -> Tensor:
        return 2.0 * self.last(torch.tanh(self.first(h)))


class Regression(PyroModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.block = SDEBlock(
            Field(3, args.width), augment=2, scale=args.scale, steps=args.steps, initial="normal"
        )
        self.head = nn.Linear(3, 1)
        self.head.weight.data = torch.tensor([[0.0, 1.0, 1.0]])  # the prior has no slope of its own
        self.noise = PyroParam(torch.tensor(0.1), constraints.positive)

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        f = pyro.deterministic("f", self.head(self.block(x.unsqueeze(-1))).squeeze(-1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)


def truth(x: Tensor) -> Tensor:
    return torch.sin(x)


def make_data(n: int) -> tuple[Tensor, Tensor]:
    u = torch.rand(n // 2, 2)
    low, high = torch.tensor([LEFT, RIGHT]).unbind(-1)
    x = (low + (high - low) * u).flatten()
    return x, truth(x) + NOISE * torch.randn_like(x)


def functions(model: PyroModule, x: Tensor, guide: AutoSDE | None, n: int) -> Tensor:
    """Functions of the prior, or with a guide of the posterior, at ``x``: of shape (n, len(x))."""
    draw = Predictive(model, guide=guide, num_samples=n, parallel=True, return_sites=["f"])
    with torch.no_grad():
        return draw(x)["f"].reshape(n, -1)


def inside(x: Tensor, interval: tuple[float, float]) -> Tensor:
    return (x > interval[0]) & (x < interval[1])


def main(args: argparse.Namespace) -> dict[str, float]:
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    x, y = make_data(args.data)
    grid = torch.linspace(-5, 5, 201)
    model = Regression(args)
    prior = functions(model, grid, None, args.samples)
    guide = AutoSDE(model, contraction=True)
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args, x, y)
    posterior = functions(model, grid, guide, args.samples)

    seen, gap = inside(grid, LEFT) | inside(grid, RIGHT), inside(grid, (LEFT[1], RIGHT[0]))
    spread = posterior.std(0)
    error = posterior.mean(0) - truth(grid)
    low, high = torch.quantile(posterior, LEVELS, dim=0)
    covered = ((low < truth(grid)) & (truth(grid) < high)).float()
    result = {
        "ratio": (spread[gap].mean() / spread[seen].mean()).item(),
        "rmse": error[seen].square().mean().sqrt().item(),
        "coverage": covered[seen | gap].mean().item(),
    }
    print(
        f"standard deviation of the function: {spread[seen].mean():.3f} among the data, "
        f"{spread[gap].mean():.3f} in the gap; rmse {result['rmse']:.3f} among the data, "
        f"{covered[gap].mean():.0%} of the gap inside the 95 % band; noise {model.noise:.3f}"
    )
    print(f"uncertainty in the gap over that at the data: {result['ratio']:.2f}")

    fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True, sharey=True, layout="constrained")
    panel(axes[0], grid, prior, x, y, "prior, before training")
    panel(axes[1], grid, posterior, x, y, "posterior")
    axes[0].set(ylabel="f(x)", xlim=(-5, 5), ylim=(-3.2, 3.2))
    axes[1].set_ylabel("")
    save(fig, args, "sdebnn_regression.png")
    return result


def panel(ax: plt.Axes, grid: Tensor, draws: Tensor, x: Tensor, y: Tensor, title: str) -> None:
    ax.axvspan(LEFT[1], RIGHT[0], color="0.95", lw=0)
    ax.text((LEFT[1] + RIGHT[0]) / 2, -3, "no data", ha="center", fontsize=8, color="0.4")
    ax.plot(grid, truth(grid), "--", color=EXACT, lw=1.4, label="truth", zorder=3)
    plot_paths(grid, draws, max_paths=8, label="functions drawn", ax=ax)
    plot_band(grid, draws, (0.5, 0.95), median=False, label="f", data=(x, y), ax=ax)
    ax.set_xlabel("x")
    ax.set_title(title, pad=34)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=2500, particles=32, lr=2e-2)
    p.add_argument("--data", type=int, default=200, help="how many data")
    p.add_argument("--width", type=int, default=8, help="hidden units of the field")
    p.add_argument("--scale", type=float, default=0.5, help="diffusion of the weights")
    p.add_argument("--steps", type=int, default=8, help="steps of depth")
    p.add_argument("--samples", type=int, default=1000, help="functions for the bands")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
