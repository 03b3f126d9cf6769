"""Two checkouts side by side: one gradient of each problem of elbo_step.py, of sdebnn_step.py and
of the README model, and the files that one SVI step goes through.

Each checkout runs in a process of its own, with its own package and benchmarks. They take turns,
round after round, and the ratio is the median over the rounds.

Run: git worktree add ../before HEAD~1; python benchmarks/versus.py ../before
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def problems(threads: int) -> dict:
    """Timers by name, in the process of one checkout."""
    import elbo_step
    import pyro
    import sdebnn_step
    import torch
    from contestants import Latent, contestants

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    timers = {}
    for size, problem in elbo_step.SIZES.items():
        latent = Latent(problem)
        clear = lambda latent=latent: (pyro.clear_param_store(), latent.zero_grad())  # noqa: E731
        programs = contestants(latent, False)
        timers |= {f"{size} {k}": elbo_step.timer(f, clear) for k, f in programs.items()}
    for name, f in sdebnn_step.competitors(64, 20).items():
        timers[f"sdebnn {name}"] = elbo_step.timer(f, pyro.clear_param_store)
    for memory in ("graph", "recompute"):
        for name in ("ou", "double well"):
            loss = readme_loss(name, memory)
            key = f'README model, {name}, memory="{memory}"'
            timers[key] = elbo_step.timer(loss, pyro.clear_param_store)
    return {k: t for k, t in timers.items() if "torchsde" not in k}


def readme_model(name: str, memory: str):
    import pyro
    import pyro.distributions as dist
    import torch

    from pyro_sde import select, time_grid
    from pyro_sde.distributions import OrnsteinUhlenbeck, SDEPath

    times = torch.tensor([0.2, 0.9, 1.0, 2.5])
    grid = time_grid(0.0, 3.0, dt=0.1, include=times)

    def model(y: torch.Tensor) -> None:
        path = OrnsteinUhlenbeck(1.0, 0.0, 0.7, grid, memory=memory)
        if name == "double well":
            start = dist.Normal(torch.zeros(1), 1.0).to_event(1)
            path = SDEPath(lambda t, z: z - z**3, lambda t, z: 0.7 + 0 * z, start, grid, memory)
        z = pyro.sample("z", path)
        with pyro.plate("obs", len(times)):
            x = select(z, grid, times, plate_dim=-1)[..., 0]
            pyro.sample("y", dist.Laplace(x, 0.1), obs=y)

    return model, torch.tensor([0.3, -0.8, -0.6, 1.2])


def readme_loss(name: str, memory: str):
    import pyro

    from pyro_sde import AutoSDE, TraceSDE_ELBO

    pyro.clear_param_store()
    model, y = readme_model(name, memory)
    guide = AutoSDE(model, contraction=True).setup(y)
    options = {"num_particles": 16, "vectorize_particles": True, "max_plate_nesting": 1}
    elbo = TraceSDE_ELBO(**options)
    return lambda: elbo.differentiable_loss(model, guide, y)


def visits(root: str) -> tuple[int, int]:
    """Files of the package that one SVI step calls into, and changes from one file to another."""
    import pyro
    from pyro.infer import SVI

    from pyro_sde import AutoSDE, TraceSDE_ELBO

    pyro.clear_param_store()
    model, y = readme_model("ou", "graph")
    elbo = TraceSDE_ELBO(num_particles=16, vectorize_particles=True)
    svi = SVI(model, AutoSDE(model, contraction=True), pyro.optim.Adam({"lr": 1e-2}), elbo)
    for _ in range(3):
        svi.step(y)
    files: list[str] = []

    def watch(frame, event, arg) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{root}/pyro_sde/"):
            files.append(name)

    sys.setprofile(watch)
    svi.step(y)
    sys.setprofile(None)
    return len(set(files)), sum(a != b for a, b in zip(["", *files], files, strict=False))


def work(root: str, threads: int, only: list[str]) -> None:
    """Answer questions about one checkout, a line each."""
    sys.path[:0] = [root, f"{root}/benchmarks", f"{root}/examples"]
    timers = {k: t for k, t in problems(threads).items() if any(part in k for part in only)}
    for timer in timers.values():
        timer(2)
    print(json.dumps({"files": visits(root), "names": list(timers)}), flush=True)
    for line in sys.stdin:
        name, calls = json.loads(line)
        print(json.dumps(timers[name](calls)), flush=True)


class Checkout:
    def __init__(self, root: Path, args: argparse.Namespace) -> None:
        options = ["--work", "--threads", str(args.threads), "--only", *args.only]
        command = [sys.executable, __file__, str(root), *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes)
        self.about = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a checkout failed: {self.process.args}")
        return json.loads(line) if line[0] in '{[0123456789"' else self._answer()

    def seconds(self, name: str, calls: int) -> float:
        print(json.dumps([name, calls]), file=self.process.stdin, flush=True)
        return self._answer()


def main(args: argparse.Namespace) -> dict[str, float]:
    if args.work:
        return work(str(args.other), args.threads, args.only) or {}
    pair = [Checkout(root, args) for root in (args.other.resolve(), HERE)]
    for checkout, name in zip(pair, ("there", "here"), strict=True):
        files, changes = checkout.about["files"]
        print(f"one SVI step of the README model, {name}: {files} files, {changes} changes of file")
    ratios = {}
    print("\n| problem | there, ms | here, ms | here / there |\n|---|---|---|---|")
    for name in pair[0].about["names"]:
        if name not in pair[1].about["names"]:
            continue
        calls = max(1, min(60, int(args.seconds / pair[0].seconds(name, 1))))
        found = []
        for i in range(args.repeats):
            turns = pair if i % 2 else pair[::-1]
            seconds = {id(c): c.seconds(name, calls) for c in turns}
            found.append([1000 * seconds[id(c)] for c in pair])
        there, here = (statistics.median(x) for x in zip(*found, strict=True))
        ratios[name] = statistics.median(b / a for a, b in found)
        print(f"| {name} | {there:.2f} | {here:.2f} | {ratios[name]:.3f} |", flush=True)
    for checkout in pair:
        checkout.process.communicate()
    return ratios


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("other", type=Path, help="a checkout to compare this one with")
    p.add_argument("--only", nargs="+", default=[""], help="parts of the names of problems")
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--seconds", type=float, default=0.25, help="of one problem in one round")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
