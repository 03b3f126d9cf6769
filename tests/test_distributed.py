"""Two real processes train as one does on the same data, and noise is never shared by accident."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import distributed as example
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributed as processes
import torch.multiprocessing as mp
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.distributed import mini_batches, place, seed_rank
from pyro_sde.distributions import OrnsteinUhlenbeck
from pyro_sde.nn import SDEBlock

from .guides.models import GRID

WORLD, SIZE, BATCH = 2, 12, 8
PATIENCE = 100  # seconds until a process that hangs is given up
CASES = ["series", "sdebnn", "recompute", "reversible", "mixed"]


class Lean(example.Network):
    """The same network, its steps redone in the backward pass."""

    def __init__(self, size, memory):
        super().__init__(size)
        options = {"memory": memory}
        if memory == "reversible":
            options["method"] = "reversible_heun"
        self.block = SDEBlock(nn.Linear(3, 3), augment=2, steps=4, **options)


class Mixed(PyroModule):
    """Series with embeddings of their own, a local latent, and two global ones upstream."""

    def __init__(self, size):
        super().__init__()
        self.size, self.decay = size, nn.Parameter(torch.tensor(0.3))

    def plate(self, rows, y):
        return pyro.plate("series", self.size, subsample=rows)

    def forward(self, rows, y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        with self.plate(rows, y):
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0).expand((1,)).to_event(1))
            rate = self.decay.exp()
            z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, scale.unsqueeze(-1), GRID))
            law = dist.Normal(z[..., [2, 4, -1], 0] + shift, noise)
            pyro.sample("y", law.to_event(1), obs=y)


def problem(case):
    """Data, model, a guide that is not at its start, and the options of the ELBO."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    options = {"max_plate_nesting": 1}
    if case == "series":
        data = example.Series.simulate(SIZE)
        model, guide = example.build("series", *data)
    elif case == "mixed":
        data = torch.arange(SIZE), torch.randn(SIZE, 3)
        model = Mixed(SIZE)
        guide = AutoSDE(model, rest=partial(AutoNormal, create_plates=model.plate)).setup(*data)
    else:
        data = example.Network.simulate(SIZE)
        model = example.Network(SIZE) if case == "sdebnn" else Lean(SIZE, case)
        guide = AutoSDE(model, contraction=True).setup(*data)
        options = {"num_particles": 2, "vectorize_particles": True, "max_plate_nesting": 1}
    with torch.no_grad():
        for p in guide.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return data, model, guide, TraceSDE_ELBO(**options)


@contextmanager
def noise_of(series):
    """Every series draws the noise that belongs to it, in whatever batch it is; what is drawn
    without series (``series`` empty, or another shape) is the same everywhere."""
    calls = 0

    def draw(*shape, dtype=None, device=None):
        nonlocal calls
        calls += 1
        shape = torch.Size(shape[0] if len(shape) == 1 else shape)

        def of(number, size):
            generator = torch.Generator().manual_seed(1000 * calls + number)
            return torch.empty(size).normal_(generator=generator)

        if len(series) and len(shape) > 1 and shape[-2] == len(series):
            row = shape[:-2] + shape[-1:]
            return torch.stack([of(int(i), row) for i in series], -2)
        return of(999, shape)

    with (
        mock.patch.object(torch, "randn", draw),
        mock.patch("torch.distributions.normal._standard_normal", draw),
    ):
        yield


