"""Draws architecture.svg: the folders, which of them know each other, and the way of the data."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

plt.switch_backend("Agg")
plt.rcParams["svg.fonttype"] = "none"  # text stays text
plt.rcParams["svg.hashsalt"] = "pyro_sde"  # the same file every time

INK, FILL, DATA = "#222222", "#e8eff7", "#d1495b"
BOXES = {  # name: (x, y, width, what it holds)
    "nn": (0.1, 2.5, 2.6, "SDEBlock: weights as a path\nNeuralDrift, NeuralDiffusion"),
    "guides": (3.9, 2.5, 2.6, "AutoSDE, MLPControl,\nGRUEncoder"),
    "forecasting, training": (7.7, 2.5, 2.6, "forecast, fit, metrics,\ndiagnostics, plotting"),
    "solvers": (0.1, 1.0, 2.6, "integrate: an ODE\nalong a drawn path"),
    "distributions": (3.9, 1.0, 2.6, "path measures:\ntransition, rsample, log_prob"),
    "infer": (7.7, 1.0, 2.6, "girsanov,\nTraceSDE_ELBO"),
    "series, times": (0.1, -0.5, 2.6, "pad_series, series_grid,\ntime_grid, select"),
    "your model": (3.9, -0.5, 2.6, "a prior path,\nany likelihood"),
    "Pyro's SVI": (7.7, -0.5, 2.6, "plates, particles,\noptimisers"),
}
YOURS = ("your model", "Pyro's SVI")
HEIGHT = 0.95
KNOWS = [
    ("nn", "solvers"),
    ("solvers", "distributions"),
    ("guides", "distributions"),
    ("infer", "distributions"),
    ("forecasting, training", "guides"),
]
DATA_FLOW = [("series, times", "your model"), ("your model", "Pyro's SVI")]


def main() -> None:
    fig, ax = plt.subplots(figsize=(9.4, 4.0))
    for name, (x, y, width, text) in BOXES.items():
        own = name in YOURS
        style = {"fc": "white" if own else FILL, "ec": DATA if own else INK, "lw": 1.0}
        ax.add_patch(FancyBboxPatch((x, y), width, HEIGHT, boxstyle="round,pad=0.06", **style))
        middle = x + width / 2
        ax.text(middle, y + 0.8, name, ha="center", va="center", weight="bold", size=11, color=INK)
        ax.text(middle, y + 0.32, text, ha="center", va="center", size=8.5, color=INK)
    for pairs, color, line in ((KNOWS, INK, "-"), (DATA_FLOW, DATA, "--")):
        for a, b in pairs:
            style = {"arrowstyle": "-|>", "mutation_scale": 13, "color": color, "ls": line}
            ax.add_patch(FancyArrowPatch(*ends(a, b), shrinkA=0, shrinkB=0, **style))
    ax.text(0.1, -0.95, "black: imports", color=INK, size=9)
    ax.text(3.9, -0.95, "red, dashed: the way of the data", color=DATA, size=9)
    ax.set(xlim=(-0.05, 10.45), ylim=(-1.1, 3.65))
    ax.axis("off")
    fig.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})


def ends(a: str, b: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """From the edge of one box to the edge of the other."""
    (xa, ya, wa, _), (xb, yb, wb, _) = BOXES[a], BOXES[b]
    gap = 0.08
    if abs(ya - yb) > 0.1 and xa == xb:
        up = yb > ya
        middle = xa + wa / 2
        start = ya + HEIGHT + gap if up else ya - gap
        return (middle, start), (middle, yb - gap if up else yb + HEIGHT + gap)
    right = xb > xa
    return (
        (xa + wa + gap if right else xa - gap, ya + HEIGHT / 2),
        (xb - gap if right else xb + wb + gap, yb + HEIGHT / 2),
    )


if __name__ == "__main__":
    main()
