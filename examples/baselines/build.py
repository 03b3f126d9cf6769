"""Every classifier of the comparison, by name."""

import functools
from typing import Any

import pyro
import torch
from common.classify import Bayesian, Categorical, Deterministic
from common.images import Data
from pyro.distributions import Normal
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock

from .mean_field import bayesian_
from .networks import DistanceHead, network
from .stages import HyperODEStage, ODEStage, ResNetStage

STEPS = 5
GAIN = 1.65
"""The prior's weights decay by e^-1 over the depth: this makes up for half of it."""


class Ensemble(nn.Module):
    """Networks trained side by side on the same batches from different first weights."""

    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return sum(F.cross_entropy(net(x), y) for net in self.nets) / len(self.nets)

    def functions(self, x: Tensor, samples: int) -> Any:
        yield from self.nets


class Penalised(SDEBlock):
    """A point w_0 under the prior that it would have if it were inferred: a MAP estimate."""

    def forward(self, h: Tensor) -> Tensor:
        prior = Normal(torch.zeros_like(self.start), self.start_scale)
        pyro.factor(
            f"prior of {self._pyro_get_fullname(self._start_name)}",
            prior.log_prob(self.start).sum(),
        )
        return super().forward(h)


def _plain(data: Data, stage: Any, head: Any = None) -> nn.Module:
    return Deterministic(network(data.name, stage, head=head))


def _mean_field(data: Data, stage: Any) -> nn.Module:
    """Normal posteriors of the stages' weights; stem and head are point estimates, as they are
    for the SDE-BNN, so that the posterior is all in which the two differ."""
    model = Categorical(network(data.name, stage), len(data.train))
    guide = AutoNormal(model, init_loc_fn=init_to_sample, init_scale=0.01)
    return _bayesian(data, model, guide, TraceMeanField_ELBO())


def _hyper_mean_field(field: nn.Module) -> nn.Module:
    stage = HyperODEStage(field, STEPS)
    bayesian_(stage.hypernetwork)
    return stage


def sde_bnn(
    data: Data,
    *,
    estimator: str = "stl",
    contraction: bool = False,
    hidden: tuple[int, ...] = (2, 128, 2),
    gain: float = GAIN,
    head: Any = None,
    kind: type[SDEBlock] = SDEBlock,
    **block: Any,
) -> nn.Module:
    """The network of the others with an SDEBlock for a stage, and AutoSDE for its guide.

    :param block: Arguments of SDEBlock.
    """
    options = {"steps": STEPS, "scale": 0.1} | block
    net = network(data.name, lambda f: kind(f, **options), gain, head)
    model = Categorical(net, len(data.train))
    control = functools.partial(MLPControl, hidden=hidden)
    guide = AutoSDE(model, control=control, contraction=contraction)
    return _bayesian(data, model, guide, TraceSDE_ELBO(path_estimator=estimator))


def _bayesian(data: Data, model: nn.Module, guide: Any, elbo: Any) -> nn.Module:
    example = data.normalise(data.train.x[:2]), data.train.y[:2]
    return Bayesian(model, guide, elbo, len(data.train), example)


BUILDERS = {
    "resnet": lambda d: _plain(d, lambda f: ResNetStage(f, STEPS)),
    "odenet": lambda d: _plain(d, lambda f: ODEStage(f, STEPS)),
    "hyper-odenet": lambda d: _plain(d, lambda f: HyperODEStage(f, STEPS)),
    "mfvi-resnet": lambda d: _mean_field(d, lambda f: bayesian_(ResNetStage(f, STEPS))),
    "mfvi-odenet": lambda d: _mean_field(d, lambda f: bayesian_(ODEStage(f, STEPS))),
    "mfvi-hyper-odenet": lambda d: _mean_field(d, _hyper_mean_field),
    "ensemble": lambda d: Ensemble([_plain(d, lambda f: ODEStage(f, STEPS)).net for _ in range(3)]),
    "sdebnn-kl": lambda d: sde_bnn(d, estimator="kl"),
    "sdebnn-stl": lambda d: sde_bnn(d, estimator="stl"),
    "sdebnn-normal": lambda d: sde_bnn(d, initial="normal", gain=1.0),
    "sdebnn-contraction": lambda d: sde_bnn(d, contraction=True),
    "sdebnn-normal-contraction": lambda d: sde_bnn(d, initial="normal", contraction=True, gain=1.0),
    "sdebnn-scale-0.2": lambda d: sde_bnn(d, scale=0.2),
    "sdebnn-rich": lambda d: sde_bnn(d, scale=0.2, hidden=(16, 128, 16), contraction=True),
    "sdebnn-penalised": lambda d: sde_bnn(d, kind=Penalised),
    "odenet-distance": lambda d: _plain(d, lambda f: ODEStage(f, STEPS), DistanceHead),
    "sdebnn-distance": lambda d: sde_bnn(d, head=DistanceHead),
}
NAMES = list(BUILDERS)


def build(name: str, data: Data, seed: int) -> nn.Module:
    """The untrained classifier ``name``; its first weights come from ``seed``."""
    torch.manual_seed(seed)
    return BUILDERS[name](data)
