"""Seconds until the bound is within 0.1 nat of the exact log evidence, and stays there.

The Ornstein-Uhlenbeck problem of ou_evidence.py, and random ones: 3 to 8 observations at different
multiples of 0.05 in (0, 3], noise log-uniform in [0.2, 0.6], rate log-uniform in [0.3, 3], data
drawn from the model. AutoSDE with contraction takes one step from each observation to the next.
The others have the coarsest grid of a ladder (60 to 3840 steps) on which the best bound, known in
closed form, is within 0.05 nat: AutoSDE without contraction, and torchsde (see
evidence_contestants.py). All: Adam with the rate lr / (1 + steps / half), as many paths in a step,
single precision.

The bound is judged after 5 steps of training and whenever they have grown by a twentieth; "stays"
means at the next ten judgements too, that is for 1.6 times the steps. Seconds are those of the
processor in the steps of training, not in the judgements. Evaluations of the network are counted
for each path, forward; each is differentiated once. Finished runs are kept: start the same command
again to go on.

Run: python benchmarks/time_to_evidence.py
"""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from evidence_contestants import CONTRACTION, PLAIN, TORCHSDE, AutoRacer, TorchsdeRacer, racer
from ou_evidence import END, FOUR, Case, bound, exact
from store import Store
from tqdm import tqdm

FIRST, GROWTH, STAY = 5, 1.05, 10
LABELS = {
    CONTRACTION: "pyro_sde, contraction",
    PLAIN: "pyro_sde",
    TORCHSDE: "torchsde, tuned",
}


def draw(seed: int) -> Case:
    """A random problem."""
    rng = torch.Generator().manual_seed(seed)

    def log_uniform(low: float, high: float) -> float:
        return low * (high / low) ** torch.rand((), generator=rng).item()

    n = int(torch.randint(3, 9, (), generator=rng))
    noise, rate = log_uniform(0.2, 0.6), log_uniform(0.3, 3.0)
    places = torch.randperm(60, generator=rng)[:n].sort().values + 1
    t = places.double() * (END / 60)
    eps = torch.randn(n, generator=rng, dtype=t.dtype)
    _, S = Case(t, torch.zeros_like(t), noise, rate).marginal()
    return Case(t, torch.linalg.cholesky(S) @ eps, noise, rate)


def arrival(gaps: list[float], tolerance: float, stay: int = STAY) -> int | None:
    """The first judgement that, with the ``stay`` next ones, is within the tolerance."""
    run = 0
    for i, gap in enumerate(gaps):
        run = run + 1 if abs(gap) <= tolerance else 0
        if run > stay:
            return i - stay
    return None


def race(r: AutoRacer | TorchsdeRacer, evidence: float, args: argparse.Namespace) -> dict[str, Any]:
    """Train until it has arrived, or the budget is spent and it is not about to."""
    steps, due, seconds = 0, FIRST, 0.0
    curve: list[dict[str, float]] = []
    with tqdm(desc="training", unit="step", leave=False, mininterval=1) as bar:
        while True:
            before = time.process_time()
            r.step()
            seconds, steps = seconds + time.process_time() - before, steps + 1
            bar.update()
            if steps < due:
                continue
            due = max(steps + 1, math.ceil(GROWTH * steps))
            value, error = bound(r.model, r.guide, args.samples, r.case.y)
            point = {"steps": steps, "seconds": seconds, "evaluations": r.paths * r.calls}
            curve.append({**point, "gap": evidence - value, "error": error})
            bar.set_postfix(gap=f"{evidence - value:.3f}", refresh=False)
            gaps = [p["gap"] for p in curve]
            found = arrival(gaps, args.within)
            near = abs(gaps[-1]) <= args.within
            if found is not None or (seconds > args.budget and not near):
                break
    best = min(gaps, key=abs)
    return {"grid": r.steps, "at": curve[found] if found is not None else None, "best": best,
            "seconds": seconds, "curve": curve}  # fmt: skip


def run(index: int, name: str, case: Case, args: argparse.Namespace, store: Store) -> dict:
    rule = {
        k: getattr(args, k) for k in ("seed", "paths", "lr", "half", "samples", "within", "budget")
    }
    task = {"problem": index, "contestant": name, **rule}
    found = store.get(task)
    if found is not None:
        return found
    options = (name, case, args.paths, (args.lr, args.half), args.within / 2)
    racer(*options).step()  # what PyTorch does once
    pyro.set_rng_seed(args.seed)
    evidence = exact(case)[0]
    result = race(racer(*options), evidence, args)
    return store.add({"task": task, "evidence": evidence, **result})


