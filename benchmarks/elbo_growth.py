"""How the cost of a gradient grows, and the peak memory of the programs of elbo_step.py."""

import argparse
import ctypes
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pyro
import sdebnn_step
import torch
from contestants import Latent, contestants
from elbo_problem import Problem
from latent_scaling import exponent, peak_memory, resident_memory
from torch import Tensor

__all__ = ["GROWTH", "growth", "memory"]

# The smallest problem, from which one thing grows by so many times. Large enough for the
# arithmetic to count: a line through times of bookkeeping is flat, whatever comes after it.
GROWTH = {
    "steps": Problem(particles=8, series=8, dim=4, steps=50, width=64),
    "series": Problem(particles=2, series=64, dim=4, steps=20, width=64),
    "particles": Problem(particles=64, series=2, dim=4, steps=20, width=64),
    "dim": Problem(particles=8, series=16, dim=64, steps=20, width=64),
}


def growth(factors: list[int], repeats: int) -> dict[str, dict]:
    """Seconds of "stl" by what grows, and the exponent of the line through all sizes."""
    steps = {
        (name, n): _step(dataclasses.replace(p, **{name: n * getattr(p, name)}))
        for name, p in GROWTH.items()
        for n in factors
    }
    times: dict[tuple, list[float]] = {case: [] for case in steps}
    for i in range(repeats + 1):
        for case, step in steps.items():
            seconds = step()
            if i:
                times[case].append(seconds)
    print('\n"stl" as one thing grows\n\n| what | from, to | ms | exponent |\n|---|---|---|---|')
    found = {}
    for name, p in GROWTH.items():
        sizes = [n * getattr(p, name) for n in factors]
        seconds = [statistics.median(times[name, n]) for n in factors]
        power = exponent(sizes, seconds)
        ms = ", ".join(f"{1000 * s:.1f}" for s in seconds)
        print(f"| {name} | {sizes[0]}, {sizes[-1]} | {ms} | {power:.2f} |", flush=True)
        found[name] = {"sizes": sizes, "seconds": seconds, "exponent": power}
    return found


def _step(problem: Problem) -> Callable[[], float]:
    latent = Latent(problem)
    loss = latent.ours("stl")

    def step() -> float:
        pyro.clear_param_store()  # every size has a guide with the same names
        start = time.perf_counter()
        loss().backward()
        return time.perf_counter() - start

    return step


def _losses(problem: dict | None, sdebnn: list[int] | None) -> dict[str, Callable[[], Tensor]]:
    if problem is None:
        return sdebnn_step.competitors(*sdebnn)
    return contestants(Latent(Problem(**problem)))


def memory(
    sizes: dict[str, Problem], sdebnn: list[int] | None, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """MB that the first gradient adds, each program in a process of its own."""
    cases = {name: (dataclasses.asdict(p), None) for name, p in sizes.items()}
    if sdebnn is not None:
        cases["sdebnn"] = (None, sdebnn)
    found: dict[str, dict[str, float]] = {}
    for size, case in cases.items():
        print(f"\n{size}: peak memory of one gradient\n\n| program | MB |\n|---|---|")
        found[size] = {}
        for name in _losses(*case):
            request = json.dumps({"case": case, "name": name, "threads": args.threads})
            child = [sys.executable, __file__, request]
            out = subprocess.run(child, check=True, capture_output=True, text=True).stdout
            found[size][name] = float(out.splitlines()[-1])
            print(f"| {name} | {found[size][name]:.1f} |", flush=True)
    return found


def measure(case: tuple, name: str, threads: int) -> float:
    torch.set_num_threads(threads)
    problem, sdebnn = case
    # A small one first, for all that is loaded at the first use.
    small = problem and problem | {"steps": 2}, sdebnn and [2, 2]
    _losses(*small)[name]().backward()
    loss = _losses(*case)[name]
    # What the allocator keeps for later would hide as much of what comes.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    before = resident_memory()
    loss().backward()
    return max(0.0, peak_memory() - before)


if __name__ == "__main__":
    print(measure(**json.loads(sys.argv[1])))
