"""The steps of a training, and what follows them."""

from __future__ import annotations

import math
import sys

from tqdm.auto import tqdm

from ..diagnostics.importance import importance_line
from ..diagnostics.importance_check import ImportanceCheck
from .history import History
from .interrupt import Interrupt
from .loop import Training
from .matching import Matching, has_joint_latents, match
from .save_times import SaveTimes

__all__ = ["check_posterior", "match_posterior", "run_steps"]

CHECK_SAMPLES, CHECK_SECONDS = 4000, 5.0
"""The number of draws of the importance check at the end, and its time limit in seconds."""


def run_steps(
    training: Training,
    total: int,
    every: int,
    patience: int | None,
    times: SaveTimes,
    progress: bool,
) -> History:
    history, first = training.history, training.step
    bar = tqdm(
        total=total, initial=first, desc="fit", unit="step", mininterval=0.2, disable=not progress
    )
    with bar, Interrupt() as interrupt:
        while training.step < total and not training.ranks.is_interrupted(interrupt):
            if _is_out_of_patience(history, patience):
                break
            training.take_step(save=training.ranks.is_due(times, training.step))
            if training.validation is not None and (
                training.step % every == 0 or training.step == total
            ):
                training.validate()
            bar.update()
            if training.step % 10 == 0 or training.step == total:
                bar.set_postfix(_figures(history), refresh=False)
    if training.step > first:
        training.check_end()
    history.stopped = "steps"
    if training.step < total:
        is_interrupted = training.ranks.is_interrupted(interrupt)
        history.stopped = "interrupted" if is_interrupted else "patience"
    return history


def match_posterior(training: Training, progress: bool) -> None:
    if not has_joint_latents(training.guide):
        return
    args, kwargs = training.batches(0)
    try:
        found = match(training.model, training.guide, args, kwargs, progress)
    except KeyboardInterrupt:
        found = Matching(0, 0.0, math.nan, {}, "matching was interrupted")
    training.ranks.copy_first(training.parameters)
    training.history.matching = found
    if progress:
        tqdm.write(str(found), file=sys.stderr)


def check_posterior(training: Training) -> tuple[ImportanceCheck | None, str]:
    """The importance check of the posterior, and the line that is printed about it."""
    if training.batches.size is not None:
        why = "the evidence of a mini-batch is not that of the data"
        return None, f"importance check: not made, because {why}"
    args, kwargs = training.batches(0)
    return importance_line(
        training.model, training.guide, args, kwargs, CHECK_SAMPLES, CHECK_SECONDS
    )


def _is_out_of_patience(history: History, patience: int | None) -> bool:
    if patience is None or history.best is None:
        return False
    return sum(step > history.best[0] for step, _ in history.validation) >= patience


def _figures(history: History, last: int = 50) -> dict[str, str]:
    found = {"ELBO": history.elbo, "KL": history.kl, "likelihood": history.log_likelihood}
    text = {}
    for name, values in found.items():
        finite = [x for x in values[-last:] if math.isfinite(x)]
        text[name] = f"{sum(finite) / len(finite):.5g}" if finite else "nan"
    if history.rejected:
        text["rejected"] = str(history.rejected)
    if history.validation:
        text["validation"] = f"{history.validation[-1][1]:.5g}"
    return text
