"""Latent ODE against an RNN on spirals: table 2 of Chen et al. (2018), Neural ODEs.

A thousand noisy spirals, half of them clockwise, of which 30, 50 or 100 points out of 100 are seen;
the 100 points that follow are to be predicted. The latent ODE is a path without noise whose start
an encoder finds; the latent SDE has the same parts and noise on its path. The RNN is told the time
to its next point and after the last observation reads its own draws. The numbers at the end: the
RMSE to the spiral without noise, and the log density of a noisy future point, on 200 other spirals.
"""

import argparse
import math

import pyro
import pyro.distributions as dist
import torch
from baselines.rnn import RNN
from common import INK, OTHER, POSTERIOR, THIRD, minimise, parser, plt, save
from torch import Tensor, nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, forecast, select
from pyro_sde.distributions import ODEPath, SDEPath
from pyro_sde.nn import NeuralDiffusion, NeuralDrift

POINTS, NOISE, HIDDEN, BATCH = 100, 0.3, 64, 100
GRID = 0.02 * torch.arange(2 * POINTS)  # what is seen lies in the first half
PAPER = {"RNN": (-133.78, -98.88, -145.15), "latent ODE": (-5.39, -5.21, -4.78)}


def spirals(n: int) -> Tensor:
    """Inwards from anywhere, 1.2 turns, of shape (n, 2 * POINTS, 2); every other clockwise."""
    angle = math.pi * (2.6 + 3.4 * torch.rand(n, 1)) - 0.6 * math.pi * GRID
    way = 1.0 - 2.0 * (torch.arange(n).unsqueeze(-1) % 2)
    return torch.stack([5 * way + 0.3 * angle * angle.cos(), way * 0.3 * angle * angle.sin()], -1)


