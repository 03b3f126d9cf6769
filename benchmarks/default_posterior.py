"""What AutoSDE(model) gives without options, beside the exact answer.

Problems whose evidence or posterior widths are known: by quadrature of the states or of the
parameters, by a particle filter, or in closed form. Each is trained by fit with its defaults, 16
particles and 1500 steps. One line says how far the bound is below the evidence, in nats with its
standard error; how wide the posterior is, over the exact width; and what the importance check says.

Run: python benchmarks/default_posterior.py [--only NAME ...] [--seeds 3]
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_sde import AutoSDE, TraceSDE_ELBO
from pyro_sde.diagnostics import ImportanceCheck, importance
from pyro_sde.distributions import OrnsteinUhlenbeck, SDEPath, Stack
from pyro_sde.training import fit

STEPS, PARTICLES = 1500, 16


@dataclass
class Problem:
    """A model, its data, and what is known of its posterior."""

    model: Callable
    data: Tensor
    evidence: float
    of_sites: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda draws: {}
    """From draws of the latents to those numbers whose standard deviation is known."""
    widths: dict[str, float] = field(default_factory=dict)
    evidence_error: float = 0.0
    """The standard error of an evidence that was estimated."""


def filter_1d(
    states: Tensor, step: Callable[[int], Tensor], start: Tensor, log_lik: dict[int, Tensor]
) -> float:
    """The log evidence of a chain in one dimension, by quadrature on a grid of states.

    :param step: From the number of a step to log p(state after | state before), (before, after).
    :param start: log p of the state at t_0, on the grid; or its weights.
    :param log_lik: From the number of a grid point to the log likelihood of its observation.
    """
    h = (states[1] - states[0]).log()
    log_p, total = start, 0.0
    for i in range(max(log_lik)):
        log_p = torch.logsumexp(log_p.unsqueeze(-1) + step(i) + h, 0)
        if i + 1 in log_lik:
            log_p = log_p + log_lik[i + 1]
            norm = torch.logsumexp(log_p + h, 0)
            total, log_p = total + norm.item(), log_p - norm
    return total


def _one_dimension(
    drift: Callable,
    diffusion: Callable,
    z0: float,
    times: Tensor,
    noise: float,
    y: Tensor,
    at: list,
) -> Problem:
    """An SDE by Euler steps from a point, seen under Gaussian noise at the grid points ``at``."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", SDEPath(drift, diffusion, torch.tensor([z0]), times))
        law = dist.Normal(z[..., at, 0], noise).to_event(1)
        pyro.sample("y", law, obs=y)

    states = torch.linspace(-4.0, 6.0, 1601, dtype=torch.float64)
    dt = times.double().diff()

    def step(i: int, x: Tensor = states) -> Tensor:
        x = x.unsqueeze(-1)
        mean = x + drift(times[i], x) * dt[i]
        return dist.Normal(mean, diffusion(times[i], x) * dt[i].sqrt()).log_prob(states)

    log_lik = {
        i: dist.Normal(states, noise).log_prob(v) for i, v in zip(at, y.double(), strict=True)
    }
    first = step(0, torch.tensor([z0], dtype=torch.float64)).squeeze(0)
    if 1 in log_lik:
        raise ValueError("the first step is not observed here")
    h = states[1] - states[0]
    later = {i - 1: v for i, v in log_lik.items()}
    evidence = filter_1d(states, lambda i: step(i + 1), first, later)
    assert abs(torch.logsumexp(first + h.log(), 0)) < 1e-3
    return Problem(model, y, evidence)


def cir() -> Problem:
    def diffusion(t: Tensor, z: Tensor) -> Tensor:
        return 0.6 * z.clamp(min=0.05).sqrt()

    y, at = torch.tensor([1.6, 0.5, 1.2, 2.4, 0.7, 1.1]), [2, 4, 6, 8, 10, 12]
    times = torch.linspace(0.0, 3.0, 13)
    return _one_dimension(lambda t, z: 1.0 - z, diffusion, 1.0, times, 0.1, y, at)


def double_well() -> Problem:
    y, at = torch.tensor([0.9, -0.8, -1.1, 0.7]), [3, 6, 9, 12]
    times = torch.linspace(0.0, 3.0, 13)

    def diffusion(t: Tensor, z: Tensor) -> Tensor:
        return torch.full_like(z, 0.8)

    return _one_dimension(lambda t, z: z - z**3, diffusion, 0.5, times, 0.2, y, at)


