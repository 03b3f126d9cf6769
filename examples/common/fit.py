"""Training of image classifiers: progress, validation, checkpoints, resuming."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_sde import metrics
from pyro_sde.solvers import SolutionError
from pyro_sde.training import CheckpointError, Diverged, load_checkpoint, save_checkpoint

from .classify import predict
from .images import Data, Images, shift

KIND = "image classifier"


def rate(progress: float, warm_up: float = 0.05) -> float:
    """Linear warm-up, then a cosine, as a share of the largest learning rate."""
    if progress < warm_up:
        return max(progress / warm_up, 0.01)
    return 0.5 * (1 + math.cos(math.pi * min((progress - warm_up) / (1 - warm_up), 1.0)))


def saved(path: Path, config: dict) -> dict | None:
    """The state to resume from, if there is one; it must be of the same settings."""
    if not path.exists():
        return None
    try:
        state = load_checkpoint(path, KIND)
    except CheckpointError as e:
        raise SystemExit(str(e)) from e
    found = json.loads(state["config"])
    other = {k: (found.get(k), v) for k, v in config.items() if found.get(k) != v}
    if other:
        raise SystemExit(
            f"{path} was made with other settings (there, here): {other}; choose another --out "
            "or remove it"
        )
    return state


def evaluate(
    classifier: nn.Module, images: Images, data: Data, samples: int
) -> tuple[dict[str, float], Tensor]:
    """Accuracy, NLL, ECE and Brier score, and the probabilities they come from."""
    p = predict(classifier, images.x, samples, data.normalise)
    return metrics.classification(p, images.y), p


def fit(
    classifier: nn.Module,
    data: Data,
    path: Path,
    config: dict,
    *,
    seed: int,
    epochs: int | None = None,
    minutes: float | None = None,
    batch: int = 128,
    lr: float = 4e-3,
    pixels: int = 2,
    flip: bool = False,
    samples: int = 2,
    describe: Callable[[], dict[str, float]] | None = None,
) -> list[dict[str, Any]]:
    """Adam with warm-up and a cosine, for so many epochs or minutes of computing.

    After every epoch the classifier is judged on the validation images and saved to ``path``;
    from there a run that was killed goes on. Every epoch has its own seed, so that it goes on
    as it would have. Minutes are those of the processor in training steps, divided by the number
    of threads: what else the machine does at the time does not count.

    :param config: What must be the same when a run is resumed.
    :param describe: More figures for the history, computed at each validation.
    :returns: A history with one entry per epoch, the last one perhaps a part of one.
    """
    if (epochs is None) == (minutes is None):
        raise ValueError("give either epochs or minutes")
    optimiser = torch.optim.Adam(classifier.parameters(), lr=lr, betas=(0.9, 0.99))
    epoch, elapsed, steps, history = 0, 0.0, 0, []
    state = saved(path, config)
    if state is not None:
        classifier.load_state_dict(state["classifier"])
        optimiser.load_state_dict(state["optimiser"])
        epoch, elapsed, steps = state["epoch"], state["elapsed"], state["steps"]
        history = json.loads(state["history"])
        print(f"resumed {path} after epoch {epoch}")
    n = len(data.train)
    per_epoch = max(n // batch, 1)
    total = epochs * per_epoch if epochs is not None else minutes * 60
    done = state is not None and state["done"]
    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=1.0, bar_format=layout, mininterval=1.0, disable=done)
    last_good = f"the last good checkpoint, after epoch {epoch}, is {path}"
    while not done:
        torch.manual_seed(1_000_003 * seed + epoch)
        order, losses = torch.randperm(n), []
        for index in order.split(batch)[:per_epoch]:
            progress = steps / total if epochs is not None else elapsed / total
            if progress >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = lr * rate(progress)
            start = time.process_time()
            x = data.normalise(shift(data.train.x[index], pixels, flip))
            optimiser.zero_grad(set_to_none=True)
            try:
                loss = classifier.loss(x, data.train.y[index])
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            except SolutionError:
                losses.append(math.inf)
            elapsed += (time.process_time() - start) / torch.get_num_threads()
            steps += 1
            bar.update(min((steps if epochs is not None else elapsed) / total, 1.0) - bar.n)
            if not math.isfinite(losses[-1]):
                bar.close()
                raise Diverged(
                    f"the loss became {losses[-1]} in epoch {epoch + 1}, step {steps}. "
                    + (last_good if history else "There is no checkpoint yet")
                    + f". Try a lower --lr (it was {lr:g}), a smaller scale or more steps"
                )
        epoch += 1
        done = (steps if epochs is not None else elapsed) >= total
        scores, _ = evaluate(classifier, data.validation, data, samples)
        history.append(
            {"epoch": epoch, "steps": steps, "seconds": elapsed}
            | {"loss": sum(losses) / max(len(losses), 1)}
            | scores
            | (describe() if describe is not None else {})
        )
        bar.set_postfix(
            loss=f"{history[-1]['loss']:.4f}",
            validation=f"{100 * scores['accuracy']:.2f}%",
            nll=f"{scores['nll']:.4f}",
        )
        save_checkpoint(
            path,
            {
                "config": json.dumps(config),
                "classifier": classifier.state_dict(),
                "optimiser": optimiser.state_dict(),
                "epoch": epoch,
                "elapsed": elapsed,
                "steps": steps,
                "history": json.dumps(history),
                "done": done,
            },
            KIND,
        )
        last_good = f"the last good checkpoint, after epoch {epoch}, is {path}"
    bar.close()
    return history
