"""One gradient of one ELBO, side by side: pyro_sde, a bare PyTorch loop, torchsde, diffrax, jax.

Every program has the same control network, number of steps and paths, and computes the KL too;
ours moves the prior by its exact steps, the libraries by Euler's. Before anything is timed, each
is given the same weights and noise, in double precision, and must find the loss and the gradient
of the bare loop. Then all take turns, round after round, so that a slow moment of the machine
falls on all of them; medians of the rounds are compared. What is compiled, compiles before.

The SDE-BNN size is that of sdebnn_step.py. The programs that need jax run in an environment of
their own, benchmarks/out/jax-venv, which is made the first time. With --growth, how the cost of
"stl" grows; with --memory, the peak memory of each program; with --contraction, what it costs that
the posterior contracts the noise, by a diagonal or by a lower-triangular matrix.

Run: python benchmarks/elbo_step.py
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pyro
import sdebnn_step
import torch
from contestants import BARE, TUNED, Latent, contestants
from elbo_agree import agree, for_jax
from elbo_growth import growth, memory
from elbo_jax import NAMES, Jax, JaxIsMissing
from elbo_problem import Problem
from torch import Tensor

from pyro_sde import MLPControl

OUT = Path(__file__).parent / "out" / "elbo_step.json"
SIZES = {
    "512x1": Problem(particles=512, dim=1, steps=100, width=200),
    "32x4": Problem(particles=32, dim=4, steps=100, width=64),
    "mocap": Problem(series=16, dim=6, steps=300, width=30, everywhere=True),
}

CONTRACTED = [(1, "diagonal"), (4, "diagonal"), (4, "full"), (16, "diagonal"), (16, "full")]
"""Dimensions and contractions of --contraction."""

Timer = Callable[[int], float]
"""From a number of gradients to the seconds of one."""


def timer(loss: Callable[[], Tensor], clear: Callable[[], None] = lambda: None) -> Timer:
    def seconds(calls: int) -> float:
        total = 0.0
        for _ in range(calls):
            clear()
            start = time.perf_counter()
            loss().backward()
            total += time.perf_counter() - start
        return total / calls

    return seconds


def rounds(timers: dict[str, Timer], repeats: int, budget: float) -> dict[str, list[float]]:
    """Seconds by round; a round takes as many gradients as fit into ``budget`` seconds."""
    warm = {name: (t(1), t(1))[1] for name, t in timers.items()}
    calls = {name: max(1, min(100, int(budget / s))) for name, s in warm.items()}
    found: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, t in timers.items():
            found[name].append(t(calls[name]))
    return found


def table(title: str, found: dict[str, list[float]], bare: str, tuned: str) -> dict[str, dict]:
    """Print it; ``bare`` and ``tuned`` name the programs to compare with."""
    print(f"\n{title}\n\n| program | ms | x bare loop | times faster than tuned torchsde |")
    print("|---|---|---|---|")
    seconds = {name: statistics.median(s) for name, s in found.items()}
    rows = {}
    for name, s in seconds.items():
        ratios = s / seconds[bare], seconds[tuned] / s
        rounds = [1000 * x for x in found[name]]
        rows[name] = {"ms": 1000 * s, "bare": ratios[0], "tuned": ratios[1], "rounds": rounds}
        print(f"| {name} | {1000 * s:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)
    return rows


def start_jax(args: argparse.Namespace, stack: ExitStack) -> tuple[Jax | None, Jax | None]:
    """In single precision, to be timed, and in double, to be checked."""
    if args.no_jax:
        print("jax and diffrax: left out, as --no-jax says")
        return None, None
    try:
        single = stack.enter_context(Jax(args.threads))
        double = stack.enter_context(Jax(args.threads, double=True))
    except JaxIsMissing as reason:
        print(f"jax and diffrax: left out, jax is not to be had ({reason})")
        return None, None
    print(f"{single.version}, processors: {args.threads}")
    return single, double


def latent_table(size: str, problem: Problem, args: argparse.Namespace, jax: tuple) -> dict:
    losses = agree(problem, jax[1])
    latent = Latent(problem)
    programs = contestants(latent, not args.no_compile)
    timers = {name: timer(f, latent.zero_grad) for name, f in programs.items()}
    if jax[0] is not None:
        jax[0].ask("set", **for_jax(latent))
        ask = lambda name: lambda n: jax[0].ask("time", name=name, calls=n)["seconds"]  # noqa: E731
        timers |= {name: ask(name) for name in NAMES}
    seconds = rounds(timers, args.repeats, args.seconds)
    p = problem
    title = f"{size}: {p.batch} paths in {p.dim} dimensions, {p.steps} steps, width {p.width}"
    rows = table(title, seconds, BARE, TUNED)
    return {"rows": rows, "losses": losses}


def contraction_table(problem: Problem, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One gradient of "stl" with contraction.

    :param problem: But for its dimension.
    """
    timers = {}
    for dim, kind in CONTRACTED:
        latent = Latent(dataclasses.replace(problem, dim=dim))
        width, times = problem.width, problem.times()
        latent.control = MLPControl(dim, (width, width), times=times, contraction=kind)
        clear = lambda latent=latent: (pyro.clear_param_store(), latent.zero_grad())  # noqa: E731
        timers[f"D = {dim}, {kind}"] = timer(latent.ours("stl", contraction=kind), clear)
    seconds = rounds(timers, args.repeats, args.seconds)
    size = f"{problem.batch} paths, {problem.steps} steps, width {problem.width}"
    print(f"\ncontraction: {size}\n\n| contraction | ms | full / diagonal |\n|---|---|---|")
    found: dict[str, dict[str, float]] = {}
    for (dim, kind), (name, by_round) in zip(CONTRACTED, seconds.items(), strict=True):
        found[name] = {"ms": 1000 * statistics.median(by_round)}
        if kind == "full":
            pairs = zip(by_round, seconds[f"D = {dim}, diagonal"], strict=True)
            found[name]["ratio"] = statistics.median(a / b for a, b in pairs)
        ratio = f"{found[name]['ratio']:.2f}" if kind == "full" else ""
        print(f"| {name} | {found[name]['ms']:.2f} | {ratio} |", flush=True)
    return found


