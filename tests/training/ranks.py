"""What ``fit`` does in one of two processes, for test_ranks.py: a case for each test."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributed as processes
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal

from pyro_sde import AutoSDE, TraceSDE_ELBO, distributed, fit
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.training import matching
from pyro_sde.training.checkpoint_file import CheckpointFile

from ..ranks import WORLD, noise_of, problem
from .models import DATA, GRID, Modular, N, make, values

STEPS, BATCH = 5, 6  # neither six nor three is the number of steps of a grid: see noise_of
PATIENCE = 300  # seconds until a process that hangs is given up
OPTIONS = {"lr": 0.05, "batch_size": BATCH, "seed": 5, "match": False, "progress": False}


class SameNoise(TraceSDE_ELBO):
    """Each series draws the noise that belongs to it, in whatever process."""

    def loss_and_grads(self, model, guide, rows, *args):
        with noise_of(rows):
            return super().loss_and_grads(model, guide, rows, *args)


class Watched(TraceSDE_ELBO):
    """Keeps the losses of this process, and does something else where ``here`` at one of them."""

    def __init__(self, do=None, here=True, step=2):
        super().__init__()
        self.losses, self.do = [], do
        self.step = step if here else None

    def loss_and_grads(self, *args):
        self.losses.append(super().loss_and_grads(*args))
        if len(self.losses) == self.step and self.do is not None:
            return self.do()
        return self.losses[-1]


class Moving(Modular):
    """A buffer that depends on the rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, index, y):
        self.mean.mul_(0.9).add_(0.1 * y.mean())
        return super().forward(index, y)


def result(model, history):
    return {
        "values": values(model),
        "history": history.state(),
        "stopped": history.stopped,
        "random": torch.get_rng_state(),
    }


def trained(elbo=None, kind="functional", data=DATA, **options):
    model, guide, default = make(kind)
    options = {"steps": STEPS, "elbo": elbo or default} | options
    return result(model, fit(model, guide, data, **OPTIONS | options))


def gaussian(y):
    pyro.sample("y", dist.Normal(pyro.param("a", torch.tensor(0.0)), 1.0), obs=y)


def simple(model=gaussian, data=1.0, **options):
    pyro.clear_param_store()
    options = {"steps": 4, "elbo": Trace_ELBO(), "match": False, "progress": False} | options
    return fit(model, lambda *_: None, torch.as_tensor(data), **options)


def same_noise(kind, *_):
    """What must not depend on the number of processes. The guide is set up before, with noise
    that is no series', and draws all latents by the functions that are patched."""
    data, model, guide = problem(kind)[:3] if kind == "mixed" else (DATA, *make(kind)[:2])
    if kind != "mixed":
        guide = AutoSDE(model, other_guide=AutoNormal).setup(*data)
    more = {"steps": STEPS, "clip": 1.0, "anneal": 2}
    return result(model, fit(model, guide, data, elbo=SameNoise(), **more, **OPTIONS))


def beginning(*_):
    """A step that changes nothing."""
    return trained(steps=1, lr=1e-300)


def all_of_the_data(rank, folder):
    elbo = Watched()
    return {**trained(elbo, batch_size=None), "losses": elbo.losses}


def own_generator(rank, folder):
    generator, drawn = torch.Generator().manual_seed(3), []

    def model(y):
        drawn.append(torch.randn((), generator=generator))
        gaussian(y + drawn[-1])

    simple(model)
    return torch.stack(drawn[-2:])


def buffers(rank, folder):
    pyro.clear_param_store()
    model = Moving()
    fit(model, AutoSDE(model), DATA, steps=STEPS, elbo=TraceSDE_ELBO(), **OPTIONS)
    return model.mean


def resumed(kind, rank, folder):
    """Rank 0 alone has a path to write to."""
    writes, real = [], CheckpointFile.write

    def write(*args, **kwargs):
        writes.append(rank)
        real(*args, **kwargs)

    more = {"validation": DATA, "validation_draws": 2, "every": 2, "save_every": 2}
    run = partial(trained, kind=kind, schedule="constant", **more)
    a, b = (f"{folder}/{kind} {i}.pt" if rank == 0 else None for i in "ab")
    with mock.patch.object(CheckpointFile, "write", write):
        whole = run(steps=6, checkpoint=a)
        run(steps=4, checkpoint=b)
        again = run(steps=6, checkpoint=b, resume=rank == 0, seed=None)
    return {"whole": whole, "again": again, "writes": writes}


