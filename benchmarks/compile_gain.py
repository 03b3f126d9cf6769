"""What a learned prior costs, an SDEPath: in ordinary steps, compiled, and as one operation.

Loss and gradient of every estimator, all in turns, medians of all rounds; what compiling takes is
told apart. One operation needs noise that is the same in all states, --constant. (For other models
see elbo_step.py.)

Run: python benchmarks/compile_gain.py [--constant]
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

STEPS, COMPILED, AT_ONCE = "ordinary steps", "compiled", "one operation"


class Model(PyroModule):
    """:param in_steps: Hide what the diffusion is, so that a path is made step by step."""

    def __init__(self, dim: int, steps: int, constant: bool, in_steps: bool) -> None:
        super().__init__()
        self.drift = NeuralDrift(dim, (64,))
        self.diffusion = g = NeuralDiffusion(dim, 0 if constant else 16, scale=0.5)
        self.start, self.times = torch.zeros(dim), torch.linspace(0, 1, steps + 1)
        # Made once, and without self: torch.compile stops at the attributes of a PyroModule.
        self.g = (lambda t, z: g(t, z)) if in_steps else g

    def forward(self, y: torch.Tensor) -> None:
        z = pyro.sample("z", SDEPath(self.drift, self.g, self.start, self.times))
        pyro.sample("y", dist.Normal(z[..., -1, :], 0.3).to_event(1), obs=y)


def main(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    y, programs = torch.ones(args.dim), {}
    for name in (STEPS, COMPILED, AT_ONCE) if args.constant else (STEPS, COMPILED):
        model = Model(args.dim, args.steps, args.constant, name != AT_ONCE)
        guide = AutoSDE(model, compile=name == COMPILED, contraction=args.contraction)
        programs[name] = model, guide
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

        def seconds(name: str, elbo: TraceSDE_ELBO = elbo) -> float:
            pyro.clear_param_store()  # all guides have parameters of the same names
            start = time.perf_counter()
            elbo.differentiable_loss(*programs[name], y).backward()
            return time.perf_counter() - start

        first = {name: seconds(name) for name in programs}
        rounds = [{name: seconds(name) for name in programs} for _ in range(args.repeats)]
        ms = {name: 1000 * statistics.median(r[name] for r in rounds) for name in programs}
        gains[estimator] = {name: ms[STEPS] / x for name, x in ms.items()}
        cells = (f"{name} {x:.1f} ms ({ms[STEPS] / x:.2f} times)" for name, x in ms.items())
        print(
            f"{estimator:5s} {', '.join(cells)}; compiling took {first[COMPILED]:.0f} s", flush=True
        )
    return gains


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--paths", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--constant", action="store_true", help="noise the same in all states")
    parser.add_argument("--contraction", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
