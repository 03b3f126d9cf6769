"""Training in several processes: fit on many series, or on an SDE-BNN, started by torchrun.

`torchrun --nproc-per-node 2 examples/distributed.py --task series`; plain python is one process.
Each takes its part of a mini-batch, scaled by a plate to the whole data set, with noise of its own,
and fit averages the gradients. The KL of a global latent, the weights of a network, counts once in
each process, so once in the average. The number is what is left to win: for the series the gap in
nats between the ELBO of one and its exact log evidence, for the network the root mean square error
of its mean function. The speed is that of all processes together.
"""

import argparse
import time

import pyro
import pyro.distributions as dist
import torch
from common import POSTERIOR, parser, plt, save
from pyro.distributions import constraints
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroParam
from torch import Tensor, nn

from pyro_sde import AutoSDE, GRUEncoder, TraceSDE_ELBO, fit, select, series_grid
from pyro_sde.distributed import join, place
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.nn import SDEBlock

NOISE = 0.2


class Series(PyroModule):
    """Noisy observations of an Ornstein-Uhlenbeck process; its parameters are learned."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        for key in ("rate", "scale", "noise"):
            setattr(self, key, PyroParam(torch.ones(1), constraints.positive))

    def forward(self, times: Tensor, values: Tensor) -> None:
        grid = series_grid(times, dt=0.2, start=0.0, end=2.0)
        with pyro.plate("series", self.size, subsample_size=len(times)):
            z = pyro.sample("z", OrnsteinUhlenbeck(self.rate, 0.0, self.scale, grid))
            x = select(z, grid, times)
            pyro.sample("y", dist.Normal(x, self.noise).to_event(2), obs=values)

    @staticmethod
    def evidence(t: Tensor, rate: Tensor, scale: Tensor, noise: Tensor) -> dist.Distribution:
        decay = torch.exp(-rate * (t.unsqueeze(-1) - t.unsqueeze(-2)).abs())
        K = scale**2 / (2 * rate) * decay + noise**2 * torch.eye(t.shape[-1]).to(t)
        return dist.MultivariateNormal(torch.zeros_like(t), K)

    @staticmethod
    def simulate(n: int) -> tuple[Tensor, Tensor]:
        times = 2 * torch.rand(n, 10).sort(-1).values
        return times, Series.evidence(times, *torch.tensor([2.0, 1.5, NOISE])).sample()[..., None]

    def judge(self, guide: AutoSDE, times: Tensor, values: Tensor) -> float:
        exact = self.evidence(times, self.rate, self.scale, self.noise).log_prob(values[..., 0])
        elbo = TraceSDE_ELBO(num_particles=100, vectorize_particles=True)
        return exact.mean().item() + elbo.loss(self, guide, times, values) / self.size


class Network(PyroModule):
    """A curve through a network whose weights are a process, the same for all data."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, field = size, nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
        self.block = SDEBlock(field, augment=2, scale=0.3, steps=8, initial="normal")
        self.head = nn.Linear(3, 1)
        self.noise = PyroParam(torch.tensor(0.5), constraints.positive)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f = self.head(self.block(x)).squeeze(-1)
        with pyro.plate("data", self.size, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)
        return f

    @staticmethod
    def simulate(n: int) -> tuple[Tensor, Tensor]:
        x = 6 * torch.rand(n, 1) - 3
        return x, (x.sin() + NOISE * torch.randn(n, 1)).squeeze(-1)

    def judge(self, guide: AutoSDE, x: Tensor, y: Tensor) -> float:
        f = Predictive(self, guide=guide, num_samples=100, return_sites=["_RETURN"])(x, y)
        return (f["_RETURN"].mean(0) - x.sin().squeeze(-1)).square().mean().sqrt().item()


TASKS = {"series": Series, "sdebnn": Network}


def build(task: str, size: int) -> tuple[PyroModule, AutoSDE]:
    model = TASKS[task](size)
    encoder = GRUEncoder(1, hidden=32, context=16) if task == "series" else None
    return model, AutoSDE(model, encoder=encoder, contraction=True)


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
    pyro.clear_param_store()
    device, (rank, world) = join(), place()
    pyro.set_rng_seed(args.seed)  # the same data everywhere
    data, test = ([x.to(device) for x in TASKS[args.task].simulate(args.size)] for _ in "ab")
    model, guide = build(args.task, args.size)
    start = time.perf_counter()
    history = fit(
        model.to(device),
        guide,
        tuple(data),
        steps=args.iterations,
        batch_size=args.batch,
        lr=args.lr,
        schedule="one_cycle",
        elbo=TraceSDE_ELBO(num_particles=args.particles, vectorize_particles=True),
        seed=args.seed,
    )
    speed = args.batch * args.iterations / (time.perf_counter() - start)
    if rank > 0:
        return {}
    with torch.no_grad():
        result = {"left": model.judge(guide, *test), "noise": model.noise.item(), "speed": speed}
    title = f"{args.task}, {world} process{'es' * (world > 1)}"
    print(f"{title}: {result['left']:.3f} left to win; noise {result['noise']:.3f}, true {NOISE}")
    print(f"{speed:.0f} {'series' if args.task == 'series' else 'data'} a second")
    fig, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    curve = -torch.tensor(history.elbo) / args.size
    ax.plot(curve, color=POSTERIOR, lw=0.7)
    ax.set(xlabel="step", ylabel="loss, nat a datum", title=title)
    save(fig, args, f"distributed_{args.task}.png")
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, iterations=1000, particles=4)
    p.add_argument("--task", choices=TASKS, default="series")
    p.add_argument("--size", type=int, default=512, help="how many series, or data")
    p.add_argument("--batch", type=int, default=64, help="of them in a mini-batch, of all ranks")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
