"""What compile=True gains where a path is no single operation: a learned prior, an SDEPath.

Loss and gradient of every estimator, eager and compiled in turns, medians of all rounds; what
compiling takes is told apart. (For other models see elbo_step.py.)

Run: python benchmarks/compile_gain.py
"""

import argparse
import statistics
import time

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributions import SDEPath
from pyro_sde.infer.girsanov import ESTIMATORS
from pyro_sde.nn import NeuralDiffusion, NeuralDrift


class Model(PyroModule):
    def __init__(self, dim: int, steps: int) -> None:
        super().__init__()
        self.drift, self.diffusion = NeuralDrift(dim, (64,)), NeuralDiffusion(dim, 16, scale=0.5)
        self.start, self.times = torch.zeros(dim), torch.linspace(0, 1, steps + 1)

    def forward(self, y: torch.Tensor) -> None:
        z = pyro.sample("z", SDEPath(self.drift, self.diffusion, self.start, self.times))
        pyro.sample("y", dist.Normal(z[..., -1, :], 0.3).to_event(1), obs=y)


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model, y = Model(args.dim, args.steps), torch.ones(args.dim)
    guides = {c: AutoSDE(model, compile=c, contraction=args.contraction) for c in (False, True)}
    print(f"{args.paths} paths in {args.dim} dimensions, {args.steps} steps; ", end="")
    print(f"medians of {args.repeats}, {args.threads} thread(s)")
    gains = {}
    for estimator in ESTIMATORS:
        elbo = TraceSDE_ELBO(
            num_particles=args.paths,
            vectorize_particles=True,
            path_estimator=estimator,
            max_plate_nesting=0,
        )

        def seconds(compiled: bool, elbo: TraceSDE_ELBO = elbo) -> float:
            pyro.clear_param_store()  # both guides have parameters of the same names
            start = time.perf_counter()
            elbo.differentiable_loss(model, guides[compiled], y).backward()
            return time.perf_counter() - start

        first = seconds(True)
        rounds = [(seconds(False), seconds(True)) for _ in range(args.repeats)]
        eager, fast = (1000 * statistics.median(s) for s in zip(*rounds, strict=True))
        gains[estimator] = eager / fast
        print(f"{estimator:5s} {eager:7.1f} ms, compiled {fast:7.1f} ms: ", end="")
        print(f"{gains[estimator]:.2f} times; the first step took {first:.1f} s", flush=True)
    return gains


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--paths", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--contraction", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
