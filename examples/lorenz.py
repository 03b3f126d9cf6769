"""A latent SDE with a learned prior: the stochastic Lorenz attractor (Li et al., 2020).

Drift, diffusion, start, decoder and noise are all learned, from short series of noisy points; an
encoder gives the posterior of each series. The numbers say how far the law of samples of the
learned prior is from that of series never seen: sliced Wasserstein distances, beside those of
other true series (the floor), of a Gaussian process with the moments of the data, and of the
prior before training.
"""

import argparse
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from common import INK, OTHER, POSTERIOR, parser, plt, save, train
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO
from pyro_sde.distributions import SDEPath
from pyro_sde.nn import NeuralDiffusion, NeuralDrift

POINTS, END, NOISE = 41, 1.0, 0.01
LATENT, LAG = 4, 8


def simulate(n: int, fine: int = 20) -> Tensor:
    """True paths from a Gaussian start, the diffusion about 0.15 of their standard deviation."""

    def drift(t: Tensor, v: Tensor) -> Tensor:
        x, y, z = v.unbind(-1)
        return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)

    grid = torch.linspace(0, END, (POINTS - 1) * fine + 1)
    start = dist.Normal(torch.tensor([0.0, 0.0, 25.0]), 6.0).to_event(1)
    with torch.no_grad():
        return SDEPath(drift, 1.2, start, grid).sample((n,))[:, ::fine]


class LatentSDE(PyroModule):
    """dz = f(z) dt + g dB from a Normal start; y = A z + b + noise."""

    def __init__(self) -> None:
        super().__init__()
        self.drift = NeuralDrift(LATENT, (64, 64))
        self.diffusion = NeuralDiffusion(LATENT, 0, scale=0.3)
        self.decoder = nn.Linear(LATENT, 3)
        self.loc = nn.Parameter(torch.zeros(LATENT))
        self.log_scale = nn.Parameter(torch.zeros(LATENT))
        self.log_noise = nn.Parameter(torch.tensor(0.1).log())

    def forward(self, times: Tensor, values: Any = None, batch: int | None = None) -> Tensor:
        with pyro.plate("series", len(times), subsample_size=batch) as index:
            start = dist.Normal(self.loc, self.log_scale.exp()).to_event(1)
            z = pyro.sample("z", SDEPath(self.drift, self.diffusion, start, times[0]))
            law = dist.Normal(self.decoder(z), self.log_noise.exp()).to_event(2)
            return pyro.sample("y", law, obs=None if values is None else values[index])


def views(y: Tensor) -> dict[str, Tensor]:
    """What the laws are compared in: states, increments, and triples of states in order."""
    triples = torch.cat([y[:, : -2 * LAG], y[:, LAG:-LAG], y[:, 2 * LAG :]], -1)
    found = {"states": y, "increments": y.diff(dim=1), "triples": triples}
    return {name: x[:, ::8].flatten(0, 1) for name, x in found.items()}


def distances(samples: Tensor, truth: Tensor, projections: int = 100) -> dict[str, float]:
    """Sliced Wasserstein distances of order 1, in units of the truth's standard deviation."""
    result = {}
    for (name, x), y in zip(views(samples).items(), views(truth).values(), strict=True):
        generator = torch.Generator().manual_seed(0)
        directions = torch.randn(y.shape[-1], projections, generator=generator)
        directions = directions / directions.norm(dim=0) / y.std(0).unsqueeze(-1)
        gaps = [((x @ d).sort().values - (y @ d).sort().values).abs().mean() for d in directions.T]
        result[name] = torch.stack(gaps).mean().item()
    return result


def gaussian(data: Tensor, n: int) -> Tensor:
    """Draws of a Gaussian process with the mean and covariance of the data."""
    flat = data.flatten(1)
    covariance = flat.T.cov() + 1e-4 * torch.eye(flat.shape[1])
    draws = dist.MultivariateNormal(flat.mean(0), covariance).sample((n,))
    return draws.unflatten(1, data.shape[1:])


def main(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    pyro.set_rng_seed(args.seed)
    pyro.clear_param_store()
    n, many = args.series, 4 * args.series
    raw = simulate(n + 2 * many)
    y = (raw - raw[:n].mean((0, 1))) / raw[:n].std((0, 1))
    data, held_out, others = (y + NOISE * torch.randn_like(y)).split([n, many, many])
    times = torch.linspace(0, END, POINTS).expand(many, POINTS)

    net = LatentSDE()
    model = poutine.scale(net, 1 / data.numel())
    guide = AutoSDE(
        model,
        encoder=GRUEncoder(3, hidden=64, context=32),
        observations=lambda times, values, batch=None: (times, values),
    )
    with torch.no_grad():
        laws = {"untrained prior": net(times)}
    elbo = TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True)
    anneal = args.iterations // 4
    train(model, guide, elbo, args, times[:n], data, min(args.batch, n), anneal=anneal, clip=1.0)

    with torch.no_grad():
        laws["Gaussian process"] = gaussian(data, many)
        laws["learned prior"] = net(times)
        laws["true series"] = others
        reconstructed = net.decoder(guide(times[:n], held_out[:n])["z"])
    scores = {name: distances(law, held_out) for name, law in laws.items()}
    error = (reconstructed - held_out[:n]).square().mean().sqrt().item()
    print(f"noise learned {net.log_noise.exp().item():.4f}, true {NOISE}; ", end="")
    print(f"error of reconstructions {error:.4f}")
    print("sliced Wasserstein distance to held-out series:")
    for name, row in scores.items():
        print(f"{name:>17}: " + ", ".join(f"{k} {v:.4f}" for k, v in row.items()))
    figure(args, [held_out, reconstructed, laws["learned prior"]])
    return scores


def figure(args: argparse.Namespace, panels: list[Tensor]) -> None:
    fig, axes = plt.subplots(2, 3, figsize=(9, 5.4), sharex="row", sharey="row")
    fig.suptitle("Stochastic Lorenz attractor: 40 series each, standardised")
    colors = (INK, POSTERIOR, OTHER)
    titles = ("held-out series", "their posterior", "samples of the learned prior")
    for column, paths, color, title in zip(axes.T, panels, colors, titles, strict=True):
        for ax, (i, j) in zip(column, ((0, 2), (0, 1)), strict=True):
            ax.plot(paths[:40, :, i].T, paths[:40, :, j].T, color=color, lw=0.6, alpha=0.7)
            ax.set(xlabel="xyz"[i], ylabel="xyz"[j])
            ax.spines[["top", "right"]].set_visible(False)
        column[0].set_title(title, fontsize=11)
    fig.tight_layout()
    save(fig, args, "lorenz.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=3000, particles=1)
    p.add_argument("--series", type=int, default=1024, help="series to learn from")
    p.add_argument("--batch", type=int, default=64, help="series in a mini-batch")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
