"""What is not set up before DistributedDataParallel is refused by name."""

import distributed as example
import pyro
import pytest
import torch
import torch.distributed as processes
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyro_sde import AutoSDE, TraceSDE_ELBO

from .ranks import SIZE


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
    model, guide = example.build("series", SIZE)
    guide.setup(*data)
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