def observe(truth: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Times and values of n points of the first half, and all of the second, with noise."""
    noisy = truth + NOISE * torch.randn_like(truth)
    index = torch.rand(len(truth), POINTS).argsort(-1)[:, :n].sort(-1).values
    return GRID[index], torch.take_along_dim(noisy, index.unsqueeze(-1), 1), noisy[:, POINTS:]


class Latent(nn.Module):
    """A path in R^4, and a network from its states to points of the plane."""

    def __init__(self, units: Tensor, is_sde: bool = False, dim: int = 4) -> None:
        super().__init__()
        self.dim, self.units = dim, units
        self.drift = NeuralDrift(dim, (HIDDEN,), activation=nn.Tanh)
        self.diffusion = NeuralDiffusion(dim, 0, scale=0.1) if is_sde else None
        self.decoder = nn.Sequential(nn.Linear(dim, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))
        self.log_noise = nn.Parameter(torch.zeros(()))

    def forward(self, times: Tensor, values: Tensor | None = None) -> None:
        grid, size, start = GRID, None, dist.Normal(torch.zeros(self.dim), 1.0).to_event(1)
        if values is not None:
            grid, size = GRID[:POINTS], min(BATCH, len(times))
        with pyro.plate("series", len(times), size) as index:
            times, values = times[index], None if values is None else values[index]
            path = ODEPath(self.drift, start, grid, "euler")
            if self.diffusion is not None:
                path = SDEPath(self.drift, self.diffusion, start, grid)
            z = pyro.sample("z", path, infer={"start": (torch.zeros(self.dim), 0.1)})
            pyro.sample("y", self.law(select(z, grid, times)).to_event(2), obs=values)

    def law(self, z: Tensor) -> dist.Normal:
        return dist.Normal(self.units * self.decoder(z), self.log_noise.exp())


def score(law: dist.Normal, truth: Tensor, future: Tensor) -> tuple[float, float]:
    """RMSE of the mean, and the log density of a point, over draws of what the law depends on."""
    law = dist.Normal(law.loc[..., -POINTS:, :], law.scale.expand_as(law.loc)[..., -POINTS:, :])
    rmse = (law.mean.mean(0) - truth[:, POINTS:]).square().mean().sqrt()
    density = law.log_prob(future).sum(-1).logsumexp(0) - math.log(len(law.mean))
    return rmse.item(), density.mean().item()


def compare(n: int, args: argparse.Namespace, truth: Tensor, test: Tensor) -> tuple[dict, dict]:
    """Train all models on n points of each spiral."""
    (times, values, _), (seen_times, seen, future) = observe(truth, n), observe(test, n)
    units = values.std((0, 1))
    rnn = RNN(units, 80)  # as many parameters as the latent ODE has with its encoder

    def batch_loss() -> Tensor:
        index = torch.randperm(len(times))[:BATCH]
        return rnn.loss(times[index], values[index])

    minimise(f"RNN, {n}", batch_loss, rnn.parameters(), args.iterations, args.lr)
    laws = {"RNN": rnn.predict(seen_times, seen, GRID[POINTS:], args.samples)}
    for name in ("latent ODE", "latent SDE")[: 1 + args.sde]:
        pyro.clear_param_store()
        model, elbo = Latent(units, name == "latent SDE"), TraceSDE_ELBO(args.particles)
        guide = AutoSDE(model, encoder=GRUEncoder(2, HIDDEN)).setup(times, values)

        def loss(elbo=elbo, model=model, guide=guide) -> Tensor:
            return elbo.differentiable_loss(model, guide, times, values) / values[..., 0].numel()

        both = [*model.parameters(), *guide.parameters()]
        minimise(f"{name}, {n}", loss, both, args.iterations, args.lr)
        predicted = forecast(model, guide, (seen_times, seen), GRID, args.samples, parallel=True)
        laws[name] = model.requires_grad_(False).law(predicted.paths["z"])
    scores = {name: score(law, test, future) for name, law in laws.items()}
    return scores, {"seen": seen, "truth": test, "laws": laws}


def main(args: argparse.Namespace) -> dict[str, dict]:
    pyro.set_rng_seed(args.seed)
    truth, test = spirals(args.series), spirals(args.series // 5)
    results, shown = {}, {}
    for n in args.observations:
        results[n], shown[n] = compare(n, args, truth, test)
    names = [f"{name}: RMSE, log density" for name in results[n]]
    print(f"| observations | {' | '.join(names)} |\n" + "|---" * (len(names) + 1) + "|")
    for n, row in results.items():
        cells = [f"{rmse:.3f}, {density:.2f}" for rmse, density in row.values()]
        print(f"| {n} of {POINTS} | {' | '.join(cells)} |")
    print(f"log-likelihoods of the paper, its own spirals, 30, 50, 100 observations: {PAPER}")
    figure(args, shown[args.observations[0]])
    return results


def figure(args: argparse.Namespace, shown: dict) -> None:
    names, colors = list(shown["laws"]), (OTHER, POSTERIOR, THIRD)
    fig, axes = plt.subplots(len(names), 4, figsize=(12, 2.8 * len(names)), layout="constrained")
    for row, name, color in zip(axes, names, colors, strict=False):
        for i, ax in enumerate(row):
            law = shown["laws"][name].mean[:, i]
            ax.plot(*shown["truth"][i].T, color=INK, lw=0.8, label="truth")
            ax.plot(*shown["seen"][i].T, "o", color=INK, ms=2.5, label="observed")
            ax.plot(*law[:10, -POINTS:].permute(2, 1, 0), color=color, lw=0.5, alpha=0.4)
            if name != "RNN":
                ax.plot(*law.mean(0)[:POINTS].T, "--", color=color, lw=1.4, label="posterior mean")
            ax.plot(*law.mean(0)[-POINTS:].T, color=color, lw=1.8, label="prediction")
            ax.set_aspect("equal", "datalim")
        row[0].set_ylabel(name)
    fig.legend(*axes[-1, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    save(fig, args, "latent_ode_spirals.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1000, particles=1)
    p.add_argument("--observations", nargs="+", type=int, default=[30, 50, 100])
    p.add_argument("--series", type=int, default=1000, help="spirals to train on")
    p.add_argument("--samples", type=int, default=50, help="draws of a prediction")
    p.add_argument("--no-sde", dest="sde", action="store_false", help="without the latent SDE")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
