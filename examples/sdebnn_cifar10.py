"""An infinitely deep Bayesian neural net of two scales on CIFAR-10.

Two SDEBlocks, each with a process of its own over the weights of the paper's convolutional field
(strided and transposed convolutions, time-conditional), with a squeeze of space into channels
between them. `--data-root` is a folder with cifar10.npz or torchvision's own files, or the .npz.
"""

import argparse

import pyro
import pyro.distributions as dist
import torch
from common.classify import Bayesian
from common.images import load
from common.report import image_parser, train_and_report
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.nn import ConvField, SDEBlock


class Net(PyroModule):
    """16 x 16 x 24, then 8 x 8 x 96: a block at each scale, and a linear head.

    :param size: How many training images there are.
    :param options: Those of the SDEBlocks.
    """

    def __init__(self, size: int, **options) -> None:
        super().__init__()
        self.size = size
        self.stem = nn.Conv2d(3, 24, 3, stride=2, padding=1)
        self.fine = SDEBlock(ConvField(24, 32), **options)
        self.squeeze = nn.PixelUnshuffle(2)
        self.coarse = SDEBlock(ConvField(96, 64), **options)
        self.head = nn.Linear(8 * 8 * 96, 10)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.fine(self.stem(x))
        h = self.coarse(self.squeeze(h))
        logits = self.head(h.flatten(-3))
        with pyro.plate("data", self.size, subsample=x):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        return logits


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return image_parser(__doc__, epochs=10).parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    pyro.clear_param_store()
    data = load("CIFAR10", args.data_root, args.subset)
    net = Net(len(data.train), steps=args.steps, scale=args.scale)
    guide = AutoSDE(net)
    elbo = TraceSDE_ELBO(path_estimator=args.estimator)
    example = data.normalise(data.train.x[:2]), data.train.y[:2]
    classifier = Bayesian(net, guide, elbo, len(data.train), example)
    return train_and_report("sdebnn_cifar10", classifier, data, args, pixels=4, flip=True)


if __name__ == "__main__":
    main(parse())
