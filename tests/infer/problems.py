"""One model and one guide in every layout, as paths and as chains of Normal sites."""

from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sde.distributions import ControlledPath

from ..cases import LIKELIHOODS, PROCESSES, TIMES, Net

OBSERVED = [1, 3, 5]
LAYOUTS = {
    "plain": ({"max_plate_nesting": 1}, False),
    "plate": ({"max_plate_nesting": 1}, True),
    "loop": ({"max_plate_nesting": 1, "num_particles": 2}, True),
    "loop_plain": ({"max_plate_nesting": 1, "num_particles": 2}, False),
    "vectorized_plain": (
        {"max_plate_nesting": 1, "num_particles": 3, "vectorize_particles": True},
        False,
    ),
    "vectorized": (
        {"max_plate_nesting": 2, "num_particles": 3, "vectorize_particles": True},
        True,
    ),
}

every_process = pytest.mark.parametrize("process", PROCESSES)
every_likelihood = pytest.mark.parametrize("likelihood", LIKELIHOODS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Problem:
    """One model and one guide, as paths and as chains of one Normal site a step."""

    def __init__(self, process, likelihood, layout, contraction=False):
        self.make = PROCESSES[process]
        self.likelihood, data = LIKELIHOODS[likelihood]
        self.data = torch.tensor(data)
        self.options, self.plate = LAYOUTS[layout]
        self.dim = self.make().event_shape[-1]
        self.net = Net(self.dim, 2 if contraction else 1)
        self.contraction = contraction

    def plates(self):
        stack = ExitStack()
        if self.plate:
            stack.enter_context(pyro.plate("series", 2, dim=-1))
        return stack

    def observe(self, z):
        x = z[..., OBSERVED, 0]
        pyro.sample("y", self.likelihood(x).to_event(1), obs=self.data)

    def control(self, t, z):
        out = self.net(t, z)
        return tuple(out.chunk(2, -1)) if self.contraction else out

    def posterior(self):
        pyro.module("net", self.net)
        prior = self.make()
        initial = None
        if not isinstance(prior.initial, torch.Tensor):
            loc = pyro.param("q_loc", torch.full((self.dim,), 0.2))
            scale = pyro.param("q_scale", torch.ones(self.dim), dist.constraints.positive)
            initial = dist.Normal(loc, 0.5 * scale).to_event(1)
        return ControlledPath(prior, self.control, initial, self.contraction)

    def model(self):
        with self.plates():
            self.observe(pyro.sample("z", self.make()))

    def guide(self):
        with self.plates():
            pyro.sample("z", self.posterior())

    def as_chain(self, values):
        """The same pair with a Normal site a step, drawing the noise that made ``values``."""
        draws = iter(values)

        def guide():
            q, value = self.posterior(), next(draws)
            z = None
            with self.plates():
                for i, step in enumerate(_steps(q, value)):
                    z = (
                        q.initial.expand(value[..., 0, :].shape)
                        if step is None
                        else (pyro.sample(f"z_{i}", step(z)))
                    )

        def model():
            p, states = self.make(), []
            with self.plates():
                if isinstance(p.initial, torch.Tensor):
                    shape = next(iter(values))[..., 0, :].shape
                    states.append(p.initial.expand(shape))
                else:
                    states.append(pyro.sample("z_0", p.initial))
                for i in range(len(TIMES) - 1):
                    dt = TIMES[i + 1] - TIMES[i]
                    mean, scale = p.transition(TIMES[i], dt, states[-1])
                    states.append(pyro.sample(f"z_{i + 1}", dist.Normal(mean, scale).to_event(1)))
                self.observe(torch.stack(states, -2))

        return model, guide


class Given(dist.Normal):
    """A Normal that draws a given noise."""

    def expand(self, batch_shape, _instance=None):
        new = super().expand(batch_shape, _instance)
        new.eps = self.eps
        return new

    def rsample(self, sample_shape=()):
        return self.loc + self.scale * self.eps


def given(mean, scale, target):
    d = Given(mean, scale)
    d.eps = ((target - mean) / scale).detach()
    return d.to_event(1)


def _steps(q, value):
    start = q.initial
    if isinstance(start, torch.Tensor):
        yield None
    else:
        base = start.base_dist
        yield lambda z: given(base.loc, base.scale, value[..., 0, :].detach())
    for i in range(len(TIMES) - 1):
        dt = TIMES[i + 1] - TIMES[i]
        target = value[..., i + 1, :].detach()
        yield lambda z, i=i, dt=dt, target=target: given(*q.transition(TIMES[i], dt, z), target)


def drawn_by(elbo_class, **options):
    """An ELBO that keeps the paths of its traces."""

    class Spy(elbo_class):
        def _get_trace(self, *args):
            traces = super()._get_trace(*args)
            self.values.append(traces[1].nodes["z"]["value"])
            return traces

    spy = Spy(**options)
    spy.values = []
    return spy