def lotka_volterra() -> Problem:
    times, at = torch.linspace(0.0, 6.0, 13), list(range(2, 13, 2))
    counts = torch.tensor([[14.0, 5], [30, 8], [22, 24], [6, 19], [5, 8], [13, 4]])
    growth, contact, sign = torch.tensor([0.8, -0.8]), 0.08, torch.tensor([-1.0, 1.0])
    scale, start = 0.3, torch.tensor([2.3, 1.8])

    def drift(t: Tensor, z: Tensor) -> Tensor:
        return growth + sign * contact * z.clamp(max=6.0).exp().flip(-1)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", SDEPath(drift, scale, start, times))
        pyro.sample("y", dist.Poisson(z[..., at, :].clamp(max=8.0).exp()).to_event(2), obs=y)

    values = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        z, total = start.expand(200_000, 2), 0.0
        for i in range(12):
            dt = times[i + 1] - times[i]
            eps = torch.randn(z.shape, generator=generator)
            z = z + drift(times[i], z) * dt + scale * dt.sqrt() * eps
            if i + 1 in at:
                law = dist.Poisson(z.clamp(max=8.0).exp())
                log_w = law.log_prob(counts[at.index(i + 1)]).sum(-1)
                total += (torch.logsumexp(log_w, 0) - math.log(len(z))).item()
                z = z[torch.multinomial(log_w.softmax(0), len(z), True, generator=generator)]
        values.append(total)
    found = torch.tensor(values, dtype=torch.float64)
    evidence = torch.logsumexp(found, 0) - math.log(len(found))
    error = found.std().item() / math.sqrt(len(found))
    return Problem(model, counts, evidence.item(), evidence_error=error)


RATES, SCALES, SUM_NOISE = (0.3, 6.0), (0.7, 2.5), 0.1


def _ou_covariance(t: Tensor, rate: Tensor | float, scale: Tensor | float) -> Tensor:
    lag = (t.unsqueeze(-1) - t).abs()
    return torch.exp(-rate * lag) * scale**2 / (2 * rate)


def _sum_of_two(stack: bool) -> Problem:
    times = torch.linspace(0.0, 4.0, 41)
    at = list(range(2, 41, 2))
    t = times[at].double()
    K = sum(_ou_covariance(t, r, s) for r, s in zip(RATES, SCALES, strict=True))
    K = K + SUM_NOISE**2 * torch.eye(len(t), dtype=t.dtype)
    law = dist.MultivariateNormal(torch.zeros(len(t), dtype=t.dtype), K)
    torch.manual_seed(1)
    y = law.sample()

    def prior() -> OrnsteinUhlenbeck | Stack:
        if stack:
            pairs = zip(RATES, SCALES, strict=True)
            return Stack(*(OrnsteinUhlenbeck(r, 0.0, s, times) for r, s in pairs))
        return OrnsteinUhlenbeck(torch.tensor(RATES), 0.0, torch.tensor(SCALES), times)

    def model(y: Tensor) -> None:
        z = pyro.sample("z", prior())
        pyro.sample("y", dist.Normal(z[..., at, :].sum(-1), SUM_NOISE).to_event(1), obs=y)

    return Problem(model, y.float(), law.log_prob(y).item())


def ou_parameters() -> Problem:
    """Rate, scale and noise of an Ornstein-Uhlenbeck process, from 20 observations."""
    times = torch.linspace(0.0, 10.0, 21)
    t = times[1:].double()
    priors = {name: dist.LogNormal(math.log(m), s) for name, m, s in
              (("rate", 1.0, 0.5), ("scale", 1.0, 0.5), ("noise", 0.5, 0.5))}  # fmt: skip
    torch.manual_seed(0)
    K = _ou_covariance(t, 1.0, 1.0) + 0.5**2 * torch.eye(len(t), dtype=t.dtype)
    y = dist.MultivariateNormal(torch.zeros_like(t), K).sample()

    def model(y: Tensor) -> None:
        rate, scale, noise = (pyro.sample(k, p).unsqueeze(-1) for k, p in priors.items())
        z = pyro.sample("z", OrnsteinUhlenbeck(rate, 0.0, scale, times))
        pyro.sample("y", dist.Normal(z[..., 1:, 0], noise).to_event(1), obs=y)

    axes = [torch.linspace(m - 5 * 0.5, m + 5 * 0.5, 61, dtype=t.dtype)
            for m in (0.0, 0.0, math.log(0.5))]  # fmt: skip
    logs = torch.cartesian_prod(*axes)
    log_p = torch.zeros(len(logs), dtype=t.dtype)
    for k, m in enumerate((0.0, 0.0, math.log(0.5))):
        log_p += dist.Normal(m, 0.5).log_prob(logs[:, k]).to(t.dtype)
    for part in torch.arange(len(logs)).split(5000):
        rate, scale, noise = (x.reshape(-1, 1, 1) for x in logs[part].exp().unbind(-1))
        K = _ou_covariance(t, rate, scale) + noise**2 * torch.eye(len(t), dtype=t.dtype)
        log_p[part] += dist.MultivariateNormal(torch.zeros_like(t), K).log_prob(y)
    cell = math.log(math.prod((a[1] - a[0]).item() for a in axes))
    evidence = torch.logsumexp(log_p, 0) + cell
    weights = (log_p + cell - evidence).exp()
    mean = weights @ logs
    sd = (weights @ (logs - mean).square()).sqrt().tolist()
    widths = dict(zip(priors, sd, strict=True))
    return Problem(model, y.float(), evidence.item(),
                   lambda d: {k: d[k].log() for k in priors}, widths)  # fmt: skip


