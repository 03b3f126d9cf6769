"""The reference: one step after the other, with an ordinary graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .base import Draw, Simulator, Step, Task
from .ratio import Local, LogRatio, Shift
from .step import checkable

__all__ = ["Loop"]


class Loop(Simulator):
    """Draws any path. All other simulators are held to this one."""

    def __call__(self, task: Task, noise: Tensor | None = None) -> Draw:
        noise = task.draw_noise() if noise is None else noise
        # One unbind, not one index a step: the backward pass of an index fills a whole tensor.
        rows = zip(*(x.unbind(0) for x in task.known), strict=True)
        states, steps = [task.z0], []
        for eps, row in zip(noise.unbind(0), rows, strict=True):
            step = task.step(states[-1], eps, *row)
            steps.append(step)
            states.append(step.after)
        value = torch.stack(states, -2)
        ratio = None if task.control is None else _ratio(steps, noise)
        if not task.validate:
            return Draw(value, noise, self, ratio, steps)
        with torch.no_grad():
            scale = torch.stack([checkable(s.scale, s.contraction, s.before) for s in steps])
        return Draw(value, noise, self, ratio, steps, scale)


def _ratio(steps: Sequence[Step], noise: Tensor) -> LogRatio:
    w = torch.stack([s.w for s in steps if s.w is not None])
    contractions = [s.contraction for s in steps if s.contraction is not None]

    def local(slopes: Shift) -> Iterator[Local]:
        by = [s.unbind(0) for s in slopes if s is not None]
        for step, *slope in zip(steps, *by, strict=True):
            yield step.before, [x for x in (step.w, step.contraction) if x is not None], slope

    return LogRatio.of_steps(w, torch.stack(contractions) if contractions else None, noise, local)
