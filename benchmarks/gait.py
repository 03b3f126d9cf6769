"""A walk as a latent path: the model, its amortised guide, random windows, training, prediction."""

import argparse
import functools
import math
import time

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from tqdm import trange

from pyro_sde import AutoSDE, TraceSDE_ELBO, anneal_kl, kl_weight
from pyro_sde.distributions import ODEPath, SDEPath
from pyro_sde.guides.encoders import SummaryEncoder
from pyro_sde.nn import NeuralDiffusion, NeuralDrift
from pyro_sde.simulation.network import GridNetwork

GIVEN = 3  # frames that are seen
DT = 0.1  # time between two frames
FLOOR = 0.3  # degrees of noise: joints that hardly move would outweigh the others
CLIP = 1e3  # norm of the gradient, for each window
PERIODS, HARMONICS = torch.arange(110.0, 185.0, 0.5), 4  # of a walk, in frames


class Gait(PyroModule):
    """A latent path, one state every few frames, and what is measured of it."""

    def __init__(self, kind: str, unit: Tensor, args: argparse.Namespace) -> None:
        super().__init__()
        self.kind, self.dim = kind, args.dim
        self.drift = NeuralDrift(args.dim, (args.hidden,))
        with torch.no_grad():  # slow at first: 30 units of time are long for a random field
            for parameter in self.drift.net[-1].parameters():
                parameter.mul_(0.1)
        if kind == "sde":
            width = args.hidden if args.stateful else 0
            scale, floor = args.diffusion, args.floor
            self.diffusion = NeuralDiffusion(self.dim, width, scale=scale, floor=floor)
        self.decoder = nn.Sequential(
            nn.Linear(args.dim, args.hidden), nn.Softplus(), nn.Linear(args.hidden, len(unit))
        )
        self.register_buffer("unit", unit)
        self.log_noise = nn.Parameter(torch.ones(len(unit) if args.joints else ()))

    def decode(self, z: Tensor) -> Tensor:
        """What is measured of a walker whose state is ``z``, but for the noise."""
        return self.decoder(z) * self.unit

    def noise(self) -> Tensor:
        return self.log_noise.exp().clamp(min=FLOOR)

    def forward(
        self,
        frames: Tensor,
        times: Tensor,
        values: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """What is measured at ``times``, (n,), of series of which the guide reads ``frames``.

        :param values: The frames at those times, (series, n, 50), if they are known.
        :param mask: Which of them count, (series, n).
        """
        start = dist.Normal(torch.zeros(self.dim), 1.0).to_event(1)
        with pyro.plate("series", len(frames)):
            if self.kind == "sde":
                path = SDEPath(self.drift, self.diffusion, start, times)
            else:
                path = ODEPath(self.drift, start, times)
            z = pyro.sample("z", path)
            mean = self.decode(z)
            if values is not None:
                law = dist.Normal(mean, self.noise()).mask(mask.unsqueeze(-1))
                pyro.sample("y", law.to_event(2), obs=values)
        return mean


class Control(nn.Module):
    """u(z, context) with smooth units and without the time: a window may begin at any phase."""

    def __init__(
        self, dim: int, hidden: int, context: int, contraction: bool = False, **_: object
    ) -> None:
        super().__init__()
        self.contraction = contraction
        self.first, self.read = nn.Linear(dim, hidden), nn.Linear(context, hidden, bias=False)
        self.last = nn.Linear(hidden, 2 * dim if contraction else dim)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, t: Tensor, z: Tensor, context: Tensor) -> object:
        h = nn.functional.softplus(self.first(z) + self.read(context))
        out = self.last(h)
        return tuple(out.chunk(2, -1)) if self.contraction else out

    def on_grid(self, t: Tensor, context: Tensor) -> GridNetwork:
        bias = self.first.bias + self.read(context[:1])  # the same at all times
        last = (self.last.weight, self.last.bias)
        biases = [bias.expand(len(t), *bias.shape[1:])]
        return GridNetwork([self.first.weight], biases, last, self.contraction, "softplus")


