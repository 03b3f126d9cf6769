"""An infinitely deep Bayesian neural net on handwritten digits.

The weights of a convolutional field follow an Ornstein-Uhlenbeck process over depth; AutoSDE
infers how they move. The figure shows the learning curve, whether the probabilities can be
trusted, and whether the net knows a letter or a shoe from a digit.
"""

import argparse
import functools

import pyro
import pyro.distributions as dist
import torch
from baselines.networks import DistanceHead, field
from common.classify import Bayesian
from common.images import load
from common.report import image_parser, train_and_report
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_sde import AutoSDE, MLPControl, TraceSDE_ELBO
from pyro_sde.nn import SDEBlock


class Net(PyroModule):
    """Two strided convolutions to 7 x 7 x 32, an SDEBlock, a head of distances.

    :param size: How many training images there are.
    :param options: Those of SDEBlock.
    """

    def __init__(self, size: int, **options) -> None:
        super().__init__()
        self.size = size
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
        )
        # The prior's weights decay by e^-1 over the depth: a gain makes up for half of it.
        self.block = SDEBlock(field(32, 32, gain=1.65), **options)
        self.head = DistanceHead(7 * 7 * 32)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.block(self.stem(x))
        logits = self.head(h.flatten(-3))
        with pyro.plate("data", self.size, subsample=x):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        return logits


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = image_parser(__doc__, epochs=20)
    p.add_argument("--initial", choices=["point", "normal"], default="point")
    p.add_argument("--contraction", action="store_true")
    p.add_argument("--hidden", nargs="+", type=int, default=[2, 128, 2], help="of the control")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    pyro.clear_param_store()
    data = load("MNIST", args.data_root, args.subset)
    net = Net(len(data.train), steps=args.steps, scale=args.scale, initial=args.initial)
    control = functools.partial(MLPControl, hidden=args.hidden)
    guide = AutoSDE(net, control=control, contraction=args.contraction)
    elbo = TraceSDE_ELBO(path_estimator=args.estimator)
    example = data.normalise(data.train.x[:2]), data.train.y[:2]
    classifier = Bayesian(net, guide, elbo, len(data.train), example)
    return train_and_report("sdebnn_mnist", classifier, data, args)


if __name__ == "__main__":
    main(parse())