def matched(rank, folder):
    def model(y):
        rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5)).unsqueeze(-1)
        z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, 1.0, GRID))
        pyro.sample("y", dist.Normal(z[..., -1, 0], 0.1), obs=y)

    pyro.clear_param_store()
    with mock.patch.multiple(matching, CALLS=5, MIN_DRAWS=100, MAX_K_HAT=9.0):
        guide, y = AutoSDE(model), torch.tensor(1.0)
        history = fit(model, guide, y, steps=20, seed=0, progress=False)
    return {"values": values(), "matching": str(history.matching)}


def alone(rank, folder):
    return trained(seed=rank, distributed=False)


def rejected(rank, folder):
    return trained(Watched(lambda: float("nan"), here=rank == 1), max_rejected=1)


def diverged(rank, folder):
    def model(y):
        gaussian(y)
        if rank == 1 and pyro.param("a") > 0.35:
            pyro.factor("f", torch.tensor(float("nan")))

    path = f"{folder}/diverged.pt" if rank == 0 else None
    simple(model, lr=0.1, schedule="constant", steps=9, checkpoint=path, save_every=1)


def failed(rank, folder):
    def fail():
        raise IndexError("no row 7")

    trained(Watched(fail, here=rank == 1))


def left(rank, folder):
    """An error that is no part of an evaluation."""

    def schedule(step):
        if rank == 1 and step == 2:
            raise KeyboardInterrupt
        return 1.0

    trained(schedule=schedule)


def terminated(rank, folder):
    return trained(Watched(lambda: signal.raise_signal(signal.SIGTERM) or 1.0, here=rank == 1))


def other_steps(rank, folder):
    trained(steps=STEPS + rank)


def other_data(rank, folder):
    trained(data=(DATA[0], DATA[1] + rank))


def other_shapes(rank, folder):
    simple(lambda y: gaussian(y + pyro.param("b", torch.zeros(2 + rank)).sum()))


def late_parameter(value, rank, folder):
    """One that the third evaluation makes, and one that only rank 0 uses after the first."""
    calls = []

    def model(y):
        calls.append(y)
        if rank == 0 or len(calls) == 1:
            y = y + pyro.param("b", torch.tensor(0.0))
        if len(calls) > 2:
            y = y + pyro.param("late", torch.tensor(value(rank)))
        gaussian(y)

    return result(model, simple(model, optim=pyro.optim.SGD({"lr": 0.1})))


def scale_of_all_ranks(rank, folder):
    def model(y):
        with poutine.scale(scale=N / BATCH):
            gaussian(y.mean())

    simple(model, DATA[1], batch_size=BATCH)


def odd_batch(rank, folder):
    trained(batch_size=5)


def locked(rank, folder):
    with CheckpointFile(f"{folder}/locked.pt") if rank == 0 else mock.MagicMock():
        trained(checkpoint=f"{folder}/locked.pt")


def hanging(rank, folder):
    distributed.join(timeout=timedelta(seconds=2))
    trained(Watched(lambda: time.sleep(4.5) or 1.0, here=rank == 1))


def absent(rank, folder):
    distributed.join(timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(4)
    simple()


def killed(rank, folder):
    distributed.join(timeout=timedelta(seconds=PATIENCE))
    trained(Watched(lambda: os.kill(os.getpid(), signal.SIGKILL), here=rank == 1))


CASES = {
    "same noise, mixed": partial(same_noise, "mixed"),
    "same noise, functional": partial(same_noise, "functional"),
    "resumed, functional": partial(resumed, "functional"),
    "resumed, modular": partial(resumed, "modular"),
    "late parameter": partial(late_parameter, lambda rank: 1.0),
    "late parameter with other values": partial(late_parameter, float),
} | {
    f.__name__: f
    for f in (
        beginning,
        all_of_the_data,
        own_generator,
        buffers,
        matched,
        alone,
        rejected,
        diverged,
        failed,
        left,
        terminated,
        other_steps,
        other_data,
        other_shapes,
        scale_of_all_ranks,
        odd_batch,
        locked,
        hanging,
        absent,
        killed,
    )
}
"""In this order: the last ones have another time limit, and the very last one ends a process."""


def worker(rank, folder):
    """Run all cases, and save what each returned, or its error."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    method = f"file://{folder}/rendezvous"
    processes.init_process_group("gloo", init_method=method, rank=rank, world_size=WORLD)
    distributed.join(timeout=timedelta(seconds=PATIENCE))
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = case(rank, folder)
        except BaseException as e:
            found[name] = type(e).__name__, str(e), str(getattr(e, "checkpoint", None))
        torch.save(found, f"{folder}/{rank}.pt")
