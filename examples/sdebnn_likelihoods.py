"""One Bayesian network of infinite depth, five likelihoods.

Model, guide and training are the same for classes, values, values with gross errors, and counts;
only the likelihood changes. The number is the distance of the posterior mean from the true curve
or rate, or the share of new points in the right class. For Cauchy and StudentT one value in six is
far too high, and a Normal trained on the same data should end further from the truth.
"""

import argparse
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from common import EXACT, INK, POSTERIOR, parser, plt, save, train
from matplotlib.colors import LinearSegmentedColormap
from pyro.distributions import constraints
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock

# From the outputs of the network, (..., n, outputs), and a learned scale.
LIKELIHOODS: dict[str, Callable[[Tensor, Tensor], dist.Distribution]] = {
    "categorical": lambda f, scale: dist.Categorical(logits=f),
    "normal": lambda f, scale: dist.Normal(f[..., 0], scale),
    "cauchy": lambda f, scale: dist.Cauchy(f[..., 0], scale),
    "student-t": lambda f, scale: dist.StudentT(2.0, f[..., 0], scale),
    "poisson": lambda f, scale: dist.Poisson(f[..., 0].exp()),
}
ROBUST, OTHER = ("cauchy", "student-t"), "#d9a441"


class Network(PyroModule):
    def __init__(self, inputs: int, outputs: int, likelihood: str, steps: int) -> None:
        super().__init__()
        width = inputs + 2
        field = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))
        self.block = SDEBlock(field, augment=2, scale=0.2, steps=steps)
        self.head = nn.Linear(width, outputs)
        self.scale = PyroParam(torch.tensor(0.3), constraints.positive)
        self.likelihood = LIKELIHOODS[likelihood]

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        f = pyro.deterministic("f", self.head(self.block(x)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", self.likelihood(f, self.scale), obs=y)


def truth(x: Tensor, likelihood: str) -> Tensor:
    """The curve, or the rate of the counts."""
    curve = torch.sin(1.2 * x[..., 0])
    return (1 + curve).exp() if likelihood == "poisson" else curve


def make_data(likelihood: str, n: int) -> tuple[Tensor, Tensor]:
    if likelihood == "categorical":  # two arms of a spiral
        y, turn = torch.arange(n) % 2, 4.5 * torch.rand(n)
        angle = turn + torch.pi * y
        x = (0.5 + 0.6 * turn).unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1)
        return x + 0.3 * torch.randn_like(x), y
    x = 8 * torch.rand(n, 1) - 4
    if likelihood == "poisson":
        return x, torch.poisson(truth(x, likelihood))
    y = truth(x, likelihood) + 0.1 * torch.randn(n)
    if likelihood in ROBUST:
        y[::6] += 2 + 4 * torch.rand(len(y[::6]))
    return x, y


def fit(likelihood: str, x: Tensor, y: Tensor, new: Tensor, args: argparse.Namespace) -> Tensor:
    """Posterior draws of the outputs at the points ``new``: (samples, points, outputs)."""
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    outputs = 2 if likelihood == "categorical" else 1
    model = Network(x.shape[-1], outputs, likelihood, args.steps)
    guide = AutoSDE(model, contraction=True)
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    train(model, guide, elbo, args, x, y)
    n = args.samples
    draw = Predictive(model, guide=guide, num_samples=n, parallel=True, return_sites=["f"])
    with torch.no_grad():
        return draw(new)["f"].reshape(n, len(new), outputs)


def classify(args: argparse.Namespace, x: Tensor, y: Tensor) -> dict[str, float]:
    new_x, new_y = make_data("categorical", 1000)
    side = torch.linspace(-4, 4, 61)
    plane = torch.cartesian_prod(side, side)
    p = fit("categorical", x, y, torch.cat([plane, new_x]), args).softmax(-1)[..., 1].mean(0)
    accuracy = ((p[len(plane) :] > 0.5) == new_y).float().mean().item()
    print(f"categorical: {accuracy:.1%} of new points in the right class")

    picture = p[: len(plane)].reshape(61, 61).T
    colors = LinearSegmentedColormap.from_list("", ["#eba9b1", "white", "#9cbce0"])
    fig, ax = plt.subplots(figsize=(5.6, 4.6))
    shades = ax.contourf(side, side, picture, levels=torch.linspace(0, 1, 21), cmap=colors)
    ax.contour(side, side, picture, levels=[0.5], colors=INK, linewidths=1)
    for k, color in enumerate((EXACT, POSTERIOR)):
        ax.plot(*x[y == k].T, "o", ms=4, mec="white", mew=0.5, color=color)
    fig.colorbar(shades, ticks=[0, 0.5, 1], label="posterior probability of the blue arm")
    ax.set(title="categorical likelihood", aspect="equal")
    save(fig, args, "sdebnn_categorical.png")
    return {"accuracy": accuracy}


def regress(args: argparse.Namespace, x: Tensor, y: Tensor) -> dict[str, float]:
    name, grid = args.likelihood, torch.linspace(-4, 4, 161).unsqueeze(-1)
    exact, t, result = truth(grid, name), grid[:, 0], {}
    fig, ax = plt.subplots(figsize=(8, 4))
    for fitted in [name, "normal"] if name in ROBUST else [name]:
        f = fit(fitted, x, y, grid, args)[..., 0]
        f = f.exp() if name == "poisson" else f
        result[fitted] = (f.mean(0) - exact).square().mean().sqrt().item()
        low, high = torch.quantile(f, torch.tensor([0.025, 0.975]), dim=0)
        covered = ((low < exact) & (exact < high)).float().mean()
        print(f"{fitted}: rmse {result[fitted]:.3f}, {covered:.0%} inside the 95 % band")
        color = POSTERIOR if fitted == name else OTHER
        ax.fill_between(t, low, high, color=color, alpha=0.25, lw=0)
        ax.plot(t, f.mean(0), color=color, label=f"posterior mean and 95 %, {fitted}")
    ax.plot(t, exact, "--", color=EXACT, label="truth")
    ax.plot(x[:, 0], y, "o", ms=3, mew=0, color=INK, alpha=0.6, label="data")
    ax.set(xlabel="x", ylabel="count" if name == "poisson" else "y", title=f"{name} likelihood")
    ax.set_ylim(top=float(y.max() + 0.25 * (y.max() - y.min())))
    ax.legend(frameon=False, fontsize=8, ncol=4, loc="upper center")
    ax.spines[["top", "right"]].set_visible(False)
    save(fig, args, f"sdebnn_{name}.png")
    return result


def main(args: argparse.Namespace) -> dict[str, float]:
    pyro.set_rng_seed(args.seed)
    x, y = make_data(args.likelihood, args.data)
    return (classify if args.likelihood == "categorical" else regress)(args, x, y)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1000, particles=32, lr=2e-2)
    p.add_argument("--likelihood", choices=LIKELIHOODS, default="cauchy")
    p.add_argument("--data", type=int, default=200, help="how many data")
    p.add_argument("--steps", type=int, default=10, help="steps of depth")
    p.add_argument("--samples", type=int, default=500, help="posterior draws for the figure")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
