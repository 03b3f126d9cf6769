"""What an ELBO of pyro_sde costs beside the same mathematics in a bare PyTorch loop.

Loss and gradient of a latent SDE: 100 steps, 512 paths, one dimension, a control 3-200-200-1 that
reads (sin t, cos t, z), any callable to the library; or, with --control mlp, the default one, whose
path is one operation to ours and a graph to the bare loop.

The variants run in turn, round after round, so that a slow moment of the machine falls on all of
them; ratios of medians to the bare loop are printed. Each variant of ours is checked against the
bare loop's loss on the same noise first.

Run: python benchmarks/elbo_overhead.py
"""

import argparse
import statistics
import time

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO
from pyro_sde.distributions import OrnsteinUhlenbeck

RATE, SCALE, NOISE, Y = 1.0, 0.7, 0.2, 0.8


class Control(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(2 + dim, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()),
            nn.Linear(width, dim),
        )

    def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        t = t.expand(z.shape[:-1] + (1,))
        return self.net(torch.cat([t.sin(), t.cos(), z], -1))


def bare_loop(control: nn.Module, times: torch.Tensor, batch: int, dim: int) -> torch.Tensor:
    """The "kl" estimator by hand: an OU prior from zero, one observation at the end."""
    z = torch.zeros(batch, dim)
    noise = torch.randn(len(times) - 1, batch, dim)
    if isinstance(control, MLPControl):
        step = control.on_grid(times[:-1].unsqueeze(-1))
    else:
        step = lambda i, z: control(times[i], z)  # noqa: E731
    dt = times.diff()
    decay = torch.exp(-RATE * dt)
    scale = SCALE * torch.sqrt((1 - decay.square()) / (2 * RATE))
    root = dt.sqrt()
    kl = torch.zeros(batch)
    for i in range(len(dt)):
        u = step(i, z)
        kl = kl + 0.5 * u.square().sum(-1) * dt[i]
        z = z * decay[i] + scale[i] * (root[i] * u + noise[i])
    log_lik = dist.Normal(z, NOISE).log_prob(torch.tensor(Y)).sum(-1)
    return (kl - log_lik).mean()


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.threads)
    times = torch.linspace(0.0, 1.0, args.steps + 1)
    if args.control == "mlp":
        control: nn.Module = MLPControl(args.dim, (args.width, args.width), times=times)
        nn.init.normal_(control.last.weight, std=0.01)
    else:
        control = Control(args.dim, args.width)

    def model() -> None:
        prior = OrnsteinUhlenbeck(RATE, 0.0, SCALE, times, initial=torch.zeros(args.dim))
        z = pyro.sample("z", prior)
        pyro.sample("y", dist.Normal(z[..., -1, :], NOISE).to_event(1), obs=torch.tensor(Y))

    guide = AutoSDE(model, control=control)

    def ours(estimator: str):
        elbo = TraceSDE_ELBO(
            path_estimator=estimator,
            num_particles=args.batch,
            vectorize_particles=True,
            max_plate_nesting=1,
        )
        return lambda: elbo.differentiable_loss(model, guide)

    variants = {"bare": lambda: bare_loop(control, times, args.batch, args.dim)}
    variants |= {name: ours(name) for name in ("kl", "full", "stl")}

    losses = {}
    for name, f in variants.items():
        pyro.set_rng_seed(0)
        losses[name] = f().item()
    if abs(losses["kl"] - losses["bare"]) > 1e-3 * abs(losses["bare"]):
        raise AssertionError(f"the loops compute different losses: {losses}")

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.repeats + 2):
        for name, f in variants.items():
            start = time.perf_counter()
            f().backward()
            seconds[name].append(time.perf_counter() - start)
            control.zero_grad()
    medians = {name: statistics.median(s[2:]) for name, s in seconds.items()}
    ratios = {name: m / medians["bare"] for name, m in medians.items()}
    print(
        f"{args.steps} steps, {args.batch} paths in {args.dim} dimensions, control "
        f"{args.control!r} of width {args.width}, ",
        end="",
    )
    print(f"{args.threads} threads, median of {args.repeats}")
    for name in variants:
        print(f"{name:5s} {medians[name] * 1e3:8.1f} ms   {ratios[name]:5.2f} x bare loop")
    return ratios


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dim", type=int, default=1)
    parser.add_argument("--control", choices=("callable", "mlp"), default="callable")
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