def main(args: argparse.Namespace) -> dict[str, dict]:
    torch.set_num_threads(args.threads)
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(0)
    sizes = {name: p for name, p in SIZES.items() if name in args.sizes}
    if args.own:
        paths, dim, steps, width = args.own
        sizes["own"] = Problem(particles=paths, dim=dim, steps=steps, width=width)
    sizes = {k: dataclasses.replace(p, control=args.control) for k, p in sizes.items()}
    print(f"threads {args.threads}, medians of {args.repeats} rounds, control {args.control!r}")
    found: dict[str, dict] = {}
    with ExitStack() as stack:
        jax = start_jax(args, stack) if sizes else (None, None)
        for name, problem in sizes.items():
            found[name] = latent_table(name, problem, args, jax)
    if "sdebnn" in args.sizes:
        batch, steps = args.sdebnn
        programs = sdebnn_step.competitors(batch, steps, not args.no_compile)
        timers = {k: timer(f, pyro.clear_param_store) for k, f in programs.items()}
        seconds = rounds(timers, args.repeats, args.seconds)
        title = f"sdebnn: 18,496 weights, batch {batch}, {steps} steps"
        found["sdebnn"] = {"rows": table(title, seconds, sdebnn_step.BARE, sdebnn_step.TUNED)}
    if args.memory:
        found["memory"] = memory(sizes, args.sdebnn if "sdebnn" in args.sizes else None, args)
    if args.contraction:
        problem = next(iter(sizes.values()), SIZES["32x4"])
        found["contraction"] = contraction_table(problem, args)
    if args.growth:
        found["growth"] = growth(args.growth_sizes, args.repeats)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    options = {k: str(v) for k, v in vars(args).items()}
    args.out.write_text(json.dumps({"options": options, **found}, indent=1))
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*SIZES, "sdebnn"]
    p.add_argument("--sizes", nargs="*", choices=names, default=names)
    p.add_argument("--own", nargs=4, type=int, metavar=("PATHS", "DIM", "STEPS", "WIDTH"))
    p.add_argument("--sdebnn", nargs=2, type=int, default=[128, 20], metavar=("BATCH", "STEPS"))
    p.add_argument("--control", choices=("callable", "mlp"), default="mlp")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--seconds", type=float, default=0.3, help="of one program in one round")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--no-jax", action="store_true")
    p.add_argument("--no-compile", action="store_true", help="leave out ours with compile=True")
    p.add_argument("--double", action="store_true", help="double precision, but for jax")
    p.add_argument("--growth", action="store_true")
    p.add_argument("--growth-sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    p.add_argument("--memory", action="store_true")
    p.add_argument("--contraction", action="store_true")
    p.add_argument("--out", type=Path, default=OUT)
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
