"""Models drawn at random, for the laws that every model must obey."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from hypothesis import strategies as st
from torch import nn

from pyro_sde import AutoSDE, MLPControl, select
from pyro_sde.distributions import (
    BrownianMotion,
    ControlledPath,
    GeometricBrownianMotion,
    OrnsteinUhlenbeck,
    SDEPath,
)
from pyro_sde.nn import NeuralDiffusion, NeuralDrift

LIKELIHOODS = {
    "normal": lambda x: dist.Normal(x, 0.3),
    "laplace": lambda x: dist.Laplace(x, 0.4),
    "cauchy": lambda x: dist.Cauchy(x, 0.3),
    "student-t": lambda x: dist.StudentT(3.0, x, 0.3),
    "poisson": lambda x: dist.Poisson(0.1 + nn.functional.softplus(x)),
    "categorical": lambda x: dist.Categorical(logits=torch.stack([x, x.cos(), -x], -1)),
}
PROCESSES = ("ou", "brownian", "geometric", "sde", "neural", "learned", "pushed")
CONTROLS = {"mlp": partial(MLPControl, hidden=(4, 3), features=2, embedding=3), "own": None}


class Own(nn.Module):
    """A control with nothing but a call."""

    def __init__(self, dim, contraction):
        super().__init__()
        self.net = nn.Linear(dim + 1, dim * (1 + contraction))
        self.contraction = contraction

    def forward(self, t, z):
        out = torch.tanh(self.net(torch.cat([t.expand(z.shape[:-1] + (1,)), z], -1)))
        return tuple(out.chunk(2, -1)) if self.contraction else out


@dataclass(frozen=True)
class Case:
    seed: int
    process: str
    initial: str
    likelihood: str
    control: str
    latent: str
    dim: int
    steps: tuple[int, ...]
    plates: tuple[int, ...]
    own_times: bool
    observed: tuple[int, ...]
    masked: bool
    contraction: bool
    particles: int
    vectorized: bool
    single: bool
    memory: str

    def start(self) -> Case:
        """Everything that is global, as this case needs it."""
        torch.set_default_dtype(torch.float32 if self.single else torch.float64)
        pyro.clear_param_store()
        pyro.set_rng_seed(self.seed)
        steps = 0.025 * torch.tensor(self.steps, dtype=torch.get_default_dtype())
        times = nn.functional.pad(steps.cumsum(0), (1, 0)) - 0.3
        if self.own_times and self.plates:
            times = times * torch.linspace(1, 2, self.plates[0]).unsqueeze(-1)
        state = {
            "times": times,
            "at": times[..., sorted({k % times.shape[-1] for k in self.observed})],
            "drift": NeuralDrift(self.dim, (3,), time=True),
            "diffusion": NeuralDiffusion(self.dim, 2),
        }
        shape = self.plates[::-1] + state["at"].shape[-1:]
        state["y"] = LIKELIHOODS[self.likelihood](torch.randn(shape)).sample()
        state["mask"] = torch.rand(shape) < 0.6
        for name, value in state.items():
            object.__setattr__(self, name, value)
        return self

    def tolerance(self) -> float:
        """Some 1e4 roundings: densities of short steps are differences of large numbers."""
        return 2e-3 if self.single else 1e-8

    def batch(self) -> ExitStack:
        stack = ExitStack()
        for i, size in enumerate(self.plates):
            stack.enter_context(pyro.plate(f"plate_{i}", size, dim=-1 - i))
        return stack

    def law(self, scale):
        """The process, with parameters to be learned."""
        one, times, kind = torch.ones(self.dim), self.times, self.process
        slope = pyro.param("slope", 0.7 * one, dist.constraints.positive)
        start = pyro.param("start", 0.3 * one)
        options = {"memory": self.memory}
        if kind == "geometric":
            wide = dist.LogNormal(start, 0.4 * one).to_event(1)
            start = start.exp() if self.initial == "point" else wide
            return GeometricBrownianMotion(scale * one, times, start, slope, **options)
        if self.initial != "point":
            start = dist.Normal(start, 0.5 * one).to_event(1)
        if kind in ("ou", "pushed"):
            start = None if self.initial == "stationary" else start
            path = OrnsteinUhlenbeck(slope, 0.2, scale * one, times, start, **options)
            return path if kind == "ou" else ControlledPath(path, lambda t, z: torch.sin(3 * z) - t)
        if kind == "brownian":
            return BrownianMotion(scale * one, times, start, slope, **options)
        if kind == "neural":
            pyro.module("drift", self.drift)
            pyro.module("diffusion", self.diffusion)
            g = self.diffusion
            return SDEPath(self.drift, lambda t, z: scale * g(t, z), start, times, **options)
        if kind == "learned":
            pyro.module("drift", self.drift)
            return SDEPath(self.drift, scale * one, start, times, **options)
        return SDEPath(
            lambda t, z: slope * torch.sin(2 * z) - t,
            lambda t, z: scale * (0.5 + torch.sigmoid(z)),
            start,
            times,
            **options,
        )

    def model(self, y, mask) -> None:
        scale = torch.tensor(0.8)
        if self.latent == "global":
            scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3)).unsqueeze(-1)
        with self.batch():
            if self.latent == "local":
                scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3)).unsqueeze(-1)
            z = pyro.sample("z", self.law(scale))
            likelihood = LIKELIHOODS[self.likelihood](select(z, self.times, self.at)[..., 0])
            if self.masked:
                likelihood = likelihood.mask(mask)
            pyro.sample("y", likelihood.to_event(1), obs=y)

    def guide(self) -> AutoSDE:
        """One that is not at its start."""
        control = CONTROLS[self.control] or Own(self.dim, self.contraction)
        guide = AutoSDE(self.model, control=control, contraction=self.contraction)
        guide.setup(self.y, self.mask)
        with torch.no_grad():
            for p in guide.parameters():
                p.add_(0.3 * torch.randn_like(p))
        return guide

    def options(self) -> dict:
        return {
            "num_particles": self.particles,
            "vectorize_particles": self.vectorized,
            "max_plate_nesting": len(self.plates),
        }


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**20),
    process=st.sampled_from(PROCESSES),
    initial=st.sampled_from(("point", "normal", "stationary")),
    likelihood=st.sampled_from(tuple(LIKELIHOODS)),
    control=st.sampled_from(tuple(CONTROLS)),
    latent=st.sampled_from(("none", "global", "local")),
    dim=st.integers(1, 3),
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple),
    plates=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    own_times=st.booleans(),
    observed=st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple),
    masked=st.booleans(),
    contraction=st.booleans(),
    particles=st.integers(1, 3),
    vectorized=st.booleans(),
    single=st.booleans(),
    memory=st.sampled_from(("graph", "graph", "recompute")),
)