def rows_of(case, rows):
    return rows if case in ("series", "mixed") else ()


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def worker(rank, folder):
    """All that the tests want to know from one rank, in a file of its own."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    processes.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE),
    )
    found = {"place": tuple(place()), "seed": seed_rank(5)}
    for case in CASES:
        data, model, guide, elbo = problem(case)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)  # rank 0's are to win
        module = elbo(model, guide)
        wrapped = DistributedDataParallel(module)
        rows = next(mini_batches(SIZE, BATCH, seed=3))
        part = [x[rows] for x in data]
        with noise_of(rows_of(case, rows)):
            loss = wrapped(*part)
        loss.backward()
        found[case] = {"rows": rows, "loss": loss.item(), "gradients": gradients(module)}
        seed = seed_rank(5)
        module.zero_grad()
        loss = wrapped(*part)
        path = guide.trace.nodes["block.w" if "block.w" in guide.trace.nodes else "z"]["value"]
        loss.backward()
        found[case]["own noise"] = {
            "seed": seed,
            "loss": loss.item(),
            "gradients": gradients(module),
            "path": path.detach(),
        }
        optimiser = torch.optim.Adam(module.parameters(), 0.01)
        for rows in islice(mini_batches(SIZE, BATCH), 5):
            optimiser.zero_grad()
            wrapped(*(x[rows] for x in data)).backward()
            optimiser.step()
        found[case]["trained"] = module.state_dict()
    torch.save(found, f"{folder}/{rank}.pt")
    processes.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    with mock.patch.dict(os.environ, environment, clear=True):
        context = mp.spawn(worker, (str(folder),), WORLD, join=False)
    deadline = time.monotonic() + PATIENCE
    try:
        while not context.join(1.0):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def assert_equal(found, loss, module):
    assert sum(r["loss"] for r in found) / WORLD == pytest.approx(loss, rel=1e-10)
    for name, p in module.named_parameters():
        for r in found:
            torch.testing.assert_close(r["gradients"][name], p.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process_on_the_global_batch(ranks, case):
    """On the same noise, mean loss and gradient are those of all rows at once."""
    found = [r[case] for r in ranks]
    rows = torch.cat([r["rows"] for r in found])
    assert len(rows.unique()) == BATCH
    data, model, guide, elbo = problem(case)
    module = elbo(model, guide)
    with noise_of(rows_of(case, rows)):
        loss = module(*(x[rows] for x in data))
    loss.backward()
    assert abs(found[0]["loss"] - found[1]["loss"]) > 1e-3
    assert_equal(found, loss.item(), module)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_draws_noise_of_its_own(ranks, case):
    """And the average is that of one process which draws both noises, one after the other."""
    found = [r[case]["own noise"] for r in ranks]
    a, b = (r["path"] for r in found)
    assert a.shape == b.shape and not (a[..., 1:, :] == b[..., 1:, :]).any()
    data, model, guide, elbo = problem(case)
    module, total = elbo(model, guide), 0.0
    for r, other in zip(found, ranks, strict=True):
        pyro.set_rng_seed(r["seed"])
        loss = module(*(x[other[case]["rows"]] for x in data)) / WORLD
        loss.backward()
        total += loss.item()
    assert_equal(found, total, module)


@pytest.mark.parametrize("case", CASES)
def test_ranks_end_with_the_same_parameters(ranks, case):
    """Bit by bit; they began with rank 0's, and moved."""
    a, b = (r[case]["trained"] for r in ranks)
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
    _, model, guide, elbo = problem(case)
    for name, p in elbo(model, guide).named_parameters():
        assert 0 < (a[name] - p).abs().max() < 0.1, name


def test_ranks_know_their_place(ranks):
    assert [r["place"] for r in ranks] == [(0, 2), (1, 2)]
    assert len({r["seed"] for r in ranks} | {seed_rank(6)}) == 3
    assert ranks[0]["seed"] == seed_rank(5)