class RenyiSDE_ELBO(TraceSDE_ELBO):
    """Renyi's bound of order 1 - ``power`` for each window, of which there are ``copies``.

    Power 1 is the importance weighted bound; towards 0 it becomes the ELBO. Three frames do not
    tell the cadence: the ELBO asks every path to be right on average, this one that some are.
    """

    def __init__(self, copies: int, power: float) -> None:
        super().__init__(path_estimator="full")
        self.copies, self.power = copies, power

    def differentiable_loss(
        self, model: Gait, guide: AutoSDE, seen: Tensor, times: Tensor, *frames: Tensor
    ) -> Tensor:
        seen, *frames = (x.repeat(self.copies, *[1] * (x.dim() - 1)) for x in (seen, *frames))
        [(p, q)] = self._get_traces(model, guide, (seen, times, *frames), {})
        log_weight = p.nodes["y"]["log_prob"] - q.nodes["z"]["log_prob"]
        powers = self.power * log_weight.unflatten(0, (self.copies, -1))
        return -(powers.logsumexp(0) - math.log(self.copies)).sum() / self.power


def times_of(args: argparse.Namespace, frames: int) -> Tensor:
    """Of the states: one every ``stride`` frames until the last frame, or just after it."""
    return DT * args.stride * torch.arange((frames - 2) // args.stride + 2)


def at(x: Tensor, rows: Tensor, position: Tensor) -> Tensor:
    """Frames between frames: sequences ``rows`` (B,) at positions (B, n), linear between."""
    left = position.floor().long().clamp(0, x.shape[1] - 2)
    weight = (position - left).clamp(0, 1).unsqueeze(-1)
    rows = rows.unsqueeze(-1)
    return torch.lerp(x[rows, left], x[rows, left + 1], weight)


def waves(cycles: Tensor, harmonics: int) -> Tensor:
    """A constant, sines and cosines of the first harmonics, (n, 1 + 2 harmonics)."""
    angle = 2 * math.pi * torch.arange(1, harmonics + 1) * cycles.unsqueeze(-1)
    return torch.cat([torch.ones_like(angle[:, :1]), angle.sin(), angle.cos()], -1)


def period(x: Tensor) -> float:
    """Of a sequence (frames, joints): the one whose harmonics leave the least of it."""

    def rest(p: Tensor) -> Tensor:
        basis = waves(torch.arange(len(x)) / p, HARMONICS).to(x)
        return (x - basis @ torch.linalg.lstsq(basis, x).solution).square().mean()

    return float(PERIODS[torch.stack([rest(p) for p in PERIODS]).argmin()])


def relative_periods(x: Tensor, args: argparse.Namespace) -> Tensor:
    """The period of each sequence in units of their mean, or 1 where all keep their own pace."""
    if not args.common:
        return torch.ones(len(x))
    periods = torch.tensor([period(one) for one in x.double()], dtype=x.dtype)
    return periods / periods.mean()


def windows(
    x: Tensor, periods: Tensor, unit: Tensor, times: Tensor, args: argparse.Namespace
) -> tuple[Tensor, ...]:
    """Random windows: begun anywhere, played a little faster or slower, until the sequence ends.

    The frames that are seen are as they were measured. What is to be predicted runs by the clock
    of the walker: three frames do not tell the pace, and a network that is asked for it learns by
    heart which posture had which.

    :param periods: Of the sequences, in units of their mean.
    :param unit: The spread of each joint, of which the noise is a share.
    :returns: Their first frames with noise, the times of the states, frames and mask there.
    """
    last = x.shape[1] - 1
    rows = torch.randint(len(x), (args.batch,))
    speed = args.speed * torch.exp(args.warp * torch.randn(args.batch, 1))
    start = torch.rand(args.batch, 1) * args.shift
    seen = at(x, rows, start + speed * torch.arange(GIVEN))
    seen = seen + args.jitter * unit * torch.randn_like(seen)
    seen = seen + args.offset * unit * torch.randn(args.batch, 1, x.shape[-1])
    position = start + speed * periods[rows].unsqueeze(-1) * times / DT
    seen = hide(seen, args.hide)
    return seen, times, at(x, rows, position), position <= last


def hide(frames: Tensor, share: float) -> Tensor:
    """Frames (series, n, joints) without a random share of the joints, in all of a series alike.

    Sixteen walkers are soon known by their posture, and a new one is then taken for one of them.
    An encoder that sees some joints only cannot know them as well, and paths that were told by
    different joints are wrong in different ways, which their mean is not.
    """
    if not share:
        return frames
    hidden = torch.rand(len(frames), 1, frames.shape[-1]) < share
    return frames.masked_fill(hidden, torch.nan)


def build(kind: str, x: Tensor, args: argparse.Namespace) -> tuple[Gait, AutoSDE]:
    """The model, and the guide that knows of each series its first frames alone."""
    model = Gait(kind, x.std((0, 1)), args)
    encoder = SummaryEncoder(x.shape[-1], args.hidden, args.context, GIVEN)

    def given(frames: Tensor, times: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return (DT * torch.arange(GIVEN)).expand(len(frames), -1), frames

    guide = AutoSDE(
        model,
        encoder=encoder,
        observations=given,
        control=functools.partial(Control, hidden=args.hidden),
        contraction=bool(args.contraction),
    )
    # Its units are those of whole sequences, read as so many triples.
    triples = x.unfold(1, GIVEN, GIVEN).flatten(0, 1).transpose(1, 2)
    guide.setup(triples, times_of(args, x.shape[1]))
    return model, guide


def train(kind: str, x: Tensor, seed: int, args: argparse.Namespace) -> tuple[Gait, AutoSDE, float]:
    """A model and its guide, and the seconds of processor time that they took."""
    torch.manual_seed(seed)
    pyro.clear_param_store()
    model, guide = build(kind, x, args)
    times, periods = times_of(args, x.shape[1]), relative_periods(x, args)
    elbo = TraceSDE_ELBO(path_estimator="kl")
    if args.copies > 1:
        elbo = RenyiSDE_ELBO(args.copies, args.power)
    parameters = [*model.parameters(), *guide.parameters()]
    optim = torch.optim.Adam(parameters, args.lr)
    rate = torch.optim.lr_scheduler.OneCycleLR(optim, args.lr, args.iterations, pct_start=0.1)
    begun = time.process_time()
    with trange(args.iterations, desc=f"{kind} {seed}", unit="step", mininterval=5) as bar:
        for i in bar:
            with anneal_kl(args.kl * kl_weight(i, args.anneal)):
                batch = windows(x, periods, model.unit, times, args)
                loss = elbo.differentiable_loss(model, guide, *batch)
            optim.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, CLIP * args.batch)
            optim.step()
            rate.step()
            if i % 50 == 49:
                noise = model.noise().mean().item()
                bar.set_postfix(loss=f"{loss.item() / args.batch:.1f}", noise=f"{noise:.2f}")
    return model, guide, time.process_time() - begun


@torch.no_grad()
def predict(
    model: Gait, guide: AutoSDE, x: Tensor, args: argparse.Namespace, frames: int
) -> Tensor:
    """Samples of the mean of every frame, (samples, series, frames, 50), given the first three."""
    times, n = times_of(args, frames), args.samples
    seen = hide(x[:, :GIVEN].repeat(n, 1, 1), args.hide)
    z = guide(seen, times)["z"]
    mean = model.decode(z)
    position = torch.arange(frames).expand(len(mean), -1) / args.stride
    return at(mean, torch.arange(len(mean)), position).unflatten(0, (n, -1))
