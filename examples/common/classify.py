"""Classifiers to be trained and judged alike: a network, or a Pyro model with its guide."""

from collections.abc import Callable, Iterator
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 1000


class Deterministic(nn.Module):
    """An ordinary network from images to logits, by maximum likelihood."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def functions(self, x: Tensor, samples: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """The one function from images to logits."""
        yield self.net


class Bayesian(nn.Module):
    """A Pyro model of (x, y), its guide and an ELBO; the loss is the negative ELBO a datum.

    :param size: How many training images there are; the model's plate has that size.
    :param example: A mini-batch (x, y) that builds the parameters of the guide.
    """

    def __init__(
        self, model: nn.Module, guide: Any, elbo: Any, size: int, example: tuple[Tensor, Tensor]
    ) -> None:
        super().__init__()
        self.model, self.guide, self.elbo, self.size = model, guide, elbo, size
        with torch.random.fork_rng():
            guide(*example)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.elbo.differentiable_loss(self.model, self.guide, x, y) / self.size

    def functions(self, x: Tensor, samples: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """Functions from images to logits, one for each draw of the weights."""
        for _ in range(samples):
            weights = self.guide(x[:1])
            yield poutine.block(poutine.condition(self.model, data=weights))


class Categorical(pyro.nn.PyroModule):
    """A network from images to logits, with the likelihood of the labels.

    :param size: How many training images there are, to scale a mini-batch's likelihood.
    """

    def __init__(self, net: nn.Module, size: int) -> None:
        super().__init__()
        self.net, self.size = net, size

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.net(x)
        with pyro.plate("data", self.size, subsample=x):
            pyro.sample("y", pyro.distributions.Categorical(logits=logits), obs=y)
        return logits


@torch.no_grad()
def predict(classifier: nn.Module, x: Tensor, samples: int, prepare: Callable) -> Tensor:
    """Class probabilities averaged over draws of the weights, each draw for all images.

    :param prepare: From a slice of ``x`` to the input of the network.
    """
    classifier.eval()
    total: Any = 0.0
    draws = 0
    for function in classifier.functions(prepare(x[:1]), samples):
        parts = [F.softmax(function(prepare(b)).double(), -1) for b in x.split(BATCH)]
        total, draws = total + torch.cat(parts), draws + 1
    classifier.train()
    return total / draws