def ratio(found: dict, ours: dict | None) -> tuple[float, str] | None:
    """Of the seconds to those of ours; a lower bound where it has not arrived."""
    if ours is None or ours["at"] is None:
        return None
    at = found["at"]
    return (at or found)["seconds"] / ours["at"]["seconds"], "" if at else "> "


def _cells(found: dict, ours: dict | None) -> list[str]:
    at, times = found["at"], ratio(found, ours)
    text = "-" if times is None else f"{times[1]}{times[0]:.3g}"
    if at is None:
        missed = f"not within {found['seconds']:.0f} s, best gap {found['best']:.2f}"
        return [str(found["grid"]), missed, "-", text]
    return [str(found["grid"]), f"{at['seconds']:.3g}", f"{at['evaluations']:.3g}", text]


def table(runs: dict[int, dict[str, dict]], cases: dict[int, Case]) -> str:
    """One row for each problem and contestant; the medians of the ratios below."""
    head = ["problem", "observations", "noise", "rate", "log evidence", "contestant", "grid"]
    head += ["seconds", "network evaluations", "x contraction"]
    rows = [head, ["---"] * len(head)]
    for index, found in runs.items():
        case, first = cases[index], next(iter(found.values()))
        about = [str(index), str(len(case.t)), f"{case.noise:.2f}", f"{case.rate:.2f}"]
        about.append(f"{first['evidence']:.3f}")
        for name, result in found.items():
            rows.append([*about, LABELS[name], *_cells(result, found.get(CONTRACTION))])
            about = [""] * 5
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def medians(runs: dict[int, dict[str, dict]]) -> dict[str, float]:
    """Over the random problems where ours arrived; printed with how many others did not."""
    result = {}
    for name, label in LABELS.items():
        pairs = [(f[name], f.get(CONTRACTION)) for i, f in runs.items() if i and name in f]
        found = [x for x in (ratio(*pair) for pair in pairs) if x is not None]
        if name != CONTRACTION and found:
            result[name] = statistics.median(x for x, _ in found)
            late = sum(bool(mark) for _, mark in found)
            print(f"{label}: {result[name]:.3g} times the seconds of ours with contraction, the ")
            print(f"  median of {len(found)} random problems; {late} not within the budget")
    return result


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    store = Store(args.out)
    cases = {0: FOUR} | {i: draw(1000 * args.seed + i) for i in range(1, args.problems + 1)}
    tasks = [(i, name) for i in cases for name in args.contestants]
    runs: dict[int, dict[str, dict]] = {}
    for i, name in tqdm(tasks, desc="races", unit="race"):
        runs.setdefault(i, {})[name] = run(i, name, cases[i], args, store)
    print(table(runs, cases))
    curves = [p for found in runs.values() for r in found.values() for p in r["curve"]]
    near = [p["error"] for p in curves if abs(p["gap"]) < 2 * args.within]
    if near:
        print(f"standard error of a judgement near the evidence: at most {max(near):.3f} nat")
    return medians(runs)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--problems", type=int, default=20, help="random ones, after that of step 1")
    p.add_argument("--contestants", nargs="+", choices=LABELS, default=list(LABELS))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--budget", type=float, default=600.0, help="seconds of training of one run")
    p.add_argument("--within", type=float, default=0.1, help="nats; half of it for the grid")
    p.add_argument("--paths", type=int, default=32, help="in one step of training")
    p.add_argument("--lr", type=float, default=2e-2)
    p.add_argument("--half", type=float, default=100.0, help="steps until the rate is half of it")
    p.add_argument("--samples", type=int, default=4000, help="paths of a judgement")
    out = Path(__file__).parent / "out/time_to_evidence.jsonl"
    p.add_argument("--out", type=Path, default=out)
    p.add_argument("--quick", action="store_true", help="2 random problems, 30 seconds a run")
    args = p.parse_args(argv)
    if args.quick:
        args.problems, args.budget = 2, 30.0
    return args


if __name__ == "__main__":
    main(parse())
