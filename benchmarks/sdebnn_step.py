"""What one training step of the MNIST SDE-BNN costs beside the same network written by hand.

Loss and gradient of one mini-batch, interleaved in one run: the bare loop of functional_call
steps along a path of weights that is given; the same with the weights' SDE and its KL written out;
pyro_sde with each estimator; and torchsde.sdeint on the joint state [h, w, kl] of the paper.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from baselines.build import sde_bnn
from common.images import Data, Images

from pyro_sde import TraceSDE_ELBO

SCALE = 0.1
BARE, TUNED = "bare loop, SDE and KL by hand", "torchsde, joint state"


class ByHand(nn.Module):
    """The network of the SDE-BNN with its weights' SDE in Euler steps, without Pyro."""

    def __init__(self, classifier: nn.Module, steps: int) -> None:
        super().__init__()
        net, guide = classifier.model.net, classifier.guide
        block = net[3]
        self.stem, self.head, self.block = net[:3], net[5], block
        self.control = guide.paths.net.get_submodule("3").w.control
        self.field, self.steps = block.skeleton.field, steps
        self.names = [names[0] for names in block.skeleton.names]
        self.shapes = block.skeleton.shapes
        self.sizes = [s.numel() for s in self.shapes]

    def step(self, h: Tensor, w: Tensor) -> Tensor:
        """dh/dt."""
        parts = zip(self.names, w.split(self.sizes), self.shapes, strict=True)
        return functional_call(self.field, {n: p.view(s) for n, p, s in parts}, (h,))

    def given(self, x: Tensor, y: Tensor, path: Tensor) -> Tensor:
        h = self.stem(x)
        for w in path.unbind(0)[: self.steps]:
            h = h + self.step(h, w) / self.steps
        return F.cross_entropy(self.head(h.flatten(1)), y)

    def drawn(self, x: Tensor, y: Tensor, size: int) -> Tensor:
        dt = 1 / self.steps
        control = self.control.on_grid(torch.arange(self.steps).unsqueeze(-1) * dt)
        h, w, kl = self.stem(x), self.block.start, x.new_zeros(())
        noise = torch.randn(self.steps, len(w))
        for i in range(self.steps):
            u = control.at(i, w)
            h = h + dt * self.step(h, w)
            kl = kl + 0.5 * dt * u.square().sum()
            w = w + dt * (SCALE * u - w) + SCALE * dt**0.5 * noise[i]
        return F.cross_entropy(self.head(h.flatten(1)), y) + kl / size


class Joint(nn.Module):
    """The same for torchsde: one row [h, w, kl], noise on w alone."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, net: ByHand, shape: torch.Size) -> None:
        super().__init__()
        self.net, self.shape = net, shape
        self.split = [shape.numel(), sum(net.sizes), 1]

    def f(self, t: Tensor, state: Tensor) -> Tensor:
        h, w, _ = state[0].split(self.split)
        u = self.net.control(t.reshape(1), w)
        dh = self.net.step(h.view(self.shape), w).flatten()
        return torch.cat([dh, SCALE * u - w, 0.5 * u.square().sum().view(1)]).unsqueeze(0)

    def g(self, t: Tensor, state: Tensor) -> Tensor:
        zero = state.new_zeros(self.split[0])
        return torch.cat([zero, state.new_full((self.split[1],), SCALE), zero[:1]]).unsqueeze(0)

    def forward(self, x: Tensor, y: Tensor, size: int) -> Tensor:
        import torchsde

        h = self.net.stem(x)
        start = torch.cat([h.flatten(), self.net.block.start, h.new_zeros(1)]).unsqueeze(0)
        dt = 1 / self.net.steps
        noise = torchsde.BrownianInterval(0.0, 1.0, size=start.shape, dt=dt)
        times = torch.tensor([0.0, 1.0])
        end = torchsde.sdeint(self, start, times, bm=noise, method="euler", dt=dt)[-1, 0]
        h, _, kl = end.split(self.split)
        return F.cross_entropy(self.net.head(h.view(len(x), -1)), y) + kl.squeeze() / size


def competitors(batch: int, steps: int, compile: bool = False) -> dict[str, Callable[[], Tensor]]:
    """Losses by name; the first is what the others are measured by.

    :param compile: Ours compiled, too. It has parameters of the same names: clear the store.
    """
    x = torch.randint(0, 256, (batch, 1, 28, 28), dtype=torch.uint8)
    images = Images(x, torch.randint(0, 10, (batch,)))
    data = Data("MNIST", images, images, images)
    x, y, size = data.normalise(x), images.y, len(images)
    pyro.clear_param_store()
    classifier = sde_bnn(data, steps=steps, scale=SCALE)
    by_hand = ByHand(classifier, steps)
    path = by_hand.block.start.detach() + SCALE * torch.randn(steps, by_hand.block.dim)
    path.requires_grad_()
    with torch.no_grad():
        joint = Joint(by_hand, by_hand.stem(x).shape)

    def ours(estimator: str, net: nn.Module = classifier) -> Callable[[], Tensor]:
        elbo = TraceSDE_ELBO(path_estimator=estimator)
        return lambda: elbo.differentiable_loss(net.model, net.guide, x, y) / size

    more = {}
    if compile:
        pyro.clear_param_store()
        fast = sde_bnn(data, steps=steps, scale=SCALE, compile=True)
        fast.load_state_dict(classifier.state_dict())
        more = {f'pyro_sde, "{name}", compiled': ours(name, fast) for name in ("kl", "stl")}
    return {
        "bare loop, weights given": lambda: by_hand.given(x, y, path),
        BARE: lambda: by_hand.drawn(x, y, size),
        'pyro_sde, "kl"': ours("kl"),
        'pyro_sde, "full"': ours("full"),
        'pyro_sde, "stl"': ours("stl"),
        **more,
        TUNED: lambda: joint(x, y, size),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--repeats", type=int, default=40)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--compile", action="store_true", help="ours with compile=True too")
    return p.parse_args(argv)


def main(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    random.seed(0)
    losses = competitors(args.batch, args.steps, args.compile)
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for i in range(args.repeats + 2):
        # In another order every round: what one leaves in the caches is felt by the next.
        for name, loss in random.sample(list(losses.items()), len(losses)):
            if args.compile:
                pyro.clear_param_store()
            start = time.process_time()
            loss().backward()
            if i > 1:
                seconds[name].append(time.process_time() - start)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    first = median[next(iter(median))]
    print(f"batch {args.batch}, {args.steps} steps, 18,496 weights; {args.threads} thread(s)")
    for name, s in median.items():
        print(f"{name:32s} {1000 * s:8.1f} ms {s / first:7.2f} x bare loop")
    return {name: s / first for name, s in median.items()}


if __name__ == "__main__":
    main(parse())
