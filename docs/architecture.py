"""Draws architecture.svg: the folders, which of them import each other, and the way of the data."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

plt.switch_backend("Agg")
plt.rcParams["svg.fonttype"] = "none"  # text stays text
plt.rcParams["svg.hashsalt"] = "pyro_sde"  # the same file every time

INK, FILL, DATA, INNER = "#222222", "#e8eff7", "#d1495b", "#ffffff"
LEFT, MIDDLE, RIGHT, WIDTH = 0.1, 3.9, 7.7, 2.8
WHOLE = RIGHT + WIDTH - LEFT
BOXES = {  # name: (x, y, width, height, what it holds)
    "series, times": (LEFT, 8.3, WIDTH, 1.0, "pad_series, series_grid,\ntime_grid, select"),
    "your model": (MIDDLE, 8.3, WIDTH, 1.0, "a path from a prior,\nany likelihood"),
    "Pyro's SVI": (RIGHT, 8.3, WIDTH, 1.0, "plates, particles,\noptimisers"),
    "interop": (LEFT, 6.8, WIDTH, 1.0, "to_arviz;\ntorchsde: sample, Joint"),
    "forecasting": (MIDDLE, 6.8, WIDTH, 1.0, "forecast;\nmetrics, plotting"),
    "training": (RIGHT, 6.8, WIDTH, 1.0, "fit, checkpoints;\ndiagnostics"),
    "nn": (LEFT, 5.3, WIDTH, 1.0, "SDEBlock, NeuralDrift,\nNeuralDiffusion"),
    "guides": (MIDDLE, 5.3, WIDTH, 1.0, "AutoSDE,\ncontrols, encoders"),
    "infer": (RIGHT, 5.3, WIDTH, 1.0, "girsanov, comparison,\nTraceSDE_ELBO"),
    "solvers": (LEFT, 3.8, WIDTH, 1.0, "integrate: an ODE\nalong a drawn path"),
    "distributions": (MIDDLE, 3.8, WIDTH, 1.0, "the laws: transition;\nrsample, log_prob"),
    "simulation": (LEFT, 0.9, WHOLE, 2.4, ""),
    "_ops": (LEFT, -0.7, WHOLE, 1.0, ""),
}
YOURS = ("your model", "Pyro's SVI")
IMPORTS = [
    ("interop", "nn"),
    ("forecasting", "guides"),
    ("training", "infer"),
    ("nn", "solvers"),
    ("solvers", "simulation"),
    ("guides", "distributions"),
    ("distributions", "simulation"),
    ("infer", "simulation"),
    ("simulation", "_ops"),
]
DIAGONAL = [("nn", "distributions"), ("infer", "distributions")]
DATA_FLOW = [("series, times", "your model"), ("your model", "Pyro's SVI")]
SIMULATORS = ("Adaptive", "Checkpointed", "Compiled", "Fused", "Loop")
GAP = 0.08

Point = tuple[float, float]


def main() -> None:
    fig, ax = plt.subplots(figsize=(9.6, 8.2))
    for name, (x, y, width, height, text) in BOXES.items():
        own = name in YOURS
        style = {"fc": "white" if own else FILL, "ec": DATA if own else INK, "lw": 1.0}
        ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.06", **style))
        middle = x + width / 2
        label = {"ha": "center", "va": "center", "color": INK}
        ax.text(middle, y + height - 0.18, name, weight="bold", size=11, **label)
        ax.text(middle, y + 0.34, text, size=9, **label)
    draw_simulation(ax)
    text = "autograd written by hand: fused, recompute, gru, gathered_mlp, first_order"
    ax.text(LEFT + WHOLE / 2, -0.32, text, ha="center", va="center", size=9, color=INK)
    for a, b in IMPORTS:
        arrow(ax, *down(a, b))
    for a, b in DIAGONAL:
        arrow(ax, *towards(a, b))
    for a, b in DATA_FLOW:
        arrow(ax, *across(a, b), color=DATA, ls="--")
    ax.text(RIGHT + WIDTH / 2 + 0.15, 4.3, "the log ratio\nof a draw", size=9, va="center")
    ax.text(LEFT, -1.15, "black: imports", color=INK, size=9)
    ax.text(MIDDLE, -1.15, "red, dashed: the way of the data", color=DATA, size=9)
    ax.set(xlim=(-0.05, 10.65), ylim=(-1.3, 9.45))
    ax.axis("off")
    fig.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})


def draw_simulation(ax: plt.Axes) -> None:
    """What the folder holds, and the simulators in the order in which they are considered."""
    middle = LEFT + WHOLE / 2
    lines = {
        2.72: "base: Law, GridControl, LinearSteps, Task, Draw, Simulator",
        2.4: "step: the formula of a step; ratio: LogRatio; network: GridNetwork",
        1.98: "simulate(task) uses what choose(task) names: the first of these that applies",
    }
    for y, text in lines.items():
        ax.text(middle, y, text, ha="center", va="center", size=9, color=INK)
    width, room = 1.72, WHOLE / len(SIMULATORS)
    for i, name in enumerate(SIMULATORS):
        x = LEFT + room * i + (room - width) / 2
        style = {"boxstyle": "round,pad=0.03", "fc": INNER, "ec": INK, "lw": 0.8}
        ax.add_patch(FancyBboxPatch((x, 1.1), width, 0.5, **style))
        ax.text(x + width / 2, 1.35, name, ha="center", va="center", size=9.5, color=INK)
        if i:
            arrow(ax, (x - (room - width) + 0.04, 1.35), (x - 0.04, 1.35), size=9)


def arrow(
    ax: plt.Axes, start: Point, end: Point, color: str = INK, ls: str = "-", size: float = 13
) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": size, "color": color, "ls": ls}
    ax.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


def down(a: str, b: str) -> tuple[Point, Point]:
    """From the lower edge of a box straight to the upper edge of one below."""
    (x, y, width, _, _), (_, y_b, _, height, _) = BOXES[a], BOXES[b]
    middle = x + width / 2
    return (middle, y - GAP), (middle, y_b + height + GAP)


def across(a: str, b: str) -> tuple[Point, Point]:
    """From the right edge of a box to the left edge of its neighbour."""
    (x, y, width, height, _), (x_b, _, _, _, _) = BOXES[a], BOXES[b]
    return (x + width + GAP, y + height / 2), (x_b - GAP, y + height / 2)


def towards(a: str, b: str) -> tuple[Point, Point]:
    """From the lower corner of a box to the upper corner of one below that is beside it."""
    (x, y, width, _, _), (x_b, y_b, width_b, height, _) = BOXES[a], BOXES[b]
    if x < x_b:
        return (x + width - 0.3, y - GAP), (x_b + 0.3, y_b + height + GAP)
    return (x + 0.3, y - GAP), (x_b + width_b - 0.3, y_b + height + GAP)


if __name__ == "__main__":
    main()
