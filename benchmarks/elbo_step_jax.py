"""The contestants of elbo_step.py that need jax, in a process and an environment of their own.

Answers requests, one line of JSON each, on standard input: a problem with the weights of its
control; then, for a contestant, the seconds of so many gradients, or its loss on given noise.

Run: python benchmarks/elbo_step_jax.py THREADS
"""

import json
import math
import os
import sys
import time
from typing import Any

# Before jax counts the processors.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])

import diffrax
import jax
import jax.numpy as jnp

Weights = list[jax.Array]


def first_bias(weights: Weights, t: jax.Array) -> jax.Array:
    features = jnp.stack([jnp.sin(math.pi * t), jnp.cos(math.pi * t)], -1)
    return features @ weights[0][:, :2].T + weights[1]


def control(weights: Weights, bias: jax.Array, z: jax.Array) -> jax.Array:
    first, _, second, b, last, c = weights
    h = jnp.tanh(z @ first[:, 2:].T + bias)
    return jnp.tanh(h @ second.T + b) @ last.T + c


class Increments(diffrax.AbstractTerm):
    """scale dB for the state, nothing for its KL."""

    scale: float
    path: diffrax.AbstractBrownianPath

    def vf(self, t: Any, y: Any, args: Any) -> Any:
        return self.scale

    def contr(self, t0: Any, t1: Any, **kwargs: Any) -> jax.Array:
        return self.path.evaluate(t0, t1)

    def prod(self, vf: Any, control: jax.Array) -> Any:
        return vf * control, jnp.zeros(control.shape[0], control.dtype)


class Given(diffrax.AbstractBrownianPath):
    """A Brownian motion whose increments are known, at the steps of a grid over [0, 1]."""

    increments: jax.Array
    levy_area = diffrax.BrownianIncrement

    @property
    def t0(self) -> float:
        return 0.0

    @property
    def t1(self) -> float:
        return 1.0

    def evaluate(self, t0: Any, t1: Any = None, left: bool = True, use_levy: bool = False) -> Any:
        return self.increments[jnp.round(t0 * len(self.increments)).astype(int)]


class Problem:
    def __init__(self, problem: dict[str, Any], weights: list, constants: list[float]) -> None:
        self.steps, self.dim, self.particles = (problem[k] for k in ("steps", "dim", "particles"))
        self.batch, self.everywhere = self.particles * problem["series"], problem["everywhere"]
        self.rate, self.scale, self.noise, self.y = constants
        self.weights = [jnp.asarray(w) for w in weights]
        self.times = jnp.linspace(0.0, 1.0, self.steps + 1)
        self.start = jnp.zeros((self.batch, self.dim)), jnp.zeros(self.batch)

    def loss(self, kl: jax.Array, z: jax.Array) -> jax.Array:
        log_likelihood = jax.scipy.stats.norm.logpdf(self.y, z, self.noise).sum()
        return (kl.sum() - log_likelihood) / self.particles

    def scan(self, weights: Weights, noise: jax.Array) -> jax.Array:
        dt = 1 / self.steps
        biases = first_bias(weights, self.times[:-1])

        def step(state: Any, given: Any) -> Any:
            (z, kl), (bias, eps) = state, given
            u = control(weights, bias, z)
            z = z + dt * (self.scale * u - self.rate * z) + self.scale * math.sqrt(dt) * eps
            return (z, kl + 0.5 * dt * jnp.square(u).sum(-1)), z if self.everywhere else None

        (z, kl), zs = jax.lax.scan(step, self.start, (biases, noise))
        return self.loss(kl, zs if self.everywhere else z)

    def diffrax(self, weights: Weights, path: diffrax.AbstractBrownianPath) -> jax.Array:
        def drift(t: Any, y: Any, weights: Weights) -> Any:
            u = control(weights, first_bias(weights, t), y[0])
            return self.scale * u - self.rate * y[0], 0.5 * jnp.square(u).sum(-1)

        found = diffrax.diffeqsolve(
            diffrax.MultiTerm(diffrax.ODETerm(drift), Increments(self.scale, path)),
            diffrax.Euler(),
            *(0.0, 1.0, None, self.start, weights),
            saveat=diffrax.SaveAt(steps=True) if self.everywhere else diffrax.SaveAt(t1=True),
            stepsize_controller=diffrax.StepTo(ts=self.times),
            max_steps=self.steps,
        )
        z, kl = found.ys
        return self.loss(kl[-1], z)

    def drawn(self, name: str, weights: Weights, key: jax.Array) -> jax.Array:
        shape = (self.batch, self.dim)
        if name == "diffrax":
            tree = diffrax.VirtualBrownianTree(0.0, 1.0, 0.5 / self.steps, shape, key)
            return self.diffrax(weights, tree)
        return self.given(name, weights, jax.random.normal(key, (self.steps, *shape)))

    def given(self, name: str, weights: Weights, noise: jax.Array) -> jax.Array:
        if name == "hand-written jax scan":
            return self.scan(weights, noise)
        return self.diffrax(weights, Given(noise / math.sqrt(self.steps)))


class Server:
    def __init__(self) -> None:
        self.problem: Any = None
        self.gradients: dict[str, Any] = {}
        self.calls = 0

    def set(self, problem: dict, weights: list, constants: list[float]) -> dict:
        self.problem, self.gradients = Problem(problem, weights, constants), {}
        return {}

    def time(self, name: str, calls: int) -> dict[str, float]:
        p = self.problem
        if name not in self.gradients:
            self.gradients[name] = jax.jit(jax.value_and_grad(lambda w, k: p.drawn(name, w, k)))
        keys = [jax.random.key(self.calls + i) for i in range(calls)]
        self.calls += calls
        start = time.perf_counter()
        for key in jax.block_until_ready(keys):
            jax.block_until_ready(self.gradients[name](p.weights, key))
        return {"seconds": (time.perf_counter() - start) / calls}

    def check(self, name: str, noise: list) -> dict[str, Any]:
        """Loss, and its gradient by the weights of the last layer."""
        p = self.problem
        gradient = jax.jit(jax.value_and_grad(lambda w, noise: p.given(name, w, noise)))
        loss, by = gradient(p.weights, jnp.asarray(noise))
        return {"loss": float(loss), "gradient": by[4].tolist()}


if __name__ == "__main__":
    server = Server()
    print(json.dumps({"version": f"jax {jax.__version__}, diffrax {diffrax.__version__}"}))
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:  # the one who asks decides what becomes of it
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