def location(seed: int) -> Problem:
    """The long-run mean of a process that is observed from t_0 on."""
    times = torch.linspace(0.0, 4.0, 17)
    t = times.double()
    torch.manual_seed(seed)
    K = _ou_covariance(t, 1.0, 1.0) + 0.1**2 * torch.eye(len(t), dtype=t.dtype) + 4.0
    law = dist.MultivariateNormal(torch.zeros_like(t), K)
    y = law.sample()

    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 2.0)).unsqueeze(-1)
        z = pyro.sample("z", OrnsteinUhlenbeck(1.0, loc, 1.0, times))
        pyro.sample("y", dist.Normal(z[..., 0], 0.1).to_event(1), obs=y)

    ones = torch.ones_like(t)
    sd = math.sqrt(4.0 - 16.0 * (ones @ torch.linalg.solve(K, ones)).item())
    return Problem(
        model, y.float(), law.log_prob(y).item(), lambda d: {"loc": d["loc"]}, {"loc": sd}
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "CIR": cir,
    "double well": double_well,
    "Lotka-Volterra": lotka_volterra,
    "sum, one site": lambda: _sum_of_two(False),
    "sum, Stack": lambda: _sum_of_two(True),
    "OU parameters": ou_parameters,
    "location": lambda: location(3),  # half a standard deviation of the prior away
    "far location": lambda: location(0),  # 2.7 of them
}


@dataclass
class Found:
    gap: float
    error: float
    ratios: dict[str, float]
    """Width of the guide over the exact one."""
    check: ImportanceCheck
    off: float
    """The importance check's log evidence less the exact one, in standard errors."""


def train(problem: Problem, seed: int, args: argparse.Namespace, **options: object) -> Found:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoSDE(problem.model, **options)
    elbo = TraceSDE_ELBO(num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=0)
    fit(problem.model, guide, problem.data, steps=args.steps, elbo=elbo, progress=args.progress)
    return evaluate(problem, guide)


def evaluate(problem: Problem, guide: AutoSDE) -> Found:
    elbo = TraceSDE_ELBO(num_particles=20_000, vectorize_particles=True, max_plate_nesting=0)
    values = torch.tensor([])
    with torch.no_grad():
        for p, q in elbo._get_traces(problem.model, guide, (problem.data,), {}):
            log_p = sum(s["log_prob"] for s in p.nodes.values() if s["type"] == "sample")
            log_q = sum(s["log_prob"] for s in q.nodes.values() if s["type"] == "sample")
            values = (log_p - log_q).double()
            draws = {k: s["value"] for k, s in q.nodes.items() if s["type"] == "sample"}
    gap = problem.evidence - values.mean().item()
    sds = {k: x.std().item() for k, x in problem.of_sites(draws).items()}
    ratios = {k: sds[k] / sd for k, sd in problem.widths.items()}
    check = importance(problem.model, guide, problem.data)
    error = math.hypot(check.log_evidence.error, problem.evidence_error)
    off = (check.log_evidence.value - problem.evidence) / error
    return Found(gap, values.std().item() / math.sqrt(len(values)), ratios, check, off)


def main(args: argparse.Namespace) -> dict[str, list[Found]]:
    torch.set_num_threads(1)
    table = {}
    for name in args.only or PROBLEMS:
        problem = PROBLEMS[name]()
        table[name] = [train(problem, seed, args) for seed in range(args.seeds)]
        for found in table[name]:
            widths = ", ".join(f"{k} {x:.2f}" for k, x in found.ratios.items())
            print(f"{name:15s} gap {found.gap:.3f} ± {found.error:.3f}  {widths}")
            print(f"{'':15s} {found.check.line} ({found.off:+.1f} errors off)", flush=True)
    return table


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--only", nargs="+", choices=list(PROBLEMS))
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--no-progress", dest="progress", action="store_false")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
