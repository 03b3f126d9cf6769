"""Strong convergence of every method on equations whose solution is known.

Left, a random ODE, dh/dt = w_t h along a Brownian path w: h = exp of its integral. The path is
known on the grid only, so no method's order exceeds 1. Middle, the same without noise: the order
of the method itself. Right, an SDE, dz = a z dt + b z dB, whose solution is an exponential of the
Brownian path, by steps of a path distribution, by torchsde's methods, and by tolerance().
"""

import argparse
import math

import pyro
import torch
from common import EXACT, INK, OTHER, POSTERIOR, THIRD, exponent, finish, parser, plt, save
from torch import Tensor
from tqdm import tqdm

from pyro_sde import tolerance
from pyro_sde.distributions import BrownianMotion, SDEPath
from pyro_sde.interop.torchsde import sample
from pyro_sde.solvers import METHODS, integrate

A, B, FINE = 0.5, 0.8, 13
THEIRS = ("euler", "milstein", "srk", "midpoint")


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def random_ode(noise: float, steps: list[int], paths: int) -> dict[str, list[float]]:
    """Errors of h(1) by method; w starts at 1 and has an integral known to 2^-13 of a step."""
    times = torch.linspace(0, 1, 2**FINE + 1, dtype=torch.float64)
    w = BrownianMotion(max(noise, 1e-12), times, torch.ones(1, dtype=torch.float64)).sample(
        (paths,)
    )
    exact = torch.trapezoid(w, times, dim=1).exp()
    start = torch.ones_like(exact)
    errors: dict[str, list[float]] = {}
    for method in METHODS:
        for n in steps:
            every = 2**FINE // n
            h = integrate(
                lambda t, h, w: w * h, start, w[:, ::every], times[::every], method=method
            )
            errors.setdefault(method, []).append(rms(h - exact))
    return errors


def brownian(paths: int) -> object:
    """One path of the noise for every step size."""
    import torchsde

    return torchsde.BrownianInterval(
        0.0, 1.0, size=(paths, 1), dtype=torch.float64, entropy=1, halfway_tree=True, tol=1e-30,
        cache_size=None, levy_area_approximation="space-time",
    )  # fmt: skip


def growth(times: Tensor) -> SDEPath:
    one = torch.ones(1, dtype=torch.float64)
    # Coarse steps of Euler's may lead below zero, where the diffusion is negative.
    return SDEPath(lambda t, z: A * z, lambda t, z: B * z, one, times, validate_args=False)


def sde(steps: list[int], paths: int) -> dict[str, list[float]]:
    """Errors of z(1); ours with the same increments as torchsde's."""
    noise = brownian(paths)
    exact = torch.exp((A - B**2 / 2) + B * noise(0.0, 1.0))
    errors: dict[str, list[float]] = {}
    for n in tqdm(steps, desc="torchsde"):
        times = torch.linspace(0, 1, n + 1, dtype=torch.float64)
        path = growth(times)
        eps = torch.stack([noise(i / n, (i + 1) / n) for i in range(n)]) * math.sqrt(n)
        start = torch.ones(paths, 1, dtype=torch.float64)
        z = path.draw(start, eps).value
        errors.setdefault("SDEPath", []).append(rms(z[:, -1] - exact))
        for method in THEIRS:
            z = sample(path, (paths,), method=method, dt=1 / n, brownian=brownian(paths))
            errors.setdefault(f"torchsde, {method}", []).append(rms(z[:, -1] - exact))
    return errors


def adaptive(tolerances: list[float], paths: int) -> tuple[list[float], list[float]]:
    """Evaluations and errors at each tolerance."""
    counts, errors = [], []
    for tol in tqdm(tolerances, desc="tolerance"):
        pyro.set_rng_seed(0)
        with tolerance(rtol=tol, atol=tol) as solved:
            z = growth(torch.tensor([0.0, 1.0], dtype=torch.float64)).sample((paths,))
            b = solved._refined[0].noise[0](0.0, 1.0)
        counts.append(float(solved.evaluations))
        errors.append(rms(z[:, -1] - torch.exp((A - B**2 / 2) + B * b)))
    return counts, errors


@torch.no_grad()
def main(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    pyro.set_rng_seed(args.seed)
    steps = [2**k for k in range(2, 2 + args.levels)]
    panels = {
        "random ODE, noise 1": random_ode(1.0, steps, args.particles),
        "the same without noise": random_ode(0.0, steps, 1),
        "SDE with multiplicative noise": sde(steps, args.particles),
    }
    orders = {k: {m: -exponent(steps, e) for m, e in v.items()} for k, v in panels.items()}
    for title, found in orders.items():
        print(f"{title}: " + ", ".join(f"{m} {o:.2f}" for m, o in found.items()))
    tolerances = [10.0**-k for k in range(1, args.digits + 1)]
    counts, errors = adaptive(tolerances, args.particles)
    for tol, n, e in zip(tolerances, counts, errors, strict=True):
        print(f"tolerance {tol:g}: {n:.0f} evaluations, error {e:.2g} = {e / tol:.2f} x tolerance")
    figure(args, steps, panels, orders, (counts, errors))
    ratio = {f"{t:g}": e / t for t, e in zip(tolerances, errors, strict=True)}
    return orders | {"error / tolerance": ratio}


def figure(
    args: argparse.Namespace, steps: list[int], panels: dict, orders: dict, refined: tuple
) -> None:
    fig, axes = plt.subplots(1, 3, figsize=(12, 5), layout="constrained")
    fig.suptitle("Strong convergence to known solutions; in brackets, the order that was measured")
    colors = (INK, POSTERIOR, OTHER, THIRD, EXACT)
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        for k, (method, e) in enumerate(lines.items()):
            label = f"{method} ({orders[title][method]:.1f})"
            # Where lines coincide, the wider ones are seen at the borders of those above them.
            style = {"color": colors[k], "marker": "osD^v"[k], "ms": 6 - k, "lw": 3.8 - 0.6 * k}
            ax.plot(steps, e, label=label, **style)
        ax.set_title(title, fontsize=11, pad=48)
        ax.set(xscale="log", yscale="log")
    axes[2].plot(*refined, "s--", ms=4, color="0.5", label="tolerance(), by evaluations")
    for ax in axes:
        finish(ax, 2, xlabel="steps (evaluations)" if ax is axes[2] else "steps")
    axes[0].set_ylabel("root mean square error at time 1")
    save(fig, args, "convergence.png")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, particles=200)
    p.add_argument("--levels", type=int, default=6, help="doublings of 4 steps, and one")
    p.add_argument("--digits", type=int, default=4, help="tolerances down to 10^-digits")
    return p.parse_args(argv)


if __name__ == "__main__":
    main(parse())
