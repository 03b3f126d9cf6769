"""A training that kills itself: ``python -m tests.training.killed KIND PATH WHERE``.

WHERE is "step" (in the middle of the evaluation of step 8) or "write" (with half of the third
checkpoint on its way to the disk).
"""

import os
import signal
import stat
import sys

import torch

import pyro_sde
from tests.training.models import DATA, make


def options() -> dict:
    return {
        "steps": 12,
        "lr": 0.05,
        "schedule": "one_cycle",
        "batch_size": 3,
        "anneal": 4,
        "clip": 5.0,
        "validation": DATA,
        "validation_draws": 2,
        "every": 2,
        "checkpoint_every": 3,
        "seed": 5,
        "progress": False,
    }


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, path: str, where: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    model, guide, elbo = make(kind)
    if where == "step":
        real = elbo.loss_and_grads
        calls = []

        def loss_and_grads(*args, **kwargs):
            loss = real(*args, **kwargs)
            calls.append(loss)
            if len(calls) == 8:
                kill()
            return loss

        elbo.loss_and_grads = loss_and_grads
    else:
        sync, drafts = os.fsync, []

        def half(descriptor):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                drafts.append(descriptor)
            if len(drafts) == 3:
                os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
                kill()
            sync(descriptor)

        os.fsync = half
    pyro_sde.fit(model, guide, DATA, elbo=elbo, checkpoint=path, **options())


if __name__ == "__main__":
    main(*sys.argv[1:])
