"""Two processes that train on one checkpoint at once, and are killed with SIGKILL.

Both run ``fit(resume=True)`` in a loop, with a checkpoint after every step. One of them holds the
file; the other is refused, told who holds it, and tries again. At random moments, half of them
soon after a step, one of the two is killed and started anew. After each kill the checkpoint and
the generation before it must be readable, no step that was saved may be lost, and the drafts of
killed processes must not pile up. A process that takes a step after another one has taken over
counts as an overlap.
"""

import contextlib
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import trange

from pyro_sde.training import CheckpointError, CheckpointInUse, load_checkpoint

from .victim import Victim

COUNT = 200
BOUNDS = {
    "corrupt files": 0,
    "steps lost": 0,
    "most drafts at once": 2,
    "overlaps": 0,
    "told nobody": 0,
    "told wrongly": 0,
    "other errors": 0,
}
LONGEST = 0.5
"""Seconds between two kills."""


def write(path: Path, log: Path) -> None:
    """Train for ever, and log each step, and what the errors tell."""
    torch.set_num_threads(1)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)

    def note(*words: object) -> None:
        os.write(file, (" ".join(map(str, [os.getpid(), *words])) + "\n").encode())

    def log_step(step: int) -> float:
        note("step")
        return 1.0

    while True:
        try:
            Victim().train(path, 10**9, resume=True, anneal=log_step)
        except CheckpointInUse as e:
            holder = re.search(r"in use by process (\d+)", str(e))
            note("told", holder[1] if holder else "nobody")
            time.sleep(0.01)
        except BaseException as e:
            note("error", repr(e))
            time.sleep(0.1)


def attack(count: int, seed: int) -> dict[str, int]:
    """Kill ``count`` times. This needs Linux, where a process can be forked."""
    rng = random.Random(seed)
    found = {"kills": count, "of the holder": 0, "in the middle of a write": 0}
    found |= dict.fromkeys(BOUNDS, 0)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "run.pt", Path(folder) / "log"
        log.touch()

        def start() -> multiprocessing.process.BaseProcess:
            process = context.Process(target=write, args=(path, log), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads of this process
                process.start()
            return process

        Victim().train(None, 2)  # what is slow the first time is done before the fork
        both = [start(), start()]
        try:
            _wait_for(path.exists)
            step = 0
            for _ in trange(count, desc="writers", unit="kill", mininterval=1.0):
                if rng.random() < 0.5:  # on a slow machine, too, some of them train
                    steps = _steps(log)
                    _wait_for(lambda steps=steps: _steps(log) > steps)
                time.sleep(rng.uniform(0.0, LONGEST))
                i = rng.randrange(2)
                both[i].kill()
                both[i].join()
                with open(log, "a") as file:
                    file.write(f"{both[i].pid} killed\n")
                drafts = _drafts(path)
                is_holder = f"process {both[i].pid} on" in _holder(path)
                found["of the holder"] += is_holder
                found["in the middle of a write"] += is_holder and bool(drafts)
                found["most drafts at once"] = max(found["most drafts at once"], len(drafts))
                for file in (path, path.with_name("run.pt.1")):
                    found["corrupt files"] += file.exists() and _step(file) is None
                last = _step(path) or 0
                found["steps lost"] += max(0, step - last)
                step = last
                both[i] = start()
        finally:
            for process in both:
                process.kill()
                process.join()
        return found | {"steps": step} | _of_log(log.read_text())


def _wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise RuntimeError("no training took a step within a minute")


def _steps(log: Path) -> int:
    return log.read_text().count(" step\n")


def _drafts(path: Path) -> set[str]:
    return {p.name for p in path.parent.glob(".run.pt.*.draft")}


def _holder(path: Path) -> str:
    """What the next holder has not replaced yet. It does so before it makes drafts of its own."""
    with contextlib.suppress(OSError):
        return path.with_name(".run.pt.holder").read_text()
    return ""


def _step(path: Path) -> int | None:
    """The step of a checkpoint; None if it cannot be read."""
    try:
        return load_checkpoint(path, "pyro_sde.fit")["step"]
    except (CheckpointError, OSError):
        return None


def _of_log(text: str) -> dict[str, int]:
    """What the writers have noted, line by line and in order."""
    names = "writers", "refused", "told nobody", "told wrongly", "overlaps", "other errors"
    found = dict.fromkeys(names, 0)
    killed: set[str] = set()
    ended: set[str] = set()
    now = None
    for pid, what, *rest in (line.split(maxsplit=2) for line in text.splitlines()):
        if what == "killed":
            killed.add(pid)
        elif what == "step" and pid != now:
            found["writers"] += 1
            found["overlaps"] += pid in ended
            ended |= {now} if now else set()
            now = pid
        elif what == "told":
            found["refused"] += 1
            found["told nobody"] += rest == ["nobody"]
            found["told wrongly"] += rest[0] in killed
        elif what == "error":
            found["other errors"] += 1
            print(*rest, file=sys.stderr)
    return found