def test_mini_batches_deal_the_data():
    whole = list(islice(mini_batches(11, 4, seed=1), 4))
    assert all(len(rows) == 4 for rows in whole)
    assert len(torch.cat(whole[:2]).unique()) == 8  # an epoch: 3 of 11 are left over
    assert not torch.equal(torch.cat(whole[:2]), torch.cat(whole[2:]))
    parts = []
    for rank in range(2):
        with mock.patch("pyro_sde.distributed.place", lambda rank=rank: (rank, 2)):
            parts.append(list(islice(mini_batches(11, 4, seed=1), 4)))
            with pytest.raises(ValueError, match=r"multiple of the 2 processes.*found 3"):
                mini_batches(11, 3)
    for rows, *both in zip(whole, *parts, strict=True):
        assert torch.equal(torch.stack(both, -1).flatten(), rows)
    with pytest.raises(ValueError, match="at most size=3"):
        mini_batches(3, 4)


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    method = f"file://{tmp_path}/rendezvous"
    processes.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    yield
    processes.destroy_process_group()


REMEDY = r"guide\.setup\(\*args\).*before DistributedDataParallel"


def network():
    return example.Network(SIZE), example.Network.simulate(SIZE)


@pytest.mark.parametrize("elbo", [TraceSDE_ELBO, Trace_ELBO])
def test_a_guide_that_was_not_set_up(alone, elbo):
    model, data = network()
    guide = AutoSDE(model)
    with pytest.raises(RuntimeError, match=REMEDY):
        DistributedDataParallel(elbo()(model, guide))(*data)
    late = AutoSDE(model, name="late")
    wrapped = DistributedDataParallel(elbo()(model, late))
    late.setup(*data)
    with pytest.raises(RuntimeError, match=r"not given \d+ parameters, 'paths\.block\.w"):
        wrapped(*data)
    assert torch.isfinite(DistributedDataParallel(elbo()(model, late))(*data))


def test_an_encoder_alone_is_not_a_guide(alone):
    """The encoder has parameters from the start, the control and the head of z_0 have not."""
    data = example.Series.simulate(SIZE)
    model, guide = example.build("series", *data)
    unset = AutoSDE(model, encoder=guide.encoder, name="other")
    with pytest.raises(RuntimeError, match=r"'paths\.z"):
        DistributedDataParallel(TraceSDE_ELBO()(model, unset))(*data)


def test_other_parameters_that_are_made_late(alone):
    """Those of another autoguide, and those that a model makes by pyro.param."""
    model, data = network()
    with pytest.raises(RuntimeError, match=r"AutoNormal\.locs\.block\.w"):
        DistributedDataParallel(TraceSDE_ELBO()(model, AutoNormal(model)))(*data)

    class Late(example.Network):
        def forward(self, x, y):
            pyro.param("extra", torch.tensor(1.0))
            return super().forward(x, y)

    pyro.clear_param_store()
    model = Late(SIZE)
    guide = AutoSDE(model).setup(*data)
    with pytest.raises(RuntimeError, match=r"'extra'.*PyroParam"):
        DistributedDataParallel(TraceSDE_ELBO()(model, guide))(*data)


def test_no_alarm_without_the_wrapper(alone):
    """A process group may serve other ends: guides are set up by their first call as always."""
    model, data = network()
    assert torch.isfinite(TraceSDE_ELBO()(model, AutoSDE(model))(*data))


def test_parameters_that_are_not_trained_may_stay_out(alone):
    model, data = network()
    guide = AutoSDE(model).setup(*data)
    frozen = pyro.param("frozen", torch.tensor(1.0))
    frozen.unconstrained().requires_grad_(False)

    class Frozen(nn.Module):
        def forward(self, *args):
            assert not pyro.param("frozen").requires_grad
            return model(*args)

    guide = AutoSDE(both := Frozen(), name="both").setup(*data)
    both.model = model
    assert torch.isfinite(DistributedDataParallel(TraceSDE_ELBO()(both, guide))(*data))


def test_torchrun(tmp_path):
    """The command of the doc string; one rank speaks."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(root / "examples/distributed.py"), "--task", "sdebnn"]
    command += ["--iterations", "3", "--size", "12", "--batch", "6", "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sdebnn, 2 processes") == done.stdout.count("figure:") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["distributed_sdebnn.png"]
