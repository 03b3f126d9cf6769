"""Attacks on training: long runs, damaged checkpoints, writers that are killed.

Each attack counts what went wrong. Where a count is above its bound, a promise of the package is
broken, and the program ends with an error. The bounded versions of the same attacks are tests, in
``tests/faults``.

Run: python benchmarks/soak.py damage --count 1000
"""

import argparse
import importlib
import sys
from collections.abc import Mapping

import torch

NAMES = ("memory", "damage", "writers", "divergence")
"""The modules of ``attacks``; each has ``attack``, ``BOUNDS`` and its usual ``COUNT``."""


def main(args: argparse.Namespace) -> list[str]:
    """Run the attacks, and return the promises that were broken."""
    torch.set_num_threads(1)
    broken = []
    for name in NAMES if args.name == "all" else [args.name]:
        module = importlib.import_module(f"attacks.{name}")
        found = module.attack(module.COUNT if args.count is None else args.count, args.seed)
        print(f"{name}: " + ", ".join(f"{k} {_text(v)}" for k, v in found.items()), flush=True)
        broken += [f"{name}: {problem}" for problem in exceeded(found, module.BOUNDS)]
    return broken


def exceeded(found: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """The figures that are above their bounds, or are not numbers."""
    return [
        f"{k} {_text(found[k])}, more than {_text(bound)}"
        for k, bound in bounds.items()
        if not found[k] <= bound
    ]


def _text(x: float | str) -> str:
    return f"{x:,.2f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else str(x)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("name", choices=(*NAMES, "all"))
    p.add_argument("--count", type=int, help="how many attacks; by default that of each attack")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args(argv)


if __name__ == "__main__":
    problems = main(parse())
    if problems:
        sys.exit("\n".join(problems))
